"""A run that was stopped, however it was stopped, goes on as if it had never been."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from functools import reduce
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from llamagym import Callback, CheckpointError, ConfigError, EnvironmentTimeoutError, EpisodeError, train
from llamagym.agent.agent import collector_of
from llamagym.saving import atomic, file_operations
from llamagym.saving.atomic import atomic_folder, verify
from llamagym.saving.checkpoints import best, check_options, checkpoint_path, describe_change, find, newest, prune
from llamagym.saving.manifest import MANIFEST, SCHEMA
from llamagym.saving.state_files import read_state, write_state
from llamagym.training.tracking import JsonlTracker, MultiTracker
from tests.helpers import ROOT
from tests.helpers.agents import ChoiceAgent, CountdownEnv, WordAgent, make_agent
from tests.helpers.killed import killed_at
from tests.helpers.resumed_run import CASES, SIZES, DiceEnv

# A process that goes on


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three updates in one go; one; two more in another process."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    done = []
    for folder, updates, *resume in ((one, 3), (two, 1), (two, 2, "resume")):
        command = [sys.executable, "-m", "tests.helpers.resumed_run", str(folder), str(updates), *resume]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        done.append(json.loads(result.stdout))
    return done


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one(runs, name):
    whole, first, resumed = (run[name] for run in runs)
    assert first["stats"] == whole["stats"][:1]
    assert first["weights"] != whole["weights"]
    assert json.dumps(resumed) == json.dumps(whole)
    assert len(whole["stats"]) == 3
    assert len(whole["actions"]) > 0


def learning(folder: Path, agent: Any = None, env: Any = DiceEnv, episodes: int = 12, **options: Any) -> Any:
    agent = agent or make_agent(ChoiceAgent, ppo=SIZES, context="turn")
    options = {"num_envs": 2, "seed": 0, "checkpoint_dir": folder, "checkpoint_every": 1, **options}
    return agent, train(agent, env, episodes=episodes, **options)


def test_resuming_a_finished_run_extends_it(tmp_path):
    _, done = learning(tmp_path)
    _, more = learning(tmp_path, episodes=8, resume=True)
    assert more.returns[:12] == done.returns
    assert len(more.returns) == 20


def test_resume_without_a_checkpoint_starts_a_run(tmp_path):
    _, done = learning(tmp_path / "new", resume=True)
    assert len(done.returns) == 12
    with pytest.raises(ConfigError, match="needs the run_dir or checkpoint_dir"):
        train(make_agent(ChoiceAgent), DiceEnv, episodes=2, resume=True)


class Fickle(DiceEnv):
    """Does not depend on its seed."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.int64, dict]:
        return super().reset(seed=int(np.random.default_rng().integers(2**31)))


def test_episodes_that_cannot_be_replayed_restart_and_are_logged(tmp_path, caplog):
    with pytest.raises(SystemExit):
        stop_after_steps(tmp_path, 1, env=Fickle)
    learning(tmp_path, env=Fickle, resume=True)
    assert "start again" in caplog.text


def test_a_custom_loop_resumes_an_agent(tmp_path):
    def play(agent: Any, turns: int) -> list[Any]:
        said = []
        for turn in range(turns):
            said.append(agent.act(turn))
            agent.assign_reward(float(turn % 3))
            if turn % 2:
                said.append({k: v for k, v in agent.terminate_episode().items() if not k.endswith("_s")})
        return said

    one = make_agent(WordAgent)
    play(one, 6)
    one.save_checkpoint(tmp_path / "checkpoint", loop={"turns": 6})
    other = make_agent(WordAgent, seed=3)
    assert other.load_checkpoint(tmp_path / "checkpoint") == {"turns": 6}
    assert json.dumps(play(one, 8)) == json.dumps(play(other, 8))
    one.act("x")
    one.save_checkpoint(tmp_path / "checkpoint")
    other.load_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(EpisodeError, match="no episode to end"):
        other.terminate_episode()
    other.load_checkpoint(tmp_path / "checkpoint", keep_episodes=True)
    assert other.current_episode_messages == one.current_episode_messages


# Stopping


@pytest.fixture(autouse=True)
def ctrl_c_interrupts():
    """As in a terminal: a shell lets its background jobs ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupting(DiceEnv):
    """Sends its own process a signal after some steps."""

    steps, number = 0, signal.SIGINT

    def step(self, action: int) -> Any:
        type(self).steps -= 1
        if type(self).steps == 0:
            os.kill(os.getpid(), self.number)
        return super().step(action)


def stop_after_steps(folder: Path, steps: int, number: signal.Signals = signal.SIGINT, env: Any = DiceEnv) -> None:
    class Stopped(Interrupting, env):
        pass

    Stopped.__name__, Stopped.steps, Stopped.number = env.__name__, steps, number
    learning(folder, env=Stopped)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_exits(tmp_path, number, caplog):
    with pytest.raises(SystemExit) as exit_:
        stop_after_steps(tmp_path, 7, number)
    assert exit_.value.code == 130
    assert "stopping after the current step and saving" in caplog.text
    assert f"the same train(...) with checkpoint_dir={str(tmp_path)!r}, resume=True" in caplog.text
    _, whole = learning(tmp_path / "whole")
    _, resumed = learning(tmp_path, resume=True)
    assert resumed.returns == whole.returns
    assert resumed.turns == whole.turns
    # Afterwards signals mean what they meant.
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_second_signal_stops_immediately(tmp_path):
    class Twice(DiceEnv):
        def step(self, action: int) -> Any:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            return super().step(action)

    with pytest.raises(KeyboardInterrupt):
        learning(tmp_path, env=Twice)
    # That of the beginning.
    assert sorted(tmp_path.iterdir()) == [checkpoint_path(tmp_path, 0)]


def test_handle_signals_false_keeps_the_handlers(tmp_path):
    class Stopped(Interrupting):
        steps = 3

    with pytest.raises(KeyboardInterrupt):
        learning(tmp_path, env=Stopped, handle_signals=False)


@pytest.mark.long
def test_a_killed_run_resumes_from_its_last_checkpoint(tmp_path):
    """The short version of scripts/reliability/kill_and_resume.py."""
    command = [sys.executable, "-m", "tests.helpers.endless_run", str(tmp_path / "run")]
    updates = []
    for _ in range(3):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(3):
                updates.append(int(process.stdout.readline()))
            process.kill()
        kept = newest(tmp_path / "run")
        assert kept is not None
        # The checkpoint of an update is written before the next step.
        assert json.loads((kept / MANIFEST).read_text())["updates"] >= updates[-2]
    assert updates == sorted(updates)
    assert len(set(updates)) >= 7


# Failures


class Broken(DiceEnv):
    """Fails, or hangs, at a step; the run that goes on afterwards is of an environment of this name, too."""

    fails_at, error, hangs = -1, ValueError("out of cards"), False

    def __init__(self, number: int = 0) -> None:
        self.number, self.steps = number, 0

    def step(self, action: int) -> Any:
        self.steps += 1
        if self.number == 1 and self.steps == self.fails_at:
            if self.hangs:
                time.sleep(60)
            raise self.error
        return super().step(action)


def broken(**attributes: Any) -> Any:
    numbers = iter(range(100))
    kind = type("DiceEnv", (Broken,), attributes)
    return lambda: kind(next(numbers))


@pytest.mark.parametrize("steps", [1, 9])
def test_a_failing_environment_is_named_and_the_run_resumes_before_the_step(tmp_path, steps, caplog):
    with pytest.raises(ValueError, match="out of cards"):
        learning(tmp_path, env=broken(fails_at=steps))
    assert "failed in environment 1; the last complete state is saved in" in caplog.text
    _, resumed = learning(tmp_path, resume=True)
    _, whole = learning(tmp_path / "whole")
    assert resumed.returns == whole.returns
    assert resumed.turns == whole.turns


@pytest.mark.long
def test_a_hanging_environment_is_named_and_the_run_is_saved(tmp_path, caplog):
    agent = make_agent(ChoiceAgent, ppo=SIZES, context="turn")
    with pytest.raises(EnvironmentTimeoutError, match=r"Environments \[0, 1\].*env_timeout=2"):
        learning(
            tmp_path, agent, lambda: type("DiceEnv", (Broken,), {"fails_at": 6, "hangs": True})(1), env_timeout=2.0
        )
    assert "the last complete state is saved in" in caplog.text
    _, resumed = learning(tmp_path, resume=True)
    assert len(resumed.returns) == 12


@pytest.mark.long
def test_an_environment_that_hangs_during_replay_is_named(tmp_path):
    with pytest.raises(SystemExit):
        stop_after_steps(tmp_path, 3)
    hangs = type("DiceEnv", (Broken,), {"fails_at": 1, "hangs": True})
    with pytest.raises(EnvironmentTimeoutError, match=r"Environments \[0, 1\].*within 4.5 seconds.*env_timeout=1.5"):
        learning(tmp_path, env=lambda: hangs(1), env_timeout=1.5, resume=True)
    # Nothing was lost by that.
    assert len(learning(tmp_path, resume=True)[1].returns) == 12


@pytest.mark.long
def test_episodes_in_worker_processes_are_the_same(tmp_path):
    agents = [make_agent(ChoiceAgent, ppo=SIZES, context="turn") for _ in range(2)]
    here = train(agents[0], DiceEnv, episodes=8, num_envs=2, seed=0)
    there = train(agents[1], DiceEnv, episodes=8, num_envs=2, seed=0, env_timeout=60.0)
    assert here.returns == there.returns
    with pytest.raises(ValueError, match="out of cards"):
        learning(tmp_path, env=lambda: type("DiceEnv", (Broken,), {"fails_at": 2})(1), env_timeout=60.0)
    _, resumed = learning(tmp_path, resume=True, env_timeout=60.0)
    assert len(resumed.returns) == 12


class GameError(Exception):
    """Takes other arguments than its text, so that Python cannot unpickle it."""

    def __init__(self, table: int, reason: str) -> None:
        super().__init__(f"table {table}: {reason}")


class LockedError(ValueError):
    """Holds what cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


@pytest.mark.long
@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        # Gymnasium takes the traceback for a format: of these "% o" and "%s" want arguments, "%" is none.
        (ValueError("a sure win at 50% of %s"), ValueError, "a sure win at 50% of %s"),
        (RuntimeError("100%"), RuntimeError, "100%"),
        (GameError(3, "no dealer"), RuntimeError, "GameError: table 3: no dealer"),
        (LockedError("no key"), RuntimeError, "LockedError: no key"),
    ],
    ids=["a format", "a per cent", "other arguments", "not to be pickled"],
)
def test_errors_of_worker_processes_are_unchanged(error, raised, text, caplog, recwarn):
    failing = type("DiceEnv", (Broken,), {"fails_at": 1, "error": error})
    with pytest.raises(raised) as caught:
        train(make_agent(ChoiceAgent, ppo=SIZES), lambda: failing(1), episodes=4, num_envs=1, seed=0, env_timeout=60.0)
    assert type(caught.value) is raised
    assert text in str(caught.value)
    assert "failed in environment 0" in caplog.text
    # Where it was raised, in the other process.
    assert "in step" in str(caught.value.__cause__)
    assert not recwarn.list


def test_out_of_memory_halves_microbatches_until_they_fit(monkeypatch, caplog):
    agent = make_agent(ChoiceAgent, ppo=SIZES)
    evaluate = agent.policy.evaluate

    def limited(segments: Any, reference: bool = False) -> Any:
        if agent.learner.pass_tokens > 256:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return evaluate(segments, reference)

    monkeypatch.setattr(agent.policy, "evaluate", limited)
    result = train(agent, DiceEnv, episodes=12, num_envs=2, seed=0)
    assert len(result.updates) > 1
    for size in (512, 256):
        assert caplog.text.count(f"memory has run out: from now on a pass takes {size} tokens") == 1
    # A resumed run does not try the size again that did not fit: it would round otherwise.
    resumed = make_agent(ChoiceAgent, ppo=SIZES)
    resumed.learner.load_state_dict(agent.learner.state_dict())
    assert resumed.learner.pass_tokens == agent.learner.pass_tokens == 256
    monkeypatch.setattr(agent.policy, "evaluate", lambda *_: exec("raise MemoryError"))
    with pytest.raises(MemoryError):
        train(agent, DiceEnv, episodes=12, num_envs=2, seed=0)


class Failing:
    """A tracker whose disk is full."""

    def log(self, metrics: Any, step: int) -> None:
        raise OSError("disk full")

    def close(self) -> None:
        pass


def test_a_failing_tracker_does_not_end_a_run(tmp_path, caplog):
    with closing(JsonlTracker(tmp_path / "metrics.jsonl")) as jsonl:
        agent = make_agent(ChoiceAgent, ppo=SIZES)
        result = train(agent, DiceEnv, episodes=12, num_envs=2, seed=0, tracker=MultiTracker(Failing(), jsonl))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(result.updates) > 1
    assert caplog.text.count("Failing cannot log") == 1
    assert (
        len(
            train(
                make_agent(ChoiceAgent, ppo=SIZES), DiceEnv, episodes=12, num_envs=2, seed=0, tracker=Failing()
            ).updates
        )
        > 1
    )


def test_a_resumed_run_does_not_duplicate_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(JsonlTracker(path)) as tracker:
        learning(tmp_path / "run", tracker=tracker)
    lines = path.read_text()
    with closing(JsonlTracker(path)) as tracker:
        tracker.log({"lost": 1.0}, 99)
        _, result = learning(tmp_path / "run", tracker=tracker, resume=True)
    assert path.read_text().startswith(lines)
    logged = [json.loads(line)["updates"] for line in path.read_text().splitlines()]
    assert logged == [stats["updates"] for stats in result.updates]


# Files


def write(folder: Path, content: str = "all") -> None:
    with atomic_folder(folder, "checkpoint", {"run": "mine"}) as whole:
        (whole / "a.txt").write_text(content)
        (whole / "inner").mkdir()
        (whole / "inner" / "b.txt").write_text(content)


def test_reads_the_state_that_was_written(tmp_path):
    state = {
        "plain": {"a": [1, 2.5, None, "x", True], "empty": {}, "nan": [float("nan"), float("-inf")]},
        "tensors": [torch.arange(3), {"b": torch.randn(2, 2)}, torch.tensor(1.5, dtype=torch.bfloat16)],
    }
    write_state(tmp_path, "state", state)
    again = read_state(tmp_path, "state")
    assert str(again) == str(state)
    (tmp_path / "state.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state(tmp_path, "state")


def test_saves_tensors_that_share_memory(tmp_path):
    whole = torch.arange(6.0)
    state = {"one": whole, "same": whole, "tail": whole[2:], "middle": whole[1:4], "empty": whole[3:3]}
    write_state(tmp_path, "state", state)
    assert str(read_state(tmp_path, "state")) == str(state)
    # Loaded tensors are views of one file.
    (tmp_path / "again").mkdir()
    write_state(tmp_path / "again", "state", read_state(tmp_path, "state"))
    assert str(read_state(tmp_path / "again", "state")) == str(state)


@pytest.mark.skipif(os.name == "nt", reason="needs the modes of Unix")
def test_saved_files_have_the_mode_of_the_umask(tmp_path):
    agent = make_agent(WordAgent)
    before = os.umask(0o027)
    try:
        agent.save_checkpoint(tmp_path / "checkpoint")
        agent.save(tmp_path / "agent")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files if path.stat().st_mode & 0o777 != 0o640} == set()
    assert {path.suffix for path in files} >= {".json", ".safetensors", ".md"}


def test_rejects_a_loop_state_that_cannot_be_saved(tmp_path):
    agent = make_agent(WordAgent)
    agent.save_checkpoint(tmp_path / "now", loop={"seen": [1]})
    with pytest.raises(ConfigError, match="loop/seen/1 is a set, which cannot be saved"):
        agent.save_checkpoint(tmp_path / "now", loop={"seen": [1, {2}]})
    assert agent.load_checkpoint(tmp_path / "now") == {"seen": [1]}


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        ({"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}, "Two tensors would be saved as loop/a/b"),
        ({"x": {"__number__": "3"}}, "loop/x has '__number__' as its only key"),
        ({"x": {"__tensor__": "foo"}}, "loop/x has '__tensor__' as its only key"),
        ({"x": torch.eye(2).to_sparse()}, r"loop/x is a tensor that cannot be saved .*sparse_coo"),
        ({"x": torch.ones(1, dtype=torch.complex64)}, r"loop/x is a tensor that cannot be saved \(torch\.complex64"),
        ({"x": 10**5000}, "loop/x is an int of 16610 bits"),
        (reduce(lambda state, _: {"in": state}, range(3000), {}), "has more than 100 levels"),
        ({"seen_\udcff.txt": torch.ones(1)}, "contains a lone surrogate"),
    ],
    ids=range(8),
)
def test_rejects_a_loop_state_that_cannot_be_read_again(loop, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        make_agent(WordAgent).save_checkpoint(tmp_path / "now", loop=loop)
    assert list(tmp_path.iterdir()) == []


def test_saves_lone_surrogates_in_keys_without_tensors(tmp_path):
    agent = make_agent(WordAgent)
    agent.save_checkpoint(tmp_path / "now", loop={"seen_\udcff": 1, "last": "\udcff"})
    assert agent.load_checkpoint(tmp_path / "now") == {"seen_\udcff": 1, "last": "\udcff"}


@pytest.mark.parametrize("name", ["options", "kind", "schema", "llamagym", "files"])
def test_rejects_facts_with_reserved_names(name, tmp_path):
    with pytest.raises(ConfigError, match=rf"facts has \['{name}'\], which llamagym writes itself"):
        make_agent(WordAgent).save_checkpoint(tmp_path / "now", facts={name: 5, "turns": 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["", "[]", '{"kind": "agent", "files": {}, "schema": 2}', None])
def test_a_run_continues_past_its_damaged_checkpoint(tmp_path, damage, caplog):
    _, whole = learning(tmp_path / "whole")
    learning(tmp_path / "run", episodes=8)
    damaged = newest(tmp_path / "run")
    (damaged / "notes.txt").write_text("mine")
    if damage is None:
        (damaged / MANIFEST).unlink()
    else:
        (damaged / MANIFEST).write_text(damage)
    before = {path.name: path.read_bytes() for path in damaged.iterdir()}
    learning(tmp_path / "run", resume=True, keep_checkpoints=99)
    assert "Taking an older one" in caplog.text
    # The same turn was reached again, and nothing was deleted.
    verify(damaged, "checkpoint")
    (aside,) = (tmp_path / "run").glob(f"{damaged.name}-damaged-*")
    assert f"it is moved to '{aside.name}'" in caplog.text
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == before
    assert len(whole.returns) == 12


def test_a_checkpoint_with_a_damaged_file_is_replaced(tmp_path, caplog):
    learning(tmp_path / "run", episodes=8)
    damaged = newest(tmp_path / "run")
    (damaged / "notes.txt").write_text("mine")
    (damaged / "state.json").write_text("{")
    learning(tmp_path / "run", resume=True, keep_checkpoints=99)
    assert "Taking an older one" in caplog.text
    verify(damaged, "checkpoint")
    assert (damaged / "notes.txt").read_text() == "mine"
    assert list((tmp_path / "run").glob("*-damaged-*")) == []


def break_manifest(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | changes))


DAMAGE = {
    "a byte": (lambda folder: (folder / "inner" / "b.txt").write_text("alt"), "damaged: 'inner/b.txt'"),
    "a file": (lambda folder: (folder / "a.txt").unlink(), "damaged: 'a.txt' is missing"),
    "the manifest": (lambda folder: (folder / MANIFEST).write_text("{"), "cannot be read"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "holds no checkpoint of llamagym"),
    "another kind": (lambda folder: break_manifest(folder, kind="model"), "holds: model; expected: checkpoint"),
    "a later version": (lambda folder: break_manifest(folder, schema=SCHEMA + 1), "Use the version that wrote it"),
    "an earlier version": (lambda folder: break_manifest(folder, schema=SCHEMA - 1), "Use the version that wrote it"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_skips_damaged_and_foreign_checkpoints_for_an_older_one(tmp_path, what, caplog):
    damage, message = DAMAGE[what]
    for turns in (1, 2):
        write(checkpoint_path(tmp_path, turns))
    damage(checkpoint_path(tmp_path, 2))
    with pytest.raises(CheckpointError, match=message):
        verify(checkpoint_path(tmp_path, 2), "checkpoint")
    assert newest(tmp_path) == find(tmp_path) == checkpoint_path(tmp_path, 1)
    assert "Taking an older one" in caplog.text
    damage(checkpoint_path(tmp_path, 1))
    with pytest.raises(CheckpointError, match=r"None of the 2 checkpoints.*pass another folder"):
        newest(tmp_path)


def test_rejects_a_folder_without_checkpoints(tmp_path):
    assert newest(tmp_path) is None
    with pytest.raises(CheckpointError, match="is neither a checkpoint nor a folder with checkpoints"):
        make_agent(WordAgent).load_checkpoint(tmp_path)


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for turns, score in ((1, 0.5), (2, 3.0), (3, 1.0), (4, 2.0), (5, None)):
        with atomic_folder(checkpoint_path(tmp_path, turns), "checkpoint", {"return_mean": score, "run": "mine"}):
            pass
    prune(tmp_path, 2, checkpoint_path(tmp_path, 5), "mine")
    assert sorted(tmp_path.iterdir()) == [checkpoint_path(tmp_path, turns) for turns in (2, 4, 5)]
    assert best(tmp_path) == checkpoint_path(tmp_path, 2)


def test_pruning_keeps_a_good_checkpoint_beside_a_damaged_newer_one(tmp_path):
    for turns in (10, 40):
        write(checkpoint_path(tmp_path, turns))
    DAMAGE["a file"][0](checkpoint_path(tmp_path, 40))
    write(checkpoint_path(tmp_path, 20))
    prune(tmp_path, 1, checkpoint_path(tmp_path, 20), "mine")
    assert newest(tmp_path) == checkpoint_path(tmp_path, 20)
    # A byte of it is wrong, which only a checksum tells.
    write(checkpoint_path(tmp_path, 50))
    DAMAGE["a byte"][0](checkpoint_path(tmp_path, 50))
    write(checkpoint_path(tmp_path, 30))
    prune(tmp_path, 1, checkpoint_path(tmp_path, 30), "mine")
    assert newest(tmp_path) == checkpoint_path(tmp_path, 30)


def test_finds_a_checkpoint_in_a_backup(tmp_path):
    write(checkpoint_path(tmp_path, 1))
    checkpoint_path(tmp_path, 1).rename(tmp_path / f".replaced-{checkpoint_path(tmp_path, 1).name}")
    assert newest(tmp_path) == checkpoint_path(tmp_path, 1)


def test_pruning_keeps_checkpoints_of_later_versions(tmp_path):
    for turns in (1, 2, 3):
        write(checkpoint_path(tmp_path, turns))
    DAMAGE["a later version"][0](checkpoint_path(tmp_path, 1))
    prune(tmp_path, 1, checkpoint_path(tmp_path, 3), "mine")
    assert sorted(tmp_path.iterdir()) == [checkpoint_path(tmp_path, turns) for turns in (1, 3)]


def test_a_new_run_rejects_a_folder_with_checkpoints(tmp_path):
    learning(tmp_path / "run", episodes=20)
    before = sorted((tmp_path / "run").iterdir())
    with pytest.raises(CheckpointError, match=r"of an earlier run, the newest is .*Pass resume=True"):
        learning(tmp_path / "run", episodes=20)
    assert sorted((tmp_path / "run").iterdir()) == before


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    agent, _ = learning(tmp_path / "run")
    before = newest(tmp_path / "run")
    assert before is not None

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left.*Older checkpoints are unchanged"):
        learning(tmp_path / "run", episodes=20, resume=True)
    with pytest.raises(CheckpointError, match=rf"cannot write the checkpoint '{before}'.*No space left"):
        agent.save_checkpoint(before)
    monkeypatch.undo()
    assert newest(tmp_path / "run") == before
    assert not list((tmp_path / "run").glob(f"{atomic.SCRATCH_PREFIX}*"))
    assert len(learning(tmp_path / "run", episodes=8, resume=True)[1].returns) == 20


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
@pytest.mark.parametrize("limit", [0, 1000, 30_000])
def test_a_failed_write_keeps_the_old_checkpoint(tmp_path, limit):
    import resource

    agent, _ = learning(tmp_path / "run")
    before = newest(tmp_path / "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"(?i)too large.*Older checkpoints are unchanged"):
            learning(tmp_path / "run", agent, episodes=30, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    assert newest(tmp_path / "run") == before


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("replaces", [False, True])
def test_a_kill_during_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch, replaces):
    # Every tensor takes several writes, the manifest too.
    monkeypatch.setattr(file_operations, "BLOCK_BYTES", 64)

    def save(turns: int, number: float) -> None:
        with atomic_folder(checkpoint_path(tmp_path, turns), "checkpoint") as whole:
            write_state(whole, "state", {"a": torch.full((30,), number), "b": [number, torch.ones(3)]})

    save(1, 1.0)
    points, found = 0, set()
    while not killed_at(points, lambda: save(1 if replaces else 2, 2.0)):
        kept = newest(tmp_path)
        assert kept is not None
        state = read_state(kept, "state")
        assert state["a"].tolist() == [state["b"][0]] * 30
        found.add(state["b"][0])
        points += 1
    assert points > 30
    # Whatever comes after the rename is no loss either.
    assert found == {1.0, 2.0}


# What does not fit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "qwen2"}, "other frozen weights"),
        ({"activated": False}, "under a LoRA that is activated or scaled otherwise"),
        ({"ppo": {"critic": "lstd"}}, r"learner.critic was None and is now 'lstd'\. Pass those"),
        ({"ppo": {"learning_rate": 0.1, "gamma": 0.5}}, r"learning_rate was 0\.0003 and is now 0\.1.*gamma was 1\.0"),
        ({"algorithm": "grpo"}, "algorithm was 'ppo' and is now 'grpo'"),
        ({"replay_config_dict": {}}, "replay_config_dict was None and is now {"),
        ({"generate": {"temperature": 2.0}}, "generate_config_dict.temperature was 1.0 and is now 2.0"),
        (
            {"context": "turn", "response_prefix": "I"},
            "context was 'episode' and is now 'turn'; response_prefix was ''",
        ),
        ({"calibrate_choices": False}, "calibrate_choices was True"),
    ],
)
def test_rejects_a_checkpoint_of_another_agent_unchanged(tmp_path, options, message):
    make_agent(WordAgent).save_checkpoint(tmp_path / "checkpoint")
    other = make_agent(WordAgent, **options)
    before = str(collector_of(other).state_dict())
    with pytest.raises(CheckpointError, match=message):
        other.load_checkpoint(tmp_path / "checkpoint")
    assert str(collector_of(other).state_dict()) == before


def test_no_change_is_offered_where_it_would_not_help(tmp_path):
    make_agent(ChoiceAgent, algorithm="grpo").save_checkpoint(tmp_path / "now")
    with pytest.raises(CheckpointError, match=r"learner.algorithm was 'grpo' and is now 'ppo'") as caught:
        make_agent(ChoiceAgent).load_checkpoint(tmp_path / "now")
    assert "allow_changes" not in str(caught.value)


def test_options_without_effect_may_differ(tmp_path):
    make_agent(WordAgent, seed=np.int64(1), invalid_action_penalty=np.float32(-0.5)).save_checkpoint(tmp_path / "now")
    options = {"seed": 2, "ppo": {"max_tokens_per_pass": 64, "seed": 5}, "invalid_action_penalty": -0.5}
    make_agent(WordAgent, **options).load_checkpoint(tmp_path / "now")
    break_manifest(tmp_path / "now", options={"learner": {"algorithm": "ppo", "microbatch_nodes": 32}})
    make_agent(WordAgent, **options).load_checkpoint(tmp_path / "now")
    # Nor need an option be known to the version that wrote a checkpoint.
    break_manifest(tmp_path / "now", options={"learner": {"algorithm": "ppo"}, "of another version": 1})
    make_agent(WordAgent, ppo={"gamma": 0.5}).load_checkpoint(tmp_path / "now")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 4}, "num_envs was 2 and is now 4"),
        ({"seed": None}, "seed was 0 and is now None"),
    ],
)
def test_rejects_resuming_with_other_options(tmp_path, options, message):
    _, done = learning(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        learning(tmp_path, resume=True, **options)
    assert learning(tmp_path, resume=True)[1].returns[:12] == done.returns


@pytest.mark.parametrize(
    "saved", [list(range(200_000)), "x" * 200_000, {"a": "x" * 200_000}], ids=["list", "text", "dict"]
)
def test_a_large_value_in_a_manifest_is_a_short_error(tmp_path, saved):
    make_agent(WordAgent).save_checkpoint(tmp_path / "now")
    manifest = json.loads((tmp_path / "now" / MANIFEST).read_text())
    (tmp_path / "now" / MANIFEST).write_text(json.dumps(manifest | {"train": {"num_envs": saved}}))
    with pytest.raises(CheckpointError, match=r"num_envs was .*\.\.\. and is now 4") as raised:
        check_options(tmp_path / "now", "train", {"num_envs": 4})
    assert len(str(raised.value)) < 1000


def test_a_changed_list_is_shown_around_its_first_difference():
    one, other = list(range(1000)), [*range(998), 0, 999]
    assert re.search(r"^a was \.\.\..* 998, 999\] and is now \.\.\..* 0, 999\]$", describe_change("a", one, other))


class Terse(ChoiceAgent):
    """Another agent, though its methods are the same."""


class Instructed(ChoiceAgent):
    """Says at length what to do."""

    prompt = "You walk. " * 20 + "Say where to go."

    def get_system_prompt(self) -> str:
        return self.prompt


def test_rejects_resuming_with_another_agent_or_environment(tmp_path):
    gym.register("Dice-v3", DiceEnv)
    gym.register("Coin-v0", DiceEnv)
    try:
        agent, done = learning(tmp_path, make_agent(Instructed, ppo=SIZES, context="turn"), "Dice-v3")
        with pytest.raises(CheckpointError, match=r"environment\.id was 'Dice-v3' and is now 'Coin-v0'"):
            learning(tmp_path, agent, "Coin-v0", resume=True)
        agent.prompt += " Now."
        message = r"system_prompt was '\.\.\..*to go\.' and is now '\.\.\..*to go\. Now\.'"
        with pytest.raises(CheckpointError, match=message):
            learning(tmp_path, agent, "Dice-v3", resume=True)
        del agent.prompt
        # However it was made, as far as anybody knows by what.
        for env in (lambda: gym.make("Dice-v3"), DiceEnv):
            assert learning(tmp_path, agent, env, resume=True)[1].returns[:12] == done.returns
        other = make_agent(Terse, ppo=SIZES, context="turn")
        with pytest.raises(CheckpointError, match="class was 'Instructed' and is now 'Terse'"):
            other.load_checkpoint(tmp_path)
    finally:
        for name in ("Dice-v3", "Coin-v0"):
            gym.registry.pop(name)


@pytest.mark.parametrize("env_id", [object(), [1], ("a", {}), b"x"])
def test_rejects_ids_and_groups_that_cannot_be_saved(env_id):
    agent = make_agent(WordAgent)
    with pytest.raises(EpisodeError, match=r"Pass a number, a string, or a tuple of such"):
        agent.act_batch(["x"], [env_id])
    agent.act("x")
    agent.assign_reward(0.0)
    with pytest.raises(EpisodeError, match="The group"):
        agent.terminate_episode(group=env_id)
    agent.terminate_episode(group=("a", 1))


def test_rejects_invalid_checkpoint_options(tmp_path):
    for options in ({"checkpoint_every": 0}, {"keep_checkpoints": 0}, {"checkpoint_every": "2"}):
        with pytest.raises(ConfigError, match=r"whole number of at least 1|must be an int"):
            learning(tmp_path, **options)


def test_saves_actions_of_any_space(tmp_path):
    class Anything(gym.Env):
        observation_space = gym.spaces.Discrete(10)
        action_space = gym.spaces.Dict(
            {"turn": gym.spaces.Box(-1.0, 1.0, (2,)), "say": gym.spaces.Text(5), "n": gym.spaces.MultiDiscrete([3, 3])}
        )

        def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.int64, dict]:
            super().reset(seed=seed)
            self.total = 0.0
            return np.int64(0), {}

        def step(self, action: Any) -> Any:
            self.total += float(action["turn"].sum()) + len(action["say"]) + int(action["n"][0])
            return np.int64(self.total), self.total, self.total > 9, False, {}

    class Actor(WordAgent):
        def extract_action(self, response: str) -> Any:
            size = len(response)
            return {"turn": np.full(2, size / 9, np.float32), "say": "x" * (size % 4 + 1), "n": np.array([size % 3, 1])}

    class StopInTheMiddle(Callback):
        def on_episode_end(self, run: Any, episode: Any) -> bool:
            return len(run.returns) < 4

    def play(folder: Path, **options: Any) -> list[float]:
        agent = make_agent(Actor, ppo=SIZES, context="turn", generate={"max_new_tokens": 3})
        return learning(folder, agent, Anything, 8, **options)[1].returns

    assert len(play(tmp_path, callbacks=StopInTheMiddle())) == 4
    assert play(tmp_path, resume=True) == play(tmp_path / "whole", callbacks=Callback())


def test_a_run_without_checkpoints_logs_nothing_of_them(caplog):
    with caplog.at_level(logging.INFO):
        train(make_agent(ChoiceAgent), CountdownEnv, episodes=3)
    assert "checkpoint" not in caplog.text
