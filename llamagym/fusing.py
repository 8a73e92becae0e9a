"""Decoder layers that run as one function each, where no gradients are needed.

With few rows, as when replies are written, a layer's dozen modules and their many small operations take as long as its
matrix products. Most families' layers are Llama's: attention with rotary positions, then a gated product, each
normalized by root mean squares before and added to what was. Here such a layer is its products, those of the same
inputs in one, and a compiled function between each two of them.

Shapes: B rows, T tokens, H width, O outputs of a projection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from .adapter import low_rank_of
from .compiling import has_kernels
from .history import RoomyCache
from .kernels import attend, gated, normalize
from .packing import Packed

_KINDS = {f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")}


class Fused:
    """A context in which layers of the usual kind run as one function each; outside of it the model is as it was."""

    def __init__(self, body: nn.Module, packed: Packed) -> None:
        """Find the layers of `body` that can; frozen weights multiply as `packed` has them."""
        self._layers = {layer: _Layer(layer, packed) for layer in body.modules() if _is_usual(layer)}

    def __enter__(self) -> None:
        """Let the layers run fused, but for those that do more, or a module of which would be missed by its hooks."""
        for layer, fused in self._layers.items():
            if "forward" not in vars(layer) and not fused.is_watched:
                vars(layer)["forward"] = fused

    def __exit__(self, *error: object) -> None:
        """Let them run as they are again."""
        for layer, fused in self._layers.items():
            if vars(layer).get("forward") is fused:
                del vars(layer)["forward"]

    def give_up(self) -> None:
        """Let all layers run as they are from now on."""
        self._layers = {}


class _Layer:
    """A decoder layer as one function."""

    def __init__(self, layer: Any, packed: Packed) -> None:
        self._layer, self._packed = layer, packed
        attention, feed_forward = layer.self_attn, layer.mlp
        self._in = attention.q_proj, attention.k_proj, attention.v_proj
        self._out = (attention.o_proj,)
        self._gate_up = feed_forward.gate_proj, feed_forward.up_proj
        self._down = (feed_forward.down_proj,)
        # Learning multiplies by each matrix of an adapted layer alone; copies of both kinds would take twice the room.
        projections = self._in + self._out + self._gate_up + self._down
        self._is_plain = all(type(module) is nn.Linear for module in projections)
        inner = [module for module in layer.modules() if module is not layer]
        self._hooks = [hooks for module in inner for hooks in (module._forward_hooks, module._forward_pre_hooks)]

    @property
    def is_watched(self) -> bool:
        """Whether a module inside has hooks."""
        return any(self._hooks)

    def __call__(self, hidden: Tensor, past_key_values: Cache | None = None, **others: Any) -> Tensor:
        """What the layer makes of hidden states (B, T, H), given as to the layer itself."""
        is_bare = not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        if is_bare and has_kernels(hidden) and isinstance(past_key_values, RoomyCache):
            return self._run(hidden, past_key_values, **others)
        layer = self._layer
        result: Tensor = type(layer).forward(layer, hidden, past_key_values=past_key_values, **others)
        return result

    def _run(
        self,
        hidden: Tensor,
        cache: RoomyCache,
        *,
        attention_mask: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        shared_prefix: Any = None,
        **others: Any,
    ) -> Tensor:
        attention = self._layer.self_attn
        before, after = self._layer.input_layernorm, self._layer.post_attention_layernorm
        _, inputs = normalize(hidden, before.weight, before.variance_epsilon)
        query, key, value = self._project(self._in, inputs)
        if hasattr(attention, "q_norm"):
            query = _normalize_heads(query, attention.q_norm, attention.head_dim)
            key = _normalize_heads(key, attention.k_norm, attention.head_dim)
        kept = cache.grow(attention.layer_idx, hidden.shape[1])
        shared = None if shared_prefix is None else shared_prefix[attention.layer_idx]
        seen = attend(query, key, value, position_embeddings, kept, shared, attention_mask, attention.scaling)
        (added,) = self._project(self._out, seen)
        hidden, inputs = normalize(hidden, after.weight, after.variance_epsilon, added)
        (added,) = self._project(self._down, gated(*self._project(self._gate_up, inputs)))
        return hidden + added

    def _project(self, layers: tuple[Any, ...], inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs (B, T, O) of projections of the same inputs."""
        if self._is_plain:
            return self._packed.multiply(layers, inputs)
        return tuple(self._project_one(layer, inputs) for layer in layers)

    def _project_one(self, layer: nn.Module, inputs: Tensor) -> Tensor:
        """Output (B, T, O) of a projection that may be adapted, with fewer operations than PEFT's."""
        if type(layer) is nn.Linear:
            return self._packed.multiply((layer,), inputs)[0]
        if (low_rank := low_rank_of(layer)) is None:
            result: Tensor = layer(inputs)
            return result
        base, down, up, scale = low_rank
        product = self._project_one(base, inputs)
        low = nn.functional.linear(inputs.to(down.dtype), down).flatten(0, 1)
        adapted = torch.addmm(product.to(up.dtype).flatten(0, 1), low, up.mT, alpha=scale)
        return adapted.to(product.dtype).view_as(product)


def _normalize_heads(heads: Tensor, norm: Any, size: int) -> Tensor:
    """Each of the heads side by side (B, T, N D), normalized."""
    return normalize(heads.unflatten(-1, (-1, size)), norm.weight, norm.variance_epsilon)[1].flatten(2)


def _is_usual(layer: Any) -> bool:
    """Whether a module is a decoder layer of the usual kind, none of whose modules does more than its class says."""
    return (
        type(layer).__name__ in _KINDS
        and layer.self_attn.config.hidden_act == "silu"
        and len({weight.dtype for name, weight in layer.named_parameters() if ".lora_" not in name}) == 1
        and not any("forward" in vars(module) for module in layer.modules())
    )
