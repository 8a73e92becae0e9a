"""Frozen weights laid out as the processor reads them, in half precision where that holds them.

For every matrix product a CPU's library copies the weights into blocks that fit its registers and caches. With few
rows, as when replies are written, this costs as much as multiplying, and reading the weights costs as much again. Here
frozen weights are copied once. float32 weights that float16 holds, those that were published in float16 or bfloat16,
are kept in it by FBGEMM, which multiplies in float32: half the bytes, the same products. bfloat16 weights and other
float32 ones are laid out by oneDNN as they are.

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .hardware import memory_bytes

# Rows of inputs that oneDNN lays a copy out for; 1 to 1024 gave copies alike in speed.
_ROWS = 64
# Of the machine's memory, what copies may take.
_SHARE = 1 / 16
# What float16 may change a weight matrix by, relative to its norm: what every float32 is rounded by. bfloat16's
# smallest numbers, far below a matrix's others, have no place in float16.
_TOLERANCE = torch.finfo(torch.float32).eps


class Packed:
    """A context in which the frozen linear layers of a model on a CPU multiply by packed copies.

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
        self._copies: dict[nn.Linear, tuple[object, _Copy | None]] = {}

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
        copy = self._copy_of(layer, adapter)
        if copy is None:
            return nn.functional.linear(inputs, layer.weight, layer.bias)
        is_learning = torch.is_grad_enabled()
        product: Tensor = _Product.apply(inputs, layer.weight, copy) if is_learning else copy.multiply(inputs)
        return product if layer.bias is None else product + layer.bias

    def _copy_of(self, layer: nn.Linear, adapter: BaseTunerLayer | None) -> _Copy | None:
        """A packed copy of the layer's weight; None if it cannot be packed or there is no room."""
        weight = layer.weight
        # Merging an adapter into a weight does not change its version.
        merged = tuple(adapter.merged_adapters) if adapter else ()
        state = weight._version, weight.data_ptr(), weight.dtype, weight.requires_grad, merged
        known_state, copy = self._copies.get(layer, (None, None))
        if state != known_state:
            self._copies.pop(layer, None)
            room = int(_SHARE * memory_bytes(weight.device))
            room -= sum(known.nbytes for _, known in self._copies.values() if known is not None)
            copy = _pack(weight.detach(), room) if _can_be_packed(weight) else None
            self._copies[layer] = state, copy
        return copy


@dataclass(frozen=True, slots=True)
class _Copy:
    """A packed copy of a weight (O, I): multiplies inputs (..., I) by it, giving (..., O)."""

    multiply: Callable[[Tensor], Tensor]
    nbytes: int


def _can_be_packed(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.requires_grad or torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    is_native = weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return is_native or weight.dtype == torch.float32


def _pack(weight: Tensor, room: int) -> _Copy | None:
    """A packed copy of at most `room` bytes of a weight (O, I), or None."""
    is_held = weight.dtype == torch.float32 and bool(
        torch.linalg.vector_norm(weight - weight.half()) <= _TOLERANCE * weight.norm()
    )
    nbytes = 2 * weight.numel() if is_held else weight.nbytes
    if nbytes > room:
        return None
    if is_held:
        copy = torch.ops.quantized.linear_prepack_fp16(weight, None)
        return _Copy(lambda inputs: torch.ops.quantized.linear_dynamic_fp16(inputs, copy), nbytes)
    copy = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return _Copy(lambda inputs: torch.ops.mkldnn._linear_pointwise(inputs, copy, None, "none", [], ""), nbytes)


class _Product(torch.autograd.Function):
    """inputs (..., I) times a frozen weight (O, I), transposed; the gradient takes the weight as it is."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, copy: _Copy) -> Tensor:
        ctx.save_for_backward(weight)
        return copy.multiply(inputs)

    @staticmethod
    def backward(ctx: Any, of_product: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return of_product @ weight, None, None
