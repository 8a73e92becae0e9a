"""What a layer computes between its matrix products, each part as one function compiled for the processor.

With few rows, as when replies are written, a PyTorch operation takes about 10 us whatever it computes, and a layer
makes dozens of them. Here what normalizes, gates or attends is one call each. numba compiles it at first use, in a few
seconds, and keeps it on disk where it can. There are no gradients.

All is computed in float32 and rounded where transformers rounds. Compiled functions take addresses, since wrapping
tensors as arrays would take as long as some of the work; what lies there is checked before. numba knows no bfloat16:
to it these are unsigned integers, the upper halves of float32.

Shapes: B rows, T tokens, H width, I inner width, N query heads, K heads of keys and values, D head size, P shared
columns of keys and values, S columns of a row's own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np.numpy_support import carray
from torch import Tensor

# Arrays without elements: they tell compiled functions what they find at an address.
_KINDS = {torch.float32: np.empty(0, np.float32), torch.bfloat16: np.empty(0, np.uint16)}
# Sums may be added up in any order and products be fused with sums; infinities are respected.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
# Products in attention that are worth a second thread, which takes some microseconds to start.
_WORTH_A_THREAD = 2**18
_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)


def has_kernels(states: Tensor) -> bool:
    """Whether the functions here can compute with such states: float32 or bfloat16 on the CPU, without gradients."""
    return states.device.type == "cpu" and states.dtype in _KINDS and not torch.is_grad_enabled()


def normalize(states: Tensor, weight: Tensor, epsilon: float, addend: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The sum of states (..., H) and an addend; and this divided by its root mean square, times a weight (H,)."""
    states = states.contiguous()
    addend = None if addend is None else addend.contiguous()
    total = states if addend is None else torch.empty_like(states)
    result = torch.empty_like(states)
    rows, width = states.numel() // states.shape[-1], states.shape[-1]
    kind = _kind_of(states, weight, *([] if addend is None else [addend]))
    at = states.data_ptr(), 0 if addend is None else addend.data_ptr(), weight.data_ptr()
    _normalize(kind, at, (total.data_ptr(), result.data_ptr()), rows, width, epsilon)
    return total, result


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of the gate times the input, both (B, T, I) with tokens at equal distances."""
    result = torch.empty_like(gate, memory_format=torch.contiguous_format)
    at = gate.data_ptr(), up.data_ptr(), result.data_ptr()
    rows, width = gate.shape[0] * gate.shape[1], gate.shape[2]
    _gated(_kind_of(gate, up), at, (gate.stride(1), up.stride(1)), rows, width)
    return result


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
    """Rotate queries and keys, keep keys and values, and return what the heads see, (B, T, N D).

    Args:
        query: As projected, (B, T, N D), tokens at equal distances.
        key: (B, T, K D), likewise.
        value: (B, T, K D), likewise.
        angles: Cosines and sines of the tokens' positions, (B, T, D) each, or (1, T, D) for all rows.
        kept: Keys and values of each row's own columns, (B, K, S, D) each with columns side by side; the last T are
            filled in.
        shared: Keys and values (2, K, P, D) that all rows see before their own.
        mask: Additive, of shared and own columns, (B, 1, T, P + S) or (1, 1, T, P + S).
        scaling: Factor of the scores.

    Raises:
        ValueError: If angles or mask are not of these tokens and columns.
    """
    (rows, tokens, width), (_, groups, own, size) = query.shape, kept[0].shape
    before = 0 if shared is None else shared.shape[2]
    cosines = _of_rows(rows, angles[0], (tokens, size))
    sines = _of_rows(rows, angles[1], (tokens, size))
    mask = _of_rows(rows, mask, (1, tokens, before + own))
    result = torch.empty_like(query, memory_format=torch.contiguous_format)
    products = rows * tokens * width * (before + own)
    parts = min(torch.get_num_threads(), products // _WORTH_A_THREAD + 1)
    (_attend_in_threads if parts > 1 and _HAS_THREADS else _attend_alone)(
        _kind_of(query, key, value, cosines, sines, mask, *kept, *([] if shared is None else [shared])),
        (query.data_ptr(), key.data_ptr(), value.data_ptr()),
        (cosines.data_ptr(), sines.data_ptr(), mask.data_ptr()),
        (kept[0].data_ptr(), kept[1].data_ptr(), 0 if shared is None else shared.data_ptr()),
        result.data_ptr(),
        (rows, tokens, width // size, groups, size),
        (before, own),
        (query.stride(1), key.stride(1), value.stride(1), *kept[0].stride()[:2]),
        scaling,
        parts,
    )
    return result


def _of_rows(rows: int, part: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """What is the same for all rows or not, as (B, *sizes)."""
    if part.shape[1:] != sizes:
        raise ValueError(f"attention was given what is of shape {tuple(part.shape)}; expected ({rows}, *{sizes})")
    return (part if len(part) == rows else part.expand(rows, *sizes)).contiguous()


def _kind_of(*tensors: Tensor) -> Any:
    """What all of these hold."""
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) > 1:
        raise TypeError(f"compiled functions were given {sorted(map(str, kinds))} together; expected one of them")
    return _KINDS[kinds.pop()]


def _has_threads() -> bool:
    """Whether numba has threads that several of Python's may start at once: OpenMP's or TBB's, not its own."""
    for pool in ("tbbpool", "omppool"):
        with suppress(ImportError):
            import_module(f"numba.np.ufunc.{pool}")
            return True
    return False


_HAS_THREADS = _has_threads()


def _compiled(function: Callable[..., None], parallel: bool = False) -> Callable[..., None]:
    """The function, compiled at its first call for what it is given."""
    compiled: Any = njit(nogil=True, fastmath=_FAST, error_model="numpy", parallel=parallel)(function)
    with suppress(RuntimeError):  # There may be no folder to keep it in.
        compiled.enable_caching()
    return compiled


def _compile_pointer(typing_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    """An address as a pointer, which `carray` makes an array of."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


_pointer: Any = intrinsic(_compile_pointer)


def _wide(number: Any) -> Any:
    """An element as float32; the functions below compile it."""


@overload(_wide, strict=False)
def _compile_wide(number: Any) -> Callable[..., Any]:
    if number == types.float32:
        return lambda number: number
    return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)


def _as(kind: Any, number: Any) -> Any:
    """A float32 as an element, rounded to the nearest, to even at a tie; the functions below compile it."""


@overload(_as, strict=False)
def _compile_as(kind: Any, number: Any) -> Callable[..., Any]:
    def rounded(kind, number):  # type: ignore[no-untyped-def]
        bits = np.float32(number).view(np.uint32)
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return (lambda kind, number: number) if kind.dtype == types.float32 else rounded


@njit(fastmath=_FAST)
def _exp(number):  # type: ignore[no-untyped-def]
    """The exponential of a float32 that is not positive, to two units in the last place (Cephes' `expf`)."""
    number = max(number, np.float32(-87))
    doublings = np.floor(number * _LOG2_E + np.float32(0.5))
    rest = number - doublings * _LN_2
    series = np.float32(1.9875691e-4)
    series = series * rest + np.float32(1.3981999e-3)
    series = series * rest + np.float32(8.3334519e-3)
    series = series * rest + np.float32(4.1665796e-2)
    series = series * rest + np.float32(1.6666666e-1)
    series = series * rest + np.float32(5.0000001e-1)
    power = np.uint32((np.int32(doublings) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (series * rest * rest + rest + np.float32(1)) * power


@_compiled
def _normalize(kind, given_at, results_at, rows, width, epsilon):  # type: ignore[no-untyped-def]
    states = carray(_pointer(given_at[0]), (rows, width), kind.dtype)
    addend = carray(_pointer(given_at[1]), (rows, width), kind.dtype)
    weight = carray(_pointer(given_at[2]), (width,), kind.dtype)
    sums = carray(_pointer(results_at[0]), (rows, width), kind.dtype)
    result = carray(_pointer(results_at[1]), (rows, width), kind.dtype)
    for row in range(rows):
        if given_at[1]:
            for i in range(width):
                sums[row, i] = _as(kind, _wide(states[row, i]) + _wide(addend[row, i]))
        squares = np.float32(0)
        for i in range(width):
            squares += _wide(sums[row, i]) * _wide(sums[row, i])
        scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(epsilon))
        for i in range(width):
            result[row, i] = _as(kind, _wide(weight[i]) * _wide(_as(kind, _wide(sums[row, i]) * scale)))


@_compiled
def _gated(kind, at, strides, rows, width):  # type: ignore[no-untyped-def]
    result = carray(_pointer(at[2]), (rows, width), kind.dtype)
    for row in range(rows):
        gate = carray(_pointer(at[0] + kind.itemsize * row * strides[0]), (width,), kind.dtype)
        up = carray(_pointer(at[1] + kind.itemsize * row * strides[1]), (width,), kind.dtype)
        for i in range(width):
            number = _wide(gate[i])
            power = _exp(-abs(number))
            sigmoid = (np.float32(1) if number >= 0 else power) / (np.float32(1) + power)
            result[row, i] = _as(kind, _wide(_as(kind, number * sigmoid)) * _wide(up[i]))


@njit(fastmath=_FAST)
def _rotate(kind, head, cosines, sines, result):  # type: ignore[no-untyped-def]
    """Rotate a head (D,) by the angles of its position."""
    half = len(head) // 2
    for i in range(half):
        j = half + i
        low, high = _wide(head[i]), _wide(head[j])
        lows = _as(kind, low * _wide(cosines[i])), _as(kind, high * _wide(sines[i]))
        highs = _as(kind, high * _wide(cosines[j])), _as(kind, low * _wide(sines[j]))
        result[i] = _wide(_as(kind, _wide(lows[0]) - _wide(lows[1])))
        result[j] = _wide(_as(kind, _wide(highs[0]) + _wide(highs[1])))


@njit(fastmath=_FAST, error_model="numpy")
def _attend(kind, new_at, given_at, kept_at, result_at, sizes, columns, strides, scaling, part, parts):  # type: ignore[no-untyped-def]
    """One part of all pairs of a row and a group of heads that share keys and values."""
    rows, tokens, heads, groups, size = sizes
    before, own = columns
    cosines = carray(_pointer(given_at[0]), (rows, tokens, size), kind.dtype)
    sines = carray(_pointer(given_at[1]), (rows, tokens, size), kind.dtype)
    mask = carray(_pointer(given_at[2]), (rows, tokens, before + own), kind.dtype)
    shared = carray(_pointer(kept_at[2]), (2, groups, before, size), kind.dtype)
    result = carray(_pointer(result_at), (rows, tokens, heads, size), kind.dtype)
    # What one group sees of one row, in float32. Values are summed up four columns at a time.
    keys = np.empty((before + own, size), np.float32)
    values = np.zeros((before + own + 3, size), np.float32)
    asked = np.empty(size, np.float32)
    weights = np.zeros(before + own + 3, np.float32)
    seen = np.empty(size, np.float32)
    first, last = part * rows * groups // parts, (part + 1) * rows * groups // parts
    for pair in range(first, last):
        group, row = pair // rows, pair % rows
        if pair == first or row == 0:
            for column in range(before):
                for i in range(size):
                    keys[column, i] = _wide(shared[0, group, column, i])
                    values[column, i] = _wide(shared[1, group, column, i])
        offset = kind.itemsize * (row * strides[3] + group * strides[4])
        own_keys = carray(_pointer(kept_at[0] + offset), (own, size), kind.dtype)
        own_values = carray(_pointer(kept_at[1] + offset), (own, size), kind.dtype)
        for token in range(tokens):
            nth = kind.itemsize * (row * tokens + token)
            key = carray(_pointer(new_at[1] + nth * strides[1]), (groups, size), kind.dtype)
            value = carray(_pointer(new_at[2] + nth * strides[2]), (groups, size), kind.dtype)
            _rotate(kind, key[group], cosines[row, token], sines[row, token], asked)
            for i in range(size):
                own_keys[own - tokens + token, i] = _as(kind, asked[i])
                own_values[own - tokens + token, i] = value[group, i]
        for column in range(own):
            for i in range(size):
                keys[before + column, i] = _wide(own_keys[column, i])
                values[before + column, i] = _wide(own_values[column, i])
        for token in range(tokens):
            nth = kind.itemsize * (row * tokens + token)
            query = carray(_pointer(new_at[0] + nth * strides[0]), (heads, size), kind.dtype)
            for head in range(group * (heads // groups), (group + 1) * (heads // groups)):
                _rotate(kind, query[head], cosines[row, token], sines[row, token], asked)
                largest = np.float32(-np.inf)
                for column in range(before + own):
                    score = np.float32(0)
                    for i in range(size):
                        score += asked[i] * keys[column, i]
                    weights[column] = np.float32(scaling) * score + _wide(mask[row, token, column])
                    largest = max(largest, weights[column])
                total = np.float32(0)
                for column in range(before + own):
                    weights[column] = _exp(weights[column] - largest)
                    total += weights[column]
                seen[:] = 0
                for c in range(0, before + own, 4):
                    one, two, three, four = weights[c], weights[c + 1], weights[c + 2], weights[c + 3]
                    for i in range(size):
                        early = one * values[c, i] + two * values[c + 1, i]
                        seen[i] += early + three * values[c + 2, i] + four * values[c + 3, i]
                for i in range(size):
                    result[row, token, head, i] = _as(kind, seen[i] / total)


@_compiled
def _attend_alone(kind, new_at, given_at, kept_at, result_at, sizes, columns, strides, scaling, parts):  # type: ignore[no-untyped-def]
    for part in range(parts):
        _attend(kind, new_at, given_at, kept_at, result_at, sizes, columns, strides, scaling, part, parts)


@partial(_compiled, parallel=True)
def _attend_in_threads(kind, new_at, given_at, kept_at, result_at, sizes, columns, strides, scaling, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        _attend(kind, new_at, given_at, kept_at, result_at, sizes, columns, strides, scaling, part, parts)
