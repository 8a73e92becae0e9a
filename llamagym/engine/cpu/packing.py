"""Packed weights: frozen matrices in the layout in which the CPU multiplies, in half precision where that is exact.

For every matrix product a BLAS library packs the weights into blocks that fit registers and caches. With few rows, as
in decoding, packing takes as long as multiplying, and so does reading the weights. Here frozen weights are packed once.
float32 weights that float16 represents, such as those published in float16 or bfloat16, are packed by FBGEMM, which
multiplies in float32: half the bytes, the same products. bfloat16 weights and all other float32 ones are packed by
oneDNN in their own dtype.

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

# Largest error of float16, relative to a matrix's norm: float32's own rounding. bfloat16's smallest numbers, far below
# the matrix's others, underflow in float16.
_TOLERANCE = torch.finfo(torch.float32).eps


class PackedWeights:
    """A context in which the frozen linear layers of a model on a CPU multiply by packed weights.

    A layer's weight is packed when it is first used. Outside of the context the model is unchanged.

    Attributes:
        max_bytes: Maximum size of all packed weights together.
        weights: By the layers whose weights are joined, and whether these are transposed: the state of the weights when
            they were packed, and the result, None if they cannot be packed.
    """

    def __init__(self, model: nn.Module, max_bytes: int) -> None:
        """Finds the layers of `model` whose weights can be packed.

        Args:
            model: Any model.
            max_bytes: Maximum size of all packed weights together.
        """
        self.max_bytes = max_bytes
        self._adapter_of = adapters_by_module(model)
        # A layer whose `forward` was replaced, by accelerate's hooks for example, does more than multiply.
        self._forwards = {
            layer: partial(self._forward, layer)
            for layer in model.modules()
            if type(layer) is nn.Linear and "forward" not in vars(layer) and _can_pack(layer.weight)
        }
        self.weights: dict[tuple[tuple[nn.Linear, ...], bool], tuple[object, PackedWeight | None]] = {}

    def __enter__(self) -> None:
        """Lets the layers multiply by packed weights; drops those of weights that have changed."""
        for key, (state, _) in list(self.weights.items()):
            if state != self._state_of(key[0]):
                del self.weights[key]
        for layer, forward in self._forwards.items():
            vars(layer).setdefault("forward", forward)

    def __exit__(self, *error: object) -> None:
        """Lets the layers multiply by their own weights again."""
        for layer, forward in self._forwards.items():
            if vars(layer).get("forward") is forward:
                del vars(layer)["forward"]

    @property
    def nbytes(self) -> int:
        """Size of all packed weights together, in bytes."""
        return sum(packed.nbytes for _, packed in self.weights.values() if packed is not None)

    def clear(self) -> None:
        """Drops all packed weights."""
        self.weights.clear()

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """Drops the weights that are packed while this is open, and no others, on closing."""
        before = dict(self.weights)
        try:
            yield
        finally:
            self.weights = before

    def multiply(self, layers: tuple[nn.Linear, ...], inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs (..., O) of several layers for the same inputs (..., I), from one matrix product."""
        packed = self._packed_weight(layers) if inputs.shape[0] else None
        if packed is None:
            return tuple(nn.functional.linear(inputs, layer.weight, layer.bias) for layer in layers)
        if torch.is_grad_enabled() and inputs.requires_grad:
            transposed = self._packed_weight(layers, is_transposed=True)
            product = _Product.apply(inputs, packed, transposed, *[layer.weight for layer in layers])
        else:
            product = packed.multiply(inputs)
        outputs = [product]
        if len(layers) > 1:
            outputs = list(torch.split_with_sizes(product, [layer.out_features for layer in layers], -1))
        for index, layer in enumerate(layers):
            if layer.bias is not None:
                outputs[index] = outputs[index] + layer.bias
        return tuple(outputs)

    def _forward(self, layer: nn.Linear, inputs: Tensor) -> Tensor:
        """The layer's outputs (..., O) for inputs (..., I)."""
        # Under autocast, attention returns half precision.
        return self.multiply((layer,), inputs.to(layer.weight.dtype))[0]

    def _packed_weight(self, layers: tuple[nn.Linear, ...], is_transposed: bool = False) -> PackedWeight | None:
        """The layers' weights joined and packed; None if they cannot be packed or there is no room."""
        key = layers, is_transposed
        if key not in self.weights:
            packed = None
            if all(_can_pack(layer.weight) for layer in layers):
                weight = torch.cat([layer.weight.detach() for layer in layers])
                if is_transposed:
                    weight = weight.T.contiguous()
                packed = pack_weight(weight, self.max_bytes - self.nbytes)
            self.weights[key] = self._state_of(layers), packed
        return self.weights[key][1]

    def _state_of(self, layers: tuple[nn.Linear, ...]) -> list[object]:
        """Fingerprint of the layers' weights, which differs after a change."""
        weights = [layer.weight for layer in layers]
        state: list[object] = [*versions_of(weights)]
        state += [(weight.data_ptr(), weight.dtype, weight.requires_grad) for weight in weights]
        for adapter in map(self._adapter_of.get, layers):
            state.append(merged_into(adapter) if adapter else ())
        return state


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed weight (O, I), which multiplies inputs (..., I), giving (..., O)."""

    multiply: Product
    nbytes: int


def _can_pack(weight: Tensor) -> bool:
    return not weight.requires_grad and can_pack(weight)


def pack_weight(weight: Tensor, room: int) -> PackedWeight | None:
    """Packs a weight (O, I) into at most `room` bytes; None if that is impossible."""
    fits_float16 = weight.dtype == torch.float32 and bool(
        torch.linalg.vector_norm(weight - weight.half()) <= _TOLERANCE * weight.norm()
    )
    if fits_float16 and FLOAT16_PACKING.works:
        nbytes = 2 * weight.numel()
        return PackedWeight(pack_float16(weight), nbytes) if nbytes <= room else None
    if PACKING.works and weight.nbytes <= room:
        return PackedWeight(pack(weight), weight.nbytes)
    return None


class _Product(torch.autograd.Function):
    """The product of inputs (..., I) with frozen weights (O, I), transposed; the weights get no gradient."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, packed: PackedWeight, transposed: PackedWeight | None, *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*weights)
        ctx.transposed = transposed
        return packed.multiply(inputs)

    @staticmethod
    def backward(ctx: Any, grad_product: Tensor) -> tuple[Tensor | None, ...]:
        weights = ctx.saved_tensors
        transposed: PackedWeight | None = ctx.transposed
        no_gradients = [None] * (2 + len(weights))
        if transposed is None:
            return grad_product @ torch.cat(weights), *no_gradients
        return transposed.multiply(grad_product), *no_gradients
