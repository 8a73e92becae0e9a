"""What is steered between updates, with and without: entropy runs out, the KL runs away."""

from __future__ import annotations

import math

import pytest
import torch

from llamagym import ConfigError
from llamagym.learners.config import LearnerConfig
from llamagym.learners.controllers import EntropyController, Whitening
from tests.agents import ChoiceAgent, make_agent

SIZES = {"batch_size": 32, "warmup_steps": 1}


def learn(updates, algorithm, **options):
    """Updates on one observation whose first choice earns 1: their statistics, and the exact KL of each, in nats."""
    agent = make_agent(ChoiceAgent, context="turn", algorithm=algorithm, **{algorithm: {**SIZES, **options}})
    stats, moved = [], []
    before = agent.action_probabilities(["x"])[0]
    for _ in range(updates):
        actions = agent.act_batch(["x"] * 32)
        agent.assign_rewards([float(action == 0) for action in actions])
        stats.append(agent.terminate_episodes(range(32)))
        after = agent.action_probabilities(["x"])[0]
        moved.append(sum(p * math.log(p / after[choice]) for choice, p in before.items()))
        before = after
    return stats, moved


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_entropy_floor_holds_what_falls_without(algorithm):
    options = {"learning_rate": 0.003, "entropy_coef": 0.02}
    free, _ = learn(32, algorithm, **options)
    held, _ = learn(32, algorithm, **options, entropy_floor=0.5)
    # It swings about the floor, over ten updates or so.
    assert sum(each["entropy"] for each in free[-12:]) / 12 < 0.2
    assert sum(each["entropy"] for each in held[-12:]) / 12 > 0.4
    assert {each["entropy_coef"] for each in free} == {0.02}
    assert max(each["entropy_coef"] for each in held) > 0.1


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_target_kl_holds_what_runs_away_without(algorithm):
    options = {"learning_rate": 0.001, "cliprange": 100.0, "entropy_coef": 0.0}
    _, free = learn(4, algorithm, **options)
    _, held = learn(4, algorithm, **options, target_kl=0.02)
    # One step may overshoot before it is seen, so the KL comes near the target and not below it.
    assert max(free) > 0.3
    assert max(held) < 0.1


def test_the_entropy_coefficient_moves_within_its_bounds():
    controller = EntropyController(0.01, 1.0, floor=0.5)
    # Above the floor it stays at the least; at half of it a step of 1.5 ** 0.5, at none 1.5, at twice it 1 / 1.5.
    for entropy, value in ((0.6, 0.01), (0.25, 0.01 * 1.5**0.5), (0.0, 0.01 * 1.5**1.5), (1.0, 0.01 * 1.5**0.5)):
        controller.update(entropy)
        assert controller.value == pytest.approx(value)
    controller.update(5.0)
    assert controller.value == pytest.approx(0.01)
    decaying = EntropyController(0.01, 0.5, floor=None)
    for value in (0.005, 0.0025):
        decaying.update(entropy=0.0)
        assert decaying.value == pytest.approx(value)
    for _ in range(30):
        controller.update(0.0)
    assert controller.value == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="Pass a small positive entropy_coef"):
        LearnerConfig(entropy_floor=0.5, entropy_coef=0.0)


def test_before_the_first_reward_advantages_say_nothing():
    whiten, real = Whitening(), torch.ones(1, 2, dtype=torch.bool)
    of_critic = torch.tensor([[0.01, -0.01]])
    assert whiten(of_critic, real, rewarded=False).tolist() == [[0.0, 0.0]]
    assert whiten(of_critic, real, rewarded=True).std().item() == pytest.approx(1.0, rel=1e-3)
    # The critic has learnt from rewards now, so its differences tell something in a batch without any as well.
    assert whiten(of_critic, real, rewarded=False).std().item() == pytest.approx(1.0, rel=1e-3)


def test_advantages_that_say_next_to_nothing_are_not_blown_up():
    whiten, real = Whitening(), torch.ones(1, 4, dtype=torch.bool)
    varied = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    # The unbiased deviation of these is (4 / 3) ** 0.5; a hundredth of it counts as a quarter.
    assert whiten(varied, real).tolist() == [pytest.approx([0.75**0.5, -(0.75**0.5)] * 2)]
    assert not whiten.is_flat
    assert whiten(0.01 * varied, real).tolist() == [pytest.approx([0.04 * 0.75**0.5, -0.04 * 0.75**0.5] * 2, rel=1e-3)]
    assert whiten.is_flat
    assert whiten(0.5 * varied, real).std().item() == pytest.approx(1.0, rel=1e-3)
    assert not whiten.is_flat
