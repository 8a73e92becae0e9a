"""A critic in closed form: the value head's weights by least-squares temporal differences.

The value head is linear in features that it does not shape, so what TD(lambda) would converge to on a batch solves a
linear system (LSTD(lambda), Boyan 2002, https://doi.org/10.1023/A:1017936530646): no learning rate, no steps, and no
lag behind returns that grow. Values for advantages come from the other half of the batch's episodes: no episode
finds its own luck in its values. How firmly weights stay where they were (ridge regression towards them) is what lets
each half predict the other's discounted returns best.

Shapes: N turns, E episodes, F features, the last one constant.
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
    next_features: Tensor,
    lengths: Sequence[int],
    rewards: Tensor,
    final_values: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Fit the head to a batch, and say what turns, and what comes after episodes, are worth by the other half of it.

    Args:
        head: Whose weights are replaced.
        features: Hidden states where values are read, episode after episode, (N, F - 1).
        next_features: Of the turn after each episode's last, (E, F - 1), where the episode goes on.
        lengths: Turns of each episode, which add up to N.
        rewards: Float (N,).
        final_values: What comes after each episode's last turn, float (E,); NaN where it goes on.
        gamma: Discount per turn.
        lam: Lambda.

    Returns:
        Float (N,) and (E,), the latter `final_values` without what is NaN.
    """
    rows, next_rows = _standardised(head, features), _standardised(head, next_features)
    goes_on = final_values.isnan()
    next_rows[~goes_on], final_values = 0.0, final_values.nan_to_num().double()
    half_of_episode = torch.arange(len(lengths)) % 2
    half = half_of_episode.repeat_interleave(torch.tensor(lengths))
    weights = torch.cat([head.summary.weight[0], head.summary.bias]).cpu().double()
    systems = []
    for index in (0, 1):
        members = half_of_episode == index
        chosen = [length for length, member in zip(lengths, members.tolist(), strict=True) if member]
        of_half = half == index
        after = next_rows[members], final_values[members]
        systems.append(normal_equations(rows[of_half], chosen, rewards[of_half], *after, gamma, lam))
    # By the other half, for each prior: of turns, and after episodes.
    values = torch.empty(len(_PRIOR_TURNS), len(rows), dtype=torch.double)
    finals = torch.empty(len(_PRIOR_TURNS), len(lengths), dtype=torch.double)
    for row, prior in enumerate(_PRIOR_TURNS):
        for index in (0, 1):
            solution = _solve(systems[1 - index], weights, prior)
            values[row, half == index] = rows[half == index] @ solution
            members = half_of_episode == index
            finals[row, members] = final_values[members] + next_rows[members] @ solution
    # What all are measured by must not be one's own.
    returns = _returns(lengths, rewards, finals.median(0).values, gamma)
    best = int((values - returns).square().mean(1).argmin())
    fitted = _solve(systems[0] + systems[1], weights, _PRIOR_TURNS[best]).to(head.summary.weight)
    head.summary.weight.copy_(fitted[None, :-1])
    head.summary.bias.copy_(fitted[-1:])
    return values[best].float(), finals[best].float()


def _standardised(head: ValueHead, features: Tensor) -> Tensor:
    """Features as the head takes them, and the constant, float64."""
    standard = ((features - head.feature_mean.cpu()) / head.feature_std.cpu()).double()
    return torch.cat([standard, torch.ones(len(standard), 1, dtype=torch.double)], dim=1)


def normal_equations(
    rows: Tensor,
    lengths: Sequence[int],
    rewards: Tensor,
    next_rows: Tensor,
    final_values: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """LSTD's A and b side by side, (F, F + 1): weights w with A w = b have no TD(lambda) error on average.

    With z_t = gamma lambda z_{t-1} + x_t along an episode, A = sum z_t (x_t - gamma x_{t+1})^T and b = sum z_t r_t.

    Args:
        rows: Features x, episode after episode, float64 (N, F).
        lengths: Turns of each episode.
        rewards: Float (N,).
        next_rows: Features after each episode's last turn, float64 (E, F); 0 where there are none.
        final_values: What is to be added to their value, float (E,).
        gamma: Discount per turn.
        lam: Lambda.
    """
    size = rows.shape[1]
    total = rows.new_zeros(size, size + 1)
    turns = torch.tensor(list(lengths), dtype=torch.long)
    # The longest first, so that the episodes that reach a turn are the first ones.
    order = turns.argsort(descending=True)
    starts, turns = (turns.cumsum(0) - turns)[order], turns[order]
    next_rows, final_values = next_rows[order], final_values[order].to(rows)
    traces = rows.new_zeros(len(turns), size)
    for turn in range(int(turns.max()) if len(turns) else 0):
        under_way, going_on = int((turns > turn).sum()), int((turns > turn + 1).sum())
        now = starts[:under_way] + turn
        traces = gamma * lam * traces[:under_way] + rows[now]
        change, earned = rows[now], rewards[now].to(rows)
        change[:going_on] -= gamma * rows[now[:going_on] + 1]
        change[going_on:] -= gamma * next_rows[going_on:under_way]
        earned[going_on:] += gamma * final_values[going_on:under_way]
        total += traces.T @ torch.cat([change, earned[:, None]], dim=1)
    return total


def _returns(lengths: Sequence[int], rewards: Tensor, final_values: Tensor, gamma: float) -> Tensor:
    """What each turn is followed by, discounted, float (N,)."""
    padded = pad_sequence(list(rewards.split(list(lengths))), batch_first=True)
    last = torch.tensor(lengths) - 1
    padded[torch.arange(len(lengths)), last] += gamma * final_values
    return discounted_returns(padded, gamma)[torch.arange(padded.shape[1]) <= last[:, None]]


def _solve(system: Tensor, weights: Tensor, prior: float) -> Tensor:
    """The solution of a linear system, regularised towards the weights before (ridge regression)."""
    matrix, target = system[:, :-1], system[:, -1]
    firmness = torch.full_like(weights, prior)
    firmness[-1] = _PRIOR_TURNS_OF_CONSTANT
    return weights + torch.linalg.solve(matrix + firmness.diag(), target - matrix @ weights)
