"""Episodes of several processes that learn together, exchanged so that all have the same batch."""

from __future__ import annotations

from .. import distributed
from ..policy.policy import Policy
from ..text.episode import Episode, from_process


def of_all_ranks(policy: Policy, own: list[Episode]) -> list[Episode]:
    """The episodes of all processes, this one's own among them, once all measure choices against the same."""
    if distributed.world_size() == 1:
        return own
    calibration = policy.calibration
    told = distributed.gather_objects((policy.weights_version, calibration.measured if calibration else {}, own))
    samples = [measured for _, measured, _ in told]
    if changed := calibration is not None and calibration.agree(samples, learns=policy.num_updates > 0):
        policy.calibration_changed()
    # Every process counts the states of its weights for itself.
    now = policy.weights_version
    return [
        from_process(rank, episode, {} if changed else {version: now})
        for rank, (version, _, episodes) in enumerate(told)
        for episode in episodes
    ]
