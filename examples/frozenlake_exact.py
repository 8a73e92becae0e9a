"""Exact success probability of any policy for `FrozenLake-v1`, from its transition table instead of from episodes.

The lake is Gymnasium's default: 4 by 4, slippery (a step goes where it is meant to with probability 1/3, and to either
side otherwise), cut off after 100 steps. Reward is 1 at the goal and 0 elsewhere, so the expected return is the
probability of reaching the goal in time. A policy is the probability of each action in each cell one can act in.

>>> print(f"{success_probability(uniform_policy()):.3f} {success_probability(best_policy()):.3f}")
0.014 0.740
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

ACTIONS = ("left", "down", "right", "up")
"""By the environment's number."""
STEP_LIMIT = 100
"""Steps after which the registered environment cuts an episode off."""

_LAKE: Any = gym.make("FrozenLake-v1").unwrapped
CELLS: list[str] = [square.decode() for square in _LAKE.desc.flatten()]
"""What each cell is, row by row: S start, F ice, H hole, G goal."""
STATES: list[int] = [cell for cell, square in enumerate(CELLS) if square in "SF"]
"""Cells in which one can act; in the others the episode has ended."""

Policy = Mapping[int, Sequence[float]]
"""For every cell in `STATES` the probability of each of `ACTIONS`."""


def _tables() -> tuple[np.ndarray, np.ndarray]:
    """Chance of each next cell (16, 4, 16) and mean reward (16, 4) by cell and action; 0 once the episode has ended."""
    chances, rewards = np.zeros((16, 4, 16)), np.zeros((16, 4))
    for cell in STATES:
        for action, outcomes in _LAKE.P[cell].items():
            for chance, after, reward, _ in outcomes:
                chances[cell, action, after] += chance
                rewards[cell, action] += chance * reward
    return chances, rewards


_CHANCES, _REWARDS = _tables()


def success_probability(policy: Policy, steps: int = STEP_LIMIT) -> float:
    """Probability of reaching the goal within a number of steps, exact up to float rounding.

    Raises:
        ValueError: A state is missing, or its probabilities are not four that sum to 1.
    """
    probabilities = np.zeros((16, 4))
    for state in STATES:
        row = np.asarray(policy.get(state, ()), float)
        if row.shape != (4,) or (row < 0).any() or abs(row.sum() - 1) > 1e-6:
            raise ValueError(
                f"The policy's probabilities in cell {state} are {row.tolist()}, expected four that sum to 1, one for "
                f"each of {ACTIONS}. Give them for every cell in STATES."
            )
        probabilities[state] = row
    onward = np.einsum("sa,san->sn", probabilities, _CHANCES)
    at_once = (probabilities * _REWARDS).sum(1)
    values = np.zeros(16)
    for _ in range(steps):
        values = at_once + onward @ values
    return float(values[0])


def uniform_policy() -> dict[int, list[float]]:
    """Every action alike."""
    return {state: [0.25] * 4 for state in STATES}


def best_policy() -> dict[int, list[float]]:
    """The best policy for an episode without end, by value iteration; it looks at the cell only.

    Under the step limit no change of its action in a single cell makes it better (a test shows it).
    """
    values = np.zeros(16)
    for _ in range(10_000):
        values = (_REWARDS + _CHANCES @ values).max(1)
    best = (_REWARDS + _CHANCES @ values).argmax(1)
    return {state: np.eye(4)[best[state]].tolist() for state in STATES}


def optimum() -> float:
    """Success probability of the best policy there is, which also knows how many steps are left.

    >>> round(optimum(), 3)
    0.744
    """
    values = np.zeros(16)
    for _ in range(STEP_LIMIT):
        values = (_REWARDS + _CHANCES @ values).max(1)
    return float(values[0])


def baseline_returns() -> dict[str, float]:
    """Success probabilities that a policy is compared with, worst first."""
    return {
        "random": success_probability(uniform_policy()),
        "best by cell": success_probability(best_policy()),
        "optimum": optimum(),
    }


def policy_map(policy: Policy) -> str:
    """The lake with the likeliest action in each cell and its probability in percent.

    >>> print(policy_map(best_policy()).splitlines()[0])
    left 100   up 100     up 100     up 100
    """
    lines = []
    for row in range(4):
        words = []
        for cell in range(4 * row, 4 * row + 4):
            if cell in STATES:
                action = int(np.argmax(policy[cell]))
                words.append(f"{ACTIONS[action]} {100 * policy[cell][action]:.0f}")
            else:
                words.append({"H": "hole", "G": "goal"}[CELLS[cell]])
        lines.append("".join(f"{word:<11}" for word in words).rstrip())
    return "\n".join(lines)
