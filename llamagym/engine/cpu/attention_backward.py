"""Attention of a fused layer with gradients, as one autograd function.

Under autograd, attention is about forty small operations, most of which copy: heads into the products' layout, numbers
to float32, scores next to scores. Here the products are PyTorch's, in float32, and each of the four steps between them
is one compiled kernel. The prefix that all rows share is read in place, as in `attention`.

Shapes: B rows, T tokens, N query heads, K heads of keys and values, D head size, P shared columns of keys and values, S
own columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from ...models.hardware import sum_dtype
from .attention_kernel import expand_rows, rotate
from .compiling import as_element, compiled, empty_array_like, exponential, inlined, new_sums, summand, sums_at
from .numba_internals import carray, pointer


def attend_with_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    angles: tuple[Tensor, Tensor],
    cached: tuple[Tensor, Tensor],
    shared: Tensor | None,
    mask: Tensor,
    scaling: float,
) -> Tensor:
    """Like `attention_kernel.attend`, with gradients for new queries, keys and values but not for cached ones.

    All scores are stored, 4 bytes for each query head, token and column, 8 for a model in bfloat16.
    """
    output: Tensor = _Attention.apply(query, key, value, angles, cached, shared, mask, scaling)
    return output


class _Attention(torch.autograd.Function):
    """With p = softmax(q k), o = p v and D = sum(p dp): dp = do v, ds = p (dp - D), dq = ds k, dk = ds q, dv = p do.

    Query heads with the same keys are grouped: scores are (K, B N/K T, P) and (K B, N/K T, S).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        angles: tuple[Tensor, Tensor],
        cached: tuple[Tensor, Tensor],
        shared: Tensor | None,
        mask: Tensor,
        scaling: float,
    ) -> Tensor:
        rows, tokens, width = query.shape
        _, kv_heads, own, head_size = cached[0].shape
        heads = width // head_size
        prefix = 0 if shared is None else shared.shape[2]
        cosines = expand_rows(rows, angles[0], (tokens, head_size))
        sines = expand_rows(rows, angles[1], (tokens, head_size))
        mask = expand_rows(rows, mask, (1, tokens, prefix + own))
        sizes = rows, tokens, heads, kv_heads, head_size, prefix, own
        rotated = torch.empty(kv_heads * rows, heads // kv_heads * tokens, head_size, dtype=sum_dtype(query))
        keys = rotated.new_empty(kv_heads * rows, own, head_size)
        values = rotated.new_empty(kv_heads * rows, own, head_size)
        _run(
            _rotate_and_lay_out,
            empty_array_like(query, key, value, cosines, sines, *cached),
            (query, key, value, cosines, sines, *cached, rotated, keys, values),
            sizes,
            (query.stride(1), key.stride(1), value.stride(1), *cached[0].stride()[:2]),
            scaling,
        )
        if shared is None:
            shared_keys, shared_values = rotated.new_zeros(2, kv_heads, 0, head_size)
        else:
            shared_keys, shared_values = shared.to(rotated)
        # The softmax replaces scores by probabilities.
        shared_scores = _merge_rows(rotated, kv_heads) @ shared_keys.mT
        own_scores = rotated @ keys.mT
        _run(_softmax, empty_array_like(mask), (shared_scores, own_scores, mask), sizes)
        output = torch.baddbmm((shared_scores @ shared_values).view_as(rotated), own_scores, values)
        ctx.save_for_backward(
            rotated, keys, values, shared_keys, shared_values, shared_scores, own_scores, cosines, sines
        )
        ctx.sizes = sizes
        ctx.scaling = scaling
        output = output.view(kv_heads, rows, -1, tokens, head_size).permute(1, 3, 0, 2, 4)
        return query.new_empty(output.shape).copy_(output).view(query.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        rotated, keys, values, shared_keys, shared_values, shared_probs, own_probs, cosines, sines = ctx.saved_tensors
        rows, tokens, heads, kv_heads, head_size, _, _ = ctx.sizes
        by_row = grad_output.reshape(rows, tokens, kv_heads, -1, head_size).permute(2, 0, 3, 1, 4)
        grad_heads = rotated.new_empty(by_row.shape).copy_(by_row).view_as(rotated)
        # The softmax's backward kernel replaces gradients of probabilities by those of scores.
        grad_shared = _merge_rows(grad_heads, kv_heads) @ shared_values.mT
        grad_own = grad_heads @ values.mT
        probs_and_gradients = shared_probs, own_probs, grad_shared, grad_own
        _run(_softmax_backward, empty_array_like(cosines), probs_and_gradients, ctx.sizes)
        grad_rotated = torch.baddbmm((grad_shared @ shared_keys).view_as(rotated), grad_own, keys)
        grad_keys = grad_own[..., -tokens:].mT @ rotated
        grad_values = own_probs[..., -tokens:].mT @ grad_heads
        grad_query = grad_output.new_empty(rows, tokens, heads * head_size)
        grad_key = grad_output.new_empty(rows, tokens, kv_heads * head_size)
        grad_value = grad_output.new_empty(rows, tokens, kv_heads * head_size)
        _run(
            _rotate_back_and_lay_out,
            empty_array_like(grad_output, cosines, sines),
            (grad_query, grad_key, grad_value, cosines, sines, grad_rotated, grad_keys, grad_values),
            ctx.sizes,
            scaling=ctx.scaling,
        )
        return grad_query, grad_key, grad_value, None, None, None, None, None


def _merge_rows(states: Tensor, kv_heads: int) -> Tensor:
    """(K B, M, X) as (K, B M, X)."""
    return states.view(kv_heads, -1, states.shape[2])


def _run(
    kernel: Any,
    like: Any,
    tensors: Sequence[Tensor],
    sizes: tuple[int, ...],
    strides: tuple[int, ...] = (),
    scaling: float = 1.0,
) -> None:
    """Runs a kernel on all rows."""
    rows, tokens, heads, _, head_size, prefix, own = sizes
    multiplications = rows * tokens * heads * (head_size + prefix + own)
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    kernel(multiplications, like, addresses, sizes, strides, scaling)


@compiled
def _rotate_and_lay_out(like, addresses, sizes, strides, scaling, chunks):  # type: ignore[no-untyped-def]
    """Rotates queries, which are scaled, and keys, caches keys and values, and lays all out for the products."""
    for chunk in prange(chunks):
        rows, tokens, heads, kv_heads, head_size, _, own = sizes
        cosines = carray(pointer(addresses[3]), (rows, tokens, head_size), like.dtype)
        sines = carray(pointer(addresses[4]), (rows, tokens, head_size), like.dtype)
        queries = sums_at(like, addresses[7], (kv_heads, rows, heads // kv_heads, tokens, head_size))
        keys = sums_at(like, addresses[8], (kv_heads, rows, own, head_size))
        values = sums_at(like, addresses[9], (kv_heads, rows, own, head_size))
        rotated = new_sums(like, head_size)
        for row in range(chunk * rows // chunks, (chunk + 1) * rows // chunks):
            for token in range(tokens):
                nth = like.itemsize * (row * tokens + token)
                query_shape = (kv_heads, heads // kv_heads, head_size)
                query = carray(pointer(addresses[0] + nth * strides[0]), query_shape, like.dtype)
                for kv_head in range(kv_heads):
                    for head in range(heads // kv_heads):
                        rotate(query[kv_head, head], cosines[row, token], sines[row, token], rotated)
                        for i in range(head_size):
                            queries[kv_head, row, head, token, i] = np.float32(scaling) * rotated[i]
            for kv_head in range(kv_heads):
                offset = like.itemsize * (row * strides[3] + kv_head * strides[4])
                cached_keys = carray(pointer(addresses[5] + offset), (own, head_size), like.dtype)
                cached_values = carray(pointer(addresses[6] + offset), (own, head_size), like.dtype)
                for token in range(tokens):
                    nth, column = like.itemsize * (row * tokens + token), own - tokens + token
                    key = carray(pointer(addresses[1] + nth * strides[1]), (kv_heads, head_size), like.dtype)
                    value = carray(pointer(addresses[2] + nth * strides[2]), (kv_heads, head_size), like.dtype)
                    rotate(key[kv_head], cosines[row, token], sines[row, token], rotated)
                    for i in range(head_size):
                        cached_keys[column, i] = as_element(like, rotated[i])
                        cached_values[column, i] = value[kv_head, i]
                for column in range(own):
                    for i in range(head_size):
                        keys[kv_head, row, column, i] = summand(cached_keys[column, i])
                        values[kv_head, row, column, i] = summand(cached_values[column, i])


@compiled
def _softmax(like, addresses, sizes, strides, scaling, chunks):  # type: ignore[no-untyped-def]
    """Replaces scores, of shared and of own columns, by one softmax over both."""
    for chunk in prange(chunks):
        rows, tokens, heads, _, _, prefix, own = sizes
        shared_scores = sums_at(like, addresses[0], (rows * heads * tokens, prefix))
        own_scores = sums_at(like, addresses[1], (rows * heads * tokens, own))
        mask = carray(pointer(addresses[2]), (rows, tokens, prefix + own), like.dtype)
        for line in range(chunk * len(own_scores) // chunks, (chunk + 1) * len(own_scores) // chunks):
            line_mask = mask[line // _scores_per_row(sizes) % rows, line % tokens]
            shared_line, own_line = shared_scores[line], own_scores[line]
            for i in range(prefix):
                shared_line[i] += summand(line_mask[i])
            for i in range(own):
                own_line[i] += summand(line_mask[prefix + i])
            rank = np.int32(-(2**31))
            for i in range(prefix):
                rank = max(rank, _float_to_ordered_int(shared_line[i]))
            for i in range(own):
                rank = max(rank, _float_to_ordered_int(own_line[i]))
            largest, total = _ordered_int_to_float(rank), np.float32(0)
            for i in range(prefix):
                shared_line[i] = exponential(shared_line[i] - largest)
                total += shared_line[i]
            for i in range(own):
                own_line[i] = exponential(own_line[i] - largest)
                total += own_line[i]
            for i in range(prefix):
                shared_line[i] /= total
            for i in range(own):
                own_line[i] /= total


@inlined
def _float_to_ordered_int(number):  # type: ignore[no-untyped-def]
    """A float32's bits as an integer of the same order: maxima are vectorized for integers, but not for floats."""
    return _flip_if_negative(np.float32(number).view(np.int32))


@inlined
def _ordered_int_to_float(rank):  # type: ignore[no-untyped-def]
    """The inverse of `_float_to_ordered_int`."""
    bits = _flip_if_negative(np.int32(rank))
    return np.int32(bits).view(np.float32)


@inlined
def _flip_if_negative(bits):  # type: ignore[no-untyped-def]
    """Flips all bits but the sign of a negative float32, so that they order as integers do; its own inverse."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@compiled
def _softmax_backward(like, addresses, sizes, strides, scaling, chunks):  # type: ignore[no-untyped-def]
    """Replaces gradients of probabilities, of shared and of own columns, by those of scores."""
    for chunk in prange(chunks):
        rows, tokens, heads, _, _, prefix, own = sizes
        shared_probs = sums_at(like, addresses[0], (rows * heads * tokens, prefix))
        own_probs = sums_at(like, addresses[1], (rows * heads * tokens, own))
        grad_shared = sums_at(like, addresses[2], (rows * heads * tokens, prefix))
        grad_own = sums_at(like, addresses[3], (rows * heads * tokens, own))
        for line in range(chunk * len(grad_own) // chunks, (chunk + 1) * len(grad_own) // chunks):
            mean = np.float32(0)
            for i in range(prefix):
                mean += shared_probs[line, i] * grad_shared[line, i]
            for i in range(own):
                mean += own_probs[line, i] * grad_own[line, i]
            for i in range(prefix):
                grad_shared[line, i] = shared_probs[line, i] * (grad_shared[line, i] - mean)
            for i in range(own):
                grad_own[line, i] = own_probs[line, i] * (grad_own[line, i] - mean)


@compiled
def _rotate_back_and_lay_out(like, addresses, sizes, strides, scaling, chunks):  # type: ignore[no-untyped-def]
    """Computes gradients of queries and keys before rotation, and writes all in the projections' layout."""
    for chunk in prange(chunks):
        rows, tokens, heads, kv_heads, head_size, _, _ = sizes
        query_shape = (rows, tokens, kv_heads, heads // kv_heads, head_size)
        grad_query = carray(pointer(addresses[0]), query_shape, like.dtype)
        grad_key = carray(pointer(addresses[1]), (rows, tokens, kv_heads, head_size), like.dtype)
        grad_value = carray(pointer(addresses[2]), (rows, tokens, kv_heads, head_size), like.dtype)
        cosines = carray(pointer(addresses[3]), (rows, tokens, head_size), like.dtype)
        sines = carray(pointer(addresses[4]), (rows, tokens, head_size), like.dtype)
        grad_rotated = sums_at(like, addresses[5], (kv_heads, rows, heads // kv_heads, tokens, head_size))
        grad_keys = sums_at(like, addresses[6], (kv_heads, rows, tokens, head_size))
        grad_values = sums_at(like, addresses[7], (kv_heads, rows, tokens, head_size))
        for row in range(chunk * rows // chunks, (chunk + 1) * rows // chunks):
            for token in range(tokens):
                cosine, sine = cosines[row, token], sines[row, token]
                for kv_head in range(kv_heads):
                    for head in range(heads // kv_heads):
                        rotated = grad_rotated[kv_head, row, head, token]
                        result = grad_query[row, token, kv_head, head]
                        _rotate_back(like, rotated, cosine, sine, np.float32(scaling), result)
                    rotated = grad_keys[kv_head, row, token]
                    _rotate_back(like, rotated, cosine, sine, np.float32(1), grad_key[row, token, kv_head])
                    for i in range(head_size):
                        grad_value[row, token, kv_head, i] = as_element(like, grad_values[kv_head, row, token, i])


@inlined
def _scores_per_row(sizes):  # type: ignore[no-untyped-def]
    """Lines of scores that belong to one row and key head."""
    _, tokens, heads, kv_heads, _, _, _ = sizes
    return heads // kv_heads * tokens


@inlined
def _rotate_back(like, gradients, cosines, sines, factor, result):  # type: ignore[no-untyped-def]
    """Writes the gradient of a head (D,) before rotation, given the one after it."""
    half = len(gradients) // 2
    for i in range(half):
        j = half + i
        result[i] = as_element(like, factor * (gradients[i] * summand(cosines[i]) + gradients[j] * summand(sines[i])))
        result[j] = as_element(like, factor * (gradients[j] * summand(cosines[j]) - gradients[i] * summand(sines[i])))
