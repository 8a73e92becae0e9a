"""Finished episodes of several processes that learn together, exchanged so that all have the same batch."""

from __future__ import annotations

from ..conversation.episode import Episode, played_by
from ..policy.policy import Policy
from ..policy.saved import agree_on_priors
from . import ranks


def of_all_ranks(policy: Policy, ended: list[Episode]) -> list[Episode]:
    """The episodes that ended in all processes, this one's among them, once all have the same priors of choices."""
    if ranks.count() == 1:
        return ended
    told = ranks.gather((policy.weights_version, policy.measured, ended))
    changed = agree_on_priors(policy, [measured for _, measured, _ in told])
    # Every process counts the states of its weights for itself.
    now = policy.weights_version
    return [
        played_by(rank, episode, {} if changed else {version: now})
        for rank, (version, _, episodes) in enumerate(told)
        for episode in episodes
    ]
