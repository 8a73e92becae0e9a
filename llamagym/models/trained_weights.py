"""The part of a model that learns, to be saved and restored, and a mark of the part that does not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .lora import freeze_and_extend_, has_frozen_half, is_activated
from .peft_internals import is_down, is_up, lora_layers
from .value_head import AutoModelForCausalLMWithValueHead

# Number of values hashed at each end of a frozen tensor.
_HASHED = 32


def trained_state(model: AutoModelForCausalLMWithValueHead) -> dict[str, Any]:
    """Everything that learns, the value head's constants, and a fingerprint of the frozen weights."""
    return {
        "weights": dict(_trained(model)),
        "set_aside": has_frozen_half(model.pretrained_model),
        "frozen": _mark_of_frozen(model),
        "description": _description(model),
    }


def check_fits(
    model: AutoModelForCausalLMWithValueHead, state: Mapping[str, Any], may_change_model: bool = False
) -> None:
    """Reject weights that were trained on another model.

    Args:
        model: The model.
        state: What `trained_state` returned of another one.
        may_change_model: Whether the frozen weights may differ, given equal shapes.

    Raises:
        CheckpointError: They were, or another adapter holds them.
    """
    if state["frozen"] != _mark_of_frozen(model) and not may_change_model:
        raise CheckpointError(
            "It was saved with other frozen weights: another base model, the same in another dtype, or under a LoRA "
            f"that is activated or scaled otherwise. The model was {state.get('description', 'not described')} and is "
            f"now {_description(model)}. Load the model that it was saved with, or pass allow_changes=['model']."
        )
    growth = 2 if state["set_aside"] and not has_frozen_half(model.pretrained_model) else 1
    saved = {name: (tuple(weight.shape), weight.dtype) for name, weight in state["weights"].items()}
    have = {name: (_grown(name, tuple(weight.shape), growth), weight.dtype) for name, weight in _trained(model).items()}
    if saved != have:
        different = sorted(name for name in saved.keys() | have.keys() if saved.get(name) != have.get(name))
        name = different[0]
        raise CheckpointError(
            f"{len(different)} trained weights do not fit, among them {name!r}: saved {saved.get(name)}, expected "
            f"{have.get(name)}. Build the model with the adapter that it was saved with."
        )


@torch.no_grad()
def restore_trained_(model: AutoModelForCausalLMWithValueHead, state: Mapping[str, Any]) -> None:
    """Take weights that `check_fits` has seen."""
    if state["set_aside"] and not has_frozen_half(model.pretrained_model):
        freeze_and_extend_(model.pretrained_model)
    for name, weight in _trained(model).items():
        weight.copy_(state["weights"][name])


def _trained(model: AutoModelForCausalLMWithValueHead) -> dict[str, Tensor]:
    head = {f"v_head.{name}": tensor for name, tensor in model.v_head.state_dict(keep_vars=True).items()}
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad} | head


def _grown(name: str, shape: tuple[int, ...], growth: int) -> tuple[int, ...]:
    """The shape of a weight once the rank of its LoRA has grown."""
    if is_down(name):
        return (growth * shape[0], *shape[1:])
    return (shape[0], growth * shape[1]) if is_up(name) else shape


def _description(model: AutoModelForCausalLMWithValueHead) -> str:
    """A model in a line: its architecture and name, dtypes and LoRA."""
    base = model.pretrained_model
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in base.parameters()})
    scales = sorted({scale for layer in lora_layers(base) for scale in layer.scaling.values()})
    adapter = f"{'activated' if is_activated(base) else 'plain'} LoRA with scale {scales}" if scales else "no LoRA"
    name = base.config.name_or_path or "no name"
    return f"{base.config.model_type} {name!r} ({', '.join(dtypes)}; {adapter})"


def _mark_of_frozen(model: AutoModelForCausalLMWithValueHead) -> str:
    """Tells one model's frozen weights from another's, by names, shapes, dtypes and the first and last few numbers.

    How LoRA is applied to them belongs to it.
    """
    scales = [layer.scaling for layer in lora_layers(model.pretrained_model)]
    digest = hashlib.sha256(f"{is_activated(model.pretrained_model)} {scales}".encode())
    for name, weight in model.pretrained_model.named_parameters():
        if not weight.requires_grad:
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            ends = weight.detach().flatten()
            for end in (ends[:_HASHED], ends[-_HASHED:]):
                digest.update(end.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
