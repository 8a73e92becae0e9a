"""Runs that are resumed with other settings: rejected with both values, or allowed by name."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import gymnasium as gym
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit, TransformReward

from llamagym import CheckpointError, ConfigError, train
from llamagym.agent.agent import collector_of
from tests.helpers.agents import ChoiceAgent, CountdownEnv, WordAgent, make_agent
from tests.helpers.resumed_run import SIZES, DiceEnv


class Vector:
    """Makes vector environments of a source."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __call__(self) -> Any:
        return gym.vector.SyncVectorEnv([self._source] * 2)


class Changing(ChoiceAgent):
    """Offers the choices of an attribute; None is free text."""

    offered: Any = ("go left", "go right", "stay")

    def get_action_choices(self, observation):
        return None if self.offered is None else list(self.offered)

    def extract_action(self, response):
        return len(response) % 3


def going_on(
    folder: Any, offered: Any = Changing.offered, env: Any = DiceEnv, episodes: int = 8, **options: Any
) -> Any:
    """A run, or its continuation; returns the agent and the result."""
    ppo = {**SIZES, **options.pop("ppo", {})}
    agent = make_agent(Changing, context="turn", ppo=ppo, generate={"max_new_tokens": 3}, **options.pop("agent", {}))
    agent.offered = offered
    options = {"num_envs": 2, "seed": 0, "checkpoint_dir": folder, "checkpoint_every": 1, **options}
    return agent, train(agent, env, episodes=episodes, **options)


def before_the_end(folder: Any, **options: Any) -> None:
    """A run that ends at its first update, in the middle of episodes."""
    going_on(folder, on_update=lambda stats: False, **options)


@pytest.mark.parametrize("is_vector", [False, True], ids=["played again", "vector environment"])
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (("go left", "go right"), ("go left", "stay"), r"choices was .*'go right'.* and is now .*'stay'"),
        (("go left", "go right"), None, r"choices was .*'go right'.* and is now 'free text'"),
        (None, ("go left", "go right"), r"choices was 'free text' and is now .*'go right'"),
    ],
    ids=["other choices", "free text", "choices instead of free text"],
)
def test_rejects_other_choices(tmp_path, before, after, message, is_vector):
    def env() -> Any:
        return gym.vector.SyncVectorEnv([DiceEnv] * 2) if is_vector else DiceEnv

    before_the_end(tmp_path, offered=before, env=env())
    with pytest.raises(CheckpointError, match=message):
        going_on(tmp_path, after, env(), resume=True)
    _, result = going_on(tmp_path, after, env(), resume=True, allow_changes=["choices"])
    assert len(result.returns) == 8


def test_accepts_the_same_choices_depending_on_the_observation(tmp_path):
    class Depending(Changing):
        def get_action_choices(self, observation):
            return ["a", "b"] if observation % 2 else (["c", "d", "e"] if observation % 3 else None)

    def run(**options: Any) -> Any:
        agent = make_agent(Depending, context="turn", ppo=SIZES, generate={"max_new_tokens": 3})
        return train(
            agent, DiceEnv, episodes=20, num_envs=3, seed=0, checkpoint_dir=tmp_path, checkpoint_every=1, **options
        )

    run(on_update=lambda stats: False)
    assert len(run(resume=True).returns) == 20


class Scaled(gym.RewardWrapper):
    def reward(self, reward):
        return 100 * reward


class Flipped(gym.ActionWrapper):
    def action(self, action):
        return 2 - action


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (DiceEnv, lambda: Scaled(DiceEnv()), r"wrappers was '' and is now 'Scaled\(\)'"),
        (lambda: Scaled(Flipped(DiceEnv())), lambda: Flipped(Scaled(DiceEnv())), r"was 'Scaled\(\), Flipped\(\)'"),
        (DiceEnv, lambda: TimeLimit(DiceEnv(), 2), r"is now 'TimeLimit\(max_episode_steps=2\)'"),
        (lambda: TransformReward(DiceEnv(), abs), DiceEnv, r"was \"TransformReward\(func='builtin_function"),
        (Vector(DiceEnv), Vector(lambda: Scaled(DiceEnv())), r"wrappers was '' and is now 'Scaled\(\)'"),
    ],
    ids=["reward", "order", "time limit", "removed", "vector environment"],
)
def test_rejects_other_wrappers(tmp_path, before, after, message):
    def made(source: Any) -> Any:
        return source() if isinstance(source, Vector) else source

    before_the_end(tmp_path, env=made(before))
    with pytest.raises(CheckpointError, match=message):
        going_on(tmp_path, env=made(after), resume=True)


def test_allows_other_recording_wrappers(tmp_path):
    before_the_end(tmp_path)
    going_on(tmp_path, env=lambda: RecordEpisodeStatistics(DiceEnv()), resume=True)


def test_rejects_another_chat_template(tmp_path, monkeypatch):
    before_the_end(tmp_path)
    usual = Changing.__init__

    def changed(self, model, tokenizer, *args, **options):
        tokenizer.chat_template = "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}"
        usual(self, model, tokenizer, *args, **options)

    monkeypatch.setattr(Changing, "__init__", changed)
    with pytest.raises(CheckpointError, match=r"chat_template was .* and is now .*allow_changes=\['chat_template'\]"):
        going_on(tmp_path, resume=True)


def test_rejects_another_judge_or_restarts_episodes_if_allowed(tmp_path):
    before_the_end(tmp_path)
    with pytest.raises(CheckpointError, match="judge was False and is now True"):
        going_on(tmp_path, judge=lambda episode: 5.0, resume=True)
    _, result = going_on(tmp_path, judge=lambda episode: 5.0, resume=True, allow_changes=["judge"])
    assert len(result.returns) == 8


class CoinEnv(DiceEnv):
    """Another environment with the same spaces."""


class WideEnv(DiceEnv):
    """Has more observations."""

    observation_space = gym.spaces.Discrete(200)


WideEnv.__name__ = "DiceEnv"


class FewEnv(DiceEnv):
    """Has fewer actions."""

    action_space = gym.spaces.Discrete(2)


FewEnv.__name__ = "DiceEnv"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (CoinEnv, r"environment\.class was 'DiceEnv' and is now 'CoinEnv'"),
        (WideEnv, r"environment\.observation_space was 'Discrete\(100\)' and is now 'Discrete\(200\)'"),
        (FewEnv, r"environment\.action_space was 'Discrete\(3\)' and is now 'Discrete\(2\)'"),
        (lambda: gym.vector.SyncVectorEnv([WideEnv] * 2), r"Discrete\(100\)' and is now 'Discrete\(200\)'"),
    ],
    ids=["class", "observations", "actions", "vector environment"],
)
def test_rejects_another_environment(tmp_path, env, message, caplog):
    before_the_end(tmp_path)
    made = env if isinstance(env, type) else env()
    with pytest.raises(CheckpointError, match=message + r".*allow_changes=\['environment"):
        going_on(tmp_path, env=made, resume=True)
    if env is not FewEnv:
        _, result = going_on(tmp_path, env=made, resume=True, allow_changes=["environment"])
        assert len(result.returns) == 8
        assert "the episodes under way start again" in caplog.text


def test_rejects_an_environment_made_with_other_options(tmp_path):
    class Lasting(CountdownEnv):
        metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"]}

        def __init__(self, length: int = 3, rule: Any = None, render_mode: Any = None) -> None:
            super().__init__(length)
            self.render_mode = render_mode

    gym.register("Lasting-v0", Lasting)
    try:
        before_the_end(tmp_path, env=gym.make("Lasting-v0", rule=print))
        # Objects that are not plain data are compared by their type.
        going_on(tmp_path, env=gym.make("Lasting-v0", rule=len, render_mode="ansi"), resume=True)
        with pytest.raises(CheckpointError, match=r"'max_episode_steps': None.* and is now .*'max_episode_steps': 2"):
            going_on(tmp_path, env=lambda: gym.make("Lasting-v0", rule=len, max_episode_steps=2), resume=True)
        message = r"environment\.options was .*'rule'.* and is now .*'length': 5"
        for env in (gym.make("Lasting-v0", length=5), lambda: gym.make("Lasting-v0", length=5)):
            with pytest.raises(CheckpointError, match=message):
                going_on(tmp_path, env=env, resume=True)
    finally:
        gym.registry.pop("Lasting-v0")


def test_allows_another_learning_rate_by_name(tmp_path):
    before_the_end(tmp_path)
    faster: dict[str, Any] = {"ppo": {"learning_rate": 0.02, "cooldown": 0.0}}
    names = r"\['learner\.learning_rate', 'learner\.cooldown'\]"
    message = rf"learning_rate was 0\.01 and is now 0\.02.*allow_changes={names}"
    with pytest.raises(CheckpointError, match=message):
        going_on(tmp_path, resume=True, **faster)
    with pytest.raises(CheckpointError, match=r"options: learner\.cooldown was 1\.0 and is now 0\.0\. Pass"):
        going_on(tmp_path, resume=True, allow_changes=["learner.learning_rate"], **faster)
    _, result = going_on(tmp_path, resume=True, allow_changes=["learner"], **faster)
    first, last = (stats["learning_rate"] / math.sqrt(stats["step_share"]) for stats in result.updates)
    assert last == pytest.approx(0.02)
    assert first < 0.011


def test_allows_another_number_of_environments_by_name(tmp_path, caplog):
    before_the_end(tmp_path)
    with pytest.raises(CheckpointError, match=r"is now 'free text'"):
        going_on(tmp_path, None, resume=True, num_envs=3, allow_changes=["num_envs"])
    with pytest.raises(CheckpointError, match=r"num_envs was 2 and is now 3.*allow_changes=\['num_envs'\]"):
        going_on(tmp_path, resume=True, num_envs=3)
    _, result = going_on(tmp_path, resume=True, num_envs=3, allow_changes=["num_envs"])
    assert len(result.returns) == 8
    assert "the episodes under way start again" in caplog.text


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"agent": {"replay_config_dict": {}}}, "replay_config_dict"),
        ({"ppo": {"critic": "gradient"}}, "learner.critic"),
        ({"seed": 3}, "seed"),
    ],
    ids=["replay", "critic", "seed"],
)
def test_rejects_changes_that_the_saved_state_does_not_allow(tmp_path, options, name):
    before_the_end(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{name} was .* and is now .*in another folder\.$"):
        going_on(tmp_path, resume=True, allow_changes=[name], **options)


def test_rejects_another_model_and_names_both(tmp_path):
    make_agent(WordAgent).save_checkpoint(tmp_path / "checkpoint")
    other = make_agent(WordAgent, activated=False)
    before = str(collector_of(other).state_dict())
    both = r"was llama 'no name' \(float32; activated LoRA with scale .*is now llama .*plain LoRA"
    message = rf"{both}.*allow_changes=\['model'\]"
    with pytest.raises(CheckpointError, match=message):
        other.load_checkpoint(tmp_path / "checkpoint")
    assert str(collector_of(other).state_dict()) == before
    other.load_checkpoint(tmp_path / "checkpoint", allow_changes=["model"])


def test_rejects_a_single_name_of_a_change(tmp_path):
    with pytest.raises(ConfigError, match=r"allow_changes must be a list of strings, got 'environment'"):
        going_on(tmp_path, resume=True, allow_changes="environment")
