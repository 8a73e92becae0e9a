"""Attention for few query tokens as one compiled kernel, without gradients.

With few rows, as in decoding, a PyTorch operation takes about 10 us whatever it computes, and attention is a dozen
operations per layer. Here it is one call. Cached keys and values and the result are rounded to the model's dtype; sums
run in the dtype given by `models.hardware.sum_dtype`.

Shapes: B rows, T tokens, N query heads, K heads of keys and values, D head size, P shared columns of keys and values, S
own columns of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from .compiling import as_element, compiled, empty_array_like, exponential, inlined, new_sums, summand
from .numba_internals import carray, pointer


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    angles: tuple[Tensor, Tensor],
    cached: tuple[Tensor, Tensor],
    shared: Tensor | None,
    mask: Tensor,
    scaling: float,
) -> Tensor:
    """Rotates queries and keys, writes keys and values into the KV cache, and returns the heads' outputs (B, T, N D).

    Args:
        query: Projected queries (B, T, N D), with one stride between tokens.
        key: Projected keys (B, T, K D), with one stride between tokens.
        value: Projected values (B, T, K D), with one stride between tokens.
        angles: Cosines and sines of the tokens' positions, (B, T, D) each, or (1, T, D) for all rows.
        cached: Keys and values of each row's own columns, (B, K, S, D) each, contiguous from S on; the last T columns
            are filled in.
        shared: Keys and values (2, K, P, D) of a prefix that all rows share.
        mask: Additive mask of shared and own columns, (B, 1, T, P + S) or (1, 1, T, P + S).
        scaling: Factor of the scores.

    Raises:
        ValueError: If the shape of angles or mask does not fit the tokens and columns.
    """
    rows, tokens, width = query.shape
    _, kv_heads, own, head_size = cached[0].shape
    prefix = 0 if shared is None else shared.shape[2]
    cosines = expand_rows(rows, angles[0], (tokens, head_size))
    sines = expand_rows(rows, angles[1], (tokens, head_size))
    mask = expand_rows(rows, mask, (1, tokens, prefix + own))
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    tensors = [query, key, value, cosines, sines, mask, *cached]
    if shared is not None:
        tensors.append(shared)
    _attend(
        rows * tokens * width * (prefix + own),
        empty_array_like(*tensors),
        (query.data_ptr(), key.data_ptr(), value.data_ptr()),
        (cosines.data_ptr(), sines.data_ptr(), mask.data_ptr()),
        (cached[0].data_ptr(), cached[1].data_ptr(), 0 if shared is None else shared.data_ptr()),
        output.data_ptr(),
        (rows, tokens, width // head_size, kv_heads, head_size),
        (prefix, own),
        (query.stride(1), key.stride(1), value.stride(1), *cached[0].stride()[:2]),
        scaling,
    )
    return output


def expand_rows(rows: int, tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Expands (1, *sizes) or (B, *sizes) to a contiguous (B, *sizes)."""
    if tensor.shape[1:] != sizes:
        raise ValueError(f"attention was given a tensor of shape {tuple(tensor.shape)}; expected {(rows, *sizes)}")
    if tensor.shape[0] != rows:
        tensor = tensor.expand(rows, *sizes)
    return tensor.contiguous()


@inlined
def rotate(head, cosines, sines, result):  # type: ignore[no-untyped-def]
    """Rotates a head (D,) by the angles of its position."""
    half = len(head) // 2
    for i in range(half):
        j = half + i
        low, high = summand(head[i]), summand(head[j])
        result[i] = low * summand(cosines[i]) - high * summand(sines[i])
        result[j] = high * summand(cosines[j]) + low * summand(sines[j])


@compiled
def _attend(  # type: ignore[no-untyped-def]
    like, new_addresses, mask_addresses, cached_addresses, output_address, sizes, columns, strides, scaling, chunks
):
    """Attention of each pair of a row and a key head, with all query heads that share the key head."""
    for chunk in prange(chunks):
        rows, tokens, heads, kv_heads, head_size = sizes
        prefix, own = columns
        cosines = carray(pointer(mask_addresses[0]), (rows, tokens, head_size), like.dtype)
        sines = carray(pointer(mask_addresses[1]), (rows, tokens, head_size), like.dtype)
        mask = carray(pointer(mask_addresses[2]), (rows, tokens, prefix + own), like.dtype)
        shared = carray(pointer(cached_addresses[2]), (2, kv_heads, prefix, head_size), like.dtype)
        output = carray(pointer(output_address), (rows, tokens, heads, head_size), like.dtype)
        # Keys and values of one pair. Values are summed four columns at a time.
        keys = new_sums(like, (prefix + own, head_size))
        values = new_sums(like, (prefix + own + 3, head_size))
        rotated, weighted = new_sums(like, head_size), new_sums(like, head_size)
        weights = new_sums(like, prefix + own + 3)
        first, last = chunk * rows * kv_heads // chunks, (chunk + 1) * rows * kv_heads // chunks
        for pair in range(first, last):
            kv_head, row = pair // rows, pair % rows
            if pair == first or row == 0:
                for column in range(prefix):
                    for i in range(head_size):
                        keys[column, i] = summand(shared[0, kv_head, column, i])
                        values[column, i] = summand(shared[1, kv_head, column, i])
            offset = like.itemsize * (row * strides[3] + kv_head * strides[4])
            own_keys = carray(pointer(cached_addresses[0] + offset), (own, head_size), like.dtype)
            own_values = carray(pointer(cached_addresses[1] + offset), (own, head_size), like.dtype)
            for token in range(tokens):
                nth = like.itemsize * (row * tokens + token)
                key = carray(pointer(new_addresses[1] + nth * strides[1]), (kv_heads, head_size), like.dtype)
                value = carray(pointer(new_addresses[2] + nth * strides[2]), (kv_heads, head_size), like.dtype)
                rotate(key[kv_head], cosines[row, token], sines[row, token], rotated)
                for i in range(head_size):
                    own_keys[own - tokens + token, i] = as_element(like, rotated[i])
                    own_values[own - tokens + token, i] = value[kv_head, i]
            for column in range(own):
                for i in range(head_size):
                    keys[prefix + column, i] = summand(own_keys[column, i])
                    values[prefix + column, i] = summand(own_values[column, i])
            for token in range(tokens):
                nth = like.itemsize * (row * tokens + token)
                query = carray(pointer(new_addresses[0] + nth * strides[0]), (heads, head_size), like.dtype)
                for head in range(kv_head * (heads // kv_heads), (kv_head + 1) * (heads // kv_heads)):
                    rotate(query[head], cosines[row, token], sines[row, token], rotated)
                    largest = np.float32(-np.inf)
                    for column in range(prefix + own):
                        score = np.float32(0)
                        for i in range(head_size):
                            score += rotated[i] * keys[column, i]
                        weights[column] = np.float32(scaling) * score + summand(mask[row, token, column])
                        largest = max(largest, weights[column])
                    total = np.float32(0)
                    for column in range(prefix + own):
                        weights[column] = exponential(weights[column] - largest)
                        total += weights[column]
                    weighted[:] = 0
                    for c in range(0, prefix + own, 4):
                        one, two, three, four = weights[c], weights[c + 1], weights[c + 2], weights[c + 3]
                        for i in range(head_size):
                            early = one * values[c, i] + two * values[c + 1, i]
                            weighted[i] += early + three * values[c + 2, i] + four * values[c + 3, i]
                    for i in range(head_size):
                        output[row, token, head, i] = as_element(like, weighted[i] / total)
