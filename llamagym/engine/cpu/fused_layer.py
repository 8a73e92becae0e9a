"""Fused decoder layers: each runs as one function.

With few rows, as in decoding, a layer's dozen modules and their many small operations take as long as its matrix
products; in training they take a third of the time. Most families' layers are Llama's: attention with rotary positions,
then a gated feed-forward block, each behind an RMS norm and with a residual connection. Here such a layer is its matrix
products, joined where they share inputs, with one compiled kernel between each two of them.

Shapes: B rows, T tokens, N query heads, D head size, H width, O outputs of a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ...models.hardware import sum_dtype
from ...models.peft_internals import LowRank, base_of, is_lora_weight, low_rank_of
from ...models.torch_internals import forward_hooks_of
from ...models.transformers_internals import (
    attention_function,
    attention_name,
    cache_argument,
    captures_outputs,
    has_attention,
    is_llama_layer,
    parts_of,
)
from .attention_backward import attend_with_gradients
from .attention_kernel import attend
from .compiling import has_kernels
from .low_rank import add_low_rank
from .packing import PackedWeights
from .rowwise import gated, normalize

# Without gradients, PyTorch's attention is faster than the compiled kernel from so many tokens and columns on.
_MANY_TOKENS = 8
_MANY_COLUMNS = 256


class FusedLayers:
    """A context in which decoder layers like Llama's run fused; outside of it the model is unchanged."""

    def __init__(
        self,
        body: nn.Module,
        packed: PackedWeights,
        may_store_scores: Callable[[Tensor, int], bool],
        attend_in_parts: Callable[..., Tensor],
    ) -> None:
        """Finds the layers of `body` that can be fused.

        Args:
            body: A transformer.
            packed: Packed copies of frozen weights.
            may_store_scores: Whether all attention scores for a mask and a number of heads may be stored at once.
            attend_in_parts: Attention with gradients for cached keys and values as well (see `engine.attention`).
        """
        self._layers = {
            layer: FusedLayer(layer, packed, may_store_scores, attend_in_parts)
            for layer in body.modules()
            if is_llama_layer(layer) and _can_fuse(layer)
        }

    @property
    def has_layers(self) -> bool:
        """Whether any layer can be fused."""
        return bool(self._layers)

    def __enter__(self) -> None:
        """Runs layers fused, except those with a replaced `forward` or with hooks on an inner module."""
        for layer, fused in self._layers.items():
            if "forward" not in vars(layer) and not fused.has_hooks():
                vars(layer)["forward"] = fused

    def __exit__(self, *error: object) -> None:
        """Runs layers by their own `forward` again."""
        for layer, fused in self._layers.items():
            if vars(layer).get("forward") is fused:
                del vars(layer)["forward"]


class FusedLayer:
    """A decoder layer as one function.

    Attributes:
        layer: The model's own layer.
    """

    def __init__(
        self,
        layer: Any,
        packed: PackedWeights,
        may_store_scores: Callable[[Tensor, int], bool],
        attend_in_parts: Callable[..., Tensor],
    ) -> None:
        """Finds the parts of a layer; the other arguments are those of `FusedLayers`."""
        self.layer = layer
        self._packed = packed
        self._may_store_scores = may_store_scores
        self._attend_in_parts = attend_in_parts
        self._cache_argument = cache_argument(layer)
        self._attention, projections, self._norms = parts_of(layer)
        self._qkv, self._out, self._gate_up, self._down = projections
        self._hooks: list[Any] = []
        for module in layer.modules():
            if module is not layer:
                self._hooks += forward_hooks_of(module)

    def has_hooks(self) -> bool:
        """Whether an inner module has hooks, which a fused layer would not call."""
        return any(not captures_outputs(hook) for hooks in filter(None, self._hooks) for hook in hooks.values())

    def __call__(self, hidden: Tensor, **arguments: Any) -> Tensor:
        """The layer's output for hidden states (B, T, H) and the layer's own arguments."""
        cache: Cache | None = arguments.get(self._cache_argument)
        if cache is not None and self._can_run(hidden, cache):
            del arguments[self._cache_argument]
            return self.run(hidden, cache, **arguments)
        layer = self.layer
        output: Tensor = type(layer).forward(layer, hidden, **arguments)
        return output

    def _can_run(self, hidden: Tensor, cache: Cache) -> bool:
        if not has_kernels(hidden) or torch.is_autocast_enabled("cpu"):
            return False
        if not torch.is_grad_enabled():
            return hasattr(cache, "grow")
        are_frozen = not any(norm.weight.requires_grad for norm in self._norms)
        return are_frozen and has_attention(attention_name(self._attention.config))

    def run(
        self, hidden: Tensor, cache: Any, *, attention_mask: Tensor, position_embeddings: Any, **others: Any
    ) -> Tensor:
        """The layer's output, computed by the fused function; `__call__` decides whether it can be."""
        attention_norm, feed_forward_norm, *head_norms = self._norms
        _, inputs = normalize(hidden, attention_norm.weight, attention_norm.variance_epsilon)
        query, key, value = self._project(self._qkv, inputs)
        if head_norms:
            query = _normalize_heads(query, head_norms[0], self._attention.head_dim)
            key = _normalize_heads(key, head_norms[1], self._attention.head_dim)
        attended = self._attend((query, key, value), position_embeddings, cache, attention_mask, **others)
        (residual,) = self._project(self._out, attended)
        hidden, inputs = normalize(hidden, feed_forward_norm.weight, feed_forward_norm.variance_epsilon, residual)
        gate, up = self._project(self._gate_up, inputs)
        (residual,) = self._project(self._down, gated(gate, up))
        return hidden + residual

    def _attend(
        self, projected: tuple[Tensor, Tensor, Tensor], angles: Any, cache: Any, mask: Tensor, **others: Any
    ) -> Tensor:
        """The heads' outputs (B, T, N D): from a compiled kernel, or from PyTorch where that is faster or needed."""
        attention = self._attention
        _, tokens, width = projected[0].shape
        fits = self._may_store_scores(mask, width // attention.head_dim)
        shared = others.get("shared_prefix")
        layer_shared = None if shared is None else shared[attention.layer_idx]
        kernel = self._kernel_for(mask, cache, fits)
        if kernel is not None:
            cached = cache.grow(attention.layer_idx, tokens)
            return kernel(*projected, angles, cached, layer_shared, mask, attention.scaling)
        query, key, value = (states.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for states in projected)
        if fits and _sums_in_float64(mask):
            wide_angles = [angle.double() for angle in angles]
            query = rotate(query.double(), wide_angles)
            key = rotate(key.double(), wide_angles)
            key, value = cache.update(key.to(value.dtype), value, attention.layer_idx)
            return self._attend_in_parts(query, key, value, mask, attention.scaling, layer_shared).flatten(2)
        query = rotate(query, angles)
        key = rotate(key, angles)
        key, value = cache.update(key, value, attention.layer_idx)
        attend_by_pytorch = attention_function(attention_name(attention.config))
        attended: Tensor = attend_by_pytorch(attention, query, key, value, mask, scaling=attention.scaling, **others)[0]
        return attended.flatten(2)

    @staticmethod
    def _kernel_for(mask: Tensor, cache: Any, fits: bool) -> Callable[..., Tensor] | None:
        """The compiled attention for a pass, or None; `fits` is whether scores may be stored at once."""
        if torch.is_grad_enabled():
            return attend_with_gradients if fits and hasattr(cache, "grow") and not cache.keeps_gradients else None
        if mask.shape[-2] < _MANY_TOKENS or mask.shape[-1] < _MANY_COLUMNS:
            return attend
        if _sums_in_float64(mask):
            # PyTorch's attention rounds to bfloat16 in between, which the kernels with gradients do not.
            return attend_with_gradients if fits else attend
        return None

    def _project(self, modules: tuple[Any, ...], inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs (B, T, O) of projections of the same inputs."""
        low_ranks: list[LowRank] = []
        for module in modules:
            low_rank = low_rank_of(module)
            if low_rank is None:
                return tuple(module(inputs) for module in modules)
            low_ranks.append(low_rank)
        products = self._packed.multiply(tuple(map(base_of, modules)), inputs)
        outputs: list[Tensor] = []
        for product, low_rank in zip(products, low_ranks, strict=True):
            outputs.append(add_low_rank(product, inputs, low_rank) if low_rank else product)
        return tuple(outputs)


def _sums_in_float64(states: Tensor) -> bool:
    return sum_dtype(states) == torch.float64


def rotate(states: Tensor, angles: Sequence[Tensor]) -> Tensor:
    """Applies rotary positions to queries or keys (B, heads, T, D), from cosines and sines (B, T, D)."""
    cosines, sines = (angle[:, None] for angle in angles)
    first, second = states.chunk(2, -1)
    return states * cosines + torch.cat([-second, first], dim=-1) * sines


def _normalize_heads(states: Tensor, norm: Any, head_size: int) -> Tensor:
    """Normalizes each head of (B, T, N D)."""
    return normalize(states.unflatten(-1, (-1, head_size)), norm.weight, norm.variance_epsilon)[1].flatten(2)


def _can_fuse(layer: Any) -> bool:
    """Whether a layer has Llama's activation, one dtype, linear projections and no replaced `forward`."""
    attention, projections, _ = parts_of(layer)
    return (
        attention.config.hidden_act == "silu"
        and len({weight.dtype for name, weight in layer.named_parameters() if not is_lora_weight(name)}) == 1
        and not any("forward" in vars(module) for module in layer.modules())
        and all(type(base_of(module)) is nn.Linear for modules in projections for module in modules)
    )
