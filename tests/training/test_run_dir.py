"""`train(run_dir=...)`: its files, resuming, Ctrl-C; and scores by a function."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamagym import Callback, ConfigError, EvaluationResult, Score, ScoreCallback, evaluate, train
from llamagym.saving.checkpoints import newest
from llamagym.training.comparison import Comparison
from llamagym.training.evaluation import EVALUATION_SEED, as_score
from llamagym.training.report.scores import read_scores
from tests.helpers.agents import ChoiceAgent, CountdownEnv, make_agent
from tests.helpers.resumed_run import SIZES, DiceEnv


@pytest.fixture(autouse=True)
def _ctrl_c_interrupts():
    """As in a terminal; a shell lets its background jobs ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def learning(folder: Path | None, episodes: int = 12, callbacks: Any = None, env: Any = DiceEnv, **options: Any) -> Any:
    agent = make_agent(ChoiceAgent, ppo=SIZES, context="turn")
    options = {"eval_episodes": 2 if folder and not callbacks else None, **options}
    return train(agent, env, episodes=episodes, num_envs=2, seed=0, run_dir=folder, callbacks=callbacks, **options)


class InterruptAfter(Callback):
    """Sends Ctrl-C to this process after some steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def on_step(self, run: Any) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def test_writes_metrics_transcripts_checkpoints_settings_and_a_report(tmp_path):
    result = learning(tmp_path / "run")
    written = {path.name for path in (tmp_path / "run").iterdir()}
    names = {"checkpoints", "config.json", "metrics.jsonl", "report.html", "scores.json", "transcripts.jsonl"}
    assert written == names
    assert result.report == tmp_path / "run" / "report.html"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(result.updates) > 1
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert settings["episodes"] == 12
    assert settings["batch_size"] == SIZES["batch_size"]
    assert newest(tmp_path / "run" / "checkpoints") is not None


def test_evaluates_the_agent_before_and_after_beside_a_random_policy(tmp_path, capsys):
    result = learning(tmp_path / "run", eval_episodes=20)
    assert list(result.scores) == ["before", "after", "random"]
    assert {score.episodes for score in result.scores.values()} == {20}
    assert read_scores(tmp_path / "run" / "scores.json") == result.scores
    same = evaluate("random", DiceEnv, episodes=20, seed=EVALUATION_SEED, num_envs=2)
    assert result.scores["random"] == as_score(same)
    shown = capsys.readouterr().err
    lines = str(result).splitlines()
    assert len(lines) == 5
    assert lines[-1] == f"Report: {result.report}"
    for line, (name, score) in zip(lines, result.scores.items(), strict=False):
        assert line.split() == f"{name} {score}".split()
        assert f"{name}: {score}\n" in shown


def test_evaluations_change_no_training_and_take_none_of_its_time(tmp_path):
    result, unlooked = learning(None, eval_episodes=50), learning(None)
    times = ("act_s", "learn_s")
    updates = [
        [{key: stats[key] for key in stats if key not in times} for stats in run.updates] for run in (result, unlooked)
    ]
    assert updates[0] == updates[1]
    assert learning(None, eval_episodes=2000).minutes < result.minutes + 0.05


def test_a_resumed_run_keeps_its_first_scores_and_says_where_it_goes_on(tmp_path, capsys):
    before = learning(tmp_path, eval_episodes=10).scores
    capsys.readouterr()
    result = learning(tmp_path, episodes=8, eval_episodes=10, resume=True)
    assert (result.scores["before"], result.scores["random"]) == (before["before"], before["random"])
    assert result.scores["after"] != before["after"]
    first_line = capsys.readouterr().err.splitlines()[0]
    folder = tmp_path / "checkpoints" / "checkpoint-0000000000"
    assert first_line.startswith(f"resumed from {folder}")
    assert re.search(r" after \d updates, 12 episodes, \d+ turns, 0.0 minutes; 100% of the budget is left$", first_line)


@pytest.mark.parametrize("damage", ["", "[", "[1]", '{"before": 3, "random": {"mean": "x"}}', "[" * 100_000])
def test_damaged_scores_are_left_out(tmp_path, damage):
    learning(tmp_path, eval_episodes=2)
    (tmp_path / "scores.json").write_text(damage)
    assert list(learning(tmp_path, eval_episodes=2, resume=True).scores) == ["after"]


class Picky(DiceEnv):
    """Accepts only actions that its agent takes."""

    def step(self, action: int) -> Any:
        if action == 2:
            raise ValueError("action 2 is not mine")
        return super().step(action)


class Careful(ChoiceAgent):
    def extract_action(self, response: str) -> int:
        return min(super().extract_action(response), 1)


def test_an_environment_that_rejects_random_actions_is_trained_in_all_the_same(caplog):
    agent = make_agent(Careful, ppo=SIZES, context="turn")
    result = train(agent, Picky, episodes=6, num_envs=2, seed=0, eval_episodes=20)
    assert list(result.scores) == ["before", "after"]
    assert "The evaluation 'random' failed, and is left out: ValueError('action 2 is not mine')" in caplog.text


def test_an_exact_score_replaces_evaluations(tmp_path):
    exact = ScoreCallback(lambda agent: 0.5 * agent.policy.num_updates, baselines={"random": -1, "optimum": 2.5})
    result = learning(tmp_path, callbacks=exact)
    assert {name: score.mean for name, score in result.scores.items()} == {
        "before": 0.0,
        "after": 0.5 * len(result.updates),
        "random": -1.0,
        "optimum": 2.5,
    }
    assert read_scores(tmp_path / "scores.json") == result.scores
    assert str(result).splitlines()[3].split() == ["optimum", "2.500"]
    with pytest.raises(ConfigError, match=r"baselines\['random'\] is 'low' \(str\); expected a number"):
        ScoreCallback(lambda agent: 0.0, baselines={"random": "low"})


def test_rejects_a_negative_number_of_evaluation_episodes():
    with pytest.raises(ConfigError, match="eval_episodes=-1"):
        learning(None, eval_episodes=-1)


def test_a_result_is_shown_briefly_and_with_its_report_in_a_notebook(tmp_path):
    result = learning(tmp_path, eval_episodes=2)
    assert repr(result) == f"<TrainingResult: 12 episodes, {result.turns} turns, {len(result.updates)} updates>"
    page = result._repr_html_()
    assert page.count("<iframe") == 1
    assert "&lt;!doctype html&gt;" in page
    assert "<script" not in page
    result.report.unlink()
    assert "<iframe" not in result._repr_html_()
    unlooked = str(learning(None)).splitlines()
    assert unlooked[0].startswith("mean return ")
    assert len(unlooked) == 2


def test_track_adds_a_tracker_and_needs_a_folder(tmp_path):
    learning(tmp_path / "run", track=["csv"])
    assert (tmp_path / "run" / "metrics.csv").is_file()
    with pytest.raises(ConfigError, match="needs the run_dir"):
        learning(None, track=["csv"])
    with pytest.raises(ConfigError, match="track names 'nope'"):
        learning(tmp_path / "other", track=["csv", "nope"])
    assert not (tmp_path / "other").exists()


def test_rejects_the_folder_of_another_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"holds the metrics of a run, and no checkpoint.*Pass another"):
        learning(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_an_invalid_call_leaves_no_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot be made"):
        learning(tmp_path / "run", env="NoSuchEnvironment-v0")
    assert not (tmp_path / "run").exists()


def test_an_interrupted_run_is_resumed_exactly(tmp_path, caplog):
    whole = learning(tmp_path / "whole", callbacks=Callback())
    with pytest.raises(SystemExit) as exit_:
        learning(tmp_path / "run", callbacks=InterruptAfter(7))
    assert exit_.value.code == 130
    assert f"the same train(...) with run_dir={str(tmp_path / 'run')!r}, resume=True" in caplog.text
    assert not (tmp_path / "run" / "report.html").exists()
    resumed = learning(tmp_path / "run", callbacks=Callback(), resume=True)
    assert resumed.returns == whole.returns
    assert resumed.report.is_file()
    metrics = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "run")]
    entropies = [[json.loads(line)["entropy"] for line in lines] for lines in metrics]
    # The checkpoint of the interrupt drops caches, and recomputed numbers are rounded differently.
    assert entropies[0] == pytest.approx(entropies[1], abs=1e-6)


def test_an_interrupted_run_without_a_folder_is_saved(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    whole = learning(None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit):
        learning(None, callbacks=InterruptAfter(7))
    (folder,) = tmp_path.glob("runs/ChoiceAgent-*/checkpoints")
    assert f"checkpoint_dir={str(folder)!r}, resume=True" in caplog.text
    resumed = learning(None, checkpoint_dir=folder.relative_to(tmp_path), resume=True)
    assert resumed.returns == whole.returns


def test_an_interrupt_does_not_end_an_interactive_session(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt):
        learning(tmp_path, callbacks=InterruptAfter(3))
    assert newest(tmp_path / "checkpoints") is not None


class Counting(Callback):
    """Counts the trainings that it has prepared."""

    def __init__(self) -> None:
        self.prepared = 0

    def on_training_start(self, run: Any) -> None:
        self.prepared += not run.is_resumed

    def state_dict(self) -> dict[str, Any]:
        return {"prepared": self.prepared}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.prepared = state["prepared"]


def test_callback_states_are_saved_before_the_first_step(tmp_path):
    class Failing(DiceEnv):
        def step(self, action: int) -> Any:
            raise BlockingIOError("no dice")

    Failing.__name__ = DiceEnv.__name__
    with pytest.raises(BlockingIOError):
        learning(tmp_path, callbacks=Counting(), env=Failing)
    counting = Counting()
    learning(tmp_path, callbacks=counting, resume=True)
    assert counting.prepared == 1


# Scores


def scored(
    score: Any, every: int = 1, updates: int = 3, **options: Any
) -> tuple[ScoreCallback, list[dict[str, float]]]:
    """Train for a number of updates of one episode each."""
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 3})
    callback = ScoreCallback(score, every=every, **options)
    return callback, train(agent, CountdownEnv, episodes=updates, num_envs=1, seed=0, callbacks=callback).updates


def test_scores_before_during_and_after_training():
    seen: list[int] = []

    def score(agent: Any) -> float:
        seen.append(agent.policy.num_updates)
        return 0.5 * agent.policy.num_updates

    callback, updates = scored(score, every=2, name="exact")
    # Before the first update, after the second, and at the end.
    assert seen == [0, 2, 3]
    assert (callback.before, callback.after) == (Score(0.0), Score(1.5))
    assert [stats.get("exact") for stats in updates] == [None, 1.0, None]
    assert all("standard_error" not in stats for stats in updates)


def test_the_last_update_is_scored_once():
    calls: list[int] = []
    scored(lambda agent: float(calls.append(1) or len(calls)), every=1)
    assert len(calls) == 4


def test_a_score_of_evaluate_adds_its_standard_error():
    callback, updates = scored(lambda agent: EvaluationResult([0.0, 1.0]))
    assert callback.after == as_score(EvaluationResult([0.0, 1.0]))
    assert (callback.after.mean, callback.after.standard_error) == (0.5, 0.5)
    assert [stats["standard_error"] for stats in updates] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    "value", [{"mean": 1}, "7", np.complex64(1 + 2j), np.bytes_(b"7"), 10**5000, None, np.zeros(2)], ids=range(7)
)
def test_rejects_a_score_that_is_not_a_number(value):
    with pytest.raises(ConfigError, match=rf"returned .* \({type(value).__name__}\); expected a number"):
        scored(lambda agent: value)


def test_rejects_an_interval_of_scores_below_1():
    with pytest.raises(ConfigError, match="every=0"):
        ScoreCallback(lambda agent: 0.0, every=0)


# Errors of users and of their machines


def test_a_score_added_on_resume_can_be_resumed_again(tmp_path):
    learning(tmp_path, episodes=4)
    learning(tmp_path, episodes=8, callbacks=ScoreCallback(lambda agent: 1.0), resume=True)
    score = ScoreCallback(lambda agent: 1.0)
    learning(tmp_path, episodes=12, callbacks=score, resume=True)
    assert score.before is None
    assert score.after == Score(1.0)


def test_reordered_callbacks_get_their_own_states(tmp_path):
    learning(tmp_path, callbacks=[Counting(), ScoreCallback(lambda agent: 1.0)])
    counting, score = Counting(), ScoreCallback(lambda agent: 2.0)
    learning(tmp_path, callbacks=[score, counting], resume=True)
    assert counting.prepared == 1
    assert score.before == Score(1.0)


def test_does_not_mix_the_metrics_of_two_runs(tmp_path):
    learning(tmp_path / "run", checkpoint_dir=tmp_path / "elsewhere")
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    # The folder has no checkpoint, so nothing can be resumed.
    with pytest.raises(ConfigError, match="holds the metrics of a run"):
        learning(tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == metrics


class Late(Callback):
    """Sends Ctrl-C to this process after the last step."""

    def on_training_end(self, run: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_after_the_last_step_ends_the_program(tmp_path, caplog):
    with pytest.raises(SystemExit):
        learning(tmp_path, callbacks=Late())
    assert "Stopped and saved" in caplog.text
    # Only its end was missing.
    resumed = learning(tmp_path, resume=True)
    assert len(resumed.returns) == 12
    assert resumed.report.is_file()


class LateError(Callback):
    """Fails after the last step."""

    def on_training_end(self, run: Any) -> None:
        raise BlockingIOError("the last evaluation failed")


@pytest.mark.parametrize(("late", "error"), [(Late, SystemExit), (LateError, BlockingIOError)])
def test_logs_that_nothing_is_left_to_do(tmp_path, caplog, late, error):
    with pytest.raises(error):
        learning(tmp_path, callbacks=late())
    assert len(learning(tmp_path, resume=True).returns) == 12
    assert "The interrupted call's budget is used up (12 episodes" in caplog.text
    # That call has ended now, so the next one trains.
    assert len(learning(tmp_path, resume=True).returns) == 24


@pytest.mark.parametrize("path", ["", "file", "file/below", "~nobody_of_this_name/run"])
def test_rejects_paths_that_cannot_be_folders(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    for name in ("run_dir", "checkpoint_dir"):
        with pytest.raises(ConfigError, match=f"{name}={path!r}"):
            train(make_agent(ChoiceAgent), DiceEnv, episodes=2, **{name: path})
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_rejects_a_single_name_of_a_tracker(tmp_path):
    with pytest.raises(ConfigError, match=r"track must be a list of strings, got 'csv' \(str\)"):
        learning(tmp_path, track="csv")


def test_trains_without_a_stderr(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert len(learning(None).updates) > 1


def test_records_what_was_used_rather_than_what_a_user_calls_alike(tmp_path):
    agent = make_agent(ChoiceAgent, ppo=SIZES, context="turn", seed=0)
    user = {"batch_size": 1, "agent": "mine", "note": "first try"}
    train(agent, DiceEnv, episodes=4, num_envs=2, seed=7, run_dir=tmp_path, eval_episodes=0, config=user)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["seed"] == 7
    assert settings["batch_size"] == SIZES["batch_size"]
    assert (settings["agent"], settings["note"], settings["context"]) == ("ChoiceAgent", "first try", "turn")
    assert "DiceEnv" in settings["environment"]["class"]
    with pytest.raises(ConfigError, match="config= needs the run_dir"):
        learning(None, config=user)


class Fragile(DiceEnv):
    """Breaks in evaluations, whose seeds are their own."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        if Fragile.is_broken:
            raise OSError("the port is in use")
        return super().reset(seed=seed)


def test_an_evaluation_that_fails_does_not_end_the_training(tmp_path, caplog):
    class BreakAtTheEnd(Callback):
        def on_training_end(self, run: Any) -> None:
            Fragile.is_broken = True

    Fragile.is_broken = False
    result = learning(tmp_path, env=Fragile, callbacks=BreakAtTheEnd(), eval_episodes=4)
    assert list(result.scores) == ["before", "random"]
    assert "The evaluation 'after' failed, and is left out: OSError('the port is in use')" in caplog.text
    assert result.report.is_file()


def test_a_kill_in_the_last_evaluation_leaves_only_that_to_do(tmp_path, monkeypatch):
    def killed(comparison: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Comparison, "evaluate_after", killed)
        with pytest.raises(KeyboardInterrupt):
            learning(tmp_path, eval_episodes=4)
    result = learning(tmp_path, eval_episodes=4, resume=True)
    assert len(result.returns) == 12
    assert list(result.scores) == ["before", "after", "random"]
    # Now it has ended, so another call has a budget of its own.
    assert len(learning(tmp_path, eval_episodes=4, resume=True).returns) == 24


def test_baselines_are_named_after_other_policies():
    for name in ("before", "after", 1):
        with pytest.raises(ConfigError, match="Use other policies' names"):
            ScoreCallback(lambda agent: 0.0, baselines={name: 1.0})


def test_a_text_among_the_shown_statistics_does_not_end_the_training(capsys):
    class Grade(Callback):
        def on_update(self, run: Any, stats: Any) -> None:
            stats["success_rate"] = "high"
            run.note(3)

    result = learning(None, callbacks=Grade())
    assert result.updates[0]["success_rate"] == "high"
    assert "\n3\n" in capsys.readouterr().err


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_run_whose_score_is_not_finite_is_resumed_and_reported(tmp_path, value):
    learning(tmp_path, callbacks=ScoreCallback(lambda agent: value))
    score = ScoreCallback(lambda agent: 1.0)
    result = learning(tmp_path, episodes=4, callbacks=score, resume=True)
    assert repr(score.before.mean) == repr(value)
    assert list(read_scores(tmp_path / "scores.json")) == ["after"]
    assert result.report.is_file()
