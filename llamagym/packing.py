"""Frozen weights laid out as the processor reads them.

For every matrix product a CPU's library copies the weights into blocks that fit its registers and caches. With few
rows, as when replies are written, this costs as much as multiplying. Frozen weights are copied once, by oneDNN, which
is what `torch.compile` does when it freezes a model; what it fuses beside that does not pay here.

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .hardware import memory_bytes

# Of the machine's memory, what copies may take; the largest weights come first.
_SHARE = 1 / 16
# Rows that the layout suits best; it serves any number.
_ROWS = 64


class Packed:
    """A context in which the frozen linear layers of a model in float32 on a CPU multiply by packed copies.

    Outside of it the model is as it was. Layers that carry an adapter are left alone, since it may be merged into them.
    """

    def __init__(self, model: nn.Module) -> None:
        """Copy the frozen weights of `model`."""
        self._forwards: list[tuple[nn.Linear, Callable[..., Tensor]]] = []
        if not torch.backends.mkldnn.is_available():
            return
        adapters = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        adapted = {inner for layer in adapters for inner in layer.modules()}
        layers = [module for module in model.modules() if type(module) is nn.Linear and module not in adapted]
        room = _SHARE * memory_bytes(torch.device("cpu"))
        for layer in sorted(filter(_can_be_packed, layers), key=lambda layer: layer.weight.numel(), reverse=True):
            if layer.weight.nbytes <= room:
                room -= layer.weight.nbytes
                packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS)
                self._forwards.append((layer, partial(_forward, layer, _state(layer), packed)))

    def __enter__(self) -> None:
        """Let the layers multiply by their copies."""
        for layer, forward in self._forwards:
            vars(layer)["forward"] = forward

    def __exit__(self, *error: object) -> None:
        """Let them multiply by their weights again."""
        for layer, _ in self._forwards:
            vars(layer).pop("forward", None)


def _can_be_packed(layer: nn.Linear) -> bool:
    """Whether a copy would serve; one whose `forward` was replaced, by hooks of accelerate, say, does more."""
    weight = layer.weight
    is_plain = weight.device.type == "cpu" and weight.dtype == torch.float32 and "forward" not in vars(layer)
    return is_plain and not weight.requires_grad


def _state(layer: nn.Linear) -> tuple[object, ...]:
    """What changes when the weight is no longer what was copied."""
    weight = layer.weight
    return weight._version, weight.data_ptr(), weight.requires_grad


def _forward(layer: nn.Linear, state: tuple[object, ...], packed: Tensor, inputs: Tensor) -> Tensor:
    """What the layer makes of inputs (..., I): outputs (..., O)."""
    if _state(layer) != state:
        return nn.functional.linear(inputs, layer.weight, layer.bias)
    product: Tensor
    if torch.is_grad_enabled() and inputs.requires_grad:
        product = _Product.apply(inputs, layer.weight, packed)
        return product if layer.bias is None else product + layer.bias
    product = _product(inputs, packed, layer.bias)
    return product


def _product(inputs: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
    return result


class _Product(torch.autograd.Function):
    """inputs (..., I) times a frozen weight (O, I), transposed; the gradient takes the weight as it is."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, packed: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return _product(inputs, packed)

    @staticmethod
    def backward(ctx: Any, of_product: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return of_product @ weight, None, None
