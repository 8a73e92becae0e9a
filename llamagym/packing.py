"""Frozen weights laid out as the processor reads them, in half precision where that holds them.

For every matrix product a CPU's library copies the weights into blocks that fit its registers and caches. With few
rows, as when replies are written, this costs as much as multiplying, and reading the weights costs as much again. Here
frozen weights are copied once, by FBGEMM, which keeps them in float16 and multiplies in float32: half the bytes, the
same products. Weights that were published in float16 or bfloat16 lose nothing by it; others are left alone.

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
# What float16 may change a weight matrix by, relative to its norm: what every float32 is rounded by. bfloat16's
# smallest numbers, far below a matrix's others, have no place in float16.
_TOLERANCE = torch.finfo(torch.float32).eps


class Packed:
    """A context in which the frozen linear layers of a model in float32 on a CPU multiply by packed copies.

    A layer is copied when it first multiplies. Outside of the context the model is as it was.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the layers of `model` that can be copied."""
        adapters = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        adapter_of = {inner: layer for layer in adapters for inner in layer.modules()}
        # One whose `forward` was replaced, by hooks of accelerate, say, does more than multiply.
        self._forwards = {
            layer: partial(self._forward, layer, adapter_of.get(layer))
            for layer in model.modules()
            if type(layer) is nn.Linear and "forward" not in vars(layer) and _can_be_packed(layer.weight)
        }
        self._copies: dict[nn.Linear, tuple[object, Any]] = {}

    def __enter__(self) -> None:
        """Let the layers multiply by their copies."""
        for layer, forward in self._forwards.items():
            vars(layer)["forward"] = forward

    def __exit__(self, *error: object) -> None:
        """Let them multiply by their weights again."""
        for layer in self._forwards:
            vars(layer).pop("forward", None)

    def _forward(self, layer: nn.Linear, adapter: BaseTunerLayer | None, inputs: Tensor) -> Tensor:
        """What the layer makes of inputs (..., I): outputs (..., O)."""
        packed = self._copy_of(layer, adapter)
        if packed is None:
            return nn.functional.linear(inputs, layer.weight, layer.bias)
        is_learning = torch.is_grad_enabled()
        product: Tensor = _Product.apply(inputs, layer.weight, packed) if is_learning else _product(inputs, packed)
        return product if layer.bias is None else product + layer.bias

    def _copy_of(self, layer: nn.Linear, adapter: BaseTunerLayer | None) -> Any:
        """The layer's weight, packed; None if it cannot be or there is no room."""
        weight = layer.weight
        # Merging an adapter into a weight does not change its version.
        merged = tuple(adapter.merged_adapters) if adapter else ()
        state = weight._version, weight.data_ptr(), weight.dtype, weight.requires_grad, merged
        known_state, packed = self._copies.get(layer, (None, None))
        if state != known_state:
            self._copies.pop(layer, None)
            taken = sum(known.weight.numel() for known, (_, copy) in self._copies.items() if copy is not None)
            fits = 2 * (taken + weight.numel()) <= _SHARE * memory_bytes(torch.device("cpu"))
            packed = _pack(weight.detach()) if fits and _can_be_packed(weight) else None
            self._copies[layer] = state, packed
        return packed


def _can_be_packed(weight: Tensor) -> bool:
    is_plain = weight.device.type == "cpu" and weight.dtype == torch.float32 and not weight.requires_grad
    return is_plain and torch.backends.quantized.engine in ("x86", "fbgemm")


def _pack(weight: Tensor) -> Any:
    """A packed copy of a weight (O, I), or None if float16 does not hold it."""
    lost = torch.linalg.vector_norm(weight - weight.half())
    return torch.ops.quantized.linear_prepack_fp16(weight, None) if lost <= _TOLERANCE * weight.norm() else None


class _Product(torch.autograd.Function):
    """inputs (..., I) times a frozen weight (O, I), transposed; the gradient takes the weight as it is."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, packed: Any) -> Tensor:
        ctx.save_for_backward(weight)
        return _product(inputs, packed)

    @staticmethod
    def backward(ctx: Any, of_product: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return of_product @ weight, None, None


def _product(inputs: Tensor, packed: Any) -> Tensor:
    result: Tensor = torch.ops.quantized.linear_dynamic_fp16(inputs, packed)
    return result
