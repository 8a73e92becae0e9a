"""A policy's state: weights that learn, what choices are measured against, the reference, random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..models.trained_weights import restore_trained_, trained_state
from ..text.records import ids_from
from .calibration import Calibration
from .policy import Policy


def policy_state(policy: Policy) -> dict[str, Any]:
    """What to save of a policy."""
    version = policy.weights_version  # first: a change that is noticed here may restart the calibration
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
    """Take the state of a policy with this model and these options."""
    restore_trained_(policy.model, state["model"])
    policy.reference = state["reference_weights"]
    # An adapter that grew with its weights is noticed here, which drops what choices were measured against.
    policy.drop_caches()
    restore_choices(policy, state)
    policy.drop_caches(state["weights_version"])
    policy.num_updates = state["num_updates"]
    policy.rng.set_state(state["rng"])


def choices_record(policy: Policy) -> dict[str, Any]:
    """The choices that were ever offered, and what they are measured against, by token ids."""
    calibration = policy.calibration.record(learns=policy.num_updates > 0) if policy.calibration else {}
    return {"offered": list(policy.offered), **calibration}


def restore_choices(policy: Policy, record: Mapping[str, Any], with_calibration: bool = True) -> None:
    """Take what `choices_record` gave.

    Args:
        policy: Whose choices these are from now on.
        record: Of another policy.
        with_calibration: Whether what its choices are measured against is taken, too, or left as it is.
    """
    policy.offered = dict.fromkeys(map(ids_from, record["offered"]))
    # Where none is wanted, earlier versions recorded an empty one.
    if with_calibration and policy.calibrates:
        policy.calibration = Calibration.from_record(record) if "choice_prior" in record else None
