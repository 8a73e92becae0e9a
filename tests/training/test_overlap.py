"""Slow environments: the agent acts in one half of the environments while the other half steps."""

from __future__ import annotations

import multiprocessing
import re
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from llamagym import ConfigError, EnvironmentTimeoutError, train
from llamagym.agent.agent import collector_of
from tests.helpers.agents import ChoiceAgent, actor_of, make_agent
from tests.helpers.faults import BrokenError

# Seconds after which a step that waits for the agent to act elsewhere gives up.
PATIENCE = 20
# How often the agent has acted, in memory that worker processes share.
ACTED = multiprocessing.get_context("fork").Value("i", 0)


class SeededEnv(gym.Env):
    """The observation depends on seed and step; the reward depends on the observation and the action."""

    observation_space = gym.spaces.Discrete(10_000_000)
    action_space = gym.spaces.Discrete(3)
    length = 3

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.int64, dict]:
        super().reset(seed=seed)
        self.start, self.turn = int(self.np_random.integers(1_000_000)), 0
        return np.int64(10 * self.start), {}

    def step(self, action: int) -> tuple[np.int64, float, bool, bool, dict]:
        reward = earned(10 * self.start + self.turn, int(action))
        self.turn += 1
        return np.int64(10 * self.start + self.turn), reward, self.turn == self.length, False, {}


def earned(observation: int, action: int) -> float:
    """The reward of an action after an observation."""
    return float(observation * 7 % 5 + action)


class WaitingEnv(SeededEnv):
    """Step number k ends once the agent has acted 2k times: in this half, and then in the other one."""

    steps = 0

    def step(self, action: int) -> tuple[np.int64, float, bool, bool, dict]:
        self.steps += 1
        until = time.monotonic() + PATIENCE
        while ACTED.value < 2 * self.steps:
            if time.monotonic() > until:
                raise TimeoutError
            time.sleep(0.001)
        return super().step(action)


class FailingEnv(SeededEnv):
    """Fails at its fifth step."""

    steps = 0

    def step(self, action: int) -> tuple[np.int64, float, bool, bool, dict]:
        self.steps += 1
        if self.steps == 5:
            raise BrokenError
        return super().step(action)


class CountedAgent(ChoiceAgent):
    """Counts how often it has acted."""

    def act_batch(self, *args: Any) -> Any:
        actions = super().act_batch(*args)
        ACTED.value += 1
        return actions


def run(agent: Any, env: Any = SeededEnv, **options: Any) -> Any:
    """A run in four environments."""
    return train(agent, env, **{"episodes": 12, "num_envs": 4, "seed": 0, **options})


def make(kind: Any = ChoiceAgent, **options: Any) -> Any:
    """An agent that updates after some episodes."""
    return make_agent(kind, **{"ppo": {"batch_size": 9}, **options})


@pytest.mark.long
@pytest.mark.parametrize("overlap", [True, False])
def test_acting_and_stepping_overlap(overlap: bool):
    ACTED.value = 0
    agent = make(CountedAgent, ppo={"batch_size": 1000})
    if overlap:
        assert len(run(agent, WaitingEnv, episodes=2, overlap=True).returns) == 2
    else:
        with pytest.raises(EnvironmentTimeoutError):
            run(agent, WaitingEnv, episodes=2, env_timeout=1.0)


def starts_of(agent: Any) -> set[tuple[Any, int]]:
    """Group and first number of the episodes that await an update; each is from one environment and complete."""
    starts = set()
    for episode in collector_of(agent).buffer:
        texts = [agent.tokenizer.decode(list(turn.prompt.ids)) for turn in episode.turns]
        shown = [int(re.findall(r"Observation (\d+)", text)[-1]) for text in texts]
        assert shown == list(range(shown[0], shown[0] + SeededEnv.length))
        chosen = [turn.reply.choice_index for turn in episode.turns]
        assert [turn.reward for turn in episode.turns] == list(map(earned, shown, chosen))
        starts.add((episode.group, shown[0]))
    return starts


@pytest.mark.parametrize(
    "options",
    [{"ppo": {"batch_size": 1000}}, {"algorithm": "grpo", "grpo": {"batch_size": 1000, "group_size": 2}}],
)
def test_conversations_stay_with_their_environment(options: dict[str, Any]):
    played = []
    for overlap in (True, False):
        agent = make_agent(ChoiceAgent, **options)
        run(agent, overlap=overlap)
        played.append(starts_of(agent))
    assert len(played[1]) == 12 / agent.learner.group_size
    # The halves end the same episodes in another order, and one may be ahead.
    assert played[1] <= played[0]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium logs the errors of its processes.
def test_a_failing_environment_undoes_the_step_in_both_halves(tmp_path: Path):
    where = {"checkpoint_dir": tmp_path, "resume": True, "overlap": True}
    agents = [make(ppo={"batch_size": 1000}) for _ in range(2)]
    with pytest.raises(BrokenError):
        run(agents[0], FailingEnv, **where)
    assert not actor_of(agents[0]).conversations
    # Of the same name, since a resumed run needs the environment that it began in.
    assert len(run(agents[1], type("FailingEnv", (SeededEnv,), {}), **where).returns) == 12
    assert len(starts_of(agents[1])) >= 12


def test_rejects_halves_that_split_a_group():
    agent = make_agent(ChoiceAgent, algorithm="grpo", grpo={"group_size": 2})
    with pytest.raises(ConfigError, match="num_envs=2 is one group of 2"):
        run(agent, num_envs=2, overlap=True)


@pytest.mark.long
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path):
    def saved(folder: str, updates: int = 1000) -> Any:
        where = {"checkpoint_dir": tmp_path / folder, "checkpoint_every": 1, "resume": True}
        goes_on = lambda stats: stats["updates"] < updates  # noqa: E731
        return run(make(), overlap=True, episodes=24, on_update=goes_on, **where)

    whole = saved("whole")
    assert max(update["ratio_error"] for update in whole.updates) < 1e-4
    stopped = saved("stopped", updates=2)
    assert len(stopped.updates) == 2 < len(whole.updates)
    again = saved("stopped")
    times = {"learn_s", "act_s"}
    for one, other in zip(whole.updates, again.updates, strict=True):
        assert {k: v for k, v in one.items() if k not in times} == {k: v for k, v in other.items() if k not in times}
    assert whole.returns == again.returns
