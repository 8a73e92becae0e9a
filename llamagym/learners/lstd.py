"""A critic in closed form: the value head's weights by least-squares temporal differences.

The value head is linear in features that it does not shape, so what TD(lambda) would converge to on a batch solves a
linear system (LSTD(lambda), Boyan 2002, https://doi.org/10.1023/A:1017936530646): no learning rate, no steps, and no
lag behind returns that grow. Values are cross-fitted: each half of the batch's episodes is valued by weights fitted to
the other half, so an episode's own noise does not enter its baseline. Weights are regularized towards the previous ones
(ridge regression) with the strength at which each half predicts the other's discounted returns best.

Shapes: N turns, E episodes, F features, the last one constant, P strengths.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..models.value_head import ValueHead
from .losses import discounted_returns

# Strengths of the ridge penalty, in turns that confirm the previous weights. The strongest comes first: it is taken
# where none predicts better.
_PRIOR_TURNS = tuple(4.0**power for power in range(7, 0, -1))
# The same for the constant. A few returns are averaged with those before them; of more, the mean is followed at once.
# What the constant does not explain is left to the features, and large weights of theirs make noise of every small
# change of the model.
_FEW_TURNS = 8
_PRIOR_TURNS_OF_CONSTANT_IF_FEW = 4.0
_PRIOR_TURNS_OF_CONSTANT = 0.01


class Values(NamedTuple):
    """Cross-fitted values.

    Attributes:
        of_turns: Of the state before each turn, float (N,).
        of_finals: Of the state after each episode's last turn, float (E,); 0 where the episode terminated.
    """

    of_turns: Tensor
    of_finals: Tensor


@torch.no_grad()
def fit(
    head: ValueHead,
    features: Tensor,
    lengths: Sequence[int],
    rewards: Tensor,
    final_features: Tensor,
    bootstrapped: Tensor,
    halves: Tensor,
    gamma: float,
    lam: float,
) -> Values:
    """Fits the head to a batch and values each half of the episodes by a fit to the other half.

    Args:
        head: Its weights are replaced.
        features: Hidden states before each turn, episode after episode, float (N, F - 1).
        lengths: Turns of each episode, which add up to N.
        rewards: Float (N,).
        final_features: Hidden states after each episode's last turn, float (E, F - 1).
        bootstrapped: True at episodes that were cut off, whose final states have a value, bool (E,).
        halves: The half of the batch that each episode belongs to, 0 or 1, int (E,); see `split`.
        gamma: Discount per turn.
        lam: Lambda.
    """
    rows = _standardized(head, features)
    # A final state without features has the value 0 under any weights.
    finals = _standardized(head, final_features) * bootstrapped[:, None]
    half_of_turn = halves.repeat_interleave(torch.tensor(lengths))
    weights = torch.cat([head.summary.weight[0], head.summary.bias]).cpu().double()
    systems = []
    for half in (0, 1):
        members = halves == half
        own_lengths = [length for length, is_member in zip(lengths, members.tolist(), strict=True) if is_member]
        own = half_of_turn == half
        systems.append(normal_equations(rows[own], own_lengths, rewards[own], finals[members], gamma, lam))
    predicted = torch.empty(len(_PRIOR_TURNS), len(rows), dtype=torch.double)
    predicted_finals = torch.empty(len(_PRIOR_TURNS), len(lengths), dtype=torch.double)
    for half in (0, 1):
        other_turns = int((half_of_turn != half).sum())
        solutions = _solve(systems[1 - half], weights, _PRIOR_TURNS, other_turns)
        predicted[:, half_of_turn == half] = solutions @ rows[half_of_turn == half].T
        predicted_finals[:, halves == half] = solutions @ finals[halves == half].T
    errors = [
        (values - _returns(lengths, rewards, of_finals, gamma)).square().mean()
        for values, of_finals in zip(predicted, predicted_finals, strict=True)
    ]
    best = int(torch.stack(errors).argmin())
    fitted = _solve(systems[0] + systems[1], weights, _PRIOR_TURNS[best : best + 1], len(rows))[0]
    fitted = fitted.to(head.summary.weight)
    head.summary.weight.copy_(fitted[None, :-1])
    head.summary.bias.copy_(fitted[-1:])
    return Values(predicted[best].float(), predicted_finals[best].float())


def split(starts: Sequence[Hashable], rng: np.random.Generator) -> Tensor:
    """Random halves of a batch's episodes that share every start evenly, 0 or 1, int64 (E,).

    Where two kinds of episodes alternate, as in the environments of a vector, halves by the parity of their index would
    hold one kind each, and values of one would be fitted to the other alone.

    Args:
        starts: What each episode begins with; equal for episodes that begin alike.
        rng: Draws the halves.

    >>> halves = split(["a", "b", "a", "b"], np.random.default_rng(0)).tolist()
    >>> halves[0] + halves[2], halves[1] + halves[3]
    (1, 1)
    """
    members: dict[Hashable, list[int]] = {}
    for index in rng.permutation(len(starts)).tolist():
        members.setdefault(starts[index], []).append(index)
    order = [index for group in members.values() for index in group]
    halves = torch.empty(len(starts), dtype=torch.int64)
    halves[order] = torch.arange(len(starts)) % 2
    return halves


def normal_equations(
    rows: Tensor, lengths: Sequence[int], rewards: Tensor, finals: Tensor, gamma: float, lam: float
) -> Tensor:
    """LSTD's A and b side by side, (F, F + 1): weights w with A w = b have no TD(lambda) error on average.

    With z_t = gamma lambda z_{t-1} + x_t along an episode, A = sum z_t (x_t - gamma x_{t+1})^T and b = sum z_t r_t.

    Args:
        rows: Features x, episode after episode, float64 (N, F).
        lengths: Turns of each episode.
        rewards: Float (N,).
        finals: The features after each episode's last turn, float64 (E, F); 0 where it terminated.
        gamma: Discount per turn.
        lam: Lambda.
    """
    size = rows.shape[1]
    total = rows.new_zeros(size, size + 1)
    turns = torch.tensor(list(lengths), dtype=torch.long)
    # The longest first, so that the episodes that reach a turn are the first ones.
    order = turns.argsort(descending=True)
    starts = (turns.cumsum(0) - turns)[order]
    turns, finals = turns[order], finals[order]
    traces = rows.new_zeros(len(turns), size)
    for turn in range(int(turns.max()) if len(turns) else 0):
        reaching = int((turns > turn).sum())
        continuing = int((turns > turn + 1).sum())
        now = starts[:reaching] + turn
        traces = gamma * lam * traces[:reaching] + rows[now]
        following = torch.cat([rows[now[:continuing] + 1], finals[continuing:reaching]])
        change = rows[now] - gamma * following
        total += traces.T @ torch.cat([change, rewards[now].to(rows)[:, None]], dim=1)
    return total


def _standardized(head: ValueHead, features: Tensor) -> Tensor:
    """Features as the head sees them, with the constant, float64 (N, F)."""
    standard = ((features - head.feature_mean.cpu()) / head.feature_std.cpu()).double()
    return torch.cat([standard, torch.ones(len(standard), 1, dtype=torch.double)], dim=1)


def _returns(lengths: Sequence[int], rewards: Tensor, final_values: Tensor, gamma: float) -> Tensor:
    """The discounted return from each turn on, float64 (N,); a value stands for what follows an episode's last turn."""
    padded = pad_sequence(list(rewards.double().split(list(lengths))), batch_first=True)
    last = torch.tensor(lengths) - 1
    padded[torch.arange(len(lengths)), last] += gamma * final_values
    return discounted_returns(padded, gamma)[torch.arange(padded.shape[1]) <= last[:, None]]


def _solve(system: Tensor, weights: Tensor, priors: Sequence[float], turns: int) -> Tensor:
    """Solutions of a linear system of some turns, regularized towards the previous weights, one per strength.

    Returns:
        Float64 (P, F).
    """
    matrix, target = system[:, :-1], system[:, -1]
    firmness = torch.tensor(priors).to(weights)[:, None].repeat(1, len(weights))
    firmness[:, -1] = _PRIOR_TURNS_OF_CONSTANT_IF_FEW if turns < _FEW_TURNS else _PRIOR_TURNS_OF_CONSTANT
    residual = target - matrix @ weights
    # One after the other: after `torch.set_num_threads(2)`, MKL solves a batch of hundreds of equations wrongly.
    return weights + torch.stack([torch.linalg.solve(matrix + one.diag(), residual) for one in firmness])
