"""Failed calls leave no trace: acting, ending episodes, training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from llamagym import EpisodeError, train
from llamagym.agent.agent import collector_of
from llamagym.errors import DivergedError
from llamagym.training import evaluate
from tests.helpers.agents import ChoiceAgent, CountdownEnv, WordAgent, actor_of, make_agent
from tests.helpers.faults import BrokenError, FaultyEnv, raises


def state_of(agent: Any) -> list[Any]:
    """All that acting changes."""
    conversations = {
        env_id: (of.turns[:], of.messages[:], of.pending, of.learns)
        for env_id, of in actor_of(agent).conversations.items()
    }
    return [conversations, collector_of(agent).buffer[:], agent.policy.rng.get_state().tolist()]


HOOKS = ["format_observation", "get_action_choices", "extract_action", "fallback_action", "get_system_prompt"]


@pytest.mark.pairwise(hook=HOOKS, row=[0, 1, 2], error=[BrokenError, KeyboardInterrupt])
def test_an_error_while_acting_leaves_no_trace(hook: str, row: int, error: type[BaseException], monkeypatch):
    agent = make_agent(WordAgent)
    agent.act_batch(["a", "b"], ["known", "other"])
    agent.assign_rewards([1.0, 1.0], ["known", "other"])
    before, calls = state_of(agent), []
    # A reply that names no action leads to the fallback.
    monkeypatch.setattr(agent, "extract_action", lambda text: None)
    monkeypatch.setattr(agent, "fallback_action", lambda observation: "nothing")
    usual = getattr(agent, hook)

    def breaks(*given: Any) -> Any:
        calls.append(given)
        if len(calls) > row:
            raise error
        return usual(*given)

    ids = ["known", "new", "newer", "newest"]
    with monkeypatch.context() as context:
        context.setattr(agent, hook, breaks)
        with pytest.raises(error):
            agent.act_batch(["c", "d", "e", "f"], ids)
    assert state_of(agent) == before
    assert len(agent.act_batch(["c", "d", "e", "f"], ids)) == 4


def test_the_same_reply_is_drawn_after_an_error(monkeypatch):
    agents = [make_agent(WordAgent) for _ in range(2)]
    with monkeypatch.context() as context:
        context.setattr(agents[0], "extract_action", lambda text: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            agents[0].act("a")
    assert agents[0].act("a") == agents[1].act("a")


@pytest.mark.parametrize(
    "wrong",
    [
        {"env_ids": [0, 0]},
        {"env_ids": [0, "nobody"]},
        {"truncated": [True]},
        {"truncated": [False, True]},
        {"truncated": [True, True], "final_observations": ["x"]},
        {"groups": [1, 2, 3]},
    ],
)
def test_episodes_that_cannot_end_go_on(wrong: dict[str, Any]):
    agent = make_agent(WordAgent)
    agent.act_batch(["a", "b"])
    before = state_of(agent)
    with pytest.raises(EpisodeError):
        agent.terminate_episodes(**{"env_ids": [0, 1], **wrong})
    assert state_of(agent) == before
    agent.terminate_episodes([0, 1])
    assert collector_of(agent).buffered_turns == 2


def test_a_final_observation_that_cannot_be_read_ends_nothing(monkeypatch):
    agent = make_agent(WordAgent)
    agent.act_batch(["a", "b"])
    before = state_of(agent)
    monkeypatch.setattr(agent, "format_observation", lambda observation: f"Observation {1 / observation}")
    with pytest.raises(ZeroDivisionError):
        agent.terminate_episodes([0, 1], [True, True], [1, 0])
    assert state_of(agent) == before
    agent.terminate_episodes([0, 1], [True, True], [1, 2])
    assert collector_of(agent).buffered_turns == 2


def test_an_update_that_fails_takes_back_the_final_observations_it_read(monkeypatch):
    agent = make_agent(WordAgent, ppo={"batch_size": 2})
    agent.act_batch(["a", "b"])
    before = state_of(agent)
    with monkeypatch.context() as context:
        context.setattr(agent.learner, "compute_targets", failing_at(1, BrokenError, None))
        with pytest.raises(BrokenError):
            agent.terminate_episodes([0, 1], [True, False], ["x", None])
    assert state_of(agent) == before
    assert agent.terminate_episodes([0, 1], [True, False], ["x", None])


def test_turns_in_eval_are_not_trained_on():
    agent = make_agent(ChoiceAgent)
    agent.eval()
    agent.act_batch(["a", "b"])
    agent.train()
    actor_of(agent).discard_episodes([1])
    agent.act_batch(["a", "b"])
    agent.terminate_episodes([0, 1])
    assert collector_of(agent).buffered_turns == 1


class Breaking(CountdownEnv):
    """Fails in the middle of the second episode; says whether it was closed."""

    closed = 0

    def step(self, action: int) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 5:
            raise BrokenError
        return super().step(action)

    def close(self) -> None:
        type(self).closed += 1


@pytest.mark.parametrize("run", [train, evaluate])
def test_an_environment_that_fails_leaves_no_conversations_and_copies_are_closed(run):
    agent = make_agent(ChoiceAgent)
    Breaking.closed = 0
    with pytest.raises(BrokenError):
        run(agent, Breaking, episodes=4, num_envs=2)
    assert actor_of(agent).conversations == {}
    assert Breaking.closed == 2
    assert actor_of(agent).is_learning


def test_an_update_before_an_environment_that_cannot_be_reset_has_happened():
    agent, seen = make_agent(ChoiceAgent), []
    with pytest.raises(BrokenError):
        train(agent, lambda: FaultyEnv("reset", 2, raises(BrokenError)), episodes=9, num_envs=1, on_update=seen.append)
    assert len(seen) == agent.policy.num_updates == 1


def test_an_environment_of_the_caller_s_stays_open():
    agent, env = make_agent(ChoiceAgent), Breaking()
    Breaking.closed = 0
    train(agent, env, episodes=1)
    assert Breaking.closed == 0


def test_a_run_begins_with_new_conversations():
    agent = make_agent(ChoiceAgent)
    agent.act("from before")
    seen = []
    agent.format_observation = lambda observation: (
        seen.append(actor_of(agent).conversation(0).turns[:]) or str(observation)
    )
    train(agent, CountdownEnv, episodes=1)
    assert seen[0] == []


def weights_of(agent: Any) -> list[torch.Tensor]:
    """Everything that an update may change in the model."""
    head = agent.policy.model.v_head
    return [tensor.clone() for tensor in (*agent.policy.model.parameters(), *head.buffers())]


def play(agent: Any, rewards: Sequence[float]) -> Any:
    """One episode of a turn in each environment; returns the statistics."""
    ids = list(range(len(rewards)))
    agent.act_batch(["a", "b", "c", "d"][: len(ids)], ids)
    agent.assign_rewards(list(rewards), ids)
    return agent.terminate_episodes(ids)


def failing_at(call: int, error: type[BaseException], usual: Any) -> Any:
    """A function that raises at one of its calls."""
    calls = []

    def fails(*given: Any, **named: Any) -> Any:
        calls.append(given)
        if len(calls) == call:
            raise error
        return usual(*given, **named)

    return fails


PARTS = [("learner", "_step", 1), ("learner", "_step", 2), ("learner", "_value_loss", 3), ("replay", "_step", 1)]


@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt])
@pytest.mark.parametrize(("part", "method", "call"), PARTS)
def test_an_error_in_an_update_takes_it_back(part, method, call, error, monkeypatch):
    options = {"ppo": {"batch_size": 4, "mini_batch_size": 2, "learning_rate": 0.1, "warmup_steps": 1}}
    agents = [make_agent(ChoiceAgent, replay_config_dict={"steps": 2}, **options) for _ in range(2)]
    for agent in agents:
        assert play(agent, [1.0, 0.0, 2.0, 0.0])
    agent = agents[0]
    before = weights_of(agent)
    agent.act_batch(["a", "b", "c", "d"])
    agent.assign_rewards([0.0, 1.0, 0.0, 1.0])
    with monkeypatch.context() as context:
        owner = getattr(collector_of(agent), part)
        context.setattr(owner, method, failing_at(call, error, getattr(owner, method)))
        with pytest.raises(error):
            agent.terminate_episodes([0, 1, 2, 3])
    assert all(torch.equal(now, old) for now, old in zip(weights_of(agent), before, strict=True))
    assert collector_of(agent).buffered_turns == 0
    assert not any(weight.grad is not None and weight.grad.any() for weight in agent.policy.model.parameters())
    # Asked again, it does what it would have done.
    stats = agent.terminate_episodes([0, 1, 2, 3])
    expected = play(agents[1], [0.0, 1.0, 0.0, 1.0])
    for name in ("entropy", "policy_loss", "grad_norm", "replay_loss", "optimizer_steps", "updates"):
        assert stats[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)
    for one, other in zip(weights_of(agent), weights_of(agents[1]), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_step_that_is_not_finite_is_skipped_and_said(monkeypatch, caplog):
    agent = make_agent(ChoiceAgent, ppo={"batch_size": 4, "mini_batch_size": 2, "ppo_epochs": 1})
    backward = agent.learner.accelerator.backward
    losses = []

    def nan_at_first(loss: torch.Tensor) -> None:
        losses.append(loss)
        backward(loss * float("nan") if len(losses) == 1 else loss)

    monkeypatch.setattr(agent.learner.accelerator, "backward", nan_at_first)
    stats = play(agent, [1.0, 0.0, 2.0, 0.0])
    assert stats["skipped_steps"] == 1.0
    assert stats["optimizer_steps"] == 1.0
    assert "skipped" in caplog.text
    assert all(tensor.isfinite().all() for tensor in weights_of(agent))


def test_after_several_steps_that_are_not_finite_the_run_ends_with_the_last_good_weights(monkeypatch):
    agent = make_agent(ChoiceAgent, ppo={"batch_size": 4, "mini_batch_size": 1, "ppo_epochs": 2})
    before = weights_of(agent)
    backward = agent.learner.accelerator.backward
    monkeypatch.setattr(agent.learner.accelerator, "backward", lambda loss: backward(loss * float("inf")))
    with pytest.raises(DivergedError, match="3 optimizer steps in a row"):
        play(agent, [1.0, 0.0, 2.0, 0.0])
    assert all(torch.equal(now, old) for now, old in zip(weights_of(agent), before, strict=True))
