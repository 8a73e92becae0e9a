"""The discovery bonus: paid for what an episode has not shown yet, and for nothing else."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from llamagym import ConfigError
from llamagym.envs.discovery import DiscoveryBonus

LEFT, DOWN, RIGHT, UP = range(4)


def lake() -> gym.Env:
    return gym.make("FrozenLake-v1", is_slippery=False)


def rewards(env, actions) -> list[float]:
    return [float(env.step(action)[1]) for action in actions]


def test_what_is_new_pays_once_an_episode():
    env = DiscoveryBonus(lake(), 0.5)
    for seed in range(2):
        env.reset(seed=seed)
        # The wall changes nothing, and the way back has been seen.
        assert rewards(env, (LEFT, RIGHT, LEFT, RIGHT, RIGHT)) == [0.0, 0.5, 0.0, 0.0, 0.5]


def test_the_task_s_own_reward_stays():
    env = DiscoveryBonus(lake(), 0.5)
    env.reset(seed=0)
    assert rewards(env, (DOWN, DOWN, RIGHT, RIGHT, DOWN, RIGHT)) == [0.5] * 5 + [1.5]


@pytest.mark.parametrize("observation", ["a view", np.zeros((2, 3)), {"a": np.int64(1), "b": (1, "x")}, 7])
def test_observations_of_any_kind_are_told_apart_by_what_they_hold(observation):
    class Same(gym.Env):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return observation, {}

        def step(self, action):
            other = np.ones((2, 3)) if action else observation
            return other, 0.0, False, False, {}

    env = DiscoveryBonus(Same(), 1)
    env.reset(seed=0)
    assert rewards(env, (0, 1, 1, 0)) == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), "0.1"])
def test_a_bonus_that_is_none_is_refused(wrong):
    with pytest.raises(ConfigError, match="expected a positive number"):
        DiscoveryBonus(lake(), wrong)
