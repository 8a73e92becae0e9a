"""A policy's state: weights that learn, what choices are measured against, the reference, random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..models.trained_weights import restore_trained_, trained_state
from .calibration import Calibration
from .policy import Policy


def policy_state(policy: Policy) -> dict[str, Any]:
    """What to save of a policy."""
    version = policy.weights_version  # first: a change that is noticed here may restart the calibration
    return {
        "model": trained_state(policy.model),
        "reference": None if policy.reference is None else _weights(policy.reference.pretrained_model),
        **choices_record(policy),
        "num_updates": policy.num_updates,
        "weights_version": version,
        "rng": policy.rng.get_state(),
    }


@torch.no_grad()
def restore_policy(policy: Policy, state: Mapping[str, Any]) -> None:
    """Take the state of a policy with this model and these options."""
    restore_trained_(policy.model, state["model"])
    if policy.reference is not None:
        for name, weight in _weights(policy.reference.pretrained_model).items():
            weight.copy_(state["reference"][name])
    policy.drop_caches(state["weights_version"])
    restore_choices(policy, state)
    policy.num_updates = state["num_updates"]
    policy.rng.set_state(state["rng"])


def choices_record(policy: Policy) -> dict[str, Any]:
    """The choices that were ever offered, and what they are measured against, by token ids."""
    return {"offered": list(policy.offered), **policy.calibration.record(learns=policy.num_updates > 0)}


def restore_choices(policy: Policy, record: Mapping[str, Any]) -> None:
    """Take what `choices_record` gave."""
    policy.offered = dict.fromkeys(map(tuple, record["offered"]))
    policy.calibration = Calibration.from_record(record)


def _weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())
