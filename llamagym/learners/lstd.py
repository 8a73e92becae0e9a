"""A critic in closed form: the value head's weights by least-squares temporal differences.

The value head is linear in features that it does not shape, so what TD(lambda) would converge to on a batch solves a
linear system (LSTD(lambda), Boyan 2002, https://doi.org/10.1023/A:1017936530646): no learning rate, no steps, and no
lag behind returns that grow. Values for advantages come from the other half of the batch's episodes: no episode
finds its own luck in its values. How firmly weights stay where they were (ridge regression towards them) is what lets
each half predict the other's discounted returns best.

Shapes: N turns, E episodes, F features, the last one constant, P priors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..models.value_head import ValueHead
from .losses import discounted_returns

# How firmly weights stay where they are: as if so many turns had confirmed each of them. The firmest first: it is taken
# where none predicts better.
_PRIOR_TURNS = tuple(4.0**power for power in range(7, 0, -1))
# The same of the constant: returns that grow as a whole are followed at once.
_PRIOR_TURNS_OF_CONSTANT = 4.0


@torch.no_grad()
def fit(
    head: ValueHead,
    features: Tensor,
    lengths: Sequence[int],
    rewards: Tensor,
    final_values: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """Fit the head to a batch; returns the value of each turn by what the other half of the episodes teaches, (N,).

    Args:
        head: Whose weights are replaced.
        features: Hidden states where values are read, episode after episode, (N, F - 1).
        lengths: Turns of each episode, which add up to N.
        rewards: Float (N,).
        final_values: What comes after each episode's last turn, float (E,).
        gamma: Discount per turn.
        lam: Lambda.
    """
    standard = ((features - head.feature_mean.cpu()) / head.feature_std.cpu()).double()
    rows = torch.cat([standard, torch.ones(len(standard), 1, dtype=torch.double)], dim=1)
    half_of_episode = torch.arange(len(lengths)) % 2
    half = half_of_episode.repeat_interleave(torch.tensor(lengths))
    weights = torch.cat([head.summary.weight[0], head.summary.bias]).cpu().double()
    systems = []
    for index in (0, 1):
        members = half_of_episode == index
        chosen = [length for length, member in zip(lengths, members.tolist(), strict=True) if member]
        of_half = half == index
        systems.append(normal_equations(rows[of_half], chosen, rewards[of_half], final_values[members], gamma, lam))
    # By prior, (P, N).
    predicted = torch.empty(len(_PRIOR_TURNS), len(rows), dtype=torch.double)
    for index in (0, 1):
        of_half = half == index
        predicted[:, of_half] = _solve(systems[1 - index], weights, _PRIOR_TURNS) @ rows[of_half].T
    returns = _returns(lengths, rewards, final_values, gamma)
    best = int((predicted - returns).square().mean(1).argmin())
    fitted = _solve(systems[0] + systems[1], weights, _PRIOR_TURNS[best : best + 1])[0].to(head.summary.weight)
    head.summary.weight.copy_(fitted[None, :-1])
    head.summary.bias.copy_(fitted[-1:])
    return predicted[best].float()


def normal_equations(
    rows: Tensor, lengths: Sequence[int], rewards: Tensor, final_values: Tensor, gamma: float, lam: float
) -> Tensor:
    """LSTD's A and b side by side, (F, F + 1): weights w with A w = b have no TD(lambda) error on average.

    With z_t = gamma lambda z_{t-1} + x_t along an episode, A = sum z_t (x_t - gamma x_{t+1})^T and b = sum z_t r_t.

    Args:
        rows: Features x, episode after episode, float64 (N, F).
        lengths: Turns of each episode.
        rewards: Float (N,).
        final_values: What comes after each episode's last turn, float (E,); it has no features.
        gamma: Discount per turn.
        lam: Lambda.
    """
    size = rows.shape[1]
    total = rows.new_zeros(size, size + 1)
    turns = torch.tensor(list(lengths), dtype=torch.long)
    # The longest first, so that the episodes that reach a turn are the first ones.
    order = turns.argsort(descending=True)
    starts, turns, final_values = (turns.cumsum(0) - turns)[order], turns[order], final_values[order].to(rows)
    traces = rows.new_zeros(len(turns), size)
    for turn in range(int(turns.max()) if len(turns) else 0):
        under_way, going_on = int((turns > turn).sum()), int((turns > turn + 1).sum())
        now = starts[:under_way] + turn
        traces = gamma * lam * traces[:under_way] + rows[now]
        change, earned = rows[now], rewards[now].to(rows)
        change[:going_on] -= gamma * rows[now[:going_on] + 1]
        earned[going_on:] += gamma * final_values[going_on:under_way]
        total += traces.T @ torch.cat([change, earned[:, None]], dim=1)
    return total


def _returns(lengths: Sequence[int], rewards: Tensor, final_values: Tensor, gamma: float) -> Tensor:
    """What each turn is followed by, discounted, float (N,)."""
    padded = pad_sequence(list(rewards.split(list(lengths))), batch_first=True)
    last = torch.tensor(lengths) - 1
    padded[torch.arange(len(lengths)), last] += gamma * final_values
    return discounted_returns(padded, gamma)[torch.arange(padded.shape[1]) <= last[:, None]]


def _solve(system: Tensor, weights: Tensor, priors: Sequence[float]) -> Tensor:
    """Solutions of a linear system, regularised towards the weights before (ridge regression), each prior's, (P, F)."""
    matrix, target = system[:, :-1], system[:, -1]
    firmness = torch.tensor(priors).to(weights)[:, None].repeat(1, len(weights))
    firmness[:, -1] = _PRIOR_TURNS_OF_CONSTANT
    residual = target - matrix @ weights
    # One after the other: after `torch.set_num_threads(2)`, MKL solves a batch of hundreds of equations wrongly.
    return weights + torch.stack([torch.linalg.solve(matrix + one.diag(), residual) for one in firmness])
