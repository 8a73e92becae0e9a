"""Log-probabilities, entropies and their gradient over a whole vocabulary, as compiled kernels.

Each reads the logits in the model's dtype, float32 or bfloat16, and allocates nothing of their size: the gradient
replaces them in place.

Shapes: M nodes, V vocabulary, K targets, G groups of tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from .compiling import as_element, compiled, exponential, inlined, kind_of, wide
from .numba_internals import carray, pointer

# Of log-probabilities, the engine's.
_LEAST = np.float32(-(torch.finfo(torch.float32).max ** 0.5))
# How many logits are compared at once when the largest is sought.
_LANES = 64


def sums_in_groups(logits: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The largest of each row's logits (M, V), float32 (M,), and sums of exponentials by group, float32 (M, G)."""
    largest, sums = (torch.empty(shape, dtype=torch.float32) for shape in ((len(logits),), (len(logits), groups)))
    sizes = len(logits), groups, logits.shape[1] // groups
    _sum(logits.numel(), kind_of(logits), (logits.data_ptr(), largest.data_ptr(), sums.data_ptr()), sizes)
    return largest, sums


def measure(logits: Tensor, targets: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities (M, K) of targets, entropies (M,) and logarithms (M,) of the sums of exponentials.

    Args:
        logits: Contiguous (M, V).
        targets: int64 (M, K).
        scales: What each row's logits are multiplied by, float32 (M,).
    """
    picked, entropy, total = (scales.new_empty(shape) for shape in (targets.shape, len(logits), len(logits)))
    _run(_measure, logits, targets, scales, picked, entropy, total)
    return picked, entropy, total


def replace_by_gradient_(
    logits: Tensor, targets: Tensor, scales: Tensor, total: Tensor, of_picked: Tensor, of_entropy: Tensor, shift: Tensor
) -> None:
    """Replace logits (M, V) by their gradient.

    Args:
        logits: What `measure` was given, as are `targets` and `scales`.
        targets: int64 (M, K).
        scales: float32 (M,).
        total: The logarithms that `measure` returned.
        of_picked: Gradients of the log-probabilities, (M, K).
        of_entropy: Gradients of the entropies, (M,).
        shift: What every gradient of a row's log-probabilities is lowered by, (M,).
    """
    _run(_gradient, logits, targets, scales, total, of_picked, of_entropy, shift)


def _run(kernel: Any, logits: Tensor, targets: Tensor, *others: Tensor) -> None:
    """Run a kernel on all rows."""
    at = tuple(part.data_ptr() for part in (logits, targets, *others))
    kernel(logits.numel(), kind_of(logits), at, (*logits.shape, targets.shape[1]))


@inlined
def _at_least(number):  # type: ignore[no-untyped-def]
    """A log-probability, clamped from below; NaN stays NaN."""
    return _LEAST if number < _LEAST else number


@inlined
def _largest(logits):  # type: ignore[no-untyped-def]
    """The largest of a row (V,)."""
    highest = np.full(_LANES, -np.inf, np.float32)
    whole = len(logits) - len(logits) % _LANES
    for start in range(0, whole, _LANES):
        for i in range(_LANES):
            number = wide(logits[start + i])
            highest[i] = number if number > highest[i] else highest[i]
    for i in range(len(logits) - whole):
        highest[i] = max(highest[i], wide(logits[whole + i]))
    return highest.max()


@compiled
def _sum(kind, at, sizes, parts):  # type: ignore[no-untyped-def]
    """Largest logits, and sums of exponentials by groups, of one part of the rows."""
    for part in prange(parts):
        rows, groups, size = sizes
        logits = carray(pointer(at[0]), (rows, groups * size), kind.dtype)
        largest = carray(pointer(at[1]), (rows,), np.float32)
        sums = carray(pointer(at[2]), (rows, groups), np.float32)
        for row in range(part * rows // parts, (part + 1) * rows // parts):
            largest[row] = _largest(logits[row])
            for group in range(groups):
                powers = np.float32(0)
                for i in range(group * size, (group + 1) * size):
                    powers += exponential(wide(logits[row, i]) - largest[row])
                sums[row, group] = powers


@compiled
def _measure(kind, at, sizes, parts):  # type: ignore[no-untyped-def]
    """Log-probabilities of targets, entropy, and logarithm of the sum of exponentials, of one part of the rows."""
    for part in prange(parts):
        rows, vocabulary, count = sizes
        logits = carray(pointer(at[0]), (rows, vocabulary), kind.dtype)
        targets = carray(pointer(at[1]), (rows, count), np.int64)
        scales = carray(pointer(at[2]), (rows,), np.float32)
        picked = carray(pointer(at[3]), (rows, count), np.float32)
        entropy = carray(pointer(at[4]), (rows,), np.float32)
        total = carray(pointer(at[5]), (rows,), np.float32)
        for row in range(part * rows // parts, (part + 1) * rows // parts):
            scale = scales[row]
            largest = scale * _largest(logits[row])
            powers, products = np.float32(0), np.float32(0)
            for i in range(vocabulary):
                difference = _at_least(scale * wide(logits[row, i]) - largest)
                power = exponential(difference)
                powers += power
                products += power * difference
            total[row] = largest + np.log(powers)
            entropy[row] = np.log(powers) - products / powers
            for k in range(count):
                picked[row, k] = _at_least(scale * wide(logits[row, targets[row, k]]) - total[row])


@compiled
def _gradient(kind, at, sizes, parts):  # type: ignore[no-untyped-def]
    """Replace the logits of one part of the rows by their gradient."""
    for part in prange(parts):
        rows, vocabulary, count = sizes
        logits = carray(pointer(at[0]), (rows, vocabulary), kind.dtype)
        targets = carray(pointer(at[1]), (rows, count), np.int64)
        scales = carray(pointer(at[2]), (rows,), np.float32)
        total = carray(pointer(at[3]), (rows,), np.float32)
        of_picked = carray(pointer(at[4]), (rows, count), np.float32)
        of_entropy = carray(pointer(at[5]), (rows,), np.float32)
        shift = carray(pointer(at[6]), (rows,), np.float32)
        kept = np.empty(count, np.float32)
        for row in range(part * rows // parts, (part + 1) * rows // parts):
            scale = scales[row]
            for k in range(count):
                kept[k] = wide(logits[row, targets[row, k]])
            for i in range(vocabulary):
                logprob = _at_least(scale * wide(logits[row, i]) - total[row])
                of_logit = exponential(logprob) * (-shift[row] - of_entropy[row] * logprob)
                logits[row, i] = as_element(kind, scale * of_logit)
            # Targets' gradients are computed apart: rounding in between would cost up to 1 - p of a likely token.
            for k in range(count):
                logprob = _at_least(scale * kept[k] - total[row])
                of_logit = exponential(logprob) * (-shift[row] - of_entropy[row] * logprob)
                for other in range(count):
                    if targets[row, other] == targets[row, k]:
                        of_logit += of_picked[row, other]
                logits[row, targets[row, k]] = as_element(kind, scale * of_logit)
