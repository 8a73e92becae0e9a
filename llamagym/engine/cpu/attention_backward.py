"""Attention of a fused layer with gradients: one autograd function.

Under autograd attention is some forty small operations, most of which copy: heads into the products' layout, numbers to
float32, scores next to scores. Here the products are PyTorch's, in float32, and each of the four steps between them is
one compiled kernel. The prefix that all rows share is read in place, as in `attention`.

Shapes: B rows, T tokens, N query heads, K heads of keys and values, D head size, P shared columns of keys and values, S
columns of a row's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from ...models.hardware import sum_dtype
from .attention_kernel import of_rows, rotate
from .compiling import as_element, compiled, exponential, inlined, kind_of, new_sums, summand, sums_at
from .numba_internals import carray, pointer


def attend_with_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    angles: tuple[Tensor, Tensor],
    kept: tuple[Tensor, Tensor],
    shared: Tensor | None,
    mask: Tensor,
    scaling: float,
) -> Tensor:
    """Like `attention_kernel.attend`, with gradients for the new queries, keys and values and none for cached ones.

    All scores are held in memory, 4 bytes for each query head, token and column, 8 for a model in bfloat16.
    """
    result: Tensor = _Attention.apply(query, key, value, angles, kept, shared, mask, scaling)
    return result


class _Attention(torch.autograd.Function):
    """With p = softmax(q k), o = p v and D = sum(p dp): dp = do v, ds = p (dp - D), dq = ds k, dk = ds q, dv = p do.

    Heads that share keys stand beside each other: scores are (K, B N/K T, P) and (K B, N/K T, S).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        angles: tuple[Tensor, Tensor],
        kept: tuple[Tensor, Tensor],
        shared: Tensor | None,
        mask: Tensor,
        scaling: float,
    ) -> Tensor:
        (rows, tokens, width), (_, groups, own, size) = query.shape, kept[0].shape
        before = 0 if shared is None else shared.shape[2]
        cosines, sines = (of_rows(rows, part, (tokens, size)) for part in angles)
        mask = of_rows(rows, mask, (1, tokens, before + own))
        sizes = rows, tokens, width // size, groups, size, before, own
        asked = torch.empty(groups * rows, width // size // groups * tokens, size, dtype=sum_dtype(query))
        keys, values = (asked.new_empty(groups * rows, own, size) for _ in range(2))
        at = [part.data_ptr() for part in (query, key, value, cosines, sines, *kept, asked, keys, values)]
        strides = query.stride(1), key.stride(1), value.stride(1), *kept[0].stride()[:2]
        _run(_rotate_and_lay_out, kind_of(query, key, value, cosines, sines, *kept), at, sizes, strides, scaling)
        shared_keys, shared_values = asked.new_zeros(2, groups, 0, size) if shared is None else shared.to(asked)
        of_shared, of_own = _merge_rows(asked, groups) @ shared_keys.mT, asked @ keys.mT
        _run(_softmax, kind_of(mask), [part.data_ptr() for part in (of_shared, of_own, mask)], sizes)
        seen = torch.baddbmm((of_shared @ shared_values).view_as(asked), of_own, values)
        ctx.save_for_backward(asked, keys, values, shared_keys, shared_values, of_shared, of_own, cosines, sines)
        ctx.sizes, ctx.scaling = sizes, scaling
        apart = seen.view(groups, rows, -1, tokens, size).permute(1, 3, 0, 2, 4)
        return query.new_empty(apart.shape).copy_(apart).view(query.shape)

    @staticmethod
    def backward(ctx: Any, of_result: Tensor) -> tuple[Tensor | None, ...]:
        asked, keys, values, shared_keys, shared_values, of_shared, of_own, cosines, sines = ctx.saved_tensors
        rows, tokens, heads, groups, size, _, _ = sizes = ctx.sizes
        apart = of_result.reshape(rows, tokens, groups, -1, size).permute(2, 0, 3, 1, 4)
        of_seen = asked.new_empty(apart.shape).copy_(apart).view_as(asked)
        gradients = _merge_rows(of_seen, groups) @ shared_values.mT, of_seen @ values.mT
        _run(_softmax_backward, kind_of(cosines), [part.data_ptr() for part in (of_shared, of_own, *gradients)], sizes)
        of_asked = torch.baddbmm((gradients[0] @ shared_keys).view_as(asked), gradients[1], keys)
        of_keys, of_values = gradients[1][..., -tokens:].mT @ asked, of_own[..., -tokens:].mT @ of_seen
        of_heads = [of_result.new_empty(rows, tokens, count * size) for count in (heads, groups, groups)]
        at = [part.data_ptr() for part in (*of_heads, cosines, sines, of_asked, of_keys, of_values)]
        _run(_rotate_back_and_lay_out, kind_of(of_result, cosines, sines), at, sizes, scaling=ctx.scaling)
        return *of_heads, None, None, None, None, None


def _merge_rows(rows: Tensor, groups: int) -> Tensor:
    """(K B, M, X) as (K, B M, X)."""
    return rows.view(groups, -1, rows.shape[2])


def _run(
    function: Any, kind: Any, at: list[int], sizes: tuple[int, ...], strides: tuple[int, ...] = (), scaling: float = 1.0
) -> None:
    """Run a kernel on all rows."""
    rows, tokens, heads, _, size, before, own = sizes
    products = rows * tokens * heads * (size + before + own)
    function(products, kind, tuple(at), sizes, strides, scaling)


@compiled
def _rotate_and_lay_out(kind, at, sizes, strides, scaling, parts):  # type: ignore[no-untyped-def]
    """Apply RoPE to scaled queries and to keys, cache keys and values, and lay all out for the products."""
    for part in prange(parts):
        rows, tokens, heads, groups, size, _, own = sizes
        cosines = carray(pointer(at[3]), (rows, tokens, size), kind.dtype)
        sines = carray(pointer(at[4]), (rows, tokens, size), kind.dtype)
        asked = sums_at(kind, at[7], (groups, rows, heads // groups, tokens, size))
        keys = sums_at(kind, at[8], (groups, rows, own, size))
        values = sums_at(kind, at[9], (groups, rows, own, size))
        turned = new_sums(kind, size)
        for row in range(part * rows // parts, (part + 1) * rows // parts):
            for token in range(tokens):
                nth = kind.itemsize * (row * tokens + token)
                query = carray(pointer(at[0] + nth * strides[0]), (groups, heads // groups, size), kind.dtype)
                for group in range(groups):
                    for head in range(heads // groups):
                        rotate(query[group, head], cosines[row, token], sines[row, token], turned)
                        for i in range(size):
                            asked[group, row, head, token, i] = np.float32(scaling) * turned[i]
            for group in range(groups):
                offset = kind.itemsize * (row * strides[3] + group * strides[4])
                kept_keys = carray(pointer(at[5] + offset), (own, size), kind.dtype)
                kept_values = carray(pointer(at[6] + offset), (own, size), kind.dtype)
                for token in range(tokens):
                    nth, column = kind.itemsize * (row * tokens + token), own - tokens + token
                    key = carray(pointer(at[1] + nth * strides[1]), (groups, size), kind.dtype)
                    value = carray(pointer(at[2] + nth * strides[2]), (groups, size), kind.dtype)
                    rotate(key[group], cosines[row, token], sines[row, token], turned)
                    for i in range(size):
                        kept_keys[column, i] = as_element(kind, turned[i])
                        kept_values[column, i] = value[group, i]
                for column in range(own):
                    for i in range(size):
                        keys[group, row, column, i] = summand(kept_keys[column, i])
                        values[group, row, column, i] = summand(kept_values[column, i])


@compiled
def _softmax(kind, at, sizes, strides, scaling, parts):  # type: ignore[no-untyped-def]
    """Replace scores, of shared and of own columns, by one softmax over both."""
    for part in prange(parts):
        rows, tokens, heads, _, _, before, own = sizes
        of_shared = sums_at(kind, at[0], (rows * heads * tokens, before))
        of_own = sums_at(kind, at[1], (rows * heads * tokens, own))
        mask = carray(pointer(at[2]), (rows, tokens, before + own), kind.dtype)
        for line in range(part * len(of_own) // parts, (part + 1) * len(of_own) // parts):
            masked = mask[line // _scores_per_row(sizes) % rows, line % tokens]
            shared, others = of_shared[line], of_own[line]
            for i in range(before):
                shared[i] += summand(masked[i])
            for i in range(own):
                others[i] += summand(masked[before + i])
            rank = np.int32(-(2**31))
            for i in range(before):
                rank = max(rank, _float_to_ordered_int(shared[i]))
            for i in range(own):
                rank = max(rank, _float_to_ordered_int(others[i]))
            largest, total = _ordered_int_to_float(rank), np.float32(0)
            for i in range(before):
                shared[i] = exponential(shared[i] - largest)
                total += shared[i]
            for i in range(own):
                others[i] = exponential(others[i] - largest)
                total += others[i]
            for i in range(before):
                shared[i] /= total
            for i in range(own):
                others[i] /= total


@inlined
def _float_to_ordered_int(number):  # type: ignore[no-untyped-def]
    """A float32's bits as an integer of the same order: maxima of integers are vectorised, of floats they are not."""
    return _flip_if_negative(np.float32(number).view(np.int32))


@inlined
def _ordered_int_to_float(rank):  # type: ignore[no-untyped-def]
    """The float32 that `_float_to_ordered_int` made this integer of."""
    bits = _flip_if_negative(np.int32(rank))
    return np.int32(bits).view(np.float32)


@inlined
def _flip_if_negative(bits):  # type: ignore[no-untyped-def]
    """Flip all but the sign of a negative float32's bits, so that they order as integers do; its own inverse."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@compiled
def _softmax_backward(kind, at, sizes, strides, scaling, parts):  # type: ignore[no-untyped-def]
    """Replace gradients of probabilities, of shared and of own columns, by those of scores."""
    for part in prange(parts):
        rows, tokens, heads, _, _, before, own = sizes
        shared = sums_at(kind, at[0], (rows * heads * tokens, before))
        others = sums_at(kind, at[1], (rows * heads * tokens, own))
        of_shared = sums_at(kind, at[2], (rows * heads * tokens, before))
        of_own = sums_at(kind, at[3], (rows * heads * tokens, own))
        for line in range(part * len(of_own) // parts, (part + 1) * len(of_own) // parts):
            mean = np.float32(0)
            for i in range(before):
                mean += shared[line, i] * of_shared[line, i]
            for i in range(own):
                mean += others[line, i] * of_own[line, i]
            for i in range(before):
                of_shared[line, i] = shared[line, i] * (of_shared[line, i] - mean)
            for i in range(own):
                of_own[line, i] = others[line, i] * (of_own[line, i] - mean)


@compiled
def _rotate_back_and_lay_out(kind, at, sizes, strides, scaling, parts):  # type: ignore[no-untyped-def]
    """Gradients of queries and keys before RoPE from those after it; all are written in the projections' layout."""
    for part in prange(parts):
        rows, tokens, heads, groups, size, _, _ = sizes
        query = carray(pointer(at[0]), (rows, tokens, groups, heads // groups, size), kind.dtype)
        key = carray(pointer(at[1]), (rows, tokens, groups, size), kind.dtype)
        value = carray(pointer(at[2]), (rows, tokens, groups, size), kind.dtype)
        cosines = carray(pointer(at[3]), (rows, tokens, size), kind.dtype)
        sines = carray(pointer(at[4]), (rows, tokens, size), kind.dtype)
        of_asked = sums_at(kind, at[5], (groups, rows, heads // groups, tokens, size))
        of_keys = sums_at(kind, at[6], (groups, rows, tokens, size))
        of_values = sums_at(kind, at[7], (groups, rows, tokens, size))
        for row in range(part * rows // parts, (part + 1) * rows // parts):
            for token in range(tokens):
                cosine, sine = cosines[row, token], sines[row, token]
                for group in range(groups):
                    for head in range(heads // groups):
                        turned = of_asked[group, row, head, token]
                        _rotate_back(kind, turned, cosine, sine, np.float32(scaling), query[row, token, group, head])
                    turned = of_keys[group, row, token]
                    _rotate_back(kind, turned, cosine, sine, np.float32(1), key[row, token, group])
                    for i in range(size):
                        value[row, token, group, i] = as_element(kind, of_values[group, row, token, i])


@inlined
def _scores_per_row(sizes):  # type: ignore[no-untyped-def]
    """Lines of scores that belong to one row and group."""
    _, tokens, heads, groups, _, _, _ = sizes
    return heads // groups * tokens


@inlined
def _rotate_back(kind, gradients, cosines, sines, factor, result):  # type: ignore[no-untyped-def]
    """The gradient of a head (D,) before RoPE, given the one after it."""
    half = len(gradients) // 2
    for i in range(half):
        j = half + i
        result[i] = as_element(kind, factor * (gradients[i] * summand(cosines[i]) + gradients[j] * summand(sines[j])))
        result[j] = as_element(kind, factor * (gradients[j] * summand(cosines[j]) - gradients[i] * summand(sines[i])))
