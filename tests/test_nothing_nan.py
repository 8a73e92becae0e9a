"""What is not finite, or far beyond the rest, reaches neither weights nor controllers, and learning goes on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from llamagym import LlamaGymError, PPOConfig
from llamagym.errors import DivergedError
from llamagym.learners.controllers import AdaptiveKLController, EntropyController, Whitening
from llamagym.learners.losses import kl_estimate
from llamagym.learners.ppo_trainer import PPOTrainer
from tests.agents import ChoiceAgent, WordAgent, make_agent
from tests.tiny import tiny_model


def learn(agent: Any, updates: int, outlier_at: int | None = None) -> None:
    """The first choice earns 1, the others nothing; one reward may be a million."""
    for update in range(updates):
        actions = agent.act_batch(["x"] * 32)
        rewards = [float(action == 0) for action in actions]
        if update == outlier_at:
            rewards[0] = 1e6
        agent.assign_rewards(rewards)
        assert agent.terminate_episodes(range(32))


@pytest.mark.parametrize("outlier_at", [0, 6])
@pytest.mark.parametrize("options", [{}, {"critic": "lstd"}], ids=["gradient", "lstd"])
def test_one_reward_of_a_million_does_not_end_learning(options: dict[str, Any], outlier_at: int):
    sizes = {"batch_size": 32, "warmup_steps": 1, "learning_rate": 0.003}
    agent = make_agent(ChoiceAgent, context="turn", ppo=sizes | options)
    learn(agent, 40, outlier_at)
    assert agent.action_probabilities(["x"])[0]["go left"] > 0.9


def test_the_scale_of_advantages_forgets():
    real, varied = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    whiten = Whitening()
    for _ in range(5):
        whiten(varied, real)
    whiten(1e6 * varied, real)
    assert whiten(varied, real).std().item() == pytest.approx(1.0, rel=1e-3)
    # What is a hundredth from now on counts as little at first, and in full after some hundred updates.
    assert whiten(0.01 * varied, real).std().item() < 0.1
    spreads = [whiten(0.01 * varied, real).std().item() for _ in range(700)]
    assert spreads == sorted(spreads)
    assert spreads[-1] == pytest.approx(1.0, rel=1e-3)
    whiten(torch.full_like(varied, math.inf), real)
    assert whiten(0.01 * varied, real).std().item() == pytest.approx(1.0, rel=1e-3)


def test_k3_of_a_policy_that_ran_away_is_finite_and_pulls_back():
    logprobs = torch.tensor([-1.0, -10.9, -11.1, -300.0], requires_grad=True)
    k3 = kl_estimate(logprobs, torch.full((4,), -1.0), "k3")
    assert k3[:2].tolist() == pytest.approx([0.0, math.exp(9.9) - 1 - 9.9])
    assert k3.isfinite().all()
    k3.sum().backward()
    # The gradient goes on beyond 10 nats as it is there.
    slope = 1 - math.exp(10.0)
    assert logprobs.grad.tolist() == pytest.approx([0.0, 1 - math.exp(9.9), slope, slope], rel=1e-4)


def test_what_steers_survives_what_is_not_finite():
    kl = AdaptiveKLController(0.1, target=1.0, horizon=100)
    for value in (math.nan, math.inf):
        kl.update(value, steps=10)
        assert kl.value == 0.1
    kl.update(0.0, steps=10**9)
    assert kl.value == pytest.approx(0.08)
    entropy = EntropyController(0.01, 1.0, floor=0.5)
    entropy.update(math.nan)
    assert entropy.value == 0.01
    entropy.update(0.0)
    assert entropy.value > 0.01


@pytest.mark.parametrize("kind", [ChoiceAgent, WordAgent])
def test_weights_that_are_not_finite_are_said_and_not_sampled_from(kind: type):
    agent = make_agent(kind)
    with torch.no_grad():
        next(weight for weight in agent.policy.model.parameters() if weight.requires_grad).fill_(math.nan)
    with pytest.raises(DivergedError, match="NaN or infinite"):
        agent.act("a")
    assert agent._conversations == {}


def test_replay_makes_no_step_that_is_not_finite(monkeypatch, caplog):
    agent = make_agent(ChoiceAgent, replay_config_dict={"steps": 2})
    usual, calls = agent._replay.accelerator.backward, []

    def spoilt(loss: torch.Tensor) -> None:
        calls.append(loss)
        usual(loss * math.nan if len(calls) == 1 else loss)

    monkeypatch.setattr(agent._replay.accelerator, "backward", spoilt)
    agent.act_batch(["a", "b", "c", "d"])
    agent.assign_rewards([1.0, 0.0, 1.0, 0.0])
    stats = agent.terminate_episodes(range(4))
    assert stats["replay_skipped_steps"] == 1.0
    assert all(weight.isfinite().all() for weight in agent.policy.model.parameters())
    assert "optimiser steps were skipped" in caplog.text


def test_the_trainer_makes_no_step_that_is_not_finite_and_ends_where_it_began(monkeypatch):
    trainer = PPOTrainer(PPOConfig(batch_size=2, mini_batch_size=1, ppo_epochs=1), tiny_model("llama"))
    samples = [torch.tensor([1, 2])] * 2, [torch.tensor([3])] * 2, [0.0, 1.0]
    usual, spoiled = trainer.accelerator.backward, [True, False]
    monkeypatch.setattr(
        trainer.accelerator, "backward", lambda loss: usual(loss * math.nan if spoiled.pop(0) else loss)
    )
    assert trainer.step(*samples)["skipped"] == 1.0
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())
    before = [weight.clone() for weight in trainer.model.parameters()]
    spoiled += [False, True, True, True]
    assert trainer.step(*samples)["skipped"] == 1.0
    moved = [weight.clone() for weight in trainer.model.parameters()]
    assert any(not torch.equal(now, old) for now, old in zip(moved, before, strict=True))
    with pytest.raises(LlamaGymError, match="in a row"):
        trainer.step(*samples)
    assert all(torch.equal(now, old) for now, old in zip(trainer.model.parameters(), moved, strict=True))
