"""In bfloat16, what samples and what learns is one policy: whole conversations, whatever else is in a batch.

Both round to bfloat16 after every step of a layer, and differ in how many rows and columns they sum beside each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from llamagym import Agent, load_model_and_tokenizer
from tests.helpers.agents import ChoiceAgent, WordAgent, make_agent, settled

pytestmark = pytest.mark.kernels


def updates(agent: Agent, games: int, length: int) -> Iterator[dict[str, float]]:
    """Play games of one, two or three turns in one conversation each, and learn from each four."""
    for game in range(games):
        for turn in range(3):
            envs = [env for env in range(4) if env % 3 >= turn]
            agent.act_batch([f"{game} {turn} {'more ' * length * env}" for env in envs], env_ids=envs)
            agent.assign_rewards([float(env) for env in envs], env_ids=envs)
        yield agent.terminate_episodes(range(4))


@pytest.mark.numerical
@pytest.mark.pairwise(kind=[WordAgent, ChoiceAgent], activated=[True, False], family=["llama", "qwen3"])
def test_every_ratio_of_the_first_minibatch_is_1(kind, activated, family):
    agent = make_agent(kind, family, activated, torch.bfloat16, context="episode", ppo={"batch_size": 7})
    first, second = updates(settled(agent), 2, 10)
    assert first["ratio_error"] < 1e-3
    assert second["ratio_error"] < 1e-3


@pytest.mark.long
def test_the_embedded_model_too():
    model, tokenizer, device = load_model_and_tokenizer("smollm2-135m", device="cpu", dtype="bfloat16")
    options = {"batch_size": 7, "mini_batch_size": 7, "ppo_epochs": 1}
    agent = WordAgent(model, tokenizer, device, {"max_new_tokens": 2}, options, context="episode", seed=0)
    # Before and after a step: the adapter is zero at first.
    first, second = updates(agent, 2, 2)
    assert first["ratio_error"] < 0.02
    assert second["ratio_error"] < 0.02


@pytest.mark.long
@pytest.mark.parametrize("max_draft_tokens", [0, 16])
def test_a_single_environment_s_ratios_are_1(max_draft_tokens):
    """One row of bfloat16 is multiplied in another order than several, which learning has."""
    model, tokenizer, device = load_model_and_tokenizer("smollm2-135m", device="cpu", dtype="bfloat16")
    generate = {"max_new_tokens": 8, "max_draft_tokens": max_draft_tokens}
    agent = WordAgent(model, tokenizer, device, generate, {"batch_size": 8}, context="episode", seed=0)
    for number in range(8):
        agent.act(f"{number}")
        agent.assign_reward(float(number % 2))
    assert agent.terminate_episode()["ratio_error"] < 1e-3
