"""The training loop: autoreset, truncation, quotas, seeds."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest

from llamagym import ConfigError, evaluate, train
from llamagym.agent.agent import collector_of
from llamagym.training.tracking import JsonlTracker, default_tracker
from tests.helpers import ROOT
from tests.helpers.agents import ChoiceAgent, CountdownEnv, actor_of, make_agent


class IndexAgent(ChoiceAgent):
    """Records its observations."""

    def format_observation(self, observation):
        seen = self.__dict__.setdefault("seen", [])
        seen.append(int(observation))
        return str(observation)


def test_steps_count_as_turns_and_resets_do_not(tmp_path):
    agent = make_agent(IndexAgent, context="turn", ppo={"batch_size": 1000})
    result = train(agent, functools.partial(CountdownEnv, 3), episodes=4, num_envs=2, seed=0)
    assert len(result.returns) == 4
    assert result.turns == 12
    # Two environments, two episodes each: the final observation belongs to no turn, the next episode's first does.
    assert agent.seen == [3, 3, 2, 2, 1, 1] * 2
    assert [len(episode.turns) for episode in collector_of(agent).buffer] == [3, 3, 3, 3]
    assert sum(episode.total_reward for episode in collector_of(agent).buffer) == sum(result.returns)
    assert result.updates == []
    assert "12 turns, and a batch needs 1000" in result.message


def test_truncated_episodes_are_valued_at_their_final_observation():
    agent = make_agent(IndexAgent, context="turn", ppo={"batch_size": 1000})
    train(agent, functools.partial(CountdownEnv, 2, truncates=True), episodes=2, num_envs=2, seed=0)
    # 0 is the final observation of each environment; the next episode's first, 2, must not replace it.
    assert agent.seen == [2, 2, 1, 1, 0, 0]
    assert all(episode.truncated and episode.final_prompt is not None for episode in collector_of(agent).buffer)


def test_updates_reach_on_update_and_the_tracker(tmp_path):
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 6})
    seen = []
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    result = train(agent, CountdownEnv, episodes=4, num_envs=2, on_update=seen.append, tracker=tracker)
    tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(seen) == len(lines) == len(result.updates) == 2
    assert [line["step"] for line in lines] == [2, 4]
    assert lines[0]["entropy"] == seen[0]["entropy"]
    assert result.message == ""


class SeededEnv(CountdownEnv):
    """Shows a number drawn at reset; lasts one step or, where the first action asks for it, two."""

    resets: ClassVar[list[tuple[int, int]]] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shown, self.age = np.int64(self.np_random.integers(100)), 0
        self.resets.append((id(self), seed))
        return self.shown, {}

    def step(self, action):
        self.age += 1
        return self.shown, float(action), self.age == 2 or action == 0, False, {}


@pytest.fixture
def resets():
    SeededEnv.resets.clear()
    return SeededEnv.resets


def test_episodes_of_a_group_begin_alike_and_groups_do_not(resets):
    agent = make_agent(IndexAgent, context="turn", algorithm="grpo", grpo={"batch_size": 10_000, "group_size": 3})
    train(agent, SeededEnv, episodes=60, num_envs=6, seed=0)
    groups = {}
    for episode in collector_of(agent).buffer:
        groups.setdefault(episode.group, []).append(episode)
    complete = [episodes for episodes in groups.values() if len(episodes) == 3]
    assert len(complete) >= 15
    assert all(len({episode.turns[0].prompt.ids for episode in episodes}) == 1 for episodes in complete)
    assert any(len({len(episode.turns) for episode in episodes}) > 1 for episodes in complete)
    assert len({episodes[0].turns[0].prompt.ids for episodes in complete}) > 10
    # Environments of a row have the same seeds in the same order, each at its own pace; the other row has others.
    copies = {}
    for copy, seed in resets:
        copies.setdefault(copy, []).append(seed)
    first, second = [list(copies.values())[start : start + 3] for start in (0, 3)]
    for row in (first, second):
        longest = max(row, key=len)
        assert all(seeds == longest[: len(seeds)] for seeds in row)
    assert not {seed for seeds in first for seed in seeds} & {seed for seeds in second for seed in seeds}


class TalkativeEnv(CountdownEnv):
    """Returns infos that change each time and have another type in every environment."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.info = {"note": 1 if self.made % 2 else "text"}

    def reset(self, **given: Any) -> Any:
        return super().reset(**given)[0], self.info

    def step(self, action: int) -> Any:
        return *super().step(action)[:4], self.info


@pytest.mark.parametrize("env_timeout", [None, 60])
def test_infos_may_hold_any_object(env_timeout):
    assert (
        len(train(make_agent(ChoiceAgent), TalkativeEnv, episodes=2, num_envs=2, env_timeout=env_timeout).returns) == 2
    )


def test_reset_seeds_differ_between_episodes_and_runs(resets):
    played = []
    for seed in (0, 0, 1):
        agent = make_agent(IndexAgent, context="turn", ppo={"batch_size": 10_000})
        train(agent, SeededEnv, episodes=20, num_envs=2, seed=seed)
        assert {episode.group for episode in collector_of(agent).buffer} == {None}
        played.append([number for _, number in resets])
        resets.clear()
    evaluate(agent, SeededEnv, episodes=20, num_envs=2, seed=2)
    played.append([number for _, number in resets])
    assert played[0] == played[1]
    assert all(len(set(numbers)) == len(numbers) for numbers in played)
    assert not set(played[0]) & set(played[2])
    assert not set(played[2]) & set(played[3])


def test_rejects_num_envs_that_is_not_a_multiple_of_group_size():
    agent = make_agent(IndexAgent, algorithm="grpo", grpo={"group_size": 4})
    with pytest.raises(ConfigError, match="num_envs=6 does not divide into groups of 4"):
        train(agent, SeededEnv, episodes=1, num_envs=6)


@pytest.mark.parametrize(
    ("options", "size", "given"),
    [
        ({"algorithm": "grpo", "grpo": {"group_size": 4}}, 4, 2),
        ({"algorithm": "grpo", "grpo": {"group_size": 4}}, 4, 1),
        ({"algorithm": "grpo", "grpo": {"group_size": 4}}, 4, 8),
        ({"algorithm": "grpo", "grpo": {"group_size": 4, "baseline": "none"}}, 1, 4),
        ({}, 1, 2),
    ],
)
def test_rejects_a_group_size_that_is_not_the_learner_s(options, size, given):
    agent = make_agent(IndexAgent, **options)
    with pytest.raises(ConfigError, match=f"group_size={given}, but the group_size of the agent's learner is {size}"):
        train(agent, SeededEnv, episodes=1, num_envs=8, group_size=given)
    assert len(train(agent, SeededEnv, episodes=1, num_envs=8, group_size=size).returns) == 1


class UnseededEnv(SeededEnv):
    """Ignores its seed."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=int(np.random.default_rng().integers(2**31)))


@pytest.mark.parametrize("made", [lambda kind: kind, lambda kind: gym.vector.SyncVectorEnv([kind] * 4)])
@pytest.mark.parametrize(
    ("kind", "size", "warns"), [(SeededEnv, 2, False), (UnseededEnv, 2, True), (UnseededEnv, 1, False)]
)
def test_warns_of_an_environment_that_ignores_its_seed(kind, size, warns, made, caplog):
    options = {"algorithm": "grpo", "grpo": {"batch_size": 10_000, "group_size": size}} if size > 1 else {}
    agent = make_agent(IndexAgent, context="turn", **options)
    train(agent, made(kind), episodes=24, num_envs=4, seed=0)
    assert caplog.text.count("Two episodes with one reset seed began differently") == int(warns)


def test_an_environment_id_makes_several_environments():
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 1000})
    agent.choices = ("a", "b", "c", "d")
    env = gym.make("FrozenLake-v1", max_episode_steps=2)
    assert len(train(agent, env, episodes=3, num_envs=3, seed=1).returns) == 3
    with pytest.raises(ConfigError, match="Pass a function that makes one"):
        train(agent, CountdownEnv(), episodes=1, num_envs=2)


def test_evaluate_plays_fixed_quotas_and_does_not_affect_training():
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 1})
    agent.act("under way")
    agent.assign_reward(1.0)
    weights = [w.detach().clone() for w in agent.policy.model.parameters()]
    result = evaluate(agent, CountdownEnv, episodes=5, seed=3, num_envs=2)
    assert len(result.returns) == 5
    # A greedy agent plays all episodes of this environment in the same way.
    assert result.standard_error == 0.0
    assert result.mean == result.returns[0]
    assert all((a == b).all() for a, b in zip(weights, agent.policy.model.parameters(), strict=True))
    assert actor_of(agent).is_learning
    assert agent.current_episode_rewards == [1.0]
    assert agent.terminate_episode()["turns"] == 1.0


@pytest.mark.long
def test_the_agents_seed_determines_a_run():
    """In processes whose global random numbers differ and which make their own LoRA."""

    def run(global_seed: int, *seeds: int) -> list[str]:
        command = [sys.executable, "-m", "tests.helpers.seeded_run", str(global_seed), *map(str, seeds)]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()

    first, again = run(1, 5), run(2, 6, 5)
    assert all("grad_norm" in line for line in first)
    assert again[len(first) :] == first
    for one, another in zip(first, again[: len(first)], strict=True):
        assert one != another


def test_on_update_can_end_the_training():
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 6})
    result = train(agent, CountdownEnv, episodes=100, num_envs=2, on_update=lambda stats: stats["updates"] < 2)
    assert len(result.updates) == 2
    assert len(result.returns) == 4


def test_wandb_is_off_unless_a_project_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    tracker = default_tracker(tmp_path, {})
    tracker.log({"x": 1.0, "undefined": float("nan")}, step=1)
    tracker.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "x": 1.0}\n'


@pytest.mark.parametrize("budget", [pytest.param({"episodes": 40}, marks=pytest.mark.long), {"turns": 120}])
@pytest.mark.parametrize(
    ("algorithm", "cooldown", "falls"), [("ppo", 0.5, True), ("grpo", 0.5, True), ("ppo", 0, False)]
)
def test_cooldown_reaches_zero_at_the_end_of_a_run(budget, algorithm, cooldown, falls):
    options = {"batch_size": 12, "warmup_steps": 1, "target_kl": None, "cooldown": cooldown, "entropy_coef": 0.01}
    options |= {"group_size": 4} if algorithm == "grpo" else {}
    agent = make_agent(ChoiceAgent, context="turn", algorithm=algorithm, **{algorithm: options})
    optimizer, stepped = agent.learner.optimizer, []

    def note(stats):
        stepped.append(optimizer.param_groups[0]["lr"] / math.sqrt(stats["step_share"]))

    env = functools.partial(CountdownEnv, 3)
    updates = train(agent, env, num_envs=4, on_update=note, **budget).updates
    full = agent.learner.config.learning_rate
    # Ten updates of a batch each; a tenth of the run is over when the second batch begins.
    expected = [min(1.0, (1 - number / 10) / 0.5) if falls else 1.0 for number in range(10)]
    rates = [update["learning_rate"] / math.sqrt(update["step_share"]) for update in updates]
    assert rates == pytest.approx([full * scale for scale in expected])
    assert stepped == pytest.approx([full * scale for scale in expected])
    assert [update["entropy_coef"] for update in updates] == pytest.approx([0.01 * scale for scale in expected])
    assert agent.learner.cooldown.scale == 1, "what comes after the run is not its end"


def test_default_num_envs():
    agent = make_agent(ChoiceAgent, algorithm="grpo", grpo={"batch_size": 6, "group_size": 3})
    assert train(agent, CountdownEnv, episodes=1).turns == 63 * 3
    # One that cannot be recreated cannot be played in groups.
    with pytest.raises(ConfigError, match="num_envs=1 does not divide into groups of 3"):
        train(agent, CountdownEnv(), episodes=1)
    assert train(make_agent(ChoiceAgent), CountdownEnv(), episodes=1).turns == 3


def test_rejects_training_without_a_budget():
    with pytest.raises(ConfigError, match="Pass minutes=10, episodes=20_000 or turns=100_000"):
        train(make_agent(ChoiceAgent), CountdownEnv)
    with pytest.raises(ConfigError, match="minutes=0"):
        train(make_agent(ChoiceAgent), CountdownEnv, minutes=0)


def test_loops_call_the_methods_that_a_subclass_overrides():
    class Counting(ChoiceAgent):
        mode = "train"
        acted = rewarded = ended = 0

        def train(self):
            super().train()
            self.mode = "train"

        def eval(self, greedy=True):
            super().eval(greedy)
            self.mode = "eval"

        def act_batch(self, *args):
            self.acted += 1
            yield from super().act_batch(*args)

        def assign_rewards(self, *args):
            self.rewarded += 1
            super().assign_rewards(*args)

        def terminate_episodes(self, *args, **options):
            self.ended += 1
            return super().terminate_episodes(*args, **options)

    agent = make_agent(Counting, context="turn")
    train(agent, CountdownEnv, episodes=2, num_envs=1, seed=0)
    assert (agent.acted, agent.rewarded, agent.ended) == (6, 6, 2)
    evaluate(agent, CountdownEnv, episodes=1, seed=0)
    assert (agent.acted, agent.mode) == (9, "train")
    agent.eval(greedy=False)
    evaluate(agent, CountdownEnv, episodes=1, seed=0)
    assert (agent.mode, actor_of(agent).is_greedy) == ("eval", False)
