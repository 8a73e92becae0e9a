"""Log-probabilities of tokens and entropies of the next token, from logits over the whole vocabulary.

A vocabulary is so large that this takes as long as some of the model's layers. On a CPU it is one compiled kernel
forward and one backward.

Shapes: M nodes, V vocabulary, K targets, G groups of tokens.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .acceleration import likelihood_kernels

# Lower bound of log-probabilities: -inf of an impossible token, times its probability of 0, would be NaN.
MIN_LOGPROB = -(torch.finfo(torch.float32).max ** 0.5)


def logprobs_and_entropy(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (M, K) of targets and entropies (M,), float32, of softmax(logits / temperature).

    Args:
        logits: Logits of next tokens, (M, V). The backward pass may overwrite them with their gradient.
        targets: Token ids, int64 (M, K).
        temperatures: Positive temperatures, float (M,).

    Raises:
        IndexError: If a target is outside the vocabulary.
    """
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[1]:
        raise IndexError(
            f"targets must be token ids below {logits.shape[1]}, the size of the model's vocabulary, got "
            f"{int(targets.min())} to {int(targets.max())}. Use the tokenizer that belongs to the model."
        )
    result: tuple[Tensor, Tensor] = _Likelihood.apply(logits, targets, temperatures)
    return result


def sums_in_groups(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit of each row, and sums of exp(logit - largest) over G groups of tokens.

    Args:
        logits: Logits (M, V), without gradient.

    Returns:
        Float32 (M,) and float32 (M, G), where G divides V and is near its square root.
    """
    logits = logits.contiguous()
    size = _group_size(logits.shape[1])
    groups = logits.shape[1] // size
    if (kernels := likelihood_kernels(logits)) is not None:
        compiled: tuple[Tensor, Tensor] = kernels.sums_in_groups(logits, groups)
        return compiled
    largest = logits.amax(-1).float()
    return largest, (logits.float() - largest[:, None]).exp().unflatten(-1, (groups, size)).sum(-1)


@cache
def _group_size(vocabulary: int) -> int:
    """Largest divisor of the vocabulary's size up to its square root."""
    return next(size for size in range(math.isqrt(vocabulary), 0, -1) if vocabulary % size == 0)


class _Likelihood(torch.autograd.Function):
    """With p = softmax(z) and H its entropy, d log p_k / dz = 1_k - p and dH / dz = -p (log p + H).

    Autograd would keep three tensors of the logits' size; this keeps the logits only.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        targets = targets.contiguous()
        scales = temperatures.float().reciprocal()
        if (kernels := likelihood_kernels(logits)) is not None:
            picked, entropy, log_sums = kernels.measure(logits, targets, scales)
        else:
            logprobs, log_sums = _logprobs(logits, scales)
            picked = logprobs.gather(1, targets)
            entropy = -torch.linalg.vecdot(logprobs.exp(), logprobs)
        ctx.save_for_backward(logits, targets, scales, entropy, log_sums)
        return picked, entropy

    @staticmethod
    def backward(ctx: Any, grad_picked: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, scales, entropy, log_sums = ctx.saved_tensors
        grad_picked = grad_picked.contiguous()
        grad_entropy = grad_entropy.contiguous()
        shift = grad_picked.sum(1) + grad_entropy * entropy
        if (kernels := likelihood_kernels(logits)) is not None:
            # The gradient overwrites the logits, which are not used again: allocating takes longer than computing.
            increment_version(logits)
            kernels.replace_by_gradient_(logits, targets, scales, log_sums, grad_picked, grad_entropy, shift)
            return logits, None, None
        logprobs, _ = _logprobs(logits, scales)
        grad_logits = torch.addcmul(-shift[:, None], logprobs, grad_entropy[:, None], value=-1).mul_(logprobs.exp_())
        grad_logits = grad_logits.scatter_add_(1, targets, grad_picked).mul_(scales[:, None])
        return grad_logits.to(logits.dtype), None, None


def _logprobs(logits: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (M, V) in float32, and logarithms (M,) of the softmax's denominators."""
    scaled = logits.float() * scales[:, None]
    log_sums = scaled.logsumexp(-1)
    return (scaled - log_sums[:, None]).clamp_min_(MIN_LOGPROB), log_sums
