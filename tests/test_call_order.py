"""Whatever is called, in whatever order and with whatever errors: only clear errors, and nothing out of step."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llamagym import GRPOConfig, LlamaGymError, PPOConfig, evaluate, train
from llamagym.learners.replay import ReplayConfig
from llamagym.learners.sft import WarmStartConfig
from llamagym.models.generation import GenerationConfig
from tests.agents import ChoiceAgent, CountdownEnv, WordAgent, make_agent

BATCH = 6
IDS = st.lists(st.integers(0, 3), max_size=4)
HOOKS = ["format_observation", "get_action_choices", "extract_action", "get_system_prompt"]
REWARDS = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 1e6]), st.floats(), st.none(), st.text(max_size=2))


class BrokenError(Exception):
    """A user's own error."""


class Loop(RuleBasedStateMachine):
    """A user's loop, and what it should have left: by environment the rewards of its turns, None before the first."""

    kind: type

    def __init__(self) -> None:
        super().__init__()
        self.agent = make_agent(self.kind, generate={"max_new_tokens": 2}, ppo={"batch_size": BATCH})
        self.agent.extract_action = lambda text: 1
        self.turns: dict[Any, list[float | None]] = {}
        self.updates = 0

    def tried(self, call: Any) -> Any:
        """A call's result, or None if it raised an error that it may raise."""
        try:
            return call()
        except (LlamaGymError, BrokenError):
            return None

    @rule(ids=IDS, observations=st.lists(st.text(max_size=3), max_size=4))
    def act(self, ids: list[int], observations: list[str]) -> None:
        actions = self.tried(lambda: self.agent.act_batch(observations, ids))
        if actions is not None:
            assert len(actions) == len(ids) == len(set(ids))
            for env_id in ids:
                self.turns.setdefault(env_id, []).append(None if self.agent.learning else 0.0)

    @rule(ids=IDS, hook=st.sampled_from(HOOKS), row=st.integers(0, 3))
    def act_with_a_broken_method(self, ids: list[int], hook: str, row: int) -> None:
        usual, calls = getattr(self.agent, hook), []

        def breaks(*args: Any) -> Any:
            calls.append(args)
            if len(calls) > row:
                raise BrokenError
            return usual(*args)

        setattr(self.agent, hook, breaks)
        try:
            self.act(ids, ["x"] * len(ids))
        finally:
            setattr(self.agent, hook, usual)

    @rule(ids=IDS, rewards=st.lists(REWARDS, max_size=4))
    def reward(self, ids: list[int], rewards: list[Any]) -> None:
        def call() -> bool:
            self.agent.assign_rewards(rewards, ids)
            return True

        if self.tried(call):
            for env_id, reward in zip(ids, rewards, strict=True):
                self.turns[env_id][-1] = (self.turns[env_id][-1] or 0.0) + float(reward)

    @precondition(lambda self: self.turns)
    @rule(value=st.sampled_from([0.0, 1.0]))
    def reward_all(self, value: float) -> None:
        self.reward(list(self.turns), [value] * len(self.turns))

    @rule(ids=IDS, cut=st.one_of(st.none(), st.lists(st.booleans(), max_size=4)), final=st.sampled_from([None, "x"]))
    def terminate(self, ids: list[int], cut: list[bool] | None, final: str | None) -> None:
        finals = None if final is None else [final] * len(ids)
        stats = self.tried(lambda: self.agent.terminate_episodes(ids, cut, finals))
        if stats is not None:
            self.updates += bool(stats)
            for env_id in ids:
                del self.turns[env_id]

    @rule(greedy=st.booleans(), learns=st.booleans())
    def switch(self, greedy: bool, learns: bool) -> None:
        if learns:
            self.agent.train()
        else:
            self.agent.eval(greedy)

    @rule(episodes=st.integers(0, 2), num_envs=st.integers(0, 2))
    def evaluate(self, episodes: int, num_envs: int) -> None:
        mode = self.agent.learning, self.agent.greedy
        result = self.tried(lambda: evaluate(self.agent, CountdownEnv, episodes, num_envs=num_envs))
        assert (self.agent.learning, self.agent.greedy) == mode
        assert result is None or len(result.returns) == episodes

    @rule(num_envs=st.integers(1, 2))
    def train(self, num_envs: int) -> None:
        result = train(self.agent, CountdownEnv, episodes=2, num_envs=num_envs)
        self.updates += len(result.updates)
        for env_id in range(num_envs):
            self.turns.pop(env_id, None)

    @rule()
    def weights_changed(self) -> None:
        self.agent.weights_changed()

    @invariant()
    def all_is_in_step(self) -> None:
        conversations = self.agent._conversations
        assert set(conversations) == set(self.turns)
        for env_id, rewards in self.turns.items():
            conversation = conversations[env_id]
            assert [turn.reward for turn in conversation.turns] == [reward or 0.0 for reward in rewards]
            assert len(conversation.messages) == 1 + 2 * len(rewards)
            assert conversation.pending is None
        assert 0 <= self.agent.buffered_turns < BATCH
        assert self.agent.policy.num_updates == self.updates
        assert all(weight.isfinite().all() for weight in self.agent.policy.model.parameters())
        assert not any(weight.grad is not None and weight.grad.any() for weight in self.agent.policy.model.parameters())


@pytest.mark.parametrize("kind", [ChoiceAgent, WordAgent])
def test_any_order_of_calls(kind: type):
    machine = type("LoopOf" + kind.__name__, (Loop,), {"kind": kind}).TestCase
    machine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None, derandomize=True)
    machine("runTest").debug()


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**40),
    st.floats(),
    st.sampled_from(["", "8", "reward", "loss", "std", "none", "lstd"]),
    st.lists(st.integers(), max_size=1),
    st.just({}),
)


@pytest.mark.parametrize("config", [PPOConfig, GRPOConfig, ReplayConfig, WarmStartConfig, GenerationConfig])
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_options_of_any_type_are_taken_or_refused_clearly(config: type, data: st.DataObject):
    names = st.sampled_from([field.name for field in fields(config)])
    options = data.draw(st.dictionaries(names, VALUES, min_size=1, max_size=3))
    try:
        made = config.from_dict(options)
    except LlamaGymError:
        return
    assert {name: getattr(made, name) for name in options} == options
