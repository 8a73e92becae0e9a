"""How far two computations of the same numbers may be apart: as far as rounding explains, on every processor.

Processors sum in different orders, in vectors of different lengths, on different numbers of threads, with or without
fused multiply-add. A tolerance that is fitted on one of them need not hold on the next, so none is fitted here: each
computation is compared with a float64 reference, and may be off by what its dtype and the length of its sums explain.

With u the dtype's unit roundoff and n roundings on the way to a result, every order of a sum obeys

    |computed - exact| <= gamma_n * sum of |terms|,    gamma_n = n u / (1 - n u)

(Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM 2002, Lemma 3.1 and Equation 3.5; Equation
3.13 for matrix products). `assert_within_rounding` checks it.

Through the layers of a model such bounds multiply into numbers that mean nothing. There the backward error counts:
what was computed is the exact result for weights that are each off by some roundings (Section 1.5, and 1.6 for how
much a result reacts), about sqrt(n) u for a sum of n terms, since roundings partly cancel (Higham and Mary, A new
approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41, 2019). `rounding_noise` measures how far the
exact result moves with such weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# How many times further off a result may be than weights that are off at random move it: activations are rounded, too,
# and the largest of a few random changes is not the largest of all.
NOISE_FACTOR = 3.0

# How far log-probabilities and values of the tiny models in float32 may be apart. Their states are exact to 4e-6 of
# their norm, which is what `rounding_noise` measures (before its factor) on all families, and this norm is
# sqrt(32); a logit's row has a norm of 0.2 sqrt(32), and a log-probability is a logit less another: 3 * 4e-6 * 6.4 * 2.
LOGPROB_TOLERANCE = 2e-4


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def gamma(terms: int, dtype: torch.dtype) -> float:
    """Higham's gamma_n: the largest relative error after `terms` roundings in a dtype."""
    error = terms * unit_roundoff(dtype)
    if error >= 1:
        raise ValueError(f"{terms} roundings in {dtype} leave no correct digit; expected fewer")
    return error / (1 - error)


def assert_within_rounding(
    actual: Tensor, reference: Tensor, dtype: torch.dtype, terms: int, scale: Tensor | float | None = None
) -> None:
    """Fail if numbers are further from the exact ones than `terms` roundings bring them.

    Args:
        actual: Numbers that were computed in `dtype`.
        reference: The same numbers, computed in float64 from the same inputs.
        dtype: Of the computation.
        terms: Roundings on the way to one number: the length of its sum, and one for each other operation.
        scale: The sum of the absolute terms, for each number or for all; by default the largest exact number.
    """
    assert reference.dtype == torch.float64
    assert actual.shape == reference.shape
    if not reference.numel():
        return
    largest = reference.abs().max() if scale is None else torch.as_tensor(scale, dtype=torch.float64)
    # Results below the smallest normal number lose digits, or are flushed to zero.
    bound = gamma(terms, dtype) * largest + torch.finfo(dtype).tiny
    error = (actual.double() - reference).abs()
    worst = (error / bound).max().item()
    # Written so that NaN fails.
    assert worst <= 1, f"off by {error.max().item():.2e}, {worst:.1f} times what {terms} roundings in {dtype} explain"


def in_float64(module: nn.Module) -> Any:
    """A copy of a model that computes in float64 throughout: RMS norms go through float32 otherwise."""
    exact = copy.deepcopy(module).double()
    for norm in exact.modules():
        kind = type(norm).__name__
        if kind.endswith("RMSNorm"):
            norm.forward = partial(_rms_norm, norm, plus_one=kind.startswith("Gemma"))
    return exact


def _rms_norm(norm: Any, states: Tensor, plus_one: bool) -> Tensor:
    epsilon = norm.eps if plus_one else norm.variance_epsilon
    weight = norm.weight + 1 if plus_one else norm.weight
    return weight * states / (states.square().mean(-1, keepdim=True) + epsilon).sqrt()


@torch.no_grad()
def rounding_noise(
    compute: Callable[[], Tensor], model: nn.Module, dtype: torch.dtype, terms: int, samples: int = 3
) -> float:
    """How far from a model's exact result what is computed in a dtype may be, as the norm of the difference.

    Args:
        compute: Computes the result in float64, with `model`'s weights as they are.
        model: Its weights, in float64, are changed while this runs: each by the sum of `terms` random roundings.
        dtype: Of the computation that is judged.
        terms: The length of the longest sum in it that runs in `dtype`.
        samples: The number of random changes.
    """
    weights = list(model.parameters())
    kept = [weight.detach().clone() for weight in weights]
    exact, moved = compute(), []
    relative = unit_roundoff(dtype) * terms**0.5
    rng = torch.Generator().manual_seed(0)
    try:
        for _ in range(samples):
            for weight, original in zip(weights, kept, strict=True):
                signs = torch.randint(2, original.shape, generator=rng, dtype=original.dtype) * 2 - 1
                weight.copy_(original * (1 + relative * signs))
            moved.append((compute() - exact).norm().item())
    finally:
        for weight, original in zip(weights, kept, strict=True):
            weight.copy_(original)
    return NOISE_FACTOR * max(moved)
