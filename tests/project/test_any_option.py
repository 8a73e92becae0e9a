"""Any value of an option is either rejected with a clear error or accepted and usable."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from llamagym import Agent, GRPOConfig, LlamaGymError, PPOConfig, evaluate, train
from llamagym.learners.algorithms import OLD_ARGUMENTS
from llamagym.learners.grpo import ReinforceConfig
from llamagym.learners.replay import ReplayConfig
from llamagym.learners.sft import WarmStartConfig
from llamagym.models.registry import GenerationConfig
from tests.helpers.agents import ChoiceAgent, CountdownEnv, make_agent

# Whole numbers are small or beyond all that is counted: so many epochs would take too long.
WHOLE = st.sampled_from([-(2**70), -1, 0, 1, 2, 3, 2**70, np.int64(2)])
NUMBERS = st.floats() | st.sampled_from([1e-320, 1e-46, 1e30, 3e38, 1e39, 1e300, 10**400, np.float32(0.1)])
WORDS = st.sampled_from(
    ["", "8", "std", "none", "token", "turn", "lstd", "loss", "episode", "grpo", "reinforce", "\ud83d"]
)
COLLECTIONS = [[], [1], {}, {"x": 1}, {1: 2}, (), b"x", np.ones(2), torch.ones(2), torch.tensor(0.5)]
OTHERS = st.sampled_from([None, True, False, np.bool_(True), 1j, object(), int, math.sin, PPOConfig(), Path("x")])
VALUES = WHOLE | NUMBERS | WORDS | OTHERS | st.sampled_from(COLLECTIONS)


def play(agent: Agent) -> None:
    """Two updates, and what is done without learning."""
    for _ in range(2):
        agent.act_batch(["a", "b", "c", "d"])
        agent.assign_rewards([1.0, 0.0, 1.0, 0.0])
        agent.terminate_episodes(range(4))
    agent.eval(greedy=False)
    agent.act("a")


def tried(call: Callable[[], Any]) -> None:
    """Call; only errors of the library's own may come out."""
    with suppress(LlamaGymError):
        call()


CONFIGS = {
    "ppo_config_dict": (PPOConfig, {}),
    "grpo_config_dict": (GRPOConfig, {"algorithm": "grpo"}),
    "reinforce_config_dict": (ReinforceConfig, {"algorithm": "reinforce"}),
    "replay_config_dict": (ReplayConfig, {}),
    "generate_config_dict": (GenerationConfig, {}),
}


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_options_of_configurations(name: str, data: st.DataObject):
    kind, others = CONFIGS[name]
    names = st.sampled_from([field.name for field in fields(kind)] + ["typo", 5])
    options = data.draw(st.dictionaries(names, VALUES, min_size=1, max_size=2))
    base = {"batch_size": 4} if "batch_size" in {field.name for field in fields(kind)} else {}
    tried(lambda: play(agent_with(**others, **{name: {**base, **options}})))


def agent_with(**options: Any) -> Agent:
    """An agent on a tiny model, with these options and no others."""
    made = make_agent(ChoiceAgent)
    return ChoiceAgent(made.policy.model, made.tokenizer, **options)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(options=st.dictionaries(st.sampled_from([field.name for field in fields(WarmStartConfig)]), VALUES, max_size=2))
@example(options={"seed": 2**63 - 1})
def test_options_of_a_warm_start(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]):
    path = tmp_path_factory.getbasetemp() / "demos.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "stay"}]
    path.write_text(json.dumps({"messages": messages}))
    tried(lambda: make_agent(ChoiceAgent).sft_from_jsonl(path, **{"epochs": 1, **options}))


PARAMETERS = inspect.signature(Agent.__init__).parameters
NAMES = [name for name in PARAMETERS if name not in ("self", "old_options")] + sorted(OLD_ARGUMENTS)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(options=st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=2))
def test_options_of_an_agent(options: dict[str, Any]):
    made = make_agent(ChoiceAgent)
    usual = {"model": made.policy.model, "tokenizer": made.tokenizer, "ppo_config_dict": {"batch_size": 4}}
    tried(lambda: play(ChoiceAgent(**{**usual, **options})))


@pytest.mark.parametrize("run", [train, evaluate])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_options_of_a_run(run: Callable[..., Any], data: st.DataObject):
    names = st.sampled_from([name for name in get_type_hints(run) if name != "return"])
    options = data.draw(st.dictionaries(names, VALUES, min_size=1, max_size=2))
    # What a user's judge raises is raised as it is.
    assume(not callable(options.get("judge")))
    usual = {"agent": make_agent(ChoiceAgent), "env": CountdownEnv, "episodes": 2}
    tried(lambda: run(**{**usual, **options}))
