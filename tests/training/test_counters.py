"""Counters: an update is all that is learned from one batch; each call has its own budget."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from llamagym import Callback, train
from llamagym.agent.agent import collector_of
from llamagym.training import run as run_module
from llamagym.training.run import Run
from tests.helpers.agents import ChoiceAgent, CountdownEnv, make_agent
from tests.helpers.resumed_run import DiceEnv

REPLAY = {"replay_config_dict": {"episodes": 4, "steps": 1, "learning_rate": 1e-2}}
SIZES = {"batch_size": 12, "warmup_steps": 1, "target_kl": None, "cooldown": 0.5}


# Updates


def test_replay_is_part_of_its_update(tmp_path):
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 6}, **REPLAY)
    updates = train(agent, CountdownEnv, episodes=40, num_envs=2, seed=0, run_dir=tmp_path).updates
    assert len(updates) == 20
    assert [stats["updates"] for stats in updates] == list(range(1, 21))
    assert agent.policy.num_updates == 20
    lines = (tmp_path / "transcripts.jsonl").read_text().splitlines()
    # Of the first 16 updates each, then every second.
    assert sorted({json.loads(line)["update"] for line in lines}) == [*range(1, 17), 18, 20]


def test_replay_learning_rate_follows_the_learners():
    agent = make_agent(ChoiceAgent, context="turn", ppo={**SIZES, "learning_rate": 0.0}, **REPLAY)
    rates, steps = [], collector_of(agent).replay.optimizer
    note = lambda _: rates.append(steps.param_groups[0]["lr"])  # noqa: E731
    train(agent, functools.partial(CountdownEnv, 3), episodes=40, num_envs=4, on_update=note)
    expected = [min(1.0, (1 - number / 10) / 0.5) for number in range(10)]
    assert rates == pytest.approx([1e-2 * scale for scale in expected])


def test_warm_starts_are_not_counted_as_updates(tmp_path):
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 6})
    path = tmp_path / "demonstrations.jsonl"
    said = [{"role": "user", "content": "Observation 3"}, {"role": "assistant", "content": "stay"}]
    path.write_text(json.dumps({"messages": said}) + "\n")
    agent.sft_from_jsonl(path, epochs=1)
    assert agent.policy.num_updates == 0
    updates = train(agent, CountdownEnv, episodes=2, num_envs=2, seed=0).updates
    assert [stats["updates"] for stats in updates] == [1.0]


# Budgets


class StopAfter(Callback):
    """Ends a training after some updates."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_update(self, run: Run, stats: dict[str, float]) -> bool:
        return len(run.updates) < self.updates


def play(folder: Path, resume: bool = True, **options: Any) -> Any:
    """Train for a budget, one update for every four episodes."""
    agent = make_agent(ChoiceAgent, context="turn", ppo=SIZES)
    env = functools.partial(CountdownEnv, 3)
    return train(agent, env, num_envs=4, seed=0, checkpoint_dir=folder, checkpoint_every=1, resume=resume, **options)


def rates(result: Any) -> list[float]:
    """Learning rates without what depends on the batch."""
    return [stats["learning_rate"] / math.sqrt(stats["step_share"]) for stats in result.updates]


@pytest.mark.parametrize("budget", [{"episodes": 16}, {"turns": 48}])
def test_a_resumed_call_has_its_own_budget(tmp_path, budget):
    first = play(tmp_path, resume=False, **budget)
    assert len(first.returns) == 16
    second = play(tmp_path, **budget)
    assert len(second.returns) == 32
    assert second.returns[:16] == first.returns
    # The cooldown is at the end of the call, not of the run: the second call begins at the full rate.
    assert rates(second)[4:] == pytest.approx(rates(first))
    assert len(play(tmp_path, episodes=4).returns) == 36


@pytest.mark.long
@pytest.mark.parametrize("budget", [{"episodes": 24}, {"turns": 72}])
def test_the_same_call_continues_an_unfinished_budget(tmp_path, budget):
    whole = play(tmp_path / "whole", **budget)
    stopped = play(tmp_path / "run", callbacks=StopAfter(4), **budget)
    assert len(stopped.updates) == 4
    resumed = play(tmp_path / "run", **budget)
    assert resumed.returns == whole.returns
    assert rates(resumed) == pytest.approx(rates(whole))


def test_another_budget_is_granted_in_full(tmp_path):
    play(tmp_path, callbacks=StopAfter(2), episodes=24)
    assert len(play(tmp_path, episodes=8).returns) == 8 + 8


def test_minutes_count_from_the_call(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run_module.time, "perf_counter", lambda: now[0])
    agent = make_agent(ChoiceAgent)
    first = Run(agent, None, None, minutes=1)
    now[0] = 30.0
    half = first.state_dict()
    now[0] = 60.0
    assert first.is_over
    # As of a call that was killed before it returned.
    end_missing = first.state_dict()
    first.finish()
    over = first.state_dict()
    # Resumed an hour later.
    now[0] = 3600.0
    again, rest = Run(agent, None, None, minutes=1), Run(agent, None, None, minutes=1)
    again.load_state_dict(over)
    rest.load_state_dict(half)
    assert (again.progress, rest.progress) == (0.0, 0.5)
    nothing = Run(agent, None, None, minutes=1)
    nothing.load_state_dict(end_missing)
    assert nothing.is_over
    now[0] = 3630.0
    assert (again.progress, rest.progress) == (0.5, 1.0)
    # The run's own time goes on.
    assert (again.minutes, rest.minutes) == (1.5, 1.0)


def test_a_resumed_call_logs_its_progress(tmp_path, capsys):
    play(tmp_path, callbacks=StopAfter(2), episodes=16)
    play(tmp_path, episodes=16)
    assert re.search(r"resumed from .*checkpoint-.* after \d updates, 8 episodes, 24 turns", capsys.readouterr().err)


@pytest.mark.long
def test_a_resumed_run_of_dice_computes_what_it_would_have_computed(tmp_path):
    """If episodes end at different times, the last step may end more episodes than the budget counts."""

    def dice(folder: Path, **options: Any) -> Any:
        agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 8})
        result = train(
            agent,
            DiceEnv,
            episodes=30,
            num_envs=4,
            seed=0,
            checkpoint_dir=folder,
            checkpoint_every=1,
            resume=True,
            **options,
        )
        return result, torch.cat([weight.detach().flatten() for weight in agent.policy.model.parameters()])

    whole, weights = dice(tmp_path / "whole")
    dice(tmp_path / "run", callbacks=StopAfter(5))
    resumed, same = dice(tmp_path / "run")
    assert resumed.returns == whole.returns
    assert len(resumed.returns) == 30
    assert torch.equal(weights, same)
