"""Progress on stderr and nothing else there: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import io
import itertools
import json
import logging
import re
import sys
import time
from contextlib import closing

import pytest

from llamagym import Progress, train
from llamagym.training import progress as progress_module
from llamagym.training.tracking import JsonlTracker
from tests.helpers.agents import ChoiceAgent, CountdownEnv, make_agent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(monkeypatch, stream: io.StringIO) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(4, window=2) as progress:
        progress.advance([1.0], {})
        progress.advance([], {})
        progress.advance([0.0, -1.0], {"entropy": 0.5, "approx_kl": 0.0123})
        progress.note("said so")
        progress.advance([1.0, 1.0], {})
    return stream.getvalue()


def test_prints_a_line_per_update_outside_a_terminal(monkeypatch):
    update, note = run(monkeypatch, io.StringIO()).splitlines()
    assert re.fullmatch(
        r"update 1: 75%, 3 episodes, mean return of the last 2 -0\.500, entropy 0\.5, approx_kl 0\.0123, \d+ s", update
    )
    assert note == "said so"


def test_prints_a_line_after_a_long_silence(monkeypatch):
    """A run whose updates take longer than the longest silence still prints lines."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress_module, "MAX_SILENCE_S", 0.05)
    with Progress(4) as progress:
        progress.advance([1.0], {})
        deadline = time.monotonic() + 10
        while not stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert re.fullmatch(
        r"25%, 1 episodes, mean return of the last 1 \+1\.000, \d+ s", stream.getvalue().splitlines()[0]
    )
    # The thread ends with the run.
    lines = stream.getvalue()
    time.sleep(0.2)
    assert stream.getvalue() == lines


def test_shows_the_share_of_a_budget_of_minutes(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(share=lambda: 0.4) as progress:
        progress.advance([1.0], {"expected_return": -0.25})
    assert stream.getvalue().startswith(
        "update 1: 40%, 1 episodes, mean return of the last 1 +1.000, expected_return -0.25"
    )


@pytest.mark.parametrize("name", ["skipped_steps", "replay_skipped_steps"])
def test_skipped_steps_are_shown_and_recorded(monkeypatch, tmp_path, capsys, name):
    """The learner's counts reach both; counts of zero are not in the line."""
    agent = make_agent(ChoiceAgent, ppo={"batch_size": 3})
    counts, usual = iter([0.0, 2.0, 0.0]), agent.learner.update
    monkeypatch.setattr(agent.learner, "update", lambda batch: usual(batch) | {name: next(counts)})
    with closing(JsonlTracker(tmp_path / "metrics.jsonl")) as tracker:
        train(agent, CountdownEnv, episodes=3, num_envs=1, seed=0, tracker=tracker)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("update ")]
    assert [f", {name} 2, " in line for line in lines] == [False, True, False]
    assert [name in line for line in lines] == [False, True, False]
    logged = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line[name] for line in logged] == [0.0, 2.0, 0.0]


def test_non_finite_steps_are_shown_and_recorded(monkeypatch, tmp_path, capsys):
    agent = make_agent(ChoiceAgent, ppo={"batch_size": 3, "mini_batch_size": 3})
    backward = agent.learner.accelerator.backward
    losses = itertools.count()

    def nan_at_second(loss):
        backward(loss * float("nan") if next(losses) == 1 else loss)

    monkeypatch.setattr(agent.learner.accelerator, "backward", nan_at_second)
    with closing(JsonlTracker(tmp_path / "metrics.jsonl")) as tracker:
        train(agent, CountdownEnv, episodes=1, seed=0, tracker=tracker)
    assert ", skipped_steps 1, " in capsys.readouterr().err
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["skipped_steps"] == 1.0


def test_shows_a_bar_in_a_terminal(monkeypatch):
    shown = run(monkeypatch, Terminal())
    assert "100%" in shown
    assert "said so\n" in shown
    # Above the bar, which lines of updates do not repeat.
    assert shown.count("update 1: 75%, 3 episodes, mean return of the last 2 -0.500, entropy 0.5") == 1


def test_the_bar_shows_share_time_left_speed_and_mean_return_and_updates_share_lines(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(200) as progress:
        for _ in range(100):
            progress.advance([0.5], {"entropy": 0.5}, turns=3)
    shown = stream.getvalue()
    bar = shown.split("\r")[-1]
    assert re.search(
        r" 50%\|.*\| \d\d:\d\d<\d\d:\d\d, 100 episodes, 100 updates, [\d,]+ turns/s, mean return \+0.500", bar
    )
    assert "nan" not in shown
    # A hundred updates in an instant.
    assert shown.count("update ") == 1


def test_an_update_is_printed_as_one_line(capsys):
    agent = make_agent(ChoiceAgent, ppo={"batch_size": 3})
    train(agent, CountdownEnv, episodes=2, num_envs=1, seed=0, on_update=print)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["update 1", "update 2"]
    assert all(
        re.search(r": 3 turns, 1 episodes, return_mean [-\d.]+, entropy 0\.\d+, approx_kl", line) for line in lines
    )


def test_drops_warnings_of_bitsandbytes_about_unused_kernels(caplog):
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "No module named 'kernels'")
    logger.warning("something else")
    assert caplog.messages == ["something else"]
