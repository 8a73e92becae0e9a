"""Log-probabilities of tokens and the entropy of the next one, from logits over the whole vocabulary.

A vocabulary is so large that this takes as long as some of the model's layers. On a CPU it is one compiled kernel
forward and one backward.

Shapes: M nodes, V vocabulary, K targets.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .acceleration import likelihood_kernels

# The lower bound of log-probabilities: -inf of an impossible token, times its probability of 0, would be NaN.
LEAST_LOGPROB = -(torch.finfo(torch.float32).max ** 0.5)


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
    if (kernels := likelihood_kernels(logits)) is not None:
        compiled: tuple[Tensor, Tensor] = kernels.sums_in_groups(logits, groups)
        return compiled
    largest = logits.amax(-1).float()
    return largest, (logits.float() - largest[:, None]).exp().unflatten(-1, (groups, size)).sum(-1)


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
        if (kernels := likelihood_kernels(logits)) is not None:
            picked, entropy, total = kernels.measure(logits, targets, scales)
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
        if (kernels := likelihood_kernels(logits)) is not None:
            # The gradient overwrites the logits, which are not used again: to allocate takes longer than to compute.
            increment_version(logits)
            kernels.replace_by_gradient_(logits, targets, scales, total, of_picked, of_entropy, shift)
            return logits, None, None
        logprobs, _ = _logprobs(logits, scales)
        of_logits = torch.addcmul(-shift[:, None], logprobs, of_entropy[:, None], value=-1).mul_(logprobs.exp_())
        of_logits = of_logits.scatter_add_(1, targets, of_picked).mul_(scales[:, None])
        return of_logits.to(logits.dtype), None, None


def _logprobs(logits: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (M, V) in float32, and the logarithms (M,) of what they were divided by."""
    scaled = logits.float() * scales[:, None]
    total = scaled.logsumexp(-1)
    return (scaled - total[:, None]).clamp_min_(LEAST_LOGPROB), total
