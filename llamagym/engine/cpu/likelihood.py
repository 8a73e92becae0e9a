"""Log-probabilities, entropies and their gradient over a whole vocabulary, as compiled kernels.

They read logits in the model's dtype, float32 or bfloat16, and allocate nothing of their size: the gradient replaces
them in place.

Shapes: M nodes, V vocabulary, K targets, G groups of tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from .compiling import as_element, compiled, empty_array_like, exponential, inlined, wide
from .numba_internals import carray, pointer

# Lower bound of log-probabilities, as in `engine.likelihood`.
_MIN_LOGPROB = np.float32(-(torch.finfo(torch.float32).max ** 0.5))
# Number of logits that are compared at once to find the largest.
_LANES = 64


def sums_in_groups(logits: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Largest logit of each row (M, V), float32 (M,), and sums of exponentials by group, float32 (M, G)."""
    largest = torch.empty(len(logits), dtype=torch.float32)
    sums = torch.empty(len(logits), groups, dtype=torch.float32)
    addresses = logits.data_ptr(), largest.data_ptr(), sums.data_ptr()
    sizes = len(logits), groups, logits.shape[1] // groups
    _sum(logits.numel(), empty_array_like(logits), addresses, sizes)
    return largest, sums


def measure(logits: Tensor, targets: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities (M, K) of targets, entropies (M,) and logarithms (M,) of the sums of exponentials.

    Args:
        logits: Contiguous logits (M, V).
        targets: Token ids, int64 (M, K).
        scales: Factor of each row's logits, float32 (M,).
    """
    picked = scales.new_empty(targets.shape)
    entropy = scales.new_empty(len(logits))
    log_sums = scales.new_empty(len(logits))
    _run(_measure, logits, targets, scales, picked, entropy, log_sums)
    return picked, entropy, log_sums


def replace_by_gradient_(
    logits: Tensor,
    targets: Tensor,
    scales: Tensor,
    log_sums: Tensor,
    grad_picked: Tensor,
    grad_entropy: Tensor,
    shift: Tensor,
) -> None:
    """Replaces logits (M, V) by their gradient.

    Args:
        logits: Logits as given to `measure`.
        targets: Token ids as given to `measure`, int64 (M, K).
        scales: Factors as given to `measure`, float32 (M,).
        log_sums: Logarithms that `measure` returned.
        grad_picked: Gradients of the log-probabilities, (M, K).
        grad_entropy: Gradients of the entropies, (M,).
        shift: Number subtracted from every gradient of a row's log-probabilities, (M,).
    """
    _run(_gradient, logits, targets, scales, log_sums, grad_picked, grad_entropy, shift)


def _run(kernel: Any, logits: Tensor, targets: Tensor, *others: Tensor) -> None:
    """Runs a kernel on all rows."""
    addresses = tuple(tensor.data_ptr() for tensor in (logits, targets, *others))
    kernel(logits.numel(), empty_array_like(logits), addresses, (*logits.shape, targets.shape[1]))


@inlined
def _clamped(number):  # type: ignore[no-untyped-def]
    """Log-probability clamped from below; NaN stays NaN."""
    return _MIN_LOGPROB if number < _MIN_LOGPROB else number


@inlined
def _largest_of(logits):  # type: ignore[no-untyped-def]
    """Largest logit of a row (V,)."""
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
def _sum(like, addresses, sizes, chunks):  # type: ignore[no-untyped-def]
    """Computes largest logits and sums of exponentials by group."""
    for chunk in prange(chunks):
        rows, groups, size = sizes
        logits = carray(pointer(addresses[0]), (rows, groups * size), like.dtype)
        largest = carray(pointer(addresses[1]), (rows,), np.float32)
        sums = carray(pointer(addresses[2]), (rows, groups), np.float32)
        for row in range(chunk * rows // chunks, (chunk + 1) * rows // chunks):
            largest[row] = _largest_of(logits[row])
            for group in range(groups):
                power_sum = np.float32(0)
                for i in range(group * size, (group + 1) * size):
                    power_sum += exponential(wide(logits[row, i]) - largest[row])
                sums[row, group] = power_sum


@compiled
def _measure(like, addresses, sizes, chunks):  # type: ignore[no-untyped-def]
    """Computes log-probabilities of targets, entropies, and logarithms of the sums of exponentials."""
    for chunk in prange(chunks):
        rows, vocabulary, count = sizes
        logits = carray(pointer(addresses[0]), (rows, vocabulary), like.dtype)
        targets = carray(pointer(addresses[1]), (rows, count), np.int64)
        scales = carray(pointer(addresses[2]), (rows,), np.float32)
        picked = carray(pointer(addresses[3]), (rows, count), np.float32)
        entropy = carray(pointer(addresses[4]), (rows,), np.float32)
        log_sums = carray(pointer(addresses[5]), (rows,), np.float32)
        for row in range(chunk * rows // chunks, (chunk + 1) * rows // chunks):
            scale = scales[row]
            largest = scale * _largest_of(logits[row])
            power_sum, product_sum = np.float32(0), np.float32(0)
            for i in range(vocabulary):
                difference = _clamped(scale * wide(logits[row, i]) - largest)
                power = exponential(difference)
                power_sum += power
                product_sum += power * difference
            log_sums[row] = largest + np.log(power_sum)
            entropy[row] = np.log(power_sum) - product_sum / power_sum
            for k in range(count):
                picked[row, k] = _clamped(scale * wide(logits[row, targets[row, k]]) - log_sums[row])


@compiled
def _gradient(like, addresses, sizes, chunks):  # type: ignore[no-untyped-def]
    """Replaces logits by their gradient."""
    for chunk in prange(chunks):
        rows, vocabulary, count = sizes
        logits = carray(pointer(addresses[0]), (rows, vocabulary), like.dtype)
        targets = carray(pointer(addresses[1]), (rows, count), np.int64)
        scales = carray(pointer(addresses[2]), (rows,), np.float32)
        log_sums = carray(pointer(addresses[3]), (rows,), np.float32)
        grad_picked = carray(pointer(addresses[4]), (rows, count), np.float32)
        grad_entropy = carray(pointer(addresses[5]), (rows,), np.float32)
        shift = carray(pointer(addresses[6]), (rows,), np.float32)
        target_logits = np.empty(count, np.float32)
        for row in range(chunk * rows // chunks, (chunk + 1) * rows // chunks):
            scale = scales[row]
            for k in range(count):
                target_logits[k] = wide(logits[row, targets[row, k]])
            for i in range(vocabulary):
                logprob = _clamped(scale * wide(logits[row, i]) - log_sums[row])
                grad_logit = exponential(logprob) * (-shift[row] - grad_entropy[row] * logprob)
                logits[row, i] = as_element(like, scale * grad_logit)
            # Targets' gradients are computed apart: rounding in between would cost up to 1 - p of a likely token.
            for k in range(count):
                logprob = _clamped(scale * target_logits[k] - log_sums[row])
                grad_logit = exponential(logprob) * (-shift[row] - grad_entropy[row] * logprob)
                for other in range(count):
                    if targets[row, other] == targets[row, k]:
                        grad_logit += grad_picked[row, other]
                logits[row, targets[row, k]] = as_element(like, scale * grad_logit)
