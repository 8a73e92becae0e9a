"""Attention for few query tokens as one compiled kernel, without gradients.

With few rows, as in decode, a PyTorch operation takes about 10 us whatever it computes, and attention is a dozen of
them per layer. Here it is one call. Cached keys and values and the result are rounded to the model's dtype; it sums in
the dtype that `models.hardware.sum_dtype` says.

Shapes: B rows, T tokens, N query heads, K heads of keys and values, D head size, P shared columns of keys and values, S
columns of a row's own.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from .compiling import as_element, compiled, exponential, inlined, kind_of, new_sums, summand
from .numba_internals import carray, pointer


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    angles: tuple[Tensor, Tensor],
    kept: tuple[Tensor, Tensor],
    shared: Tensor | None,
    mask: Tensor,
    scaling: float,
) -> Tensor:
    """Rotate queries and keys, write keys and values into the KV cache, and return the heads' outputs, (B, T, N D).

    Args:
        query: As projected, (B, T, N D), with one stride between tokens.
        key: (B, T, K D), likewise.
        value: (B, T, K D), likewise.
        angles: Cosines and sines of the tokens' positions, (B, T, D) each, or (1, T, D) for all rows.
        kept: Cached keys and values of each row's own columns, (B, K, S, D) each, contiguous from S on; the last T
            columns are filled in.
        shared: Keys and values (2, K, P, D) of a prefix that all rows share.
        mask: Additive, of shared and own columns, (B, 1, T, P + S) or (1, 1, T, P + S).
        scaling: Factor of the scores.

    Raises:
        ValueError: If the shape of angles or mask does not fit the tokens and columns.
    """
    (rows, tokens, width), (_, groups, own, size) = query.shape, kept[0].shape
    before = 0 if shared is None else shared.shape[2]
    cosines = of_rows(rows, angles[0], (tokens, size))
    sines = of_rows(rows, angles[1], (tokens, size))
    mask = of_rows(rows, mask, (1, tokens, before + own))
    result = torch.empty_like(query, memory_format=torch.contiguous_format)
    _attend(
        rows * tokens * width * (before + own),
        kind_of(query, key, value, cosines, sines, mask, *kept, *([] if shared is None else [shared])),
        (query.data_ptr(), key.data_ptr(), value.data_ptr()),
        (cosines.data_ptr(), sines.data_ptr(), mask.data_ptr()),
        (kept[0].data_ptr(), kept[1].data_ptr(), 0 if shared is None else shared.data_ptr()),
        result.data_ptr(),
        (rows, tokens, width // size, groups, size),
        (before, own),
        (query.stride(1), key.stride(1), value.stride(1), *kept[0].stride()[:2]),
        scaling,
    )
    return result


def of_rows(rows: int, part: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Expand (1, *sizes) or (B, *sizes) to a contiguous (B, *sizes)."""
    if part.shape[1:] != sizes:
        raise ValueError(f"attention was given a tensor of shape {tuple(part.shape)}; expected {(rows, *sizes)}")
    return (part if len(part) == rows else part.expand(rows, *sizes)).contiguous()


@inlined
def rotate(head, cosines, sines, result):  # type: ignore[no-untyped-def]
    """Rotate a head (D,) by the angles of its position."""
    half = len(head) // 2
    for i in range(half):
        j = half + i
        low, high = summand(head[i]), summand(head[j])
        result[i] = low * summand(cosines[i]) - high * summand(sines[i])
        result[j] = high * summand(cosines[j]) + low * summand(sines[j])


@compiled
def _attend(kind, new_at, given_at, kept_at, result_at, sizes, columns, strides, scaling, parts):  # type: ignore[no-untyped-def]
    """One part of all pairs of a row and a group of heads that share keys and values."""
    for part in prange(parts):
        rows, tokens, heads, groups, size = sizes
        before, own = columns
        cosines = carray(pointer(given_at[0]), (rows, tokens, size), kind.dtype)
        sines = carray(pointer(given_at[1]), (rows, tokens, size), kind.dtype)
        mask = carray(pointer(given_at[2]), (rows, tokens, before + own), kind.dtype)
        shared = carray(pointer(kept_at[2]), (2, groups, before, size), kind.dtype)
        result = carray(pointer(result_at), (rows, tokens, heads, size), kind.dtype)
        # What one group sees of one row. Values are summed up four columns at a time.
        keys = new_sums(kind, (before + own, size))
        values = new_sums(kind, (before + own + 3, size))
        asked, seen = new_sums(kind, size), new_sums(kind, size)
        weights = new_sums(kind, before + own + 3)
        first, last = part * rows * groups // parts, (part + 1) * rows * groups // parts
        for pair in range(first, last):
            group, row = pair // rows, pair % rows
            if pair == first or row == 0:
                for column in range(before):
                    for i in range(size):
                        keys[column, i] = summand(shared[0, group, column, i])
                        values[column, i] = summand(shared[1, group, column, i])
            offset = kind.itemsize * (row * strides[3] + group * strides[4])
            own_keys = carray(pointer(kept_at[0] + offset), (own, size), kind.dtype)
            own_values = carray(pointer(kept_at[1] + offset), (own, size), kind.dtype)
            for token in range(tokens):
                nth = kind.itemsize * (row * tokens + token)
                key = carray(pointer(new_at[1] + nth * strides[1]), (groups, size), kind.dtype)
                value = carray(pointer(new_at[2] + nth * strides[2]), (groups, size), kind.dtype)
                rotate(key[group], cosines[row, token], sines[row, token], asked)
                for i in range(size):
                    own_keys[own - tokens + token, i] = as_element(kind, asked[i])
                    own_values[own - tokens + token, i] = value[group, i]
            for column in range(own):
                for i in range(size):
                    keys[before + column, i] = summand(own_keys[column, i])
                    values[before + column, i] = summand(own_values[column, i])
            for token in range(tokens):
                nth = kind.itemsize * (row * tokens + token)
                query = carray(pointer(new_at[0] + nth * strides[0]), (heads, size), kind.dtype)
                for head in range(group * (heads // groups), (group + 1) * (heads // groups)):
                    rotate(query[head], cosines[row, token], sines[row, token], asked)
                    largest = np.float32(-np.inf)
                    for column in range(before + own):
                        score = np.float32(0)
                        for i in range(size):
                            score += asked[i] * keys[column, i]
                        weights[column] = np.float32(scaling) * score + summand(mask[row, token, column])
                        largest = max(largest, weights[column])
                    total = np.float32(0)
                    for column in range(before + own):
                        weights[column] = exponential(weights[column] - largest)
                        total += weights[column]
                    seen[:] = 0
                    for c in range(0, before + own, 4):
                        one, two, three, four = weights[c], weights[c + 1], weights[c + 2], weights[c + 3]
                        for i in range(size):
                            early = one * values[c, i] + two * values[c + 1, i]
                            seen[i] += early + three * values[c + 2, i] + four * values[c + 3, i]
                    for i in range(size):
                        result[row, token, head, i] = as_element(kind, seen[i] / total)
