"""Controllers between updates: the entropy bonus is bounded, and the KL runs away without its target."""

from __future__ import annotations

import math

import pytest

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
def test_the_entropy_bonus_decays_and_is_bounded_by_the_advantages(algorithm):
    decaying, _ = learn(3, algorithm, entropy_coef=0.01, entropy_decay=0.5)
    assert [each["entropy_coef"] for each in decaying] == pytest.approx([0.01, 0.005, 0.0025])
    # Normalized advantages of two outcomes are 1 on average where both are as frequent, and less otherwise.
    bounded, _ = learn(1, algorithm, entropy_coef=1.0)
    assert 0.05 < bounded[0]["entropy_coef"] <= 0.1


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_target_kl_holds_what_runs_away_without(algorithm):
    options = {"learning_rate": 0.001, "cliprange": 100.0, "entropy_coef": 0.0}
    _, free = learn(4, algorithm, **options)
    _, held = learn(4, algorithm, **options, target_kl=0.02)
    # One step may overshoot before it is seen, so the KL comes near the target and not below it.
    assert max(free) > 0.3
    assert max(held) < 0.1
