"""Frozen weights laid out as the processor reads them.

For every matrix product a CPU's library copies the weights into blocks that fit its registers and caches. With few
rows, as when replies are written, this costs as much as multiplying. Here frozen weights are copied once, by oneDNN, as
`torch.compile` does when it freezes a model; what it fuses beside that does not pay. The copies take as much memory
again as the weights.

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .hardware import memory_bytes

# Of the machine's memory, what copies may take.
_SHARE = 1 / 16
# Rows that the layout suits best; it serves any number.
_ROWS = 64


class Packed:
    """A context in which the frozen linear layers of a model in float32 on a CPU multiply by packed copies.

    A layer is copied when it first multiplies. Outside of the context the model is as it was. Layers that carry an
    adapter are left alone, since it may be merged into them.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the layers of `model` that can be copied."""
        adapters = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        adapted = {inner for layer in adapters for inner in layer.modules()}
        layers = [module for module in model.modules() if type(module) is nn.Linear and module not in adapted]
        # One whose `forward` was replaced, by hooks of accelerate, say, does more than multiply.
        plain = [layer for layer in layers if _can_be_packed(layer.weight) and "forward" not in vars(layer)]
        self._forwards = {layer: partial(self._forward, layer) for layer in plain}
        self._copies: dict[nn.Linear, tuple[object, Tensor | None]] = {}

    def __enter__(self) -> None:
        """Let the layers multiply by their copies."""
        for layer, forward in self._forwards.items():
            vars(layer)["forward"] = forward

    def __exit__(self, *error: object) -> None:
        """Let them multiply by their weights again."""
        for layer in self._forwards:
            vars(layer).pop("forward", None)

    def _forward(self, layer: nn.Linear, inputs: Tensor) -> Tensor:
        """What the layer makes of inputs (..., I): outputs (..., O)."""
        packed = self._copy_of(layer)
        if packed is None:
            return nn.functional.linear(inputs, layer.weight, layer.bias)
        if torch.is_grad_enabled():
            product: Tensor = _Product.apply(inputs, layer.weight, packed)
            return product if layer.bias is None else product + layer.bias
        return _product(inputs, packed, layer.bias)

    def _copy_of(self, layer: nn.Linear) -> Tensor | None:
        """The layer's weight, packed; None if it cannot be or there is no room."""
        weight = layer.weight
        state = weight._version, weight.data_ptr(), weight.dtype, weight.requires_grad
        known_state, packed = self._copies.get(layer, (None, None))
        if state != known_state:
            self._copies.pop(layer, None)
            taken = sum(copy.nbytes for _, copy in self._copies.values() if copy is not None)
            fits = taken + weight.nbytes <= _SHARE * memory_bytes(torch.device("cpu"))
            packed = None
            if fits and _can_be_packed(weight):
                packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
            self._copies[layer] = state, packed
        return packed


def _can_be_packed(weight: Tensor) -> bool:
    is_plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return is_plain and not weight.requires_grad and torch.backends.mkldnn.is_available()


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
