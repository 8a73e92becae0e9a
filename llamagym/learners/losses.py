"""The mathematics of the learners: pure functions of tensors.

Shapes: B rows, T steps (turns of an episode, or tokens of a reply), V vocabulary. A mask is True where an entry counts;
entries outside the mask never influence a result.

Sources: PPO (Schulman et al. 2017, https://arxiv.org/abs/1707.06347), GAE (Schulman et al. 2016,
https://arxiv.org/abs/1506.02438), KL estimators k1, k2, k3 (Schulman 2020, http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

KLEstimator = Literal["k1", "abs", "k2", "k3", "binary"]
GroupBaseline = Literal["leave_one_out", "std"]
# In nats; beyond it, k3 continues as its tangent.
_MAX_LOG_RATIO = 10.0


def _check_shapes(**tensors: Tensor) -> None:
    """Rejects tensors of different shapes, since broadcasting would hide a mistake."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(
            f"Tensors must share one shape, received {shapes}. Index or pad them to the same (B, T) first."
        )


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the entries where the mask is True; 0 for an empty mask.

    >>> masked_mean(torch.tensor([1.0, 2.0, 99.0]), torch.tensor([True, True, False])).item()
    1.5
    """
    _check_shapes(values=values, mask=mask)
    return values.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance (divisor n - 1) over the mask; 0 where it holds fewer than two entries.

    >>> masked_var(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False])).item()
    2.0
    """
    centered = _masked_centered(values, mask).masked_fill(~mask, 0.0)
    return centered.square().sum() / (mask.sum() - 1).clamp(min=1)


def _masked_centered(values: Tensor, mask: Tensor) -> Tensor:
    """Values minus their mean over the mask; exactly 0 if all are equal, see `_above_first`."""
    shifted = _above_first(values, values[mask])
    return shifted - masked_mean(shifted, mask)


def _above_first(values: Tensor, selected: Tensor) -> Tensor:
    """Values minus the first selected one; exactly 0 where they are equal up to float32's rounding.

    The mean of equal values is rounded and may differ from them, while the mean of zeros is exact.

    Args:
        values: Float of any shape.
        selected: The values within the mask, float (n, ...).
    """
    if not len(selected):
        return values
    difference = values - selected[0]
    resolution = torch.finfo(torch.float32).eps * selected.abs().amax(0)
    return difference.masked_fill(difference.abs() <= resolution, 0.0)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scales to unit variance over the mask and, with `shift_mean`, shifts to zero mean.

    Args:
        values: Float (B, T).
        mask: True at entries that count, bool (B, T).
        shift_mean: Whether the mean is removed.

    >>> masked_whiten(torch.tensor([1.0, 3.0]), torch.tensor([True, True])).mul(2**0.5).round().tolist()
    [-1.0, 1.0]
    """
    whitened = _masked_centered(values, mask) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + masked_mean(values, mask)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, final_values: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the steps of each row (GAE paper, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}; a row's real steps come first.

    Args:
        rewards: Reward that follows each step, float (B, T), in the environment's unit.
        values: V(s_t) when the step was taken, float (B, T).
        mask: True at real steps, bool (B, T).
        gamma: Discount per step.
        lam: GAE's lambda; 0 is one-step TD, 1 is Monte Carlo.
        final_values: V of the state after a row's last step, float (B,): 0 after termination, the critic's estimate
            after truncation. None means 0 everywhere.

    Returns:
        Advantages and returns (advantages + values), float (B, T), 0 outside the mask.

    >>> ones = torch.ones(1, 2)
    >>> advantages, returns = gae(ones, torch.zeros(1, 2), ones.bool(), gamma=0.5, lam=1.0)
    >>> advantages.tolist()
    [[1.5, 1.0]]
    """
    _check_shapes(rewards=rewards, values=values, mask=mask)
    next_value = torch.zeros_like(values[:, 0]) if final_values is None else final_values
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(values)
    for step in reversed(range(values.shape[1])):
        real = mask[:, step]
        delta = rewards[:, step] + gamma * next_value - values[:, step]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, step] = torch.where(real, advantage, 0.0)
        next_advantage = torch.where(real, advantage, next_advantage)
        next_value = torch.where(real, values[:, step], next_value)
    return advantages, torch.where(mask, advantages + values, 0.0)


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """Discounted return from each step on: G_t = r_t + gamma G_{t+1}, float (B, T) like the rewards.

    >>> discounted_returns(torch.tensor([[1.0, 0.0, 4.0]]), gamma=0.5).tolist()
    [[2.0, 2.0, 4.0]]
    """
    returns = rewards.clone()
    for step in reversed(range(rewards.shape[1] - 1)):
        returns[:, step] += gamma * returns[:, step + 1]
    return returns


def typical_size(returns: Tensor) -> float:
    """The median absolute value of the returns other than 0; 1 if all are 0. A single outlier does not change it.

    >>> typical_size(torch.tensor([0.0, -2.0, 3.0, 1e6])), typical_size(torch.zeros(2))
    (3.0, 1.0)
    """
    sizes = returns.abs()[returns != 0]
    return sizes.median().item() if len(sizes) else 1.0


def group_advantages(returns: Tensor, baseline: GroupBaseline, decides: Tensor | None = None) -> Tensor:
    """Advantage of each member of a group over the others, step by step; 0 in a group of one and for equal returns.

    "leave_one_out" subtracts the mean of the others (RLOO, Kool et al. 2019, https://openreview.net/forum?id=r1lgTGL5DE;
    Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740). "std" also divides by the group's deviation (DeepSeekMath,
    Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2) at the step where members differ most, so that
    steps keep their weights. Departure: DeepSeekMath subtracts the mean of all members. Including the member's own
    return would scale the gradient of a group of G by (G - 1) / G, and so weight small groups less.

    Args:
        returns: Return of each member from each step on, float (G, T).
        baseline: "leave_one_out" or "std".
        decides: True at steps with something to decide, bool (G, T); the deviation is over these. None: all.

    Returns:
        Advantages, float (G, T).

    >>> group_advantages(torch.tensor([[1.0], [0.0], [2.0], [1.0]]), "leave_one_out").mul(3).round()[:, 0].tolist()
    [0.0, -4.0, 4.0, 0.0]
    >>> group_advantages(torch.tensor([[1.0], [3.0]]), "std").div(2**0.5).round()[:, 0].tolist()
    [-1.0, 1.0]
    """
    members = len(returns)
    if members == 1:
        return torch.zeros_like(returns)
    shifted = _above_first(returns, returns)
    centered = shifted - shifted.mean(0)
    above_others = centered * members / (members - 1)
    if baseline == "leave_one_out":
        return above_others
    deviations = centered.std(0)
    if decides is not None:
        deviations = deviations * decides.any(0)
    return above_others / (deviations.max() + 1e-4)


class PolicyLoss(NamedTuple):
    """The clipped surrogate and its statistics; scalars."""

    loss: Tensor
    clip_fraction: Tensor
    approx_kl: Tensor
    mean_ratio: Tensor


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_range: float
) -> PolicyLoss:
    """PPO's clipped surrogate (eq. 7), negated for minimization and averaged over the mask.

    `approx_kl` is k2, half the mean squared log-ratio, which is never negative.

    Args:
        logprobs: Log-probabilities under the policy in training, float (B, T).
        old_logprobs: The same when sampled, float (B, T).
        advantages: Advantage of each entry's step, float (B, T).
        mask: True at entries that were sampled, bool (B, T).
        clip_range: Epsilon of the paper.

    >>> old, one = torch.zeros(1, 1), torch.ones(1, 1)
    >>> round(clipped_surrogate(torch.full((1, 1), 0.6931), old, one, one.bool(), 0.2).loss.item(), 4)
    -1.2
    """
    _check_shapes(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    with torch.no_grad():
        clip_fraction = masked_mean((clipped > unclipped).to(ratio.dtype), mask)
        approx_kl = 0.5 * masked_mean(log_ratio.square(), mask)
        mean_ratio = masked_mean(ratio, mask)
    return PolicyLoss(masked_mean(torch.maximum(unclipped, clipped), mask), clip_fraction, approx_kl, mean_ratio)


class ValueLoss(NamedTuple):
    """The clipped value loss and the share of clipped entries; scalars."""

    loss: Tensor
    clip_fraction: Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_range: float
) -> ValueLoss:
    """Half the mean of max((V - R)^2, (clip(V, V_old +- epsilon) - R)^2) over the mask.

    Args:
        values: The critic's estimates in training, float (B, T), in reward units.
        old_values: The same when the step was taken, float (B, T).
        returns: Targets, float (B, T).
        mask: True at entries that count, bool (B, T).
        clip_range: Epsilon, in reward units.

    >>> one = torch.ones(1, 1)
    >>> clipped_value_loss(one * 1.0, one * 0.0, one * 1.0, one.bool(), clip_range=0.5).loss.item()
    0.125
    """
    _check_shapes(values=values, old_values=old_values, returns=returns, mask=mask)
    clipped_values = torch.minimum(torch.maximum(values, old_values - clip_range), old_values + clip_range)
    unclipped = (values - returns).square()
    clipped = (clipped_values - returns).square()
    with torch.no_grad():
        clip_fraction = masked_mean((clipped > unclipped).to(values.dtype), mask)
    return ValueLoss(0.5 * masked_mean(torch.maximum(unclipped, clipped), mask), clip_fraction)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-sample estimate of KL(policy || reference) from samples of the policy.

    With r = p_ref / p: k1 = -log r (unbiased), abs = |log r|, k2 = (log r)^2 / 2, k3 = r - 1 - log r (unbiased,
    never negative). Beyond log r = 10, r in k3 continues as its tangent, so that it is finite and has a gradient.
    binary is the KL of the event that this sample is drawn: exact for two outcomes, a lower bound for more (Qi et al.
    2026, https://arxiv.org/abs/2602.04879). A rare sample adds no more to it than the probability it gains or loses,
    while its k2 can outweigh that of hundreds of others.

    Args:
        logprobs: Log-probabilities under the policy, float of any shape.
        ref_logprobs: Log-probabilities under the reference, same shape.
        estimator: The estimator.

    >>> kl_estimate(torch.tensor(0.0), torch.tensor(-1.0), "k1").item()
    1.0
    """
    _check_shapes(logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_r = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_r
    if estimator == "abs":
        return log_r.abs()
    if estimator == "k2":
        return 0.5 * log_r.square()
    if estimator == "k3":
        below = log_r.clamp_max(_MAX_LOG_RATIO)
        return below.exp() * (1 + log_r - below) - 1 - log_r
    if estimator == "binary":
        # In terms of the log-ratio, which keeps cancellation small; clamped to stay finite at p = 1.
        eps = torch.finfo(log_r.dtype).eps
        p = logprobs.exp()
        others = (-torch.expm1(logprobs)).clamp_min(eps)
        return -p * log_r - others * torch.log1p((-p * torch.expm1(log_r) / others).clamp_min(eps - 1))
    raise ValueError(f"Unknown KL estimator {estimator!r}. Expected one of {list(get_args(KLEstimator))}.")


def categorical_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Exact KL(policy || reference) of distributions along the last dimension, in nats.

    Args:
        logprobs: Log-probabilities under the policy, float (..., K); -inf is an impossible outcome.
        ref_logprobs: Log-probabilities under the reference, same shape.

    >>> even, uneven = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.25, 0.75, 0.0]).log()
    >>> round(categorical_kl(even, uneven).item(), 4)
    0.1438
    """
    _check_shapes(logprobs=logprobs, ref_logprobs=ref_logprobs)
    probabilities = logprobs.exp()
    terms = probabilities * (logprobs - ref_logprobs)
    # Only rounding can make the sum negative.
    return terms.masked_fill(probabilities == 0, 0.0).sum(-1).clamp_min(0.0)


def explained_variance(predictions: Tensor, targets: Tensor) -> float:
    """1 - Var(target - prediction) / Var(target): 1 is perfect, 0 no better than a constant; NaN for constant targets.

    >>> explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    1.0
    """
    _check_shapes(predictions=predictions, targets=targets)
    variance = targets.var(correction=0)
    if variance == 0:
        return float("nan")
    return (1 - (targets - predictions).var(correction=0) / variance).item()
