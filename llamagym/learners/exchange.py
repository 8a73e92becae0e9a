"""Episodes of several processes that learn together, exchanged so that all have the same batch."""

from __future__ import annotations

from ..conversation.episode import Episode, played_by
from ..policy.policy import Policy
from ..policy.saved import agree_on_priors
from . import ranks


def of_all_ranks(policy: Policy, own: list[Episode]) -> list[Episode]:
    """The episodes of all processes, this one's own among them, once all have the same priors of choices."""
    if ranks.count() == 1:
        return own
    told = ranks.gather((policy.weights_version, policy.measured, own))
    changed = agree_on_priors(policy, [measured for _, measured, _ in told])
    # Every process counts the states of its weights for itself.
    now = policy.weights_version
    return [
        played_by(rank, episode, {} if changed else {version: now})
        for rank, (version, _, episodes) in enumerate(told)
        for episode in episodes
    ]
