"""Which token sees which, in the form that architectures take.

Shapes: B rows, T tokens that look, S columns of keys that they may see, H width.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """What goes through layers in one pass.

    Attributes:
        inputs: Token ids, int64 (B, T), or hidden states, float (B, T, H).
        positions: Their positions, int64 (B, T).
        visible: Which keys, their own included, each of them sees, bool (B, T, S).
        key_positions: Positions of the keys, int64 (B, S).
    """

    inputs: Tensor
    positions: Tensor
    visible: Tensor
    key_positions: Tensor


def causal(before: int, size: int) -> Tensor:
    """Each of `size` tokens sees itself, those before it and `before` others, bool (size, before + size)."""
    return torch.ones(size, before + size, dtype=torch.bool).tril(before)


def attention_mask(
    tokens: Tokens, window: int | None, layer_types: AbstractSet[str], dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Additive mask (B, 1, T, S), one for each kind of layer where a model names its kinds.

    Args:
        tokens: Which look.
        window: How far back layers of sliding attention see, None if there are none.
        layer_types: The model's kinds of layers, empty if it names none.
        dtype: The mask's.
    """
    full = _additive(tokens.visible, dtype)
    sliding = full
    if window is not None and layer_types != {"full_attention"}:
        distance = tokens.positions[:, :, None] - tokens.key_positions[:, None, :]
        sliding = _additive(tokens.visible & (distance < window), dtype)
    if not layer_types:
        return sliding
    # Contexts end where chunks of attention do, so that layers of other kinds see everything.
    return {**dict.fromkeys({"full_attention", *layer_types}, full), "sliding_attention": sliding}


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)[:, None]
