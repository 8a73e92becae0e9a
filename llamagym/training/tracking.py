"""Trackers, which record the statistics of a run: in files, with the trackers of accelerate, or several of these."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from .. import distributed
from ..agent.agent import Agent, collector_of
from ..errors import CheckpointError, ConfigError
from ..options import (
    as_json,
    as_statistics,
    check_arguments,
    explains_wrong_calls,
    json_safe,
    require_text,
    shortened,
    user_path,
)
from ..saving.atomic import replace_file
from ..saving.paths import user_folder
from ..saving.state_files import saveable_state
from .report.scores import Score
from .run_folder import CONFIG, MARK, mark_of, new_run_id, require_run_folder, run_id_of
from .services import ServiceTracker

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float | str]


@runtime_checkable
class Tracker(Protocol):
    """Records metrics during training.

    An error that it raises is logged, and training continues. With an attribute `stops_on_error = True` it ends the
    training instead, after a checkpoint. A method `log_scores(scores, step)`, if there is one, receives the scores of
    the agent before and after training, and of other policies, by name.
    """

    def log(self, metrics: Metrics, step: int) -> None:
        """Records metrics at `step`, the number of finished episodes."""

    def close(self) -> None:
        """Writes what is still buffered."""


@runtime_checkable
class Rewindable(Protocol):
    """A tracker that can delete what a resumed run will write again."""

    def position(self) -> Any:
        """Returns a JSON value that describes how much has been written."""

    def rewind(self, position: Any) -> None:
        """Deletes what was written after a position."""


class JsonlTracker:
    """Writes each update at once as a line of JSON, so that a killed run keeps its history."""

    def __init__(self, path: str | Path) -> None:
        """Opens `path` for appending; creates its folder.

        Raises:
            ConfigError: The path is invalid, or the file cannot be written.
        """
        path = _appendable(path)
        self._path = path
        self._deleted = b""
        try:
            ends_a_line = _ends_a_line(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be written: {error}. Pass another path.") from error
        if not ends_a_line:
            # A killed process left an incomplete line, which the next line must not continue.
            self._file.write("\n")
            self._file.flush()

    def log(self, metrics: Metrics, step: int) -> None:
        """Appends a line, without NaN and infinite numbers, which JSON cannot hold."""
        row = as_statistics({"step": step, **metrics})
        self._append({name: value for name, value in row.items() if isinstance(value, str) or math.isfinite(value)})

    def _append(self, *lines: Mapping[str, Any]) -> None:
        # A single write, so that a killed process leaves complete lines.
        self._file.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        self._file.flush()

    def position(self) -> dict[str, Any]:
        """Returns the number of bytes written so far, and what identifies the file."""
        size = self._file.tell()
        return {"size": size, "sha256": self._checksum(size), "path": str(self._path)}

    def rewind(self, position: Mapping[str, Any]) -> None:
        """Deletes what was written after a position.

        Raises:
            CheckpointError: The position belongs to another file; nothing is deleted.
        """
        self._deleted = b""
        size = _size_of(position, self._path)
        if size > self._file.tell():
            return
        _require_same_file(position, self._checksum(size), self._path)
        with self._path.open("rb") as file:
            file.seek(size)
            self._deleted = file.read(self._file.tell() - size)
        self._file.truncate(size)
        self._file.seek(size)

    def undo_rewind(self) -> None:
        """Appends what the last `rewind` deleted."""
        self._file.buffer.write(self._deleted)
        self._file.flush()

    def _checksum(self, size: int) -> str:
        """Returns the checksum of the first `size` bytes of the file."""
        with self._path.open("rb") as file:
            return hashlib.sha256(file.read(size)).hexdigest()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class CsvTracker:
    """Writes a CSV table with a line per update and a column per metric; a new metric adds a column."""

    def __init__(self, path: str | Path) -> None:
        """Opens `path` for appending; creates its folder.

        Raises:
            ConfigError: The path is invalid, or the file is not a table that this class wrote.
        """
        self._path = _appendable(path)
        self._columns = ["step"]
        self._rows: list[dict[str, str]] = []
        self._deleted: list[dict[str, str]] = []
        try:
            if self._path.exists():
                self._read()
            # After an incomplete line of a killed process, the next line must not continue it.
            self._needs_rewrite = not _ends_a_line(self._path)
        except (OSError, ValueError, csv.Error) as error:
            raise ConfigError(
                f"{str(self._path)!r} cannot be read as a table: {error}. Move it away, or pass another path."
            ) from error

    def _read(self) -> None:
        """Reads the table; rejects one that could not be written again without a loss.

        Raises:
            ValueError: The columns are not those of such a table, or a line has more values than there are columns.
        """
        with self._path.open(newline="", encoding="utf-8") as file:
            lines = [line for line in csv.reader(file) if line]
        if not lines:
            return
        columns = lines.pop(0)
        if columns[0] != "step" or len(set(columns)) != len(columns):
            raise ValueError(f"its columns are {shortened(columns)}, expected distinct ones that begin with 'step'")
        longest = max(map(len, lines), default=0)
        if longest > len(columns):
            raise ValueError(f"a line has {longest} values for {len(columns)} columns")
        self._columns = columns
        self._rows = [dict(zip(columns, line, strict=False)) for line in lines]

    def log(self, metrics: Metrics, step: int) -> None:
        """Appends a line; after an error none of it remains in the table."""
        row = {name: str(value) for name, value in {"step": step, **metrics}.items()}
        new = [name for name in row if name not in self._columns]
        self._rows.append(row)
        self._columns += new
        try:
            if new or self._needs_rewrite or len(self._rows) == 1:
                self._rewrite()
            else:
                self._append(row)
        except BaseException:
            del self._rows[-1]
            del self._columns[len(self._columns) - len(new) :]
            raise

    def _append(self, row: Mapping[str, str]) -> None:
        line = io.StringIO(newline="")
        csv.DictWriter(line, self._columns).writerow(row)
        try:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                file.write(line.getvalue())
        except BaseException:
            # The file may hold a part of the line.
            self._needs_rewrite = True
            raise

    def position(self) -> dict[str, Any]:
        """Returns the number of lines written so far, and what identifies the table."""
        size = len(self._rows)
        return {"size": size, "sha256": self._checksum(size), "path": str(self._path)}

    def rewind(self, position: Mapping[str, Any]) -> None:
        """Deletes the lines after a position.

        Raises:
            CheckpointError: The position belongs to another table; nothing is deleted.
        """
        self._deleted = []
        size = _size_of(position, self._path)
        if size >= len(self._rows):
            return
        _require_same_file(position, self._checksum(size), self._path)
        deleted = self._rows[size:]
        del self._rows[size:]
        try:
            self._rewrite()
        except BaseException:
            self._rows += deleted
            raise
        self._deleted = deleted

    def undo_rewind(self) -> None:
        """Appends the lines that the last `rewind` deleted."""
        if self._deleted:
            self._rows += self._deleted
            self._rewrite()

    def _checksum(self, size: int) -> str:
        """Returns the checksum of the first `size` rows; columns that were added later do not change it."""
        rows = [sorted((name, value) for name, value in row.items() if value) for row in self._rows[:size]]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def close(self) -> None:
        """Does nothing, since nothing is buffered."""

    def _rewrite(self) -> None:
        """Writes all lines again; a process that is killed meanwhile leaves the file unchanged."""
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, self._columns)
        writer.writeheader()
        writer.writerows(self._rows)
        replace_file(self._path, table.getvalue())
        self._needs_rewrite = False


class TranscriptTracker(JsonlTracker):
    """Writes a few episodes as text for the report, a line of JSON each (see `agent.transcripts`).

    It records each of the first 16 updates, every second up to the 32nd, every fourth up to the 64th, and so on: eight
    more updates each time the length of the run doubles.
    """

    def __init__(self, path: str | Path, agent: Agent) -> None:
        """Opens `path` for appending the transcripts of `agent`."""
        super().__init__(path)
        self._agent = agent

    def log(self, metrics: Metrics, step: int) -> None:
        """Appends the transcripts of this update, if it is one that is recorded."""
        update = int(metrics.get("updates", 0))
        interval = 1 << ((update - 1) // 16).bit_length()
        if update % interval == 0:
            transcripts = collector_of(self._agent).transcripts
            lines = [json_safe({"step": step, "update": update, **each}) for each in transcripts]
            self._append(*lines)


class MultiTracker:
    """Calls several trackers, or none.

    An error of a tracker is logged the first time. If the tracker's `stops_on_error` is True, the error is raised once
    all trackers have been called.

    Attributes:
        run_id: Id of the run that the trackers' folder belongs to; empty without a folder.
    """

    # A nested MultiTracker re-raises only errors of trackers with stops_on_error.
    stops_on_error = True

    def __init__(self, *trackers: Tracker) -> None:
        """Wraps `trackers`; a MultiTracker among them is replaced by its own trackers."""
        self.run_id = ""
        self._trackers: list[Tracker] = []
        for tracker in trackers:
            self._trackers += tracker._trackers if type(tracker) is MultiTracker else [tracker]
        self._logged: set[tuple[int, str]] = set()
        # Trackers that the last `rewind` has rewound.
        self._rewound: list[Tracker] = []

    def log(self, metrics: Metrics, step: int) -> None:
        """Logs to each tracker."""
        error = self._call("log", lambda tracker: tracker.log(metrics, step))
        if error is not None:
            raise error

    def log_scores(self, scores: Mapping[str, Score], step: int) -> None:
        """Logs scores to each tracker that has this method."""

        def log(tracker: Tracker) -> None:
            if hasattr(tracker, "log_scores"):
                tracker.log_scores(scores, step)

        error = self._call("log scores", log)
        if error is not None:
            raise error

    def position(self) -> list[Any]:
        """Returns the class name and the position of each tracker that has positions."""
        positions: list[Any] = []

        def add(tracker: Tracker) -> None:
            if isinstance(tracker, Rewindable):
                name = type(tracker).__name__
                # In a checkpoint the position is nested in as many levels, whose number is limited.
                saveable = saveable_state({"tracker": [[name, tracker.position()]]}, f"{name}.position()")
                positions.extend(saveable["tracker"])

        self._call("report its position", add)
        return positions

    def rewind(self, position: Sequence[Any]) -> None:
        """Rewinds each tracker to its position, even if trackers were added, removed or reordered since."""
        saved = [entry for entry in position if isinstance(entry, list) and len(entry) == 2]
        if len(saved) != len(position):
            logger.warning(
                "The checkpoint has positions in an older form; nothing is deleted, and lines may be duplicated."
            )
        rewindable = [tracker for tracker in self._trackers if isinstance(tracker, Rewindable)]
        matches: dict[int, Any] = {}
        # Match by class and file first, then by class and order, since a run's folder may have been moved.
        for is_match in (_is_same_file, _is_same_class):
            for tracker in rewindable:
                entry = next((entry for entry in saved if is_match(tracker, entry)), None)
                if entry is not None and id(tracker) not in matches:
                    saved.remove(entry)
                    matches[id(tracker)] = entry[1]

        self._rewound = []

        def rewind(tracker: Tracker) -> None:
            # The saved position of a tracker without one is None.
            if isinstance(tracker, Rewindable) and matches.get(id(tracker)) is not None:
                tracker.rewind(matches[id(tracker)])
                self._rewound.append(tracker)

        error = self._call("be rewound", rewind)
        if error is not None:
            self.undo_rewind()
            raise error

    def undo_rewind(self) -> None:
        """Lets trackers write again what they deleted in the last `rewind`, if they can."""

        def undo(tracker: Tracker) -> None:
            if tracker in self._rewound and hasattr(tracker, "undo_rewind"):
                tracker.undo_rewind()

        self._call("write again what it deleted", undo)

    def close(self) -> None:
        """Closes each tracker; errors are only logged."""
        self._call("be closed", lambda tracker: tracker.close())

    def _call(self, action: str, call: Callable[[Tracker], None]) -> Exception | None:
        """Calls each tracker and logs new errors; returns the first error of a tracker with `stops_on_error`."""
        stopping_error: Exception | None = None
        for index, tracker in enumerate(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # a user's tracker may raise anything
                if getattr(tracker, "stops_on_error", False):
                    stopping_error = stopping_error or error
                if (index, action) not in self._logged:
                    logger.warning("%s cannot %s: %r.", type(tracker).__name__, action, error)
                self._logged.add((index, action))
        return stopping_error


def _is_same_class(tracker: object, entry: Sequence[Any]) -> bool:
    """Whether a saved entry belongs to a tracker of this class."""
    return bool(entry[0] == type(tracker).__name__)


def _is_same_file(tracker: object, entry: Sequence[Any]) -> bool:
    """Whether a saved entry belongs to a tracker of this class that writes to this file."""
    path = getattr(tracker, "_path", None)
    position = entry[1]
    is_same_path = path is not None and isinstance(position, Mapping) and position.get("path") == str(path)
    return is_same_path and _is_same_class(tracker, entry)


def _appendable(path: str | Path) -> Path:
    """Returns the path of a file to append to; creates its folder.

    Raises:
        ConfigError: The path is invalid, or its folder cannot be created.
    """
    path = user_path(path)
    folder = user_folder(path.parent, "path")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"path={str(path)!r}: its folder cannot be created: {error}. Pass another path.") from error
    if path.is_dir():
        raise ConfigError(f"path={str(path)!r} is a folder. Pass the path of a file.")
    return path


def _size_of(position: Any, path: Path) -> int:
    """Returns the size that a saved position holds.

    Raises:
        CheckpointError: The position is damaged, or from an earlier version, which did not identify the file.
    """
    size = position.get("size") if isinstance(position, Mapping) else None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise CheckpointError(
            f"The checkpoint does not identify the file {str(path)!r}: its position is {shortened(position)}. Nothing "
            "is deleted from the file; new lines are appended."
        )
    return size


def _require_same_file(position: Mapping[str, Any], checksum: str, path: Path) -> None:
    """Rejects a saved position of another file.

    Raises:
        CheckpointError: The content before the position differs; or the path, if there was no content yet.
    """
    is_same = position.get("sha256") == checksum
    # Empty content has the same checksum in all files.
    if not position["size"]:
        is_same = is_same and position.get("path") == str(path)
    if not is_same:
        raise CheckpointError(
            f"{str(path)!r} is not the file of the checkpoint, {shortened(position.get('path'))}. Nothing is deleted "
            "from it; new lines are appended."
        )


def _ends_a_line(path: Path) -> bool:
    """Whether a file is missing, empty, or ends with a line feed."""
    if not path.exists() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _remove_if_empty(folder: Path) -> None:
    """Removes a folder if nothing was written to it."""
    with suppress(OSError):
        folder.rmdir()


@explains_wrong_calls(positional=4)
def default_tracker(
    run_dir: str | Path,
    config: Mapping[str, Any],
    project: str | None = None,
    mode: str | None = None,
    *,
    agent: Agent | None = None,
    track: Sequence[str] = (),
) -> Tracker:
    """Returns the trackers of a run's folder: `config.json`, `metrics.jsonl`, `transcripts.jsonl`, and others by name.

    Of several processes that learn together, only the main one writes.

    Args:
        run_dir: The folder.
        config: The run's settings.
        project: Project in Weights & Biases, which is used only if a project is set here or in `WANDB_PROJECT`.
        mode: Mode of Weights & Biases: "online", "offline" or "disabled"; None honors `WANDB_MODE`.
        agent: The agent whose transcripts are recorded; None records none.
        track: "csv", "tensorboard", "wandb", "mlflow", or another of accelerate's trackers, such as "trackio".

    Raises:
        ConfigError: An argument has the wrong type, a tracker is unknown, its package is missing, or the folder is
            invalid or holds something else than a run. Then no file has been written, except by a tracker that had
            started; the folder stays that of a run.
    """
    check_arguments(default_tracker, locals())
    require_text(run_dir=run_dir)
    folder = user_folder(run_dir, "run_dir")
    return trackers_of_run(folder, config, project, mode, agent=agent, track=track)


def trackers_of_run(
    folder: Path,
    config: Mapping[str, Any],
    project: str | None = None,
    mode: str | None = None,
    *,
    agent: Agent | None = None,
    track: Sequence[str] = (),
    run_id: str = "",
) -> MultiTracker:
    """Returns the trackers of a run's folder; see `default_tracker`.

    Args:
        folder: The folder, as `user_folder` returns it.
        config: As for `default_tracker`.
        project: As for `default_tracker`.
        mode: As for `default_tracker`.
        agent: As for `default_tracker`.
        track: As for `default_tracker`.
        run_id: Id of the run; empty takes that of the folder, or a new one.
    """
    if not distributed.is_main_process():
        return MultiTracker()
    require_run_folder(folder)
    run_id = run_id or run_id_of(folder) or new_run_id()
    settings = {**as_json(dict(config)), MARK: mark_of(run_id)}
    if agent is not None:
        settings["dtype"] = str(agent.policy.model.pretrained_model.dtype).removeprefix("torch.")
    project = project or os.environ.get("WANDB_PROJECT")
    names = list(track)
    if project:
        _require_no_links(folder, project)
        if "wandb" not in names:
            names.append("wandb")
    services: list[Tracker] = []
    files: list[Tracker] = []
    try:
        with ExitStack() as on_error:
            on_error.callback(lambda: MultiTracker(*files, *services).close())
            # Services need their folder, and W&B writes elsewhere without it.
            if not folder.exists():
                folder.mkdir(parents=True)
                on_error.callback(_remove_if_empty, folder)
            tables = [CsvTracker(folder / "metrics.csv")] if "csv" in names else []
            # Before all other files: it marks the folder as that of a run, and the process may be killed at any moment.
            _write_settings(folder / CONFIG, settings, on_error)
            for name in names:
                if name != "csv":
                    options = {"mode": mode, "dir": str(folder)} if name == "wandb" else {}
                    services.append(ServiceTracker(name, folder, settings, project or "llamagym", agent, **options))
            files.append(JsonlTracker(folder / "metrics.jsonl"))
            if agent is not None:
                files.append(TranscriptTracker(folder / "transcripts.jsonl", agent))
            files += tables
            on_error.pop_all()
    except OSError as error:
        raise ConfigError(f"run_dir={str(folder)!r} cannot be written: {error}. Pass another folder.") from error
    trackers = MultiTracker(*files, *services)
    trackers.run_id = run_id
    return trackers


def _unlink_if_alone(path: Path) -> None:
    """Removes a run's mark, unless a service has written into its folder, which would then be nobody's."""
    if len(os.listdir(path.parent)) == 1:
        path.unlink()


def _require_no_links(folder: Path, project: str) -> None:
    """Rejects a run's folder in which a project's folder, where services write, is a link."""
    path = Path(project)
    # A project's name may have slashes.
    for part in (path, *path.parents[:-1]):
        if (folder / part).is_symlink():
            raise ConfigError(
                f"{str(folder / part)!r} is a symbolic link, which is never written to. Remove it, or pass another "
                "run_dir."
            )


def _write_settings(path: Path, settings: Mapping[str, Any], on_error: ExitStack) -> None:
    """Writes the settings of a run; unwinding `on_error` restores the older ones."""
    if path.exists():
        on_error.callback(replace_file, path, path.read_bytes())
    else:
        on_error.callback(_unlink_if_alone, path)
    replace_file(path, json.dumps(json_safe(settings), indent=1) + "\n")
