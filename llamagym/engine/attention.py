"""Attention where rows share a prefix, whose keys and values are kept once.

In learning, what all rows' queries make of the shared keys is one matrix product (Hydragen, Juravsky et al. 2024,
https://arxiv.org/abs/2402.05099), and one softmax runs over these scores and those of a row's own keys. Without
gradients PyTorch's fused attention over copies of the prefix takes 0.4 to 0.6 of that time, since no scores are held.

Shapes: B rows, N query heads, K heads of keys and values, T tokens, P shared columns, S columns of a row's own, D head
size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache

from ..models.hardware import sum_dtype
from ..models.transformers_internals import register_attention, using_attention
from .kv_cache import BufferCache

_NAME = "llamagym_shared_prefix"
# cuDNN's, which is faster on long sequences, makes a plan for every shape that it has not met.
_ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Larger scores are never held whole, in learning either.
_SCORES = 2**23


@cache
def register() -> None:
    """Make this attention known to transformers, once; `sharing` needs it."""
    register_attention(_NAME, _attend)


def for_any_shape(device: torch.device) -> AbstractContextManager[None]:
    """While open, attention on a device takes as long for a shape that it has not met as for another."""
    return sdpa_kernel(_ANY_SHAPE) if device.type == "cuda" else nullcontext()


@contextmanager
def sharing(body: Any, cache: Cache) -> Iterator[dict[str, Any]]:
    """While open, a model attends to a cache's shared prefix, if it has one; yields the arguments for that."""
    if not isinstance(cache, BufferCache) or cache.prefix is None:
        yield {}
        return
    with using_attention(body.config, _NAME):
        yield {"shared_prefix": cache.prefix}


def may_hold_scores(mask: Tensor, heads: int) -> bool:
    """Whether the scores of all heads under a mask (B, 1, T, P + S) may be held in memory."""
    return mask.numel() * heads <= _SCORES


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    shared_prefix: Sequence[Tensor],
    **_: Any,
) -> tuple[Tensor, None]:
    """What a layer's heads see, (B, T, N, D).

    Args:
        module: The layer's attention.
        query: (B, N, T, D).
        key: Of each row's own columns, (B, K, S, D).
        value: Likewise.
        attention_mask: Additive, of shared and own columns, (B, 1, T, P + S).
        scaling: Factor of the scores.
        shared_prefix: For each layer, shared keys and values (2, K, P, D).
    """
    shared_key, shared_value = shared_prefix[module.layer_idx]
    rows, heads = query.shape[:2]
    if not torch.is_grad_enabled() or not may_hold_scores(attention_mask, heads):
        key = torch.cat([shared_key.expand(rows, -1, -1, -1), key], dim=2)
        value = torch.cat([shared_value.expand(rows, -1, -1, -1), value], dim=2)
        seen = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=True)
        return seen.transpose(1, 2), None
    return attend_in_parts(query, key, value, attention_mask, scaling, shared_prefix[module.layer_idx]), None


def attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, shared: Tensor | None
) -> Tensor:
    """What the heads see of shared keys and values (2, K, P, D), if there are any, and of each row's own, (B, T, N, D).

    The other shapes are those of `_attend`. All scores are held.
    """
    (rows, heads, length, size), groups, dtype = query.shape, key.shape[1], sum_dtype(value)
    shared_key, shared_value = value.new_empty(2, groups, 0, size, dtype=dtype) if shared is None else shared.to(dtype)
    own_key, own_value, before = key.to(dtype), value.to(dtype), shared_key.shape[1]
    # The kernels take the scaling in float32.
    factor = torch.tensor(scaling, dtype=torch.promote_types(value.dtype, torch.float32))
    # Heads that share keys stand beside each other: (B, K, N/K T, D).
    grouped = (factor * query.to(dtype)).reshape(rows, groups, -1, size)
    of_shared = _rows_together(grouped) @ shared_key.mT
    of_own = (own_key @ grouped.mT).mT
    scores = torch.cat([_rows_apart(of_shared, rows), of_own], dim=-1)
    scores = scores.view(rows, heads, length, -1).add_(mask).softmax(-1).view_as(scores)
    seen = scores[..., before:] @ own_value
    seen = seen + _rows_apart(_rows_together(scores[..., :before]) @ shared_value, rows)
    return seen.view(rows, heads, length, size).transpose(1, 2).to(value.dtype)


def _rows_together(part: Tensor) -> Tensor:
    """(B, K, M, X) as (K, B M, X)."""
    return part.transpose(0, 1).flatten(1, 2)


def _rows_apart(part: Tensor, rows: int) -> Tensor:
    """The inverse of `_rows_together`."""
    return part.unflatten(1, (rows, -1)).transpose(0, 1)
