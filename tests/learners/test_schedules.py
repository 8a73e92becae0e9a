"""Controllers between updates: the entropy bonus is bounded, and the KL runs away without its target."""

from __future__ import annotations

import math

import pytest

from llamagym.text.episode import rows_of
from tests.helpers.agents import ChoiceAgent, make_agent
from tests.learners.test_kl import offering

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
def test_the_entropy_bonus_is_bounded_by_the_advantages(algorithm):
    weak, _ = learn(1, algorithm, entropy_coef=0.01)
    assert weak[0]["entropy_coef"] == pytest.approx(0.01)
    # Normalized advantages of two outcomes are 1 on average where both are as frequent, and less otherwise.
    bounded, _ = learn(1, algorithm, entropy_coef=1.0)
    assert 0.05 < bounded[0]["entropy_coef"] <= 0.1


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_target_kl_limits_an_update(algorithm):
    options = {"learning_rate": 0.001, "cliprange": 100.0, "entropy_coef": 0.0}
    _, free = learn(4, algorithm, **options)
    _, held = learn(4, algorithm, **options, target_kl=0.02)
    # One step may overshoot before it is seen, so the KL comes near the target and not below it.
    assert max(free) > 0.3
    assert max(held) < 0.1


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "reinforce"])
def test_turns_with_a_single_choice_do_not_lower_the_entropy_bonus(algorithm):
    coefficients = []
    for forced in (0, 72):
        sizes = {"batch_size": 8 + forced}
        if algorithm != "reinforce":
            sizes["mini_batch_size"] = 8 + forced
        agent = offering(("left", "right"), algorithm, entropy_coef=1.0, **sizes)
        agent.act_batch(["x"] * 8 + ["forced"] * forced)
        agent.assign_rewards([1.0, 0.0] * 4 + [0.5] * forced)
        groups = [0] * 8 + [1] * forced if algorithm == "grpo" else None
        coefficients.append(agent.terminate_episodes(range(8 + forced), groups=groups)["entropy_coef"])
    assert coefficients[0] == pytest.approx(coefficients[1], rel=0.05)


def test_a_minibatch_without_advantages_has_no_gradient_of_entropy_alone():
    agent = offering(("left", "right"), "grpo", batch_size=16, group_size=4, mini_batch_size=4, epochs=1)
    # For each minibatch its largest advantage and the norm of its gradient.
    largest: list[float] = []
    norms: list[float] = []
    bounded_entropy_coef = agent.learner._bounded_entropy_coef
    step = agent.learner._step

    def noting_advantages(minibatch, rollout, targets):
        rows = rows_of(minibatch)
        largest.append(targets.advantages[rows].abs().max().item())
        return bounded_entropy_coef(minibatch, rollout, targets)

    def noting_norms(*arguments):
        norms.append(step(*arguments))
        return norms[-1]

    agent.learner._bounded_entropy_coef = noting_advantages
    agent.learner._step = noting_norms
    groups = [group for group in range(4) for _ in range(4)]
    agent.act_batch([f"{group}" for group in groups])
    agent.assign_rewards([0.0] * 15 + [1.0])
    agent.terminate_episodes(range(16), groups=groups)
    informative = next(index for index, advantage in enumerate(largest) if advantage)
    assert informative > 0
    # Before the first step, the penalty that holds other turns where they were has no gradient but for rounding.
    assert norms[0] < 1e-5
    assert norms[informative] > 1e-3
