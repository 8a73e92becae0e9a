"""Trackers: files, TensorBoard and W&B, written by a real run and read back."""

from __future__ import annotations

import csv
import errno
import importlib.util
import json
import math
import os
import shutil
import signal
import struct
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest

from llamagym import Callback, ConfigError, EvalCallback, train
from llamagym.agent.agent import collector_of
from llamagym.saving.checkpoints import newest
from llamagym.training import tracking
from llamagym.training.services import _markdown
from llamagym.training.tracking import CsvTracker, JsonlTracker, MultiTracker, TranscriptTracker, default_tracker
from tests.helpers.agents import ChoiceAgent, CountdownEnv, WordAgent, make_agent


def trained(tmp_path, kind=ChoiceAgent, episodes=8, **trackers):
    agent = make_agent(kind, context="turn", ppo={"batch_size": 6})
    tracker = default_tracker(tmp_path, {"seed": 0, "path": tmp_path}, agent=agent, **trackers)
    result = train(agent, CountdownEnv, episodes=episodes, num_envs=2, seed=0, tracker=tracker)
    tracker.close()
    return agent, result


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.mark.long
@needs("tensorboard")
def test_tensorboard_logs_are_complete(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, result = trained(tmp_path, track=["tensorboard", "csv"])
    log = EventAccumulator(str(tmp_path / "llamagym")).Reload()
    read = [(event.step, event.value) for event in log.Scalars("entropy")]
    assert [step for step, _ in read] == [2, 4, 6, 8]
    assert [value for _, value in read] == pytest.approx([stats["entropy"] for stats in result.updates])
    with (tmp_path / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [float(row["entropy"]) for row in table] == [stats["entropy"] for stats in result.updates]


def wandb_records(path):
    """The records of an offline run's file: LevelDB's log format behind a header of seven bytes."""
    data, at, parts = path.read_bytes(), 7, []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


@pytest.mark.long
@needs("wandb")
def test_offline_wandb_logs_are_complete_with_a_transcript_table(tmp_path, monkeypatch):
    import wandb
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    agent, result = trained(tmp_path, project="llamagym", mode="offline")
    # W&B's process writes the file, which is complete once the process has ended.
    wandb.teardown()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    history = []
    for data in wandb_records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    entropies = [row["entropy"] for row in history if "entropy" in row]
    assert entropies == pytest.approx([stats["entropy"] for stats in result.updates])
    tables = [json.loads(table.read_text()) for table in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert len(tables) == len(result.updates)
    told = {(row[3], row[4]) for table in tables for row in table["data"]}
    assert {reply for _, reply in told} <= set(agent.choices)
    assert ("Observation 3", collector_of(agent).transcripts[0]["turns"][0]["reply"]) in told


def test_rejects_unknown_trackers_and_names_missing_packages(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'tensorboard'"):
        default_tracker(tmp_path, {}, track=["tensorbord"])
    assert tmp_path.is_dir()
    if importlib.util.find_spec("swanlab") is None:
        with pytest.raises(ConfigError, match="pip install swanlab"):
            default_tracker(tmp_path, {}, track=["swanlab"])


@needs("wandb")
@pytest.mark.parametrize("is_passed", [True, False])
def test_a_rejected_project_is_named_and_leaves_no_file(tmp_path, monkeypatch, is_passed):
    if not is_passed:
        monkeypatch.setenv("WANDB_PROJECT", "x/y")
    with pytest.raises(ConfigError, match=r"'wandb' cannot start with the project 'x/y': UsageError: .*Pass another"):
        default_tracker(tmp_path / "run", {}, "x/y" if is_passed else None, "offline")
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_csv_table_adds_columns_and_is_rewound(tmp_path):
    path = tmp_path / "metrics.csv"
    tracker = CsvTracker(path)
    tracker.log({"a": 1.0}, 1)
    tracker.log({"a": 2.0, "b": "x"}, 2)
    position = tracker.position()
    tracker.log({"a": 3.0}, 3)
    assert path.read_text() == "step,a,b\n1,1.0,\n2,2.0,x\n3,3.0,\n"
    CsvTracker(path).rewind(position)
    assert path.read_text() == "step,a,b\n1,1.0,\n2,2.0,x\n"


def test_transcripts_hold_observations_replies_probabilities_and_rewards(tmp_path):
    _, result = trained(tmp_path)
    told = lines(tmp_path / "transcripts.jsonl")
    assert [transcript["update"] for transcript in told] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert {transcript["return"] for transcript in told} <= set(result.returns)
    for transcript in told:
        turns = transcript["turns"]
        assert transcript["system"] == "Say something."
        assert [turn["read"] for turn in turns] == [f"Observation {left}" for left in (3, 2, 1)]
        assert transcript["return"] == sum(turn["reward"] for turn in turns)
        for turn in turns:
            chances = dict(turn["choices"])
            assert turn["reply"] in chances
            assert sum(chances.values()) == pytest.approx(1.0)
            assert math.isfinite(turn["value"])
            assert math.isfinite(turn["advantage"])
    # Advantages are whitened over a batch, here these two episodes.
    first = [turn["advantage"] for transcript in told[:2] for turn in transcript["turns"]]
    assert sum(first) == pytest.approx(0.0, abs=1e-5)


def test_transcripts_of_free_text_have_no_choices(tmp_path):
    class Free(WordAgent):
        def extract_action(self, response):
            return 1

    agent, _ = trained(tmp_path, Free, episodes=2)
    assert {turn["choices"] for transcript in collector_of(agent).transcripts for turn in transcript["turns"]} == {None}


@pytest.mark.long
def test_transcripts_of_long_episodes_and_runs_stay_small(tmp_path):
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 50})
    train(agent, lambda: CountdownEnv(60), episodes=9, num_envs=3, seed=0)
    assert len(collector_of(agent).transcripts) == 3
    assert collector_of(agent).transcripts[0]["length"] == 60
    assert [turn["turn"] for turn in collector_of(agent).transcripts[0]["turns"]][19:21] == [20, 41]
    tracker = TranscriptTracker(tmp_path / "transcripts.jsonl", agent)
    for update in range(1, 1025):
        tracker.log({"updates": update}, update)
    tracker.close()
    recorded = sorted({line["update"] for line in lines(tmp_path / "transcripts.jsonl")})
    assert recorded[:18] == [*range(1, 17), 18, 20]
    assert len(recorded) == 16 + 6 * 8


def test_a_resumed_run_does_not_duplicate_transcripts(tmp_path):
    agent, _ = trained(tmp_path, episodes=2)
    tracker = TranscriptTracker(tmp_path / "transcripts.jsonl", agent)
    written = tracker.position()
    tracker.log({"updates": 2}, 4)
    assert len(lines(tmp_path / "transcripts.jsonl")) == 4
    tracker.rewind(written)
    tracker.close()
    assert len(lines(tmp_path / "transcripts.jsonl")) == 2


def test_a_failed_update_does_not_change_the_transcripts(monkeypatch):
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 2})
    monkeypatch.setattr(agent.learner, "update", lambda batch: 1 / 0)
    agent.act("x")
    agent.assign_reward(1.0)
    agent.terminate_episode()
    agent.act("y")
    agent.assign_reward(2.0)
    with pytest.raises(ZeroDivisionError):
        agent.terminate_episode()
    monkeypatch.undo()
    assert agent.terminate_episode()
    assert [transcript["return"] for transcript in collector_of(agent).transcripts] == [2.0, 1.0]


def test_the_folder_of_a_service_exists_when_it_starts(tmp_path, monkeypatch):
    """W&B writes to a temporary folder if the one that it is given does not exist."""
    existed = []

    class Service:
        def __init__(self, name, run_dir, *settings, **options):
            existed.append(run_dir.is_dir())

        def close(self):
            """Nothing is open."""

    monkeypatch.setattr(tracking, "ServiceTracker", Service)
    default_tracker(tmp_path / "run", {}, track=["wandb"]).close()
    assert existed == [True]


# Trackers that fail


class Full:
    """A tracker that raises "no space left" in every method."""

    def __init__(self, stops=False):
        if stops:
            self.stops_on_error = True

    def fail(self, *given):
        raise OSError(errno.ENOSPC, "No space left on device")

    log = position = rewind = close = fail


def learning(folder, tracker, episodes=4, **options):
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 6})
    where = {"checkpoint_dir": folder, "checkpoint_every": 1, "seed": 0}
    return train(agent, CountdownEnv, episodes=episodes, num_envs=2, tracker=tracker, **where, **options)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_in_a_tracker_does_not_stop_training(tmp_path, caplog):
    (tmp_path / "metrics").symlink_to("/dev/full")
    with closing(MultiTracker(JsonlTracker(tmp_path / "metrics"))) as tracker:
        assert len(learning(tmp_path / "run", tracker).updates) == 2
        assert len(learning(tmp_path / "run", tracker, 2, resume=True).updates) == 3
    assert "JsonlTracker cannot log: OSError(28, 'No space left on device')" in caplog.text


def test_a_failing_tracker_does_not_stop_training(tmp_path, caplog):
    assert len(learning(tmp_path, Full()).updates) == 2
    assert len(learning(tmp_path, Full(), 2, resume=True).updates) == 3
    assert caplog.text.count("Full cannot log") == 2


@pytest.mark.parametrize(
    "wrap", [lambda tracker: tracker, MultiTracker, lambda tracker: MultiTracker(MultiTracker(tracker))]
)
def test_stops_on_error_ends_the_run_after_a_checkpoint(tmp_path, wrap):
    other = JsonlTracker(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="No space left on device"):
        learning(tmp_path / "run", MultiTracker(wrap(Full(stops=True)), other))
    # The other trackers have logged the update, and it is in the checkpoint.
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [2]
    other.close()
    assert len(learning(tmp_path / "run", None, resume=True).updates) == 2


def test_a_tracker_is_rewound_in_a_resumed_run_with_another_folder(tmp_path):
    with closing(JsonlTracker(tmp_path / "own.jsonl")) as own:
        learning(tmp_path / "checkpoints", own)
        shutil.rmtree(newest(tmp_path / "checkpoints"))
        before = lines(tmp_path / "own.jsonl")
        learning(tmp_path / "checkpoints", own, resume=True, run_dir=tmp_path / "run")
    steps = [line["step"] for line in lines(tmp_path / "own.jsonl")]
    assert steps[: len(before)] == [line["step"] for line in before]
    assert steps == sorted(set(steps))


def test_positions_match_trackers_by_class_and_file(tmp_path):
    names = ("a.jsonl", "b.jsonl", "c.csv")

    def trackers(folder):
        return [(CsvTracker if name.endswith("csv") else JsonlTracker)(folder / name) for name in names]

    (tmp_path / "run").mkdir()
    first = trackers(tmp_path / "run")
    for count, tracker in enumerate(first, 1):
        for step in range(count):
            tracker.log({"seen": float(step)}, step)
    position = MultiTracker(*first).position()
    written = [tracker.position() for tracker in first]
    for tracker in first:
        tracker.log({"seen": 9.0}, 9)
        tracker.close()
    # In another order, beside another tracker.
    a, b, c = trackers(tmp_path / "run")
    other = JsonlTracker(tmp_path / "other.jsonl")
    other.log({"seen": 1.0}, 1)
    with closing(MultiTracker(other, c, MultiTracker(b, a))) as moved:
        moved.rewind(position)
        assert [tracker.position() for tracker in (a, b, c)] == written
        assert len(lines(tmp_path / "other.jsonl")) == 1
    # In a folder that was moved.
    for name in names:
        with (tmp_path / "run" / name).open("a") as file:
            file.write('{"step": 9}\n' if name.endswith("jsonl") else "9,9\n")
    (tmp_path / "run").rename(tmp_path / "moved")
    again = trackers(tmp_path / "moved")
    with closing(MultiTracker(*again)) as moved:
        moved.rewind(position)
        assert [tracker.position()["size"] for tracker in again] == [each["size"] for each in written]


@pytest.mark.parametrize("position", [{"size": 0, "path": "x"}, [None, {"size": 0}], [["JsonlTracker", 3]]])
def test_positions_without_a_tracker_delete_nothing(tmp_path, position, caplog):
    with closing(JsonlTracker(tmp_path / "metrics.jsonl")) as tracker:
        tracker.log({"seen": 1.0}, 1)
        MultiTracker(tracker).rewind(position)
    assert len(lines(tmp_path / "metrics.jsonl")) == 1
    assert "nothing is deleted" in caplog.text.lower()


def test_an_unsaveable_position_does_not_stop_training(tmp_path, caplog):
    class Odd(JsonlTracker):
        def position(self):
            return {"seen": {1}}

    with closing(Odd(tmp_path / "metrics.jsonl")) as tracker:
        learning(tmp_path / "run", tracker)
    assert "Odd cannot report its position" in caplog.text


def test_all_trackers_are_closed_after_an_error_of_one(tmp_path):
    other = JsonlTracker(tmp_path / "metrics.jsonl")
    MultiTracker(Full(), other).close()
    with pytest.raises(ValueError, match="closed file"):
        other.log({}, 1)


def test_a_report_that_cannot_be_written_keeps_the_result(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("llamagym.training.loop.write_report", Full().fail)
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 6})
    result = train(agent, CountdownEnv, episodes=4, num_envs=2, seed=0, run_dir=tmp_path)
    assert (len(result.updates), result.report) == (2, None)
    assert "The report of" in caplog.text


# Paths of users


def test_paths_expand_the_home_folder(tmp_path, monkeypatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 6})
    best = EvalCallback(CountdownEnv, episodes=2, every=1, best_dir="~/best")
    monkeypatch.setattr(agent, "save", lambda folder: Path(folder).mkdir(exist_ok=True))
    trackers = MultiTracker(
        CsvTracker("~/a/m.csv"), JsonlTracker("~/b/m.jsonl"), TranscriptTracker("~/c/t.jsonl", agent)
    )
    options = {"run_dir": "~/run", "checkpoint_dir": "~/checkpoints", "callbacks": best, "tracker": trackers}
    train(agent, CountdownEnv, episodes=2, num_envs=2, seed=0, **options)
    trackers.close()
    default_tracker("~/other", {}).close()
    found = {path.name for path in home.iterdir()}
    assert found == {"a", "b", "c", "best", "run", "checkpoints", "other"}
    assert list(elsewhere.iterdir()) == []


def test_an_environment_may_change_the_working_directory(tmp_path, monkeypatch):
    class Wandering(CountdownEnv):
        def reset(self, **given):
            elsewhere = Path(tempfile.mkdtemp(dir=tmp_path / "elsewhere"))
            os.chdir(elsewhere)
            return super().reset(**given)

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 6})
    monkeypatch.setattr(agent, "save", lambda folder: Path(folder).mkdir(exist_ok=True))
    best = EvalCallback(CountdownEnv, episodes=2, every=1, best_dir="best")
    trackers = MultiTracker(CsvTracker("m.csv"), JsonlTracker("m.jsonl"))
    options = {"run_dir": "run", "checkpoint_dir": "checkpoints", "checkpoint_every": 1, "callbacks": best}
    result = train(agent, Wandering, episodes=4, num_envs=2, seed=0, tracker=trackers, track=["csv"], **options)
    trackers.close()
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"best", "checkpoints", "m.csv", "m.jsonl", "run"}
    assert result.report == tmp_path / "here" / "run" / "report.html"
    assert not list((tmp_path / "elsewhere").glob("*/*"))


def test_an_interrupted_run_is_saved_in_the_initial_working_directory(tmp_path, monkeypatch):
    class Wandering(CountdownEnv):
        def step(self, action):
            os.chdir(tmp_path / "elsewhere")
            os.kill(os.getpid(), signal.SIGTERM)
            return super().step(action)

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        train(make_agent(ChoiceAgent), Wandering, episodes=4, num_envs=1)
    assert len(list(tmp_path.glob("runs/*/checkpoints/*"))) == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


class Starting(Callback):
    """Logs to a tracker at the start, and records the ends of trainings."""

    def __init__(self, tracker):
        self.tracker, self.heard = tracker, []

    def on_training_start(self, run):
        self.heard.append("start")
        self.tracker.log({"started": 1.0}, len(run.returns))

    def on_training_end(self, run):
        self.heard.append("over" if run.is_over else "failed")


def test_a_resumed_run_keeps_metrics_logged_at_its_start(tmp_path):
    with closing(JsonlTracker(tmp_path / "own.jsonl")) as own:
        learning(tmp_path / "run", own, callbacks=[Starting(own)])
        shutil.rmtree(newest(tmp_path / "run"))
        learning(tmp_path / "run", own, resume=True, callbacks=[Starting(own)])
    assert sum("started" in line for line in lines(tmp_path / "own.jsonl")) == 2


class Unloadable(Callback):
    """Cannot load its state."""

    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        raise OSError("no state")


def test_a_failed_resume_deletes_no_lines(tmp_path):
    with closing(JsonlTracker(tmp_path / "a.jsonl")) as a:
        trackers = MultiTracker(a, CsvTracker(tmp_path / "b.csv"))
        learning(tmp_path / "run", trackers, callbacks=[Unloadable()])
        shutil.rmtree(newest(tmp_path / "run"))
        before = [(tmp_path / name).read_bytes() for name in ("a.jsonl", "b.csv")]
        for _ in range(2):
            with pytest.raises(OSError, match="no state"):
                learning(tmp_path / "run", trackers, resume=True, callbacks=[Unloadable()])
            assert [(tmp_path / name).read_bytes() for name in ("a.jsonl", "b.csv")] == before
        learning(tmp_path / "run", trackers, resume=True)
    steps = [line["step"] for line in lines(tmp_path / "a.jsonl")]
    assert steps == sorted(set(steps))


class Unplaced:
    """A tracker that cannot be rewound, with the methods of one that can."""

    stops_on_error = True

    def log(self, metrics, step):
        pass

    def close(self):
        pass

    def position(self):
        return None

    def rewind(self, position):
        raise TypeError(f"{position} is not a position")


def test_a_tracker_without_a_position_is_not_rewound(tmp_path):
    learning(tmp_path / "run", Unplaced())
    shutil.rmtree(newest(tmp_path / "run"))
    assert len(learning(tmp_path / "run", Unplaced(), resume=True).updates) > 1


class Lost(Unplaced):
    """A tracker that stops a resume."""

    def position(self):
        return {"size": 1}


def test_started_callbacks_are_notified_of_a_failed_resume(tmp_path):
    with closing(JsonlTracker(tmp_path / "own.jsonl")) as own:
        learning(tmp_path / "run", Lost(), callbacks=[Unloadable()])
        shutil.rmtree(newest(tmp_path / "run"))
        unstarted, started = Starting(own), Starting(own)
        with pytest.raises(TypeError, match="is not a position"):
            learning(tmp_path / "run", Lost(), resume=True, callbacks=[unstarted])
        assert unstarted.heard == []
        with pytest.raises(OSError, match="no state"):
            learning(tmp_path / "run", None, resume=True, callbacks=[started, Unloadable()])
        assert started.heard == ["start", "failed"]


@pytest.mark.long
@needs("mlflow")
@pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")
def test_mlflow_gets_settings_metrics_scores_and_transcripts_in_the_runs_folder(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    result = of_folder(tmp_path / "run", ["mlflow"])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    client = MlflowClient(f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'llamagym'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["batch_size"] == "6"
    assert run.data.metrics["score/after"] == result.scores["after"].mean
    entropies = [metric.value for metric in client.get_metric_history(run.info.run_id, "entropy")]
    assert entropies == pytest.approx([stats["entropy"] for stats in result.updates])
    files = [file.path for file in client.list_artifacts(run.info.run_id, "transcripts")]
    assert len(files) == len(result.updates)
    text = Path(client.download_artifacts(run.info.run_id, files[0])).read_text()
    assert "| Observation 3 |" in text


@pytest.mark.long
@needs("tensorboard")
def test_tensorboard_gets_scores_and_transcripts_as_text(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = of_folder(tmp_path, ["tensorboard"])
    log = EventAccumulator(str(tmp_path / "llamagym")).Reload()
    for name, score in result.scores.items():
        assert log.Scalars(f"score/{name}")[-1].value == pytest.approx(score.mean)
    texts = [event.tensor_proto.string_val[0].decode() for event in log.Tensors("transcripts/text_summary")]
    assert len(texts) == len(result.updates)
    assert all("| Observation 3 |" in text for text in texts)


@pytest.mark.long
@needs("tensorboard")
def test_a_killed_and_resumed_run_has_each_update_once_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def learn(**options):
        agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 6})
        options = {"track": ["tensorboard", "csv"], "eval_episodes": 0, "checkpoint_every": 3, **options}
        return train(agent, CountdownEnv, episodes=16, num_envs=2, seed=0, run_dir=tmp_path / "run", **options)

    def dies(stats):
        if stats["updates"] == 5:
            # The state is not saved, as after a kill.
            os._exit(9)

    child = os.fork()
    if child == 0:
        learn(on_update=dies)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    # TensorBoard reads its files in the order of the seconds in their names.
    time.sleep(1.1)
    result = learn(resume=True)
    log = EventAccumulator(str(tmp_path / "run" / "llamagym")).Reload()
    for tag in ("entropy", "updates"):
        assert [event.step for event in log.Scalars(tag)] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert [event.value for event in log.Scalars("updates")] == [stats["updates"] for stats in result.updates]
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == len(result.updates) == 8
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        assert [float(row["updates"]) for row in csv.DictReader(file)] == [1, 2, 3, 4, 5, 6, 7, 8]


def of_folder(folder, track):
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 6})
    return train(agent, CountdownEnv, episodes=8, num_envs=2, seed=0, run_dir=folder, eval_episodes=4, track=track)


def test_a_cell_of_a_transcript_keeps_its_column():
    row = [1, 2, 3, "a | b\nc", "left", None, 0.123456, -1.0, None]
    assert _markdown([row]).splitlines()[-1] == "| 1 | 2 | 3 | a \\| b c | left |  | 0.123 | -1 |  |"


def test_a_tracker_that_cannot_start_leaves_a_folder_that_can_be_used(tmp_path):
    tensorboard = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    with pytest.raises(ConfigError, match="names 'nope'"):
        of_folder(tmp_path / "run", [*tensorboard, "nope"])
    of_folder(tmp_path / "run", ["csv"])
    assert (tmp_path / "run" / "metrics.csv").is_file()


@pytest.mark.long
@needs("mlflow")
@pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")
def test_a_second_run_has_an_mlflow_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("one", "two"):
        of_folder(tmp_path / name, ["mlflow"])
        assert (tmp_path / name / "mlflow.db").is_file()
    assert "MLFLOW_TRACKING_URI" not in os.environ
