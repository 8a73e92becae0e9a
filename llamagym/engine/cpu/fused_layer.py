"""Fused decoder layers: each runs as one function.

With few rows, as in decode, a layer's dozen modules and their many small operations take as long as its matrix
products; in learning they take a third of the time. Most families' layers are Llama's: attention with rotary positions,
then a gated feed-forward block, each behind an RMS norm and with a residual connection. Here such a layer is its matrix
products, joined where they share inputs, with one compiled kernel between each two of them.

Shapes: B rows, T tokens, H width, O outputs of a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ...models.hardware import sum_dtype
from ...models.peft_internals import base_of, is_lora_weight, low_rank_of
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
from .packing import Packed
from .rowwise import gated, normalize

# Without gradients, PyTorch's attention is faster than the compiled kernel from so many tokens and columns on.
_MANY_TOKENS, _MANY_COLUMNS = 8, 256


class Fused:
    """A context in which decoder layers of Llama's kind run fused; outside of it the model is unchanged."""

    def __init__(
        self,
        body: nn.Module,
        packed: Packed,
        may_hold_scores: Callable[[Tensor, int], bool],
        attend_in_parts: Callable[..., Tensor],
    ) -> None:
        """Find the layers of `body` that can be fused.

        Args:
            body: A transformer.
            packed: The packed copies of frozen weights.
            may_hold_scores: Whether all attention scores for a mask and a number of heads may be held in memory.
            attend_in_parts: Attention with gradients for cached keys and values, too (see `engine.attention`).
        """
        self._layers = {
            layer: _Layer(layer, packed, may_hold_scores, attend_in_parts)
            for layer in body.modules()
            if is_llama_layer(layer) and _can_be_fused(layer)
        }

    @property
    def has_layers(self) -> bool:
        """Whether any layer can be fused."""
        return bool(self._layers)

    def __enter__(self) -> None:
        """Let the layers run fused, except those with a replaced `forward` or with hooks on an inner module."""
        for layer, fused in self._layers.items():
            if "forward" not in vars(layer) and not fused.has_hooks():
                vars(layer)["forward"] = fused

    def __exit__(self, *error: object) -> None:
        """Let them run their own `forward` again."""
        for layer, fused in self._layers.items():
            if vars(layer).get("forward") is fused:
                del vars(layer)["forward"]


class _Layer:
    """A decoder layer as one function."""

    def __init__(
        self,
        layer: Any,
        packed: Packed,
        may_hold_scores: Callable[[Tensor, int], bool],
        attend_in_parts: Callable[..., Tensor],
    ) -> None:
        self._layer, self._packed = layer, packed
        self._may_hold_scores, self._attend_in_parts = may_hold_scores, attend_in_parts
        self._cache_argument = cache_argument(layer)
        self._attention, projections, self._norms = parts_of(layer)
        self._in, self._out, self._gate_up, self._down = projections
        inner = [module for module in layer.modules() if module is not layer]
        self._hooks = [hooks for module in inner for hooks in forward_hooks_of(module)]

    def has_hooks(self) -> bool:
        """Whether an inner module has hooks, which a fused layer would not call."""
        return any(not captures_outputs(hook) for hooks in filter(None, self._hooks) for hook in hooks.values())

    def __call__(self, hidden: Tensor, **arguments: Any) -> Tensor:
        """The layer's output for hidden states (B, T, H); takes the layer's own arguments."""
        cache: Cache | None = arguments.get(self._cache_argument)
        if cache is not None and self._can_run(hidden, cache):
            del arguments[self._cache_argument]
            return self._run(hidden, cache, **arguments)
        layer = self._layer
        result: Tensor = type(layer).forward(layer, hidden, **arguments)
        return result

    def _can_run(self, hidden: Tensor, cache: Cache) -> bool:
        if not has_kernels(hidden) or torch.is_autocast_enabled("cpu"):
            return False
        if not torch.is_grad_enabled():
            return hasattr(cache, "grow")
        are_frozen = not any(norm.weight.requires_grad for norm in self._norms)
        return are_frozen and has_attention(attention_name(self._attention.config))

    def _run(
        self, hidden: Tensor, cache: Any, *, attention_mask: Tensor, position_embeddings: Any, **others: Any
    ) -> Tensor:
        before, after, *of_heads = self._norms
        _, inputs = normalize(hidden, before.weight, before.variance_epsilon)
        query, key, value = self._project(self._in, inputs)
        if of_heads:
            query = _normalize_heads(query, of_heads[0], self._attention.head_dim)
            key = _normalize_heads(key, of_heads[1], self._attention.head_dim)
        attended = self._attend((query, key, value), position_embeddings, cache, attention_mask, **others)
        (added,) = self._project(self._out, attended)
        hidden, inputs = normalize(hidden, after.weight, after.variance_epsilon, added)
        (added,) = self._project(self._down, gated(*self._project(self._gate_up, inputs)))
        return hidden + added

    def _attend(
        self, projected: tuple[Tensor, Tensor, Tensor], angles: Any, cache: Any, mask: Tensor, **others: Any
    ) -> Tensor:
        """The heads' outputs (B, T, N D): from a compiled kernel, or from PyTorch where that is faster or needed."""
        attention, (_, tokens, width) = self._attention, projected[0].shape
        fits, shared = self._may_hold_scores(mask, width // attention.head_dim), others.get("shared_prefix")
        of_layer = None if shared is None else shared[attention.layer_idx]
        if (kernel := self._kernel_for(mask, cache, fits)) is not None:
            kept = cache.grow(attention.layer_idx, tokens)
            return kernel(*projected, angles, kept, of_layer, mask, attention.scaling)
        query, key, value = (part.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for part in projected)
        if fits and _sums_in_float64(mask):
            query, key = (_rotate(part.double(), [angle.double() for angle in angles]) for part in (query, key))
            key, value = cache.update(key.to(value.dtype), value, attention.layer_idx)
            return self._attend_in_parts(query, key, value, mask, attention.scaling, of_layer).flatten(2)
        query, key = (_rotate(part, angles) for part in (query, key))
        key, value = cache.update(key, value, attention.layer_idx)
        by_pytorch = attention_function(attention_name(attention.config))
        attended: Tensor = by_pytorch(attention, query, key, value, mask, scaling=attention.scaling, **others)[0]
        return attended.flatten(2)

    @staticmethod
    def _kernel_for(mask: Tensor, cache: Any, fits: bool) -> Callable[..., Tensor] | None:
        """The compiled attention for a pass, or None; `fits` is whether scores may be held in memory."""
        if torch.is_grad_enabled():
            return attend_with_gradients if fits and hasattr(cache, "grow") and not cache.keeps_gradients else None
        if mask.shape[-2] < _MANY_TOKENS or mask.shape[-1] < _MANY_COLUMNS:
            return attend
        if _sums_in_float64(mask):
            # PyTorch's own attention rounds to bfloat16 in between, which the kernels that learn do not.
            return attend_with_gradients if fits else attend
        return None

    def _project(self, modules: tuple[Any, ...], inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs (B, T, O) of projections of the same inputs."""
        added = [low_rank for module in modules if (low_rank := low_rank_of(module)) is not None]
        if len(added) < len(modules):
            return tuple(module(inputs) for module in modules)
        products = self._packed.multiply(tuple(map(base_of, modules)), inputs)
        return tuple(add_low_rank(product, inputs, low_rank) for product, low_rank in zip(products, added, strict=True))


def _sums_in_float64(states: Tensor) -> bool:
    return sum_dtype(states) == torch.float64


def _rotate(states: Tensor, angles: Sequence[Tensor]) -> Tensor:
    """Rotary positions: queries or keys (B, heads, T, D), cosines and sines (B, T, D)."""
    cosines, sines = (part[:, None] for part in angles)
    first, second = states.chunk(2, -1)
    return states * cosines + torch.cat([-second, first], dim=-1) * sines


def _normalize_heads(heads: Tensor, norm: Any, size: int) -> Tensor:
    """Normalize each head of (B, T, N D)."""
    return normalize(heads.unflatten(-1, (-1, size)), norm.weight, norm.variance_epsilon)[1].flatten(2)


def _can_be_fused(layer: Any) -> bool:
    """Whether a decoder layer of Llama's kind is an ordinary one, and no module in it has a replaced `forward`."""
    attention, projections, _ = parts_of(layer)
    return (
        attention.config.hidden_act == "silu"
        and len({weight.dtype for name, weight in layer.named_parameters() if not is_lora_weight(name)}) == 1
        and not any("forward" in vars(module) for module in layer.modules())
        and all(type(base_of(module)) is nn.Linear for modules in projections for module in modules)
    )
