"""Calls in any order, with any errors in between, raise clear errors only and leave a consistent state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from llamagym import GRPOConfig, LlamaGymError, PPOConfig, evaluate, train
from llamagym.agent.agent import collector_of
from llamagym.learners.replay import ReplayConfig
from llamagym.learners.sft import WarmStartConfig
from llamagym.models.registry import GenerationConfig
from tests.helpers.agents import ChoiceAgent, CountdownEnv, WordAgent, actor_of, make_agent
from tests.helpers.faults import FAULTS, BrokenError, FaultyEnv, StoppedError, raises
from tests.helpers.tiny import tiny_tokenizer

BATCH = 6
IDS = st.lists(st.integers(0, 3), max_size=4)
HOOKS = ["format_observation", "get_action_choices", "extract_action", "get_system_prompt"]
REWARDS = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 1e6]), st.floats(), st.none(), st.text(max_size=2))
GROUPS = st.lists(st.sampled_from([None, 0, 1, "a", (1, "b"), [1]]), max_size=4)
# What an update goes through.
PARTS = [
    "learner.compute_targets",
    "learner._bounded_entropy_coef",
    "learner._value_loss",
    "learner._step",
    "replay.update",
    "replay._step",
]


ERRORS = st.sampled_from([BrokenError, StoppedError])


@contextmanager
def failing(owner: Any, method: str, error: type[BaseException], call: int) -> Iterator[None]:
    """While open, a method raises an error at one of its calls and from then on."""
    usual, calls = getattr(owner, method), []

    def fails(*given: Any, **named: Any) -> Any:
        calls.append(given)
        if len(calls) > call:
            raise error
        return usual(*given, **named)

    setattr(owner, method, fails)
    try:
        yield
    finally:
        setattr(owner, method, usual)


class Counting:
    """A tracker that counts updates, and may fail."""

    def __init__(self, fault: Callable[[Any], Any] | None) -> None:
        self.updates, self.fault = 0, fault

    def log(self, metrics: Any, step: int) -> None:
        self.updates += 1
        if self.fault is not None:
            self.fault(metrics)

    def close(self) -> None:
        pass


class Loop(RuleBasedStateMachine):
    """A user's loop, and what it should have left: by environment the rewards of its turns, None before the first."""

    kind: type
    options: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.agent = make_agent(self.kind, generate={"max_new_tokens": 2}, **self.options)
        self.agent.extract_action = lambda text: 1
        self.turns: dict[Any, list[float | None]] = {}
        self.updates = 0

    def tried(self, call: Any) -> Any:
        """A call's result, or None if it raised an error that it may raise."""
        try:
            return call()
        except (LlamaGymError, BrokenError, StoppedError):
            return None

    @rule(ids=IDS, observations=st.lists(st.text(max_size=3), max_size=4))
    def act(self, ids: list[int], observations: list[str]) -> None:
        actions = self.tried(lambda: self.agent.act_batch(observations, ids))
        if actions is not None:
            assert len(actions) == len(ids) == len(set(ids))
            for env_id in ids:
                self.turns.setdefault(env_id, []).append(None if actor_of(self.agent).is_learning else 0.0)

    @rule(ids=IDS, hook=st.sampled_from(HOOKS), row=st.integers(0, 3), error=ERRORS)
    def act_with_a_broken_method(self, ids: list[int], hook: str, row: int, error: type[BaseException]) -> None:
        with failing(self.agent, hook, error, row):
            self.act(ids, ["x"] * len(ids))

    @rule(ids=IDS | st.none(), rewards=st.lists(REWARDS, max_size=4), as_array=st.booleans())
    def reward(self, ids: list[int] | None, rewards: list[Any], as_array: bool = False) -> None:
        def call() -> bool:
            self.agent.assign_rewards(np.array(rewards, dtype=object) if as_array else rewards, ids)
            return True

        if self.tried(call):
            for env_id, reward in zip(range(len(rewards)) if ids is None else ids, rewards, strict=True):
                self.turns[env_id][-1] = (self.turns[env_id][-1] or 0.0) + float(reward)

    @precondition(lambda self: self.turns)
    @rule(value=st.sampled_from([0.0, 1.0]))
    def reward_all(self, value: float) -> None:
        self.reward(list(self.turns), [value] * len(self.turns))

    @rule(
        ids=IDS,
        cut=st.none() | st.lists(st.booleans(), max_size=4),
        final=st.sampled_from([None, "x"]),
        groups=st.none() | GROUPS,
    )
    def terminate(self, ids: list[int], cut: list[bool] | None, final: str | None, groups: list[Any] | None) -> None:
        finals = None if final is None else [final] * len(ids)
        stats = self.tried(lambda: self.agent.terminate_episodes(ids, cut, finals, groups=groups))
        if stats is not None:
            self.updates += bool(stats)
            for env_id in ids:
                del self.turns[env_id]

    def fill(self) -> None:
        """So many turns under way that their end fills a batch."""
        self.agent.train()
        for _ in range(3):
            self.reward_all(0.0)
            self.act([0, 1], ["x", "y"])
        self.reward([0, 1], [1.0, 0.0])

    @rule()
    def learn(self) -> None:
        self.fill()
        before = self.updates
        self.terminate([0, 1], None, None, None)
        assert self.updates == before + 1

    @rule(part=st.sampled_from(PARTS), call=st.integers(0, 2), error=ERRORS)
    def learn_with_a_broken_part(self, part: str, call: int, error: type[BaseException]) -> None:
        self.fill()
        before, updates = self.learned(), self.updates
        owner, method = part.split(".")
        part_of_agent = getattr(collector_of(self.agent), owner)
        if part_of_agent is None:
            return
        with failing(part_of_agent, method, error, call):
            self.terminate([0, 1], [True, False], "x", None)
        if self.updates == updates:
            assert all(torch.equal(now, old) for now, old in zip(self.learned(), before, strict=True))
            assert {0, 1} <= self.turns.keys()

    def learned(self) -> list[Tensor]:
        """All that an update changes, but for what is only counted."""
        agent = self.agent
        optimizers = [
            agent.learner.optimizer,
            *([] if collector_of(agent).replay is None else [collector_of(agent).replay.optimizer]),
        ]
        states = [of_weight for optimizer in optimizers for of_weight in optimizer.adam.state_dict()["state"].values()]
        tensors = [tensor for of_weight in states for tensor in of_weight.values()]
        return [tensor.clone() for tensor in (*agent.policy.model.state_dict().values(), *tensors)]

    @rule(greedy=st.booleans(), learns=st.booleans())
    def switch(self, greedy: bool, learns: bool) -> None:
        if learns:
            self.agent.train()
        else:
            self.agent.eval(greedy)

    @rule(episodes=st.integers(0, 2), num_envs=st.integers(0, 2), data=st.data())
    def evaluate(self, episodes: int, num_envs: int, data: st.DataObject) -> None:
        mode = actor_of(self.agent).is_learning, actor_of(self.agent).is_greedy
        env = data.draw(st.sampled_from([CountdownEnv, self.faulty(data)]))
        result = self.tried(lambda: evaluate(self.agent, env, episodes=episodes, num_envs=num_envs))
        assert (actor_of(self.agent).is_learning, actor_of(self.agent).is_greedy) == mode
        assert result is None or len(result.returns) == episodes

    @rule(num_envs=st.integers(1, 2), data=st.data())
    def train(self, num_envs: int, data: st.DataObject) -> None:
        env = data.draw(st.sampled_from([CountdownEnv, self.faulty(data)]))
        faults = st.sampled_from([None, raises(BrokenError), raises(StoppedError)])
        counting, on_update = Counting(data.draw(faults)), data.draw(faults)
        if num_envs % self.agent.learner.group_size == 0:
            # Otherwise the run is refused before it begins.
            for env_id in range(num_envs):
                self.turns.pop(env_id, None)
        self.tried(lambda: train(self.agent, env, episodes=2, num_envs=num_envs, on_update=on_update, tracker=counting))
        self.updates += counting.updates

    def faulty(self, data: st.DataObject) -> Callable[[], FaultyEnv]:
        """Makes environments with a fault."""
        method = data.draw(st.sampled_from(sorted(FAULTS)))
        fault, call = data.draw(st.sampled_from(FAULTS[method])), data.draw(st.integers(0, 4))
        return lambda: FaultyEnv(method, call, fault)

    @rule(learns=st.booleans(), seed=st.integers(0, 9))
    def change_weights_unseen(self, learns: bool, seed: int) -> None:
        """Then the agent does what one does that is made afterwards, in the conversations under way too."""
        random = torch.Generator().manual_seed(seed)
        for weight in self.agent.policy.model.pretrained_model.parameters():
            if weight.requires_grad == learns:
                noise = torch.randn(weight.shape, generator=random)
                weight.data.add_(0.2 * noise * weight.data.abs().mean())
        self.agent.policy.weights_changed()
        fresh = self.kind(self.agent.policy.model, tiny_tokenizer("llama"), None, {"max_new_tokens": 2}, seed=0)
        for one, other in zip(self.says(self.agent), self.says(fresh), strict=True):
            assert torch.allclose(one, other, atol=1e-4, rtol=1e-3)

    def says(self, agent: Any) -> list[Tensor]:
        """An agent's current replies and values, as tensors."""
        learning, greedy = actor_of(agent).is_learning, actor_of(agent).is_greedy
        agent.eval(greedy=True)
        agent.act_batch(["x", "yy"], ["new", "newer"])
        replies = [actor_of(agent).conversation(env_id).turns[-1].reply for env_id in ("new", "newer")]
        actor_of(agent).discard_episodes(["new", "newer"])
        if learning:
            agent.train()
        else:
            agent.eval(greedy)
        said = [torch.tensor([*reply.ids, *reply.logprobs, reply.value]) for reply in replies]
        under_way = [of.current_segment() for of in actor_of(self.agent).conversations.values() if of.turns]
        if under_way:
            with torch.no_grad():
                now = agent.policy.evaluate(under_way)
            said += [now.logprobs[now.mask], now.values]
        return said

    @invariant()
    def all_is_in_step(self) -> None:
        conversations = actor_of(self.agent).conversations
        assert set(conversations) == set(self.turns)
        for env_id, rewards in self.turns.items():
            conversation = conversations[env_id]
            assert [turn.reward for turn in conversation.turns] == [reward or 0.0 for reward in rewards]
            assert len(conversation.messages) == 1 + 2 * len(rewards)
            assert conversation.pending is None
        assert self.agent.learner.take(collector_of(self.agent).buffer[:]) == []
        assert self.agent.policy.num_updates == self.updates
        assert all(weight.isfinite().all() for weight in self.agent.policy.model.parameters())
        assert not any(weight.grad is not None and weight.grad.any() for weight in self.agent.policy.model.parameters())


LOOPS: dict[str, tuple[type, dict[str, Any]]] = {
    "ppo_choices_replay": (ChoiceAgent, {"ppo": {"batch_size": BATCH}, "replay_config_dict": {"steps": 1}}),
    "ppo_words": (WordAgent, {"ppo": {"batch_size": BATCH}}),
    "grpo_choices": (ChoiceAgent, {"algorithm": "grpo", "grpo": {"batch_size": BATCH, "group_size": 2}}),
}


# One kind of loop in the short run, the others in the long one.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "ppo_choices_replay" else pytest.mark.long) for name in LOOPS]
)
def test_any_order_of_calls(name: str):
    kind, options = LOOPS[name]
    machine = type("LoopOf_" + name, (Loop,), {"kind": kind, "options": options}).TestCase
    machine.settings = settings(max_examples=6, stateful_step_count=20, deadline=None, derandomize=True)
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
