"""How likely tokens are under logits of the whole vocabulary, and how uncertain the next one is.

A vocabulary has so many words that this takes as long as some of the model's layers. On a processor it is one compiled
function either way, which reads the logits as the model gives them and writes nothing of their size but their gradient,
in their place.

Shapes: M nodes, V vocabulary, K targets.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numba import prange
from numba.np.numpy_support import carray
from torch import Tensor
from torch.autograd.graph import increment_version

from .compiling import as_element, compiled, exponential, has_kernels, inlined, kind_of, pointer, run_in_parts, wide

# No log-probability is less: an impossible token's of -inf, times its probability of 0, would not be a number.
_LEAST = np.float32(-(torch.finfo(torch.float32).max ** 0.5))
# Logits among which the largest is looked for at once.
_LANES = 64


def logprobs_and_entropy(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (M, K) of targets and entropies (M,), float32, of softmax(logits / temperature).

    Args:
        logits: Of next tokens, (M, V); gradients flow back to them, and may then take their place in memory.
        targets: Tokens, int64 (M, K).
        temperatures: Positive, float (M,).

    Raises:
        IndexError: If a target is none of the vocabulary's tokens.
    """
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[1]:
        raise IndexError(
            f"asked for tokens {int(targets.min())} to {int(targets.max())} of {logits.shape[1]} that the model knows; "
            "the tokenizer may be another model's"
        )
    result: tuple[Tensor, Tensor] = _Likelihood.apply(logits, targets, temperatures)
    return result


def sums_in_groups(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row's logits, and the sums of exp(logit - largest) of G groups of tokens.

    Args:
        logits: (M, V); no gradient flows back to them.

    Returns:
        Float32 (M,), and float32 (M, G), where G divides V and is near its root.
    """
    logits, size = logits.contiguous(), _group_size(logits.shape[1])
    groups = logits.shape[1] // size
    if not has_kernels(logits):
        largest = logits.amax(-1).float()
        return largest, (logits.float() - largest[:, None]).exp().unflatten(-1, (groups, size)).sum(-1)
    largest = torch.empty(len(logits), dtype=torch.float32)
    sums = torch.empty(len(logits), groups, dtype=torch.float32)
    results, sizes = (largest.data_ptr(), sums.data_ptr()), (len(logits), groups, size)
    given = kind_of(logits), logits.data_ptr(), results, sizes
    run_in_parts(_sum, _sum_in_threads, logits.numel(), *given)
    return largest, sums


@cache
def _group_size(vocabulary: int) -> int:
    """The divisor of the vocabulary's size that is closest below its root."""
    return next(size for size in range(math.isqrt(vocabulary), 0, -1) if vocabulary % size == 0)


class _Likelihood(torch.autograd.Function):
    """With p = softmax(z) and H its entropy, d log p_k / dz = 1_k - p and dH / dz = -p (log p + H).

    Autograd would keep three tensors of the logits' size. This keeps the logits alone.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        logits, targets, scales = logits.contiguous(), targets.contiguous(), temperatures.float().reciprocal()
        if has_kernels(logits):
            picked, entropy, total = (scales.new_empty(shape) for shape in (targets.shape, len(logits), len(logits)))
            given = logits.data_ptr(), targets.data_ptr(), scales.data_ptr()
            results = picked.data_ptr(), entropy.data_ptr(), total.data_ptr()
            sizes = (*logits.shape, targets.shape[1])
            run_in_parts(_measure, _measure_in_threads, logits.numel(), kind_of(logits), given, results, sizes)
        else:
            logprobs, total = _logprobs(logits, scales)
            picked, entropy = logprobs.gather(1, targets), -torch.linalg.vecdot(logprobs.exp(), logprobs)
        ctx.save_for_backward(logits, targets, scales, entropy, total)
        return picked, entropy

    @staticmethod
    def backward(ctx: Any, of_picked: Tensor, of_entropy: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, scales, entropy, total = ctx.saved_tensors
        of_picked, of_entropy = of_picked.contiguous(), of_entropy.contiguous()
        shift = of_picked.sum(1) + of_entropy * entropy
        if has_kernels(logits):
            # The slopes replace the logits, which nobody else needs: fresh memory takes longer than computing them.
            increment_version(logits)
            given = logits.data_ptr(), targets.data_ptr(), scales.data_ptr(), total.data_ptr()
            gradients = of_picked.data_ptr(), of_entropy.data_ptr(), shift.data_ptr()
            sizes = (*logits.shape, targets.shape[1])
            run_in_parts(_slope, _slope_in_threads, logits.numel(), kind_of(logits), given, gradients, sizes)
            return logits, None, None
        logprobs, _ = _logprobs(logits, scales)
        of_logits = torch.addcmul(-shift[:, None], logprobs, of_entropy[:, None], value=-1).mul_(logprobs.exp_())
        of_logits = of_logits.scatter_add_(1, targets, of_picked).mul_(scales[:, None])
        return of_logits.to(logits.dtype), None, None


def _logprobs(logits: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (M, V) in float32, and the logarithms (M,) of what they were divided by."""
    scaled = logits.float() * scales[:, None]
    total = scaled.logsumexp(-1)
    return (scaled - total[:, None]).clamp_min_(_LEAST.item()), total


@inlined
def _at_least(number):  # type: ignore[no-untyped-def]
    """A log-probability, no less than the least; what is no number is not less."""
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
def _sum(kind, logits_at, results_at, sizes, part, parts):  # type: ignore[no-untyped-def]
    """Largest logits, and sums of exponentials by groups, of one part of the rows."""
    rows, groups, size = sizes
    logits = carray(pointer(logits_at), (rows, groups * size), kind.dtype)
    largest = carray(pointer(results_at[0]), (rows,), np.float32)
    sums = carray(pointer(results_at[1]), (rows, groups), np.float32)
    for row in range(part * rows // parts, (part + 1) * rows // parts):
        largest[row] = _largest(logits[row])
        for group in range(groups):
            powers = np.float32(0)
            for i in range(group * size, (group + 1) * size):
                powers += exponential(wide(logits[row, i]) - largest[row])
            sums[row, group] = powers


@compiled
def _measure(kind, given_at, results_at, sizes, part, parts):  # type: ignore[no-untyped-def]
    """Log-probabilities of targets, entropy, and logarithm of the sum of exponentials, of one part of the rows."""
    rows, vocabulary, count = sizes
    logits = carray(pointer(given_at[0]), (rows, vocabulary), kind.dtype)
    targets = carray(pointer(given_at[1]), (rows, count), np.int64)
    scales = carray(pointer(given_at[2]), (rows,), np.float32)
    picked = carray(pointer(results_at[0]), (rows, count), np.float32)
    entropy = carray(pointer(results_at[1]), (rows,), np.float32)
    total = carray(pointer(results_at[2]), (rows,), np.float32)
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
def _slope(kind, given_at, gradients_at, sizes, part, parts):  # type: ignore[no-untyped-def]
    """Replace the logits of one part of the rows by their gradient."""
    rows, vocabulary, count = sizes
    logits = carray(pointer(given_at[0]), (rows, vocabulary), kind.dtype)
    targets = carray(pointer(given_at[1]), (rows, count), np.int64)
    scales = carray(pointer(given_at[2]), (rows,), np.float32)
    total = carray(pointer(given_at[3]), (rows,), np.float32)
    of_picked = carray(pointer(gradients_at[0]), (rows, count), np.float32)
    of_entropy = carray(pointer(gradients_at[1]), (rows,), np.float32)
    shift = carray(pointer(gradients_at[2]), (rows,), np.float32)
    kept = np.empty(count, np.float32)
    for row in range(part * rows // parts, (part + 1) * rows // parts):
        scale = scales[row]
        for k in range(count):
            kept[k] = wide(logits[row, targets[row, k]])
        for i in range(vocabulary):
            logprob = _at_least(scale * wide(logits[row, i]) - total[row])
            of_logit = exponential(logprob) * (-shift[row] - of_entropy[row] * logprob)
            logits[row, i] = as_element(kind, scale * of_logit)
        # Targets' slopes anew: one that had been rounded would be off by as much as what a likely one leaves of 1.
        for k in range(count):
            logprob = _at_least(scale * kept[k] - total[row])
            of_logit = exponential(logprob) * (-shift[row] - of_entropy[row] * logprob)
            for other in range(count):
                if targets[row, other] == targets[row, k]:
                    of_logit += of_picked[row, other]
            logits[row, targets[row, k]] = as_element(kind, scale * of_logit)


@partial(compiled, parallel=True)
def _sum_in_threads(kind, logits_at, results_at, sizes, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        _sum(kind, logits_at, results_at, sizes, part, parts)


@partial(compiled, parallel=True)
def _measure_in_threads(kind, given_at, results_at, sizes, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        _measure(kind, given_at, results_at, sizes, part, parts)


@partial(compiled, parallel=True)
def _slope_in_threads(kind, given_at, gradients_at, sizes, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        _slope(kind, given_at, gradients_at, sizes, part, parts)
