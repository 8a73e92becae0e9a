"""Arguments of `train` and `evaluate`: budgets, environments of every kind, policies; and what they close."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics

from llamagym import ActionParseError, ConfigError, EvaluationResult, evaluate, name_actions, side_by_side, train
from llamagym.agent.agent import collector_of
from tests.helpers import ROOT
from tests.helpers.agents import ChoiceAgent, CountdownEnv, WordAgent, make_agent

PAGE = ROOT / "docs" / "training.md"
IDS = ["CartPole-v1", "FrozenLake-v1", "Taxi-v4", "MountainCar-v0"]


class Timed(CountdownEnv):
    """Lasts two or three steps, by its seed; infos hold the length, the success and the step."""

    made: list[Timed] = []  # noqa: RUF012 - shared on purpose

    def __init__(self, truncates: bool = False) -> None:
        super().__init__(truncates=truncates)
        self.closed = False
        self.made.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.length = int(self.np_random.integers(2, 4))
        return np.int64(self.left), {"length": self.length, "at": 0}

    def step(self, action):
        observation, reward, *over, _ = super().step(action)
        return observation, reward, *over, {"at": self.length - self.left, "success": self.left == 0 and action == 1}

    def close(self):
        self.closed = True


@pytest.fixture(autouse=True)
def _forget():
    Timed.made.clear()


class Noting(ChoiceAgent):
    """Records observations with their infos."""

    def format_observation(self, observation, info=None):
        self.__dict__.setdefault("seen", []).append((int(observation), info["at"]))
        return str(observation)


@pytest.mark.pairwise(kind=[SyncVectorEnv, AsyncVectorEnv], mode=list(AutoresetMode), truncates=[False, True])
def test_a_callers_vector_environment_is_played_like_made_environments(kind, mode, truncates):
    """Every mode gives the same observations, infos, returns and ends, and none is closed."""

    def played(env: Any, count: int | None = None) -> tuple[Any, ...]:
        agent = make_agent(Noting, context="turn", ppo={"batch_size": 1000})
        result = train(agent, env, episodes=6, num_envs=count, seed=0)
        ends = [(len(episode.turns), episode.truncated, episode.final_prompt) for episode in collector_of(agent).buffer]
        return agent.seen, result.returns, result.successes, result.turns, ends

    make = functools.partial(Timed, truncates)
    envs = kind([make] * 3, autoreset_mode=mode)
    assert played(envs) == played(make, 3)
    assert not envs.closed
    if kind is SyncVectorEnv:
        assert not any(env.closed for env in envs.envs)
        # The environments made for the comparison are closed.
        assert sum(env.closed for env in Timed.made) == 3
    envs.close()


def test_groups_share_reset_seeds_in_a_vector_environment():
    agent = make_agent(Noting, context="turn", algorithm="grpo", grpo={"batch_size": 1000, "group_size": 2})
    envs = SyncVectorEnv([Timed] * 4)
    train(agent, envs, episodes=8, seed=0)
    groups: dict[Any, set[int]] = {}
    for episode in collector_of(agent).buffer:
        groups.setdefault(episode.group, set()).add(len(episode.turns))
    assert len(groups) > 2
    assert all(len(lengths) == 1 for lengths in groups.values())


def test_accepts_wrapped_vector_environments():
    envs = DictInfoToList(RecordEpisodeStatistics(SyncVectorEnv([Timed] * 2)))
    agent = make_agent(Noting, context="turn", ppo={"batch_size": 1000})
    assert len(train(agent, envs, episodes=4, seed=0).returns) == 4
    assert {at for _, at in agent.seen} == {0, 1, 2}


def test_rejects_unusable_vector_environments():
    agent = make_agent(ChoiceAgent)
    envs = SyncVectorEnv([CountdownEnv] * 2)
    with pytest.raises(ConfigError, match=r"num_envs=3, but .* has 2 environments"):
        train(agent, envs, episodes=1, num_envs=3)
    with pytest.raises(ConfigError, match="env_timeout and overlap do not work with a vector environment"):
        train(agent, envs, episodes=1, env_timeout=5)
    envs.close()
    with pytest.raises(ConfigError, match="is closed"):
        evaluate(agent, envs, episodes=1)
    native = gym.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")
    with pytest.raises(ConfigError, match="CartPoleVectorEnv, whose environments cannot be reset one by one"):
        train(agent, native, episodes=1)
    native.close()


def test_closes_only_environments_that_it_made():
    mine = Timed()
    train(make_agent(ChoiceAgent), mine, episodes=1)
    evaluate("random", mine, episodes=1)
    assert not mine.closed
    evaluate("random", Timed, episodes=2)
    assert [env.closed for env in Timed.made[1:]] == [True, True]


def test_environments_are_closed_after_an_error():
    with pytest.raises(ActionParseError, match="returned None"):
        evaluate(lambda observation: None, Timed, episodes=1)
    assert Timed.made[0].closed


@pytest.mark.parametrize(
    ("budget", "turns"), [({"turns": 8}, 8), ({"turns": 7}, 8), ({"turns": 8, "episodes": 2}, 6), ({"episodes": 4}, 12)]
)
def test_the_first_exhausted_budget_ends_the_training(budget, turns):
    assert train(make_agent(ChoiceAgent), CountdownEnv, num_envs=2, seed=0, **budget).turns == turns


@pytest.mark.parametrize("budget", [{}, {"turns": 0}, {"episodes": 0}, {"minutes": -1}, {"turns": 1.5}])
def test_rejects_invalid_budgets(budget):
    with pytest.raises(ConfigError, match="|".join(budget) or "needs a budget"):
        train(make_agent(ChoiceAgent), CountdownEnv, **budget)


class AnyAgent(ChoiceAgent):
    """Plays any environment with a Discrete action space."""

    def __init__(self, *args, **options):
        self.actions = options.pop("actions")
        super().__init__(*args, **options)

    def get_action_choices(self, observation):
        return list(self.actions)

    def extract_action(self, response):
        return self.actions[response]

    def format_observation(self, observation):
        return str(np.round(observation, 1))


@pytest.mark.parametrize("name", IDS)
def test_both_loops_play_environments_of_gymnasium(name):
    """By id and with their masks; compared with a random policy on the same episodes."""
    env = gym.make(name, max_episode_steps=12)
    agent = make_agent(AnyAgent, context="turn", ppo={"batch_size": 8}, actions=name_actions(env.action_space))
    updates = 0
    for episode in range(2):
        (observation, info), done = env.reset(seed=episode), False
        while not done:
            observation, reward, terminated, truncated, info = env.step(agent.act(observation, info))
            agent.assign_reward(reward)
            done = terminated or truncated
        updates += bool(
            agent.terminate_episode(
                terminated=terminated, truncated=truncated, final_observation=observation, final_info=info
            )
        )
    assert updates
    assert train(agent, env, turns=24, num_envs=2, seed=0).updates
    results = {
        "agent": evaluate(agent, env, episodes=2, seed=0, num_envs=2),
        "random": evaluate("random", env, episodes=2, seed=0, num_envs=2),
    }
    env.close()
    # Taxi's masks leave out actions that earn -10.
    assert all(result.mean >= -12 for result in results.values())
    assert len(side_by_side(results).splitlines()) == 3
    if name == IDS[0]:
        assert len(train(agent, name, episodes=1, num_envs=1, seed=0).returns) == 1


def test_functions_are_policies_with_an_optional_info_parameter():
    def by_info(observation: Any, info: dict[str, Any]) -> int:
        assert info["at"] == seen[-1] + 1 if info["at"] else True
        seen.append(info["at"])
        return 1

    seen: list[int] = [-1]
    result = evaluate(by_info, Timed, episodes=4, seed=0, num_envs=1)
    assert result.successes == [True] * 4
    assert result.success_rate == 1.0
    assert result.returns == [float(length) for length in result.lengths]
    assert set(result.lengths) == {2, 3}
    assert result.invalid_rate == 0.0
    assert evaluate(lambda observation: 2, Timed, episodes=4, seed=0).success_rate == 0.0
    # The same seed plays the same episodes with any policy.
    assert evaluate("random", Timed, episodes=4, seed=0, num_envs=1).lengths == result.lengths
    with pytest.raises(ConfigError, match=r"agent='randon'.*Did you mean 'random'"):
        evaluate("randon", Timed, episodes=1)


def test_counts_successes_and_invalid_replies():
    class Odd(ChoiceAgent):
        def extract_action(self, response):
            return None if response == "go left" else super().extract_action(response)

        def fallback_action(self, observation, info):
            return info["at"]

    agent = make_agent(Odd, context="turn", ppo={"batch_size": 6})
    result = train(agent, Timed, episodes=30, num_envs=2, seed=0)
    known = [success for success in result.successes if success is not None]
    assert len(known) == 30
    assert result.success_rate == sum(known) / 30
    assert 0 < result.success_rate < 1
    assert {stats["success_rate"] for stats in result.updates} > {0.0}
    measured = evaluate(agent, Timed, episodes=30, seed=0, greedy=False)
    assert 0 < measured.invalid_rate < 1
    assert measured.invalid_rate == sum(measured.invalid) / sum(measured.lengths)
    assert f"invalid replies {measured.invalid_rate:.1%}" in str(measured)


def test_the_interval_holds_the_mean_and_shrinks_with_the_sample():
    rng = np.random.default_rng(0)
    small, large = (EvaluationResult(rng.normal(2.0, 1.0, count).tolist()) for count in (20, 2000))
    assert small.interval[0] < small.mean < small.interval[1]
    width = large.interval[1] - large.interval[0]
    # Of a normal sample: 2 * 1.96 standard errors.
    assert width == pytest.approx(2 * 1.96 * large.standard_error, rel=0.05)
    assert large.interval == large.interval


def test_warns_at_the_start_of_free_text_without_a_fallback(caplog):
    class Talker(WordAgent):
        def extract_action(self, response):
            return len(response) % 3 if response else None

    class Prepared(Talker):
        def fallback_action(self, observation):
            return 0

    class Taker(WordAgent):
        def extract_action(self, response):
            return len(response) % 3

    with caplog.at_level(logging.WARNING):
        train(make_agent(Talker), CountdownEnv, episodes=1, num_envs=1)
    told = [message for message in caplog.messages if "will end the training" in message]
    assert len(told) == 1
    assert "define fallback_action(observation)" in told[0]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for kind in (Prepared, Taker, ChoiceAgent):
            train(make_agent(kind), CountdownEnv, episodes=1, num_envs=1)
    assert not any("will end the training" in message for message in caplog.messages)


@pytest.mark.parametrize("name", ["GuessTheNumber-v0", "Mastermind-v0"])
def test_environments_of_the_library_are_registered(name):
    env = gym.make(f"llamagym/{name}")
    assert isinstance(env.reset(seed=0)[0], str)
    env.close()
    result = evaluate("random", f"llamagym/{name}", episodes=8, seed=0)
    assert result.success_rate is not None
    assert {f"llamagym/{other}-v0" for other in ("AddressBook", "BabyAI", "TextWorld")} <= set(gym.registry)


@pytest.mark.long
def test_code_in_the_training_page_runs(tmp_path, monkeypatch, capsys):
    class BlackjackAgent(ChoiceAgent):
        choices = ("stick", "hit")

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"agent": make_agent(BlackjackAgent, context="turn", ppo={"batch_size": 32})}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(block, names)
    assert (tmp_path / "runs" / "best").is_dir()
    assert names["best"].best_update >= 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "policy",
        "agent",
        "careful",
        "random",
    ]
