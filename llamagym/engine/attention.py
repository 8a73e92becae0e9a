"""Attention with a prefix that rows share, whose keys and values are stored once.

In training, all rows' queries times the shared keys is one matrix product (Hydragen, Juravsky et al. 2024,
https://arxiv.org/abs/2402.05099), and one softmax runs over these scores and those of a row's own keys. Without
gradients, PyTorch's fused attention over copies of the prefix takes 0.4 to 0.6 of that time, since it stores no scores.

Shapes: B rows, N query heads, K heads of keys and values, T tokens, P shared columns, S own columns of a row, D head
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

# Name of the attention function in transformers.
SHARED_PREFIX_ATTENTION = "llamagym_shared_prefix"
# Without cuDNN's, which is faster on long sequences but makes a plan for every new shape.
_BACKENDS_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# More scores than these are never stored at once.
MAX_SCORES = 2**23


@cache
def register() -> None:
    """Registers this attention with transformers, once; `sharing` needs it."""
    register_attention(SHARED_PREFIX_ATTENTION, _attend)


def without_shape_plans(device: torch.device) -> AbstractContextManager[None]:
    """While open, attention is as fast for a new shape as for one that it has met."""
    return sdpa_kernel(_BACKENDS_WITHOUT_PLANS) if device.type == "cuda" else nullcontext()


@contextmanager
def sharing(body: Any, cache: Cache) -> Iterator[dict[str, Any]]:
    """While open, a model attends to a cache's shared prefix, if it has one; yields the arguments that this needs."""
    if not isinstance(cache, BufferCache) or cache.prefix is None:
        yield {}
        return
    with using_attention(body.config, SHARED_PREFIX_ATTENTION):
        yield {"shared_prefix": cache.prefix}


def may_store_scores(mask: Tensor, heads: int) -> bool:
    """Whether the scores of all heads under a mask (B, 1, T, P + S) may be stored at once."""
    return mask.numel() * heads <= MAX_SCORES


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
    """The heads' outputs (B, T, N, D), as an attention function of transformers.

    Args:
        module: The layer's attention module.
        query: Queries (B, N, T, D).
        key: Keys of each row's own columns, (B, K, S, D).
        value: Values of the same columns, (B, K, S, D).
        attention_mask: Additive mask of shared and own columns, (B, 1, T, P + S).
        scaling: Factor of the scores.
        shared_prefix: For each layer, shared keys and values (2, K, P, D).
    """
    shared = shared_prefix[module.layer_idx]
    rows, heads = query.shape[:2]
    if torch.is_grad_enabled() and may_store_scores(attention_mask, heads):
        return attend_in_parts(query, key, value, attention_mask, scaling, shared), None
    shared_key, shared_value = shared
    key = torch.cat([shared_key.expand(rows, -1, -1, -1), key], dim=2)
    value = torch.cat([shared_value.expand(rows, -1, -1, -1), value], dim=2)
    output = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2), None


def attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, shared: Tensor | None
) -> Tensor:
    """The heads' outputs (B, T, N, D) from shared keys and values (2, K, P, D), if any, and each row's own.

    The other shapes are those of `_attend`. All scores are stored.
    """
    rows, heads, length, head_size = query.shape
    kv_heads = key.shape[1]
    dtype = sum_dtype(value)
    if shared is None:
        shared = value.new_empty(2, kv_heads, 0, head_size)
    shared_key, shared_value = shared.to(dtype)
    own_key = key.to(dtype)
    own_value = value.to(dtype)
    prefix_length = shared_key.shape[1]
    # The compiled kernels take the scaling in float32.
    factor = torch.tensor(scaling, dtype=torch.promote_types(value.dtype, torch.float32))
    # Query heads with the same keys are grouped: (B, K, N/K T, D).
    grouped = (factor * query.to(dtype)).reshape(rows, kv_heads, -1, head_size)
    shared_scores = _merge_rows(grouped) @ shared_key.mT
    own_scores = (own_key @ grouped.mT).mT
    scores = torch.cat([_split_rows(shared_scores, rows), own_scores], dim=-1)
    weights = scores.view(rows, heads, length, -1).add_(mask).softmax(-1).view_as(scores)
    output = weights[..., prefix_length:] @ own_value
    output = output + _split_rows(_merge_rows(weights[..., :prefix_length]) @ shared_value, rows)
    return output.view(rows, heads, length, head_size).transpose(1, 2).to(value.dtype)


def _merge_rows(states: Tensor) -> Tensor:
    """(B, K, M, X) as (K, B M, X)."""
    return states.transpose(0, 1).flatten(1, 2)


def _split_rows(states: Tensor, rows: int) -> Tensor:
    """The inverse of `_merge_rows`."""
    return states.unflatten(1, (rows, -1)).transpose(0, 1)
