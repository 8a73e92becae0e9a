"""Infos on the way from environments to the agent: methods with an info parameter, masks, vector environments."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from llamagym import ConfigError, EpisodeError, evaluate, train
from llamagym.agent.text_interface import ActionMasks
from llamagym.training.managed_env import unpack_infos
from tests.helpers.agents import ChoiceAgent, CountdownEnv, actor_of, make_agent


class Informed(ChoiceAgent):
    def get_system_prompt(self):
        return ""

    def format_observation(self, observation, info):
        return f"{observation} with {info.get('word', 'nothing')}"

    def get_action_choices(self, observation, info=None):
        return info.get("choices", ["go left", "stay"])


def test_methods_with_an_info_parameter_receive_it():
    agent = make_agent(Informed)
    agent.act(1, {"word": "this", "choices": ["stay"]})
    assert agent.current_episode_messages[0]["content"] == "1 with this"
    assert agent.current_episode_messages[1]["content"] == "stay"
    agent.assign_reward(0.0)
    agent.act(2)
    assert agent.current_episode_messages[2]["content"] == "2 with nothing"
    agent.act_batch([1, 2], ["a", "b"], [None, {"word": "that"}])
    assert actor_of(agent).conversation("b").messages[0]["content"] == "2 with that"
    (chances,) = agent.action_probabilities([1], [{"choices": ["go right", "stay"]}])
    assert set(chances) == {"go right", "stay"}


def test_info_parameters_of_mixins_are_found():
    class Mixin:
        def format_observation(self, observation, info):
            return info["word"]

    class Mixed(Mixin, ChoiceAgent):
        pass

    agent = make_agent(Mixed)
    agent.act(1, {"word": "hello"})
    assert agent.current_episode_messages[1]["content"] == "hello"
    plain = make_agent(ChoiceAgent)
    plain.act(1, {"word": "hello"})
    assert plain.current_episode_messages[1]["content"] == "Observation 1"


def test_the_info_after_the_last_step_reaches_the_critic():
    class Env(CountdownEnv):
        def step(self, action):
            return *super().step(action)[:4], {"word": f"word {self.left}"}

    class Noting(Informed):
        def format_observation(self, observation, info):
            self.__dict__.setdefault("words", []).append(info.get("word"))
            return super().format_observation(observation, info)

    agent = make_agent(Noting, context="turn", ppo={"batch_size": 100})
    train(agent, lambda: Env(2, truncates=True), episodes=1, num_envs=1, seed=0)
    assert agent.words == [None, "word 1", "word 0"]


@pytest.mark.parametrize("infos", [[1], [{}, {}], {"word": "x"}])
def test_rejects_invalid_infos(infos):
    with pytest.raises(EpisodeError, match="infos"):
        make_agent(Informed).act_batch([1], infos=infos)


def test_masked_choices_are_not_offered():
    agent = make_agent(ChoiceAgent)
    for mask in ([0, 1, 0], np.array([0, 1, 0], dtype=np.int8), (False, True, False)):
        assert agent.act(1, {"action_mask": mask}) == 1
        agent.assign_reward(0.0)
    (chances,) = agent.action_probabilities([1], [{"action_mask": [1, 0, 1]}])
    assert set(chances) == {"go left", "stay"}
    with pytest.raises(ConfigError, match="rules out all choices"):
        agent.act(1, {"action_mask": [0, 0, 0]})
    assert len(actor_of(agent).conversation(0).turns) == 3


def test_masks_match_choices_in_any_order_and_from_any_start():
    numbers = {"three": 3, "one": 1, "two": 2}
    assert ActionMasks(numbers.__getitem__).possible(list(numbers), [1, 0, 1]) == ["three", "one"]
    # Words that are not whole numbers are in the order of their actions.
    assert ActionMasks(str).possible(["a", "b", "c"], [0, 1, 1]) == ["b", "c"]
    assert ActionMasks(str).possible(["a", "b"], [0, 1, 1]) == ["a", "b"]
    pairs = ["go up", "go down", "run up", "run down"]
    assert ActionMasks(str).possible(pairs, (np.array([1, 1]), np.array([0, 1]))) == ["go down", "run down"]


def test_taxi_masks_work_without_a_wrapper():
    """No agent or random policy takes an action that the environment rules out; without the mask it would."""

    class Driver(ChoiceAgent):
        choices = ("south", "north", "east", "west", "pick up", "drop off")

    class Strict(gym.Wrapper):
        def reset(self, **options):
            observation, self.info = self.env.reset(**options)
            return observation, self.info

        def step(self, action):
            assert self.info["action_mask"][action]
            *step, self.info = self.env.step(action)
            return *step, self.info

    def make():
        return Strict(gym.make("Taxi-v4", max_episode_steps=20))

    train(make_agent(Driver, context="turn", ppo={"batch_size": 1000}), make, turns=80, num_envs=4, seed=0)
    evaluate("random", make, episodes=8, seed=0, num_envs=4)
    with pytest.raises(AssertionError):
        evaluate(lambda observation: 5, make, episodes=1, seed=0)


def test_infos_pass_through_a_vector_environment_unchanged():
    envs = gym.vector.SyncVectorEnv([CountdownEnv] * 3)
    infos: dict = {}
    said = [{"a": 1, "deep": {"b": "x"}}, {}, {"a": 2, "c": np.array([1.0, 2.0])}]
    for index, info in enumerate(said):
        envs._add_info(infos, info, index)
    out = unpack_infos(infos, 3)
    np.testing.assert_array_equal(out[2].pop("c"), said[2].pop("c"))
    assert out == said
    envs.close()


def test_unpicklable_info_values_are_left_out():
    class Env(CountdownEnv):
        def step(self, action):
            return *super().step(action)[:4], {"word": "kept", "function": lambda: None}

    class Noting(Informed):
        def format_observation(self, observation, info):
            self.__dict__.setdefault("infos", []).append(info)
            return super().format_observation(observation, info)

    agent = make_agent(Noting, context="turn", ppo={"batch_size": 100})
    train(agent, Env, episodes=1, num_envs=1, seed=0, env_timeout=60)
    assert agent.infos == [{}, {"word": "kept"}, {"word": "kept"}]
