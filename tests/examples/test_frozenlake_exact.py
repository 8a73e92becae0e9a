"""The exact success probability on the frozen lake: against played episodes, hand-made cases, and its own optimum."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from frozenlake_exact import (
    ACTIONS,
    STATES,
    baseline_returns,
    best_policy,
    optimum,
    policy_map,
    success_probability,
    uniform_policy,
)


def played(policy, episodes, seed):
    """Share of episodes that reach the goal, in the registered environment."""
    env, rng = gym.make("FrozenLake-v1"), np.random.default_rng(seed)
    wins = 0.0
    for episode in range(episodes):
        cell, _ = env.reset(seed=seed if episode == 0 else None)
        done = False
        while not done:
            cell, reward, terminated, truncated, _ = env.step(int(rng.choice(4, p=policy[int(cell)])))
            wins += reward
            done = terminated or truncated
    return wins / episodes


@pytest.mark.parametrize("eagerness", [1.0, 0.7])
def test_agrees_with_played_episodes(eagerness):
    policy = {state: [eagerness * best + (1 - eagerness) / 4 for best in row] for state, row in best_policy().items()}
    exact = success_probability(policy)
    episodes = 1500
    error = (exact * (1 - exact) / episodes) ** 0.5
    assert abs(played(policy, episodes, seed=7) - exact) < 4 * error


def test_short_ways_by_hand():
    # Six steps are the fewest, and three ways of that length avoid the holes. Slipping changes nothing where every
    # direction is as likely as the others.
    assert success_probability(uniform_policy(), steps=5) == 0.0
    assert success_probability(uniform_policy(), steps=6) == pytest.approx(3 / 4**6)
    # Always up: it slips along the top row and never comes down.
    assert success_probability({state: [0, 0, 0, 1] for state in STATES}) == 0.0


def test_no_single_change_makes_the_best_policy_better():
    best = best_policy()
    value = success_probability(best)
    for state in STATES:
        for action in range(len(ACTIONS)):
            other = {**best, state: np.eye(4)[action].tolist()}
            assert success_probability(other) <= value + 1e-9
    assert value <= optimum()


def test_baselines_are_ordered_and_known():
    values = list(baseline_returns().values())
    assert values == sorted(values)
    assert values == pytest.approx([0.0139, 0.7402, 0.7442], abs=1e-4)


@pytest.mark.parametrize("row", [[0.5, 0.5], [0.5, 0.5, 0.5, 0.5], [2.0, -1.0, 0.0, 0.0]])
def test_rejects_invalid_policy(row):
    with pytest.raises(ValueError, match=r"cell 6 .* four that sum to 1"):
        success_probability({**uniform_policy(), 6: row})
    with pytest.raises(ValueError, match="cell 0"):
        success_probability({})


def test_the_map_shows_every_cell():
    lines = policy_map(uniform_policy()).splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["left", "25", "hole", "left", "25", "hole"]
    assert lines[3].endswith("goal")
