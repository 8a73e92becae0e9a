"""Looking at an agent leaves no trace: a run is the same, bit for bit, with and without it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llamagym import Callback, evaluate
from llamagym.agent.agent import collector_of
from llamagym.models.torch_internals import can_pack
from llamagym.training.run import Run
from tests.helpers.agents import ChoiceAgent, actor_of, make_agent
from tests.helpers.everything import changed, everything
from tests.helpers.processes import together
from tests.helpers.resumed_run import DiceEnv, Talker, learn

# Each case is a run or a model of its own.
pytestmark = pytest.mark.long

DTYPES = [torch.float32, torch.bfloat16]


class Wordy(ChoiceAgent):
    """Its choices depend on the observation, so that new lists of choices keep coming."""

    def get_action_choices(self, observation: Any) -> list[str]:
        return [*self.choices, f"take {int(observation) % 23}", f"drop {int(observation) % 29}"]

    def extract_action(self, response: str) -> int:
        return len(response) % 3


LOOKS: dict[str, Callable[[Any], Any]] = {
    "evaluate": lambda agent: evaluate(agent, DiceEnv, episodes=5, seed=7, num_envs=3),
    "evaluate, sampling": lambda agent: evaluate(agent, DiceEnv, episodes=5, seed=7, num_envs=3, greedy=False),
    "preflight": lambda agent: agent.preflight([3, 90, 91]),
    "action_probabilities": lambda agent: agent.action_probabilities([3, 92, 93]),
}


def look(agent: Any, name: str) -> Any:
    if name == "action_probabilities" and isinstance(agent, Talker):
        pytest.skip("free text has no probabilities of choices")
    return LOOKS[name](agent)


def agent_of(kind: Any, dtype: torch.dtype = torch.float32, activated: bool = True, **options: Any) -> Any:
    ppo = {"batch_size": 12, "mini_batch_size": 6, "learning_rate": 0.01, "warmup_steps": 1, "target_kl": None}
    options = {"context": "episode", "ppo": ppo, "generate": {"max_new_tokens": 4}, **options}
    return make_agent(kind, "llama", activated, dtype, **options)


def state_of(agent: Any) -> str:
    """All that a checkpoint holds, but for how long things took."""
    return re.sub(r"'\w+_s': [0-9.e-]+", "", str(collector_of(agent).state_dict()))


def play(agent: Any, first: int, steps: int = 9) -> list[Any]:
    """Steps in three environments; returns all actions and the statistics of updates."""
    said: list[Any] = []
    for step in range(first, first + steps):
        said.append(agent.act_batch([(7 * step + 13 * env) % 50 for env in range(3)]))
        agent.assign_rewards([float((step + env) % 3) for env in range(3)])
        ended = [env for env in range(3) if (step + env) % 4 == 3]
        stats = agent.terminate_episodes(ended)
        said.append({name: value for name, value in stats.items() if not name.endswith("_s")})
    return said


@pytest.mark.pairwise(
    name=list(LOOKS), kind=[Wordy, Talker], activated=[True, False], stage=["fresh", "sampled", "learned"]
)
def test_looking_changes_no_state(name, kind, activated, stage):
    agent = agent_of(kind, activated=activated)
    if stage != "fresh":
        play(agent, 0, 2 if stage == "sampled" else 9)
    assert (agent.policy.num_updates > 0) == (stage == "learned")
    random.seed(0)
    np.random.seed(0)
    before = everything(agent)
    look(agent, name)
    # A packed weight is a function of the weight alone: that more of them are there makes no difference.
    ways = [
        way for way in changed(before, everything(agent)) if ".packed_weights.weights" not in way or name == "preflight"
    ]
    assert ways == []


def test_all_that_changes_is_found():
    """The control: what acting, learning and sampling change is seen."""
    agent = agent_of(Wordy)
    play(agent, 0, 2)
    before = everything(agent)
    assert changed(before, everything(agent)) == []
    parts = {
        "rng": lambda: torch.rand(1, generator=agent.policy.rng),
        "prior": lambda: agent.policy.calibrate(
            [actor_of(agent).new_conversation().observe("x", "", ["unheard", "of"])]
        ),
        "activations": lambda: agent.policy.read_critic([actor_of(agent).new_conversation().observe("yy")]),
        "pretrained_model": lambda: agent.policy.model.pretrained_model.register_forward_hook(lambda *_: None),
        "v_head": lambda: agent.policy.model.v_head.feature_mean.add_(1.0),
        "_learning": agent.eval,
        "random numbers": lambda: torch.rand(1),
    }
    for part, change in parts.items():
        before = everything(agent)
        change()
        assert any(part in way for way in changed(before, everything(agent))), part


@pytest.mark.pairwise(
    name=list(LOOKS), kind=[Wordy, Talker], dtype=DTYPES, activated=[True, False], context=["episode", "turn"]
)
def test_a_run_is_the_same_bit_by_bit_whether_it_was_looked_at(name, kind, dtype, activated, context):
    one, other = (agent_of(kind, dtype, activated, context=context) for _ in range(2))
    look(one, name)
    for first in (0, 4, 13):
        steps = 4 if first == 0 else 9
        assert play(one, first, steps) == play(other, first, steps)
        look(one, name)
        for weight, same in zip(
            one.policy.model.state_dict().values(), other.policy.model.state_dict().values(), strict=True
        ):
            assert torch.equal(weight, same)
    assert one.policy.num_updates == other.policy.num_updates > 2
    assert state_of(one) == state_of(other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_preflight_in_the_middle_of_a_run_changes_nothing(dtype):
    one, other = agent_of(Wordy, dtype), agent_of(Wordy, dtype)
    for first in (0, 4, 13):
        look(one, "preflight")
        assert play(one, first, 5) == play(other, first, 5)
    assert one.policy.num_updates > 0


class Looking(Callback):
    """Looks at the agent after each update."""

    def on_update(self, run: Run, stats: dict[str, float]) -> None:
        for each in ("evaluate, sampling", "preflight"):
            look(run.agent, each)


def run_of(folder: Path, dtype: torch.dtype, updates: int, looks: bool, resume: bool = False) -> dict[str, Any]:
    """A run that is looked at before it begins or goes on, and after each update."""
    agent = agent_of(Wordy, dtype)
    if looks:
        for each in ("preflight", "evaluate"):
            look(agent, each)
    # With a callback, a checkpoint is written before the first step as well.
    callbacks = [Looking() if looks else Callback()]
    done = learn(agent, updates, checkpoint_dir=folder, callbacks=callbacks, resume=resume)
    # Those of evaluations are among them.
    del done["actions"]
    return done


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_that_goes_on_in_another_process_is_the_same_whether_it_was_looked_at(dtype, tmp_path):
    whole = run_of(tmp_path / "whole", dtype, 3, looks=False)
    run_of(tmp_path / "looked at", dtype, 1, looks=True)
    (resumed,) = together(1, run_of, tmp_path / "looked at", dtype, 2, True, True)
    assert isinstance(resumed, dict), resumed
    assert len(resumed["stats"]) == 3
    assert json.dumps(resumed) == json.dumps(whole)


@pytest.mark.parametrize("kind", [Wordy, Talker])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_packed_where_there_is_room_for_some_weights_alone(dtype, kind):
    """Weights are packed at their first use, as long as there is room; looking leaves it to those that acting uses."""
    agents = [agent_of(kind, dtype) for _ in range(2)]
    for agent in agents:
        packed = agent.policy.backbone.transformer.acceleration.packed_weights
        if packed is None or not can_pack(torch.zeros(1, dtype=dtype)):
            pytest.skip("no weights of this dtype are packed here")
        assert packed.nbytes == 0
        packed.max_bytes = 12_000
    for name in LOOKS:
        if kind is Wordy or name != "action_probabilities":
            look(agents[0], name)
    assert play(agents[0], 0) == play(agents[1], 0)
    copies = [agent.policy.backbone.transformer.acceleration.packed_weights.weights.values() for agent in agents]
    found = [[copy is not None for _, copy in of_agent] for of_agent in copies]
    assert found[0] == found[1]
    assert {True, False} <= set(found[0])


def test_acting_in_eval_mode_leaves_a_run_as_it_was():
    one, other = agent_of(Wordy), agent_of(Wordy)
    for first in (0, 9):
        one.eval()
        drawn = one.policy.rng.get_state()
        one.act_batch([60 + first, 70 + first], ["a", "b"])
        actor_of(one).discard_episodes(["a", "b"])
        one.policy.rng.set_state(drawn)
        one.train()
        assert play(one, first) == play(other, first)
    assert state_of(one) == state_of(other)


def test_an_agent_that_only_acts_in_eval_mode_measures_choices_over_what_it_meets():
    """In one context alone all choices would be equally likely."""
    agent, learning = agent_of(Wordy, context="turn"), agent_of(Wordy, context="turn")
    agent.eval(greedy=False)
    said = [each.act_batch([3, 4, 5, 6, 7, 8]) for each in (agent, learning)]
    assert said[0] == said[1]
    later = [each.act_batch([3], ["later"]) for each in (agent, learning)]
    replies = [actor_of(each).conversation("later").turns[-1].reply for each in (agent, learning)]
    assert later[0] == later[1]
    assert replies[0].choice_logprobs == replies[1].choice_logprobs
    assert max(replies[0].choice_logprobs) > min(replies[0].choice_logprobs) + 0.1
    assert agent.policy.calibration.prior == {}
