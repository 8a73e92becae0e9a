"""Which token sees which, in the form that architectures take.

Shapes: B rows, T tokens that look, S columns of keys that they may see.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
from torch import Tensor


def causal(before: int, size: int) -> Tensor:
    """Each of `size` tokens sees itself, those before it and `before` others, bool (size, before + size)."""
    return torch.ones(size, before + size, dtype=torch.bool).tril(before)


def attention_mask(
    visible: Tensor,
    positions: Tensor,
    key_positions: Tensor,
    window: int | None,
    layer_types: AbstractSet[str],
    dtype: torch.dtype,
) -> Tensor | dict[str, Tensor]:
    """Additive mask (B, 1, T, S), one for each kind of layer where a model has several kinds.

    Args:
        visible: What each token may see, bool (B, T, S).
        positions: Of the tokens, int64 (B, T).
        key_positions: Of what they may see, int64 (B, S).
        window: How far back layers of sliding attention see, None if there are none.
        layer_types: The model's kinds of layers, empty if it names none.
        dtype: The mask's.
    """
    full = _additive(visible, dtype)
    if window is None or layer_types == {"full_attention"}:
        return {"full_attention": full} if layer_types else full
    distance = positions[:, :, None] - key_positions[:, None, :]
    sliding = _additive(visible & (distance < window), dtype)
    return {"full_attention": full, "sliding_attention": sliding} if layer_types else sliding


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)[:, None]
