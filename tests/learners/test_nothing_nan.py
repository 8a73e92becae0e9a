"""Non-finite numbers and outliers reach neither weights nor controllers, and learning continues."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from llamagym import LlamaGymError, PPOConfig, distributed
from llamagym.agent.agent import collector_of
from llamagym.errors import DivergedError
from llamagym.learners import base
from llamagym.learners.advantages import Returns, Whitening
from llamagym.learners.losses import kl_estimate
from llamagym.learners.safe_optimizer import SafeOptimizer
from llamagym.learners.schedules import AdaptiveKLController
from llamagym.trl_compat.ppo_trainer import PPOTrainer
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, make_agent
from tests.helpers.tiny import tiny_model
from tests.learners.test_replay import episode


def learn(agent: Any, updates: int, outlier_at: int | None = None) -> None:
    """The first choice earns 1, the others nothing; one reward may be a million."""
    for update in range(updates):
        actions = agent.act_batch(["x"] * 32)
        rewards = [float(action == 0) for action in actions]
        if update == outlier_at:
            rewards[0] = 1e6
        agent.assign_rewards(rewards)
        assert agent.terminate_episodes(range(32))


@pytest.mark.long
@pytest.mark.parametrize(("critic", "outlier_at"), [("lstd", 0), ("lstd", 6), ("gradient", 6)])
def test_one_reward_of_a_million_does_not_end_learning(critic: str, outlier_at: int):
    sizes = {"batch_size": 32, "warmup_steps": 1, "learning_rate": 0.003, "target_kl": 0.03}
    agent = make_agent(ChoiceAgent, context="turn", ppo=sizes | {"critic": critic})
    learn(agent, 28, outlier_at)
    assert agent.action_probabilities(["x"])[0]["go left"] > 0.9


def test_an_infinite_advantage_leaves_the_usual_scale_as_it_is():
    mask, varied = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    whiten, returns = Whitening(), Returns([episode(0.0), episode(2.0)], gamma=1.0)
    whiten(torch.full_like(varied, math.inf), mask, returns)
    assert whiten(varied, mask, returns).std().item() == pytest.approx(1.0, rel=1e-3)


def test_k3_of_a_policy_that_ran_away_is_finite_and_pulls_back():
    logprobs = torch.tensor([-1.0, -10.9, -11.1, -300.0], requires_grad=True)
    k3 = kl_estimate(logprobs, torch.full((4,), -1.0), "k3")
    assert k3[:2].tolist() == pytest.approx([0.0, math.exp(9.9) - 1 - 9.9])
    assert k3.isfinite().all()
    k3.sum().backward()
    # The gradient goes on beyond 10 nats as it is there.
    slope = 1 - math.exp(10.0)
    assert logprobs.grad.tolist() == pytest.approx([0.0, 1 - math.exp(9.9), slope, slope], rel=1e-4)


def test_controllers_ignore_values_that_are_not_finite():
    kl = AdaptiveKLController(0.1, target=1.0, horizon=100)
    for value in (math.nan, math.inf):
        kl.update(value, steps=10)
        assert kl.value == 0.1
    kl.update(0.0, steps=10**9)
    assert kl.value == pytest.approx(0.08)


@pytest.mark.parametrize("kind", [ChoiceAgent, WordAgent])
def test_non_finite_weights_raise_and_are_not_sampled_from(kind: type):
    agent = make_agent(kind)
    with torch.no_grad():
        next(weight for weight in agent.policy.model.parameters() if weight.requires_grad).fill_(math.nan)
    with pytest.raises(DivergedError, match="NaN or infinite"):
        agent.act("a")
    assert actor_of(agent).conversations == {}


def stepped(agent: Any) -> list[torch.Tensor]:
    """The weights that steps change: not a value head that is solved for."""
    return [weight for group in agent.learner.optimizer.param_groups for weight in group["params"]]


def update(agent: Any) -> dict[str, float]:
    """One batch of four turns."""
    agent.act_batch(["a", "b", "c", "d"])
    agent.assign_rewards([1.0, 0.0, 1.0, 0.0])
    return agent.terminate_episodes(range(4))


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_is_beyond_the_trust_region(kl: float, monkeypatch):
    options = {"target_kl": 0.1, "ppo_epochs": 1, "learning_rate": 0.1, "warmup_steps": 1}
    agent = make_agent(ChoiceAgent, ppo=options)
    monkeypatch.setattr(base, "measure_kl", lambda *_: kl)
    before = [weight.clone() for weight in stepped(agent)]
    stats = update(agent)
    assert (stats["skipped_steps"], stats["optimizer_steps"]) == (1.0, 0.0)
    assert stats["learning_rate"] < 0.1
    assert all(torch.equal(now, old) for now, old in zip(stepped(agent), before, strict=True))


@pytest.mark.parametrize("target_kl", [None, 0.1])
@pytest.mark.parametrize("kind", [ChoiceAgent, WordAgent])
@pytest.mark.parametrize("rates", [{"learning_rate": 1e36}, {"value_learning_rate": 3e37}], ids=["policy", "value"])
def test_undoes_a_last_step_to_output_that_is_not_finite(rates: dict[str, float], kind: type, target_kl: float | None):
    """The weights are finite, what they say is not, and no later minibatch of the update shows it."""
    agent = make_agent(kind, ppo={"warmup_steps": 1, "ppo_epochs": 1, "target_kl": target_kl, **rates})
    before = [weight.clone() for weight in stepped(agent)]
    for _ in range(2):
        stats = update(agent)
        assert (stats["skipped_steps"], stats["optimizer_steps"]) == (1.0, 0.0)
    assert all(torch.equal(now, old) for now, old in zip(stepped(agent), before, strict=True))
    # Two are bad luck, a third will not get better.
    with pytest.raises(DivergedError, match="After each of 3 updates"):
        update(agent)
    actor_of(agent).discard_episodes(range(4))
    agent.act("a")


def test_undo_restores_the_latest_copy_in_the_same_memory():
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = SafeOptimizer([[weight]], [0.1], distributed.accelerator(weight.device), max_grad_norm=1.0)
    optimizer.keep_weights()
    memory = optimizer.kept_weights[0].data_ptr()
    weight.data.fill_(1.0)
    optimizer.keep_weights()
    assert optimizer.kept_weights[0].data_ptr() == memory
    weight.data.fill_(math.nan)
    optimizer.undo()
    assert weight.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("target_kl", "kl", "is_too_far"),
    [(0.02, 0.04, True), (0.02, 0.03, False), (None, 9.0, False), (0.02, math.nan, True), (None, math.inf, True)],
)
def test_the_trust_region_ends_at_one_and_a_half_times_the_target(target_kl: float, kl: float, is_too_far: bool):
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = SafeOptimizer(
        [[weight]], [0.1], distributed.accelerator(weight.device), max_grad_norm=1.0, target_kl=target_kl
    )
    assert optimizer.record_kl(kl) == is_too_far
    # A batch that supports a quarter of a full step's KL has a quarter of the region.
    assert optimizer.is_too_far(share=0.25) == (is_too_far or target_kl is not None)
    # A smaller KL later does not make up for it.
    assert optimizer.record_kl(0.0) == is_too_far


@pytest.mark.parametrize("rates", [{"learning_rate": 1e36}, {"value_learning_rate": 3e37}], ids=["policy", "value"])
def test_trainer_undoes_a_last_step_to_output_that_is_not_finite(rates: dict[str, float], caplog):
    config = PPOConfig(batch_size=2, mini_batch_size=2, ppo_epochs=1, **rates)
    trainer = PPOTrainer(config, make_agent(WordAgent, activated=False).policy.model)
    before = [weight.clone() for weight in trainer.model.parameters()]
    samples = [torch.tensor([1, 2])] * 2, [torch.tensor([3])] * 2, [0.0, 1.0]
    for _ in range(2):
        assert trainer.step(*samples)["skipped"] == 1.0
        assert "that step is undone" in caplog.text
        assert all(torch.equal(now, old) for now, old in zip(trainer.model.parameters(), before, strict=True))
    with pytest.raises(DivergedError, match="After each of 3 updates"):
        trainer.step(*samples)


def test_measuring_the_last_steps_kl_costs_little(monkeypatch):
    agent = make_agent(ChoiceAgent, ppo={"batch_size": 16, "mini_batch_size": 8, "target_kl": None})
    for turn in range(4):
        agent.act_batch(range(turn, turn + 4))
        agent.assign_rewards([1.0, 0.0, 1.0, 0.0])
    measured, usual = [], base.measure_kl

    def measuring(*given: Any) -> float:
        before = agent.policy.tokens_forwarded
        kl = usual(*given)
        measured.append(agent.policy.tokens_forwarded - before)
        return kl

    monkeypatch.setattr(base, "measure_kl", measuring)
    stats = agent.terminate_episodes(range(4))
    assert len(measured) == 1
    # One forward pass over one of two minibatches, after two passes over both.
    assert 0 < measured[0] < 0.15 * stats["learn_tokens"]


def test_skips_gradients_of_infinite_norm(monkeypatch, caplog):
    """Each number is finite, their norm is not: clipping would divide all by it."""
    agent = make_agent(ChoiceAgent, replay_config_dict={"steps": 1, "learning_rate": 0.1})
    agent.learner.config = replace(agent.learner.config, max_grad_norm=math.inf, ppo_epochs=1)
    for part in (agent.learner, collector_of(agent).replay):
        usual = part.accelerator.backward
        monkeypatch.setattr(part.accelerator, "backward", lambda loss, usual=usual: usual(loss * 1e25))
    before = [weight.clone() for weight in stepped(agent)]
    agent.learner.epochs = 1
    stats = update(agent)
    assert (stats["skipped_steps"], stats["replay_skipped_steps"]) == (1.0, 1.0)
    assert all(torch.equal(now, old) for now, old in zip(stepped(agent), before, strict=True))
    trainer = PPOTrainer(PPOConfig(batch_size=1, mini_batch_size=1, ppo_epochs=1), tiny_model("llama"))
    usual = trainer.accelerator.backward
    monkeypatch.setattr(trainer.accelerator, "backward", lambda loss: usual(loss * 1e25))
    assert trainer.step([torch.tensor([1, 2])], [torch.tensor([3])], [1.0])["skipped"] == 1.0


def test_replay_makes_no_step_that_is_not_finite(monkeypatch, caplog):
    agent = make_agent(ChoiceAgent, replay_config_dict={"steps": 2})
    usual, calls = collector_of(agent).replay.accelerator.backward, []

    def corrupted(loss: torch.Tensor) -> None:
        calls.append(loss)
        usual(loss * math.nan if len(calls) == 1 else loss)

    monkeypatch.setattr(collector_of(agent).replay.accelerator, "backward", corrupted)
    agent.act_batch(["a", "b", "c", "d"])
    agent.assign_rewards([1.0, 0.0, 1.0, 0.0])
    stats = agent.terminate_episodes(range(4))
    assert stats["replay_skipped_steps"] == 1.0
    assert all(weight.isfinite().all() for weight in agent.policy.model.parameters())
    assert "optimizer steps were skipped" in caplog.text


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
