"""Paused environments: how many are active, what happens in the others, and resumed runs."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest

from llamagym import evaluate, train
from llamagym.training.environments import open_envs
from llamagym.training.play import Play
from llamagym.training.players import PolicyPlayer
from tests.helpers.agents import ChoiceAgent, CountdownEnv, make_agent
from tests.helpers.resumed_run import DiceEnv, learn, make


class CountedAgent(ChoiceAgent):
    """Records in how many environments it acted at each step."""

    def act_batch(self, observations: Any, *args: Any) -> Any:
        self.__dict__.setdefault("acted", []).append(len(observations))
        return super().act_batch(observations, *args)


@pytest.mark.long
@pytest.mark.parametrize(("length", "expected"), [(1, 64), (3, 32), (30, 16)])
def test_a_batch_s_episodes_set_the_number_of_active_environments(length, expected):
    agent = make_agent(CountedAgent, context="turn", ppo={"batch_size": 96, "mini_batch_size": 96})
    result = train(agent, functools.partial(CountdownEnv, length), turns=2000, seed=0)
    assert len(result.updates) >= 3
    assert agent.acted[0] == 16
    assert agent.acted[-1] == expected


def test_no_environment_is_paused_with_num_envs_or_groups():
    asked = make_agent(CountedAgent, context="turn", ppo={"batch_size": 96, "mini_batch_size": 96})
    train(asked, functools.partial(CountdownEnv, 30), turns=500, seed=0, num_envs=20)
    assert set(asked.acted) == {20}
    groups = make_agent(CountedAgent, context="turn", algorithm="grpo", grpo={"batch_size": 96, "group_size": 8})
    train(groups, functools.partial(CountdownEnv, 3), turns=500, seed=0)
    assert set(groups.acted) == {64}


class StepsEnv(DiceEnv):
    """Records the steps of all environments."""

    steps: ClassVar[list[int]] = []

    def step(self, action: int) -> Any:
        self.steps.append(action)
        return super().step(action)


def test_evaluation_plays_only_the_episodes_that_it_counts():
    StepsEnv.steps.clear()
    result = evaluate("random", StepsEnv, episodes=21, seed=0, num_envs=6)
    assert len(result.returns) == 21
    assert len(StepsEnv.steps) == round(21 * result.mean_length)


def test_evaluation_in_a_callers_vector_environment_is_the_same():
    envs = gym.vector.SyncVectorEnv([DiceEnv] * 6)
    assert (
        evaluate("random", envs, episodes=21, seed=0).lengths
        == evaluate("random", DiceEnv, episodes=21, seed=0, num_envs=6).lengths
    )


@pytest.mark.parametrize("in_processes", [False, True])
def test_groups_pause_and_resume_separately(in_processes):
    with open_envs(functools.partial(CountdownEnv, 1), [3, 5], in_processes=in_processes) as parts:
        play = Play(PolicyPlayer("random", parts[0].action_space, 0), parts, list(range(8)), seed=0)
        play.begin()
        play.pause(np.array([False, False, True, False, False, False, True, True]))
        # Running episodes are played to their end.
        assert [play.step().turns for _ in range(6)] == [3, 5, 2, 3, 2, 3]
        play.pause(np.zeros(8, dtype=bool))
        # The first group is in the middle of a step already.
        assert [play.step().turns for _ in range(4)] == [2, 5, 3, 5]


@pytest.mark.parametrize("context", ["turn", pytest.param("episode", marks=pytest.mark.long)])
def test_a_run_with_paused_environments_is_resumed_exactly(tmp_path, context):
    def run(folder: str, updates: int, resume: bool = False) -> dict[str, Any]:
        sizes = {"batch_size": 70, "mini_batch_size": 35}
        agent = make(ChoiceAgent, ppo=sizes, context=context)
        return learn(agent, updates, num_envs=None, checkpoint_dir=tmp_path / folder, resume=resume)

    whole, first, resumed = run("one", 6), run("two", 3), run("two", 3, resume=True)
    assert first["stats"] == whole["stats"][:3]
    assert resumed == whole
    # The number of active environments changes: 16 at first, at most 64.
    acted = {len(actions) for actions in whole["actions"]}
    assert len(acted) > 1
    assert 16 <= min(acted) <= max(acted) < 64
