"""Packed weights: frozen matrices in the layout that the CPU multiplies by, in half precision where that is exact.

For every matrix product a BLAS library packs the weights into blocks that fit registers and caches. With few rows, as
in decode, packing costs as much as multiplying, and reading the weights costs as much again. Here frozen weights are
packed once. float32 weights that float16 represents, such as those published in float16 or bfloat16, are packed by
FBGEMM, which multiplies in float32: half the bytes, the same products. bfloat16 weights and all other float32 ones are
packed by oneDNN in their own dtype.

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...models.peft_internals import adapters_by_module, merged_into
from ...models.torch_internals import FLOAT16_PACKING, PACKING, Product, can_pack, pack, pack_float16, versions_of

# The error that float16 may cause, relative to a matrix's norm: float32's own rounding. bfloat16's smallest numbers,
# far below a matrix's others, underflow in float16.
_TOLERANCE = torch.finfo(torch.float32).eps


class Packed:
    """A context in which the frozen linear layers of a model on a CPU multiply by packed weights.

    A layer's weight is packed when it is first used. Outside of the context the model is unchanged.
    """

    def __init__(self, model: nn.Module, max_bytes: int) -> None:
        """Find the layers of `model` whose weights can be packed, into `max_bytes` altogether."""
        self._max_bytes = max_bytes
        self._adapter_of = adapters_by_module(model)
        # A layer whose `forward` was replaced, by accelerate's hooks for example, does more than multiply.
        self._forwards = {
            layer: partial(self._forward, layer)
            for layer in model.modules()
            if type(layer) is nn.Linear and "forward" not in vars(layer) and _can_be_packed(layer.weight)
        }
        self._copies: dict[tuple[tuple[nn.Linear, ...], bool], tuple[object, _Copy | None]] = {}

    def __enter__(self) -> None:
        """Let the layers multiply by packed weights; drop those of weights that have changed."""
        for key, (state, _) in list(self._copies.items()):
            if state != self._state_of(key[0]):
                del self._copies[key]
        for layer, forward in self._forwards.items():
            vars(layer).setdefault("forward", forward)

    def __exit__(self, *error: object) -> None:
        """Let them multiply by their weights again."""
        for layer, forward in self._forwards.items():
            if vars(layer).get("forward") is forward:
                del vars(layer)["forward"]

    def forget(self) -> None:
        """Drop all packed weights."""
        self._copies.clear()

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """Drop the packed weights that are made while this is open, and no others, when it closes."""
        kept = dict(self._copies)
        try:
            yield
        finally:
            self._copies = kept

    def multiply(self, layers: tuple[nn.Linear, ...], inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs (..., O) of several layers for the same inputs (..., I), from one matrix product."""
        copy = self._copy_of(layers) if len(inputs) else None
        if copy is None:
            return tuple(nn.functional.linear(inputs, layer.weight, layer.bias) for layer in layers)
        if torch.is_grad_enabled() and inputs.requires_grad:
            transposed = self._copy_of(layers, is_transposed=True)
            product = _Product.apply(inputs, copy, transposed, *[layer.weight for layer in layers])
        else:
            product = copy.multiply(inputs)
        outputs = product.split([layer.out_features for layer in layers], -1) if len(layers) > 1 else (product,)
        return tuple(
            output if layer.bias is None else output + layer.bias for layer, output in zip(layers, outputs, strict=True)
        )

    def _forward(self, layer: nn.Linear, inputs: Tensor) -> Tensor:
        """The layer's outputs (..., O) for inputs (..., I)."""
        # Under autocast, attention returns half precision.
        return self.multiply((layer,), inputs.to(layer.weight.dtype))[0]

    def _copy_of(self, layers: tuple[nn.Linear, ...], is_transposed: bool = False) -> _Copy | None:
        """A packed copy of the layers' weights; None if they cannot be packed or there is no room."""
        key = layers, is_transposed
        if key not in self._copies:
            room = self._max_bytes - sum(copy.nbytes for _, copy in self._copies.values() if copy is not None)
            copy = None
            if all(_can_be_packed(layer.weight) for layer in layers):
                weight = torch.cat([layer.weight.detach() for layer in layers])
                copy = _pack(weight.T.contiguous() if is_transposed else weight, room)
            self._copies[key] = self._state_of(layers), copy
        return self._copies[key][1]

    def _state_of(self, layers: tuple[nn.Linear, ...]) -> list[object]:
        """A fingerprint of the layers' weights, which differs after a change."""
        weights, adapters = [layer.weight for layer in layers], map(self._adapter_of.get, layers)
        merged = [merged_into(adapter) if adapter else () for adapter in adapters]
        kinds = [(weight.data_ptr(), weight.dtype, weight.requires_grad) for weight in weights]
        return [*versions_of(weights), *kinds, *merged]


@dataclass(frozen=True, slots=True)
class _Copy:
    """A packed copy of a weight (O, I): multiplies inputs (..., I) by it, giving (..., O)."""

    multiply: Product
    nbytes: int


def _can_be_packed(weight: Tensor) -> bool:
    return not weight.requires_grad and can_pack(weight)


def _pack(weight: Tensor, room: int) -> _Copy | None:
    """A packed copy of at most `room` bytes of a weight (O, I), or None."""
    is_held = weight.dtype == torch.float32 and bool(
        torch.linalg.vector_norm(weight - weight.half()) <= _TOLERANCE * weight.norm()
    )
    is_held = is_held and FLOAT16_PACKING.works
    nbytes = 2 * weight.numel() if is_held else weight.nbytes
    if nbytes > room or not (is_held or PACKING.works):
        return None
    return _Copy(pack_float16(weight) if is_held else pack(weight), nbytes)


class _Product(torch.autograd.Function):
    """The product of inputs (..., I) with frozen weights (O, I), transposed; the weights get no gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, copy: _Copy, transposed: _Copy | None, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        ctx.transposed = transposed
        return copy.multiply(inputs)

    @staticmethod
    def backward(ctx: Any, of_product: Tensor) -> tuple[Tensor | None, ...]:
        weights = ctx.saved_tensors
        transposed: _Copy | None = ctx.transposed
        of_inputs = of_product @ torch.cat(weights) if transposed is None else transposed.multiply(of_product)
        return of_inputs, None, None, *[None] * len(weights)
