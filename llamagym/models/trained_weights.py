"""Saves and restores the trained weights of a model, with a fingerprint of its frozen weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .lora import freeze_and_extend_, has_frozen_half, is_activated
from .peft_internals import is_lora_a, is_lora_b, lora_layers
from .value_head import AutoModelForCausalLMWithValueHead

# Number of values at each end of a frozen tensor that enter the fingerprint.
_HASHED_VALUES = 32


def trained_state(model: AutoModelForCausalLMWithValueHead) -> dict[str, Any]:
    """The trained weights, the constants of the value head, and a fingerprint of the frozen weights."""
    return {
        "weights": _trained_weights(model),
        "has_frozen_half": has_frozen_half(model.pretrained_model),
        "frozen": _fingerprint_of_frozen(model),
        "description": _description(model),
    }


def check_fits(
    model: AutoModelForCausalLMWithValueHead, state: Mapping[str, Any], may_change_model: bool = False
) -> None:
    """Rejects weights that were trained on another model.

    Args:
        model: The model that is to take the weights.
        state: The result of `trained_state` for the model that was saved.
        may_change_model: Whether the frozen weights may differ, given equal shapes.

    Raises:
        CheckpointError: The frozen weights differ, or the trained weights have other names, shapes or dtypes.
    """
    if state["frozen"] != _fingerprint_of_frozen(model) and not may_change_model:
        raise CheckpointError(
            "It was saved with other frozen weights: another base model, the same in another dtype, or under a LoRA "
            f"that is activated or scaled otherwise. The model was {state.get('description', 'not described')} and is "
            f"now {_description(model)}. Load the model that it was saved with, or pass allow_changes=['model']."
        )
    growth = 2 if state["has_frozen_half"] and not has_frozen_half(model.pretrained_model) else 1
    saved = {name: (tuple(weight.shape), weight.dtype) for name, weight in state["weights"].items()}
    expected = {}
    for name, weight in _trained_weights(model).items():
        expected[name] = (_grown_shape(name, tuple(weight.shape), growth), weight.dtype)
    if saved != expected:
        different = sorted(name for name in saved.keys() | expected.keys() if saved.get(name) != expected.get(name))
        name = different[0]
        raise CheckpointError(
            f"{len(different)} trained weights do not fit, among them {name!r}: saved {saved.get(name)}, expected "
            f"{expected.get(name)}. Build the model with the adapter that it was saved with."
        )


@torch.no_grad()
def restore_trained_(model: AutoModelForCausalLMWithValueHead, state: Mapping[str, Any]) -> None:
    """Copies the weights of a state that `check_fits` accepted into a model."""
    if state["has_frozen_half"] and not has_frozen_half(model.pretrained_model):
        freeze_and_extend_(model.pretrained_model)
    for name, weight in _trained_weights(model).items():
        weight.copy_(state["weights"][name])


def _trained_weights(model: AutoModelForCausalLMWithValueHead) -> dict[str, Tensor]:
    """The weights that are trained, and all tensors of the value head, by name."""
    weights: dict[str, Tensor] = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    for name, tensor in model.v_head.state_dict(keep_vars=True).items():
        weights[f"v_head.{name}"] = tensor
    return weights


def _grown_shape(name: str, shape: tuple[int, ...], growth: int) -> tuple[int, ...]:
    """The shape of a weight after the rank of its LoRA has grown by a factor."""
    if is_lora_a(name):
        return (growth * shape[0], *shape[1:])
    if is_lora_b(name):
        return (shape[0], growth * shape[1])
    return shape


def _description(model: AutoModelForCausalLMWithValueHead) -> str:
    """Describes a model in one line: architecture, name, dtypes and LoRA."""
    base = model.pretrained_model
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in base.parameters()})
    scales = sorted({scale for layer in lora_layers(base) for scale in layer.scaling.values()})
    adapter = "no LoRA"
    if scales:
        adapter = f"{'activated' if is_activated(base) else 'plain'} LoRA with scale {scales}"
    name = base.config.name_or_path or "no name"
    return f"{base.config.model_type} {name!r} ({', '.join(dtypes)}; {adapter})"


def _fingerprint_of_frozen(model: AutoModelForCausalLMWithValueHead) -> str:
    """A hash of the frozen weights: their names, shapes, dtypes, first and last values, and how LoRA is applied."""
    scales = [layer.scaling for layer in lora_layers(model.pretrained_model)]
    digest = hashlib.sha256(f"{is_activated(model.pretrained_model)} {scales}".encode())
    for name, weight in model.pretrained_model.named_parameters():
        if not weight.requires_grad:
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            ends = weight.detach().flatten()
            for end in (ends[:_HASHED_VALUES], ends[-_HASHED_VALUES:]):
                digest.update(end.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
