"""Attention masks of tokens with explicit positions, in the form that each architecture takes.

Shapes: B rows, T tokens (queries), S columns of keys, H width.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """Inputs of one pass through some layers.

    Attributes:
        inputs: Token ids, int64 (B, T), or hidden states, float (B, T, H).
        positions: Positions of the tokens, int64 (B, T).
        visible: True where a token attends to a key, its own included, bool (B, T, S).
        key_positions: Positions of the keys, int64 (B, S).
    """

    inputs: Tensor
    positions: Tensor
    visible: Tensor
    key_positions: Tensor


def causal(before: int, size: int) -> Tensor:
    """Causal mask of `size` tokens after `before` others, bool (size, before + size); True is visible."""
    return torch.ones(size, before + size, dtype=torch.bool).tril(before)


def attention_mask(
    tokens: Tokens, window: int | None, layer_types: AbstractSet[str], dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Additive mask (B, 1, T, S); one for each type of layer if a model names its types.

    Args:
        tokens: Tokens with their visible keys.
        window: How far back layers with sliding attention see; None if there are none.
        layer_types: The model's types of layers; empty if it names none.
        dtype: Dtype of the mask.
    """
    full = _additive(tokens.visible, dtype)
    sliding = full
    if window is not None and layer_types != {"full_attention"}:
        distance = tokens.positions[:, :, None] - tokens.key_positions[:, None, :]
        sliding = _additive(tokens.visible & (distance < window), dtype)
    if not layer_types:
        return sliding
    # A context is no longer than a chunk of chunked attention, so layers of other types see everything.
    return {**dict.fromkeys({"full_attention", *layer_types}, full), "sliding_attention": sliding}


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)[:, None]
