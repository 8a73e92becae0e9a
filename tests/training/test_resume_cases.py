"""Runs that are resumed in the middle of a batch or a replay compute, bit for bit, what they would have computed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamagym import Agent, load_model_and_tokenizer
from llamagym.agent.agent import collector_of
from llamagym.saving.checkpoints import newest
from llamagym.saving.state_files import read_state
from tests.helpers.agents import ChoiceAgent
from tests.helpers.resumed_run import CASES, SIZES, Talker, learn, make


def made(name: str) -> Agent:
    """The agent of a case."""
    kind, options = CASES[name]
    return make(kind, **dict(options))


def in_a_batch(agent: Agent, do: Callable[[], Any]) -> Agent:
    """Calls a function once, at the end of the first step that leaves a batch partly filled after an update."""
    end, waits = agent.terminate_episodes, [True]

    def terminate_episodes(*args: Any, **options: Any) -> Any:
        stats = end(*args, **options)
        if waits and agent.policy.num_updates and collector_of(agent).buffered_turns:
            waits.clear()
            do()
        return stats

    agent.terminate_episodes = terminate_episodes  # type: ignore[method-assign]
    return agent


def state_in(folder: Path) -> dict[str, Any]:
    """The agent's state in the newest checkpoint."""
    path = newest(folder)
    assert path is not None
    state: dict[str, Any] = read_state(path, "state")["agent"]
    return state


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs computed the same; of actions, those since the second last update count."""
    count = min(len(one["actions"]), len(other["actions"]))
    return json.dumps({**one, "actions": one["actions"][-count:]}) == json.dumps(
        {**other, "actions": other["actions"][-count:]}
    )


@pytest.mark.parametrize(
    "name",
    [
        "ppo",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ["grpo", "choices in whole conversations", "free text"]
        ),
    ],
)
def test_a_killed_run_recomputes_its_lost_updates(tmp_path, name):
    """Killed after the fifth update, it resumes from the fourth."""
    whole = learn(made(name), 6, checkpoint_dir=tmp_path / "whole", checkpoint_every=2)
    learn(made(name), 5, checkpoint_dir=tmp_path / "killed", checkpoint_every=2)
    lost = newest(tmp_path / "killed")
    assert lost is not None
    shutil.rmtree(lost)
    resumed = learn(made(name), 2, checkpoint_dir=tmp_path / "killed", checkpoint_every=2, resume=True)
    assert len(resumed["stats"]) == 6
    assert same(resumed, whole)


@pytest.mark.parametrize(
    "name",
    [
        "choices in whole conversations",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("ppo", "gradient critic", "grpo", "replay")),
        "free text",
    ],
)
def test_a_run_stopped_within_a_batch_continues_the_batch(tmp_path, name):
    stopped = in_a_batch(made(name), lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(SystemExit):
        learn(stopped, 9, checkpoint_dir=tmp_path / "run", checkpoint_every=3)
    state = state_in(tmp_path / "run")
    assert state["buffer"]
    assert state["under_way"]
    resumed = learn(made(name), 3, checkpoint_dir=tmp_path / "run", checkpoint_every=3, resume=True)
    # A checkpoint has this effect in a run that continues.
    agent = made(name)
    in_a_batch(agent, agent.policy.drop_caches)
    whole = learn(agent, len(resumed["stats"]), checkpoint_dir=tmp_path / "whole", checkpoint_every=3)
    assert len(resumed["stats"]) > 3
    assert same(resumed, whole)


@pytest.mark.long
@pytest.mark.parametrize("kind", [ChoiceAgent, Talker])
def test_the_embedded_model_resumes_in_the_cpu_dtype(tmp_path, kind):
    sizes = {**SIZES, "learning_rate": 1e-3}

    def loaded() -> Agent:
        model, tokenizer, device = load_model_and_tokenizer("smollm2-135m", "cpu")
        return kind(model, tokenizer, device, {"max_new_tokens": 3}, sizes, context="turn", seed=0)

    whole = learn(loaded(), 2, checkpoint_dir=tmp_path / "whole")
    learn(loaded(), 1, checkpoint_dir=tmp_path / "run")
    resumed = learn(loaded(), 1, checkpoint_dir=tmp_path / "run", resume=True)
    assert len(resumed["stats"]) == 2
    assert same(resumed, whole)
