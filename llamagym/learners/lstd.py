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

# Strengths of the ridge penalty, as a number of turns that confirm the previous weights. The strongest comes first, so
# that it wins ties.
_PRIOR_TURNS = tuple(4.0**power for power in range(7, 0, -1))
# The same for the constant. A few returns are averaged with earlier ones; the mean of more is followed at once, or the
# features would have to explain it, with large weights that amplify every small change of the model.
_FEW_TURNS = 8
_PRIOR_TURNS_OF_CONSTANT_IF_FEW = 4.0
PRIOR_TURNS_OF_CONSTANT = 0.01


class Values(NamedTuple):
    """Cross-fitted values.

    Attributes:
        of_turns: Values of the states before each turn, float (N,).
        of_finals: Values of the states after each episode's last turn, float (E,); 0 after termination.
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
    """Fits the head to a batch; returns each half's values under a fit to the other half.

    Args:
        head: The value head, whose weights are replaced.
        features: Hidden states before each turn, episode after episode, float (N, F - 1).
        lengths: Turns of each episode; their sum is N.
        rewards: Rewards after each turn, float (N,).
        final_features: Hidden states after each episode's last turn, float (E, F - 1).
        bootstrapped: True at episodes whose final state has a value, bool (E,).
        halves: Half of the batch of each episode, 0 or 1, int (E,); see `split`.
        gamma: Discount per turn.
        lam: Lambda of TD(lambda).
    """
    rows = _standardized(head, features)
    # A final state without features has the value 0 under any weights.
    finals = _standardized(head, final_features) * bootstrapped[:, None]
    half_of_turn = halves.repeat_interleave(torch.tensor(lengths))
    weights = torch.cat([head.summary.weight[0], head.summary.bias]).cpu().double()
    systems = []
    for half in (0, 1):
        members = halves == half
        own_lengths = torch.tensor(lengths)[members].tolist()
        own_turns = half_of_turn == half
        systems.append(normal_equations(rows[own_turns], own_lengths, rewards[own_turns], finals[members], gamma, lam))
    predicted = torch.empty(len(_PRIOR_TURNS), len(rows), dtype=torch.double)
    predicted_finals = torch.empty(len(_PRIOR_TURNS), len(lengths), dtype=torch.double)
    for half in (0, 1):
        own_turns = half_of_turn == half
        solutions = _solve(systems[1 - half], weights, _PRIOR_TURNS, int((~own_turns).sum()))
        predicted[:, own_turns] = solutions @ rows[own_turns].T
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

    Halves by the parity of the index would not do: if two sorts of episodes alternate, as in a vector environment, the
    values of one sort would be fitted to the other.

    Args:
        starts: Key of each episode's start; equal for episodes from the same start.
        rng: Random numbers.

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
    """LSTD's A and b as one matrix, (F, F + 1): weights w with A w = b have a mean TD(lambda) error of 0.

    With z_t = gamma lambda z_{t-1} + x_t along an episode, A = sum z_t (x_t - gamma x_{t+1})^T and b = sum z_t r_t.

    Args:
        rows: Features x, episode after episode, float64 (N, F).
        lengths: Turns of each episode.
        rewards: Rewards after each turn, float (N,).
        finals: Features after each episode's last turn, float64 (E, F); 0 where it terminated.
        gamma: Discount per turn.
        lam: Lambda of TD(lambda).
    """
    size = rows.shape[1]
    total = rows.new_zeros(size, size + 1)
    turns = torch.tensor(list(lengths), dtype=torch.long)
    # Longest episodes first, so that those that reach a turn are a prefix.
    order = turns.argsort(descending=True)
    starts = (turns.cumsum(0) - turns)[order]
    turns = turns[order]
    finals = finals[order]
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
    """Standardized features with the constant, float64 (N, F)."""
    standard = ((features - head.feature_mean.cpu()) / head.feature_std.cpu()).double()
    return torch.cat([standard, torch.ones(len(standard), 1, dtype=torch.double)], dim=1)


def _returns(lengths: Sequence[int], rewards: Tensor, final_values: Tensor, gamma: float) -> Tensor:
    """The discounted return from each turn on, float64 (N,), bootstrapped by the value after the last turn."""
    padded = pad_sequence(list(rewards.double().split(list(lengths))), batch_first=True)
    last = torch.tensor(lengths) - 1
    padded[torch.arange(len(lengths)), last] += gamma * final_values
    return discounted_returns(padded, gamma)[torch.arange(padded.shape[1]) <= last[:, None]]


def _solve(system: Tensor, weights: Tensor, priors: Sequence[float], turns: int) -> Tensor:
    """Solves a linear system, regularized towards the previous weights.

    Args:
        system: A and b from `normal_equations`, (F, F + 1).
        weights: The previous weights, (F,).
        priors: Strengths of the ridge penalty, P.
        turns: Number of turns in the system.

    Returns:
        A solution per strength, float64 (P, F).
    """
    matrix = system[:, :-1]
    residual = system[:, -1] - matrix @ weights
    penalties = torch.tensor(priors).to(weights)[:, None].repeat(1, len(weights))
    penalties[:, -1] = _PRIOR_TURNS_OF_CONSTANT_IF_FEW if turns < _FEW_TURNS else PRIOR_TURNS_OF_CONSTANT
    # One by one: after `torch.set_num_threads(2)`, MKL solves a batch of hundreds of equations wrongly.
    return weights + torch.stack([torch.linalg.solve(matrix + penalty.diag(), residual) for penalty in penalties])
