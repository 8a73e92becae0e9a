"""Saving and restoring a policy: trainable weights, calibration of choices, reference, random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..models.trained_weights import restore_trained_, trained_state
from ..text.records import ids_from
from .calibration import Calibration
from .policy import Policy


def policy_state(policy: Policy) -> dict[str, Any]:
    """The state of a policy to save: trainable weights, reference, calibration, counters and random numbers."""
    # First, since a change of weights that is noticed here may reset the calibration.
    version = policy.weights_version
    return {
        "model": trained_state(policy.model),
        "reference_weights": policy.reference,
        **choices_record(policy),
        "num_updates": policy.num_updates,
        "weights_version": version,
        "rng": policy.rng.get_state(),
    }


@torch.no_grad()
def restore_policy(policy: Policy, state: Mapping[str, Any]) -> None:
    """Restores the state of a policy with the same model and options."""
    restore_trained_(policy.model, state["model"])
    policy.reference = state["reference_weights"]
    # Notices an adapter that was extended with its weights, which resets the calibration.
    policy.drop_caches()
    restore_choices(policy, state)
    policy.drop_caches(state["weights_version"])
    policy.num_updates = state["num_updates"]
    policy.rng.set_state(state["rng"])


def choices_record(policy: Policy) -> dict[str, Any]:
    """The choices that were ever offered, by token ids, and their calibration."""
    calibration = policy.calibration.record(learns=policy.num_updates > 0) if policy.calibration else {}
    return {"offered": list(policy.offered), **calibration}


def restore_choices(policy: Policy, record: Mapping[str, Any], with_calibration: bool = True) -> None:
    """Restores what `choices_record` returned.

    Args:
        policy: The policy to restore it in.
        record: The record, possibly of another policy.
        with_calibration: Whether to restore the calibration, too.
    """
    policy.offered = dict.fromkeys(map(ids_from, record["offered"]))
    # Earlier versions recorded an empty calibration for policies without one.
    if with_calibration and policy.calibrates:
        policy.calibration = Calibration.from_record(record) if "choice_prior" in record else None
