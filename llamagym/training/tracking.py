"""Where statistics go: files, the trackers that accelerate knows, or several of these."""

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
from .run_folder import CONFIG, MARK, mark_of, new_run_id, require_run_folder, run_id_of
from .services import ServiceTracker

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float | str]


@runtime_checkable
class Tracker(Protocol):
    """Takes metrics as they arise.

    An error that it raises is logged, and training goes on. With an attribute `stops_on_error = True` it ends the
    training instead, after a checkpoint.
    """

    def log(self, metrics: Metrics, step: int) -> None:
        """Record metrics that belong to `step` (episodes finished so far)."""

    def close(self) -> None:
        """Write out what is pending."""


@runtime_checkable
class Rewindable(Protocol):
    """A tracker that can drop what a resumed run will write again."""

    def position(self) -> Any:
        """How much has been written, as JSON holds it."""

    def rewind(self, position: Any) -> None:
        """Drop what was written after a position."""


class JsonlTracker:
    """One JSON object a line, written at once, so that a killed run keeps its history."""

    def __init__(self, path: str | Path) -> None:
        """Append to `path`, creating its folder.

        Raises:
            ConfigError: The path is invalid, or the file cannot be written.
        """
        path = _appendable(path)
        self._path = path
        self._dropped = b""
        try:
            ends_a_line = _ends_a_line(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be written: {error}. Pass another path.") from error
        if not ends_a_line:
            # A killed process left a part of a line; the next one must not continue it.
            self._file.write("\n")
            self._file.flush()

    def log(self, metrics: Metrics, step: int) -> None:
        """Append a line; a number that is not finite, which JSON has no word for, is left out."""
        row = as_statistics({"step": step, **metrics})
        self._append({name: value for name, value in row.items() if isinstance(value, str) or math.isfinite(value)})

    def _append(self, *lines: Mapping[str, Any]) -> None:
        # In one piece: a process that is killed leaves whole lines.
        self._file.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        self._file.flush()

    def position(self) -> dict[str, Any]:
        """Number of bytes written so far, and what identifies the file."""
        size = self._file.tell()
        return {"size": size, "sha256": self._checksum(size), "path": str(self._path)}

    def rewind(self, position: Mapping[str, Any]) -> None:
        """Drops what was written after a position, since a resumed run writes it again.

        Raises:
            CheckpointError: The position is of another file; nothing is dropped.
        """
        self._dropped = b""
        size = _size_of(position, self._path)
        if size > self._file.tell():
            return
        _require_same_file(position, self._checksum(size), self._path)
        with self._path.open("rb") as file:
            file.seek(size)
            self._dropped = file.read(self._file.tell() - size)
        self._file.truncate(size)
        self._file.seek(size)

    def undo_rewind(self) -> None:
        """Appends what the last `rewind` dropped."""
        self._file.buffer.write(self._dropped)
        self._file.flush()

    def _checksum(self, size: int) -> str:
        """Checksum of the first bytes of the file."""
        with self._path.open("rb") as file:
            return hashlib.sha256(file.read(size)).hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CsvTracker:
    """A table for spreadsheets: a line per update, a column per metric; a new metric adds a column."""

    def __init__(self, path: str | Path) -> None:
        """Append to `path`, creating its folder.

        Raises:
            ConfigError: The path is invalid, or the file is not a table that this class wrote.
        """
        self._path = _appendable(path)
        self._columns = ["step"]
        self._rows: list[dict[str, str]] = []
        self._dropped: list[dict[str, str]] = []
        try:
            if self._path.exists():
                self._read()
            # A killed process left a part of a line; the next one must not continue it.
            self._is_stale = not _ends_a_line(self._path)
        except (OSError, ValueError, csv.Error) as error:
            raise ConfigError(
                f"{str(self._path)!r} cannot be read as a table: {error}. Move it away, or pass another path."
            ) from error

    def _read(self) -> None:
        """Reads the table; one that could not be written again without a loss is rejected.

        Raises:
            ValueError: It has other columns than a table of this class, or a line does not fit them.
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
        """Appends a line; one that cannot be written is dropped as a whole."""
        row = {name: str(value) for name, value in {"step": step, **metrics}.items()}
        new = [name for name in row if name not in self._columns]
        self._rows.append(row)
        self._columns += new
        try:
            if new or self._is_stale or len(self._rows) == 1:
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
            # A part of the line may be in the file.
            self._is_stale = True
            raise

    def position(self) -> dict[str, Any]:
        """Number of lines written so far, and what identifies the table."""
        size = len(self._rows)
        return {"size": size, "sha256": self._checksum(size), "path": str(self._path)}

    def rewind(self, position: Mapping[str, Any]) -> None:
        """Drops the lines after a position, since a resumed run writes them again.

        Raises:
            CheckpointError: The position is of another table; nothing is dropped.
        """
        self._dropped = []
        size = _size_of(position, self._path)
        if size >= len(self._rows):
            return
        _require_same_file(position, self._checksum(size), self._path)
        dropped = self._rows[size:]
        del self._rows[size:]
        try:
            self._rewrite()
        except BaseException:
            self._rows += dropped
            raise
        self._dropped = dropped

    def undo_rewind(self) -> None:
        """Appends the lines that the last `rewind` dropped."""
        if self._dropped:
            self._rows += self._dropped
            self._rewrite()

    def _checksum(self, size: int) -> str:
        """Checksum of the first rows, whatever columns were added later."""
        rows = [sorted((name, value) for name, value in row.items() if value) for row in self._rows[:size]]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def close(self) -> None:
        """Nothing is pending."""

    def _rewrite(self) -> None:
        """Write all lines again; a process that is killed meanwhile leaves the file as it was."""
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, self._columns)
        writer.writeheader()
        writer.writerows(self._rows)
        replace_file(self._path, table.getvalue())
        self._is_stale = False


class TranscriptTracker(JsonlTracker):
    """A few episodes in words, one a line (see `learners.transcripts`): the report shows them.

    Of the first 16 updates each is recorded, up to the 32nd every second, up to the 64th every fourth and so on: eight
    more each time that a run's length doubles.
    """

    def __init__(self, path: str | Path, agent: Agent) -> None:
        """Append to `path` what `agent` keeps of each update."""
        super().__init__(path)
        self._agent = agent

    def log(self, metrics: Metrics, step: int) -> None:
        """Append the transcripts of this update, if it is one that is recorded."""
        update = int(metrics.get("updates", 0))
        if update % (1 << ((update - 1) // 16).bit_length()) == 0:
            self._append(
                *(json_safe({"step": step, "update": update, **told}) for told in collector_of(self._agent).transcripts)
            )


class MultiTracker:
    """Passes everything on to several trackers; with none it is the null tracker.

    An error of a tracker is logged the first time, and everything goes on, unless the tracker's `stops_on_error` is
    True: then it is raised, once all trackers have been called.

    Attributes:
        run_id: Id of the run that the trackers' folder belongs to; empty without a folder.
    """

    # A nested MultiTracker re-raises only errors of trackers with stops_on_error.
    stops_on_error = True

    def __init__(self, *trackers: Tracker) -> None:
        """Passes on to `trackers`; a MultiTracker among them is replaced by its own trackers."""
        self.run_id = ""
        self._trackers: list[Tracker] = []
        for tracker in trackers:
            self._trackers += tracker._trackers if type(tracker) is MultiTracker else [tracker]
        self._logged: set[tuple[int, str]] = set()
        # Trackers that the last `rewind` has rewound.
        self._rewound: list[Tracker] = []

    def log(self, metrics: Metrics, step: int) -> None:
        """Log to each."""
        error = self._call("log", lambda tracker: tracker.log(metrics, step))
        if error is not None:
            raise error

    def position(self) -> list[Any]:
        """Name of the class and position of each tracker that reports a position."""
        positions: list[Any] = []

        def add(tracker: Tracker) -> None:
            if isinstance(tracker, Rewindable):
                name = type(tracker).__name__
                # With as many levels around the position as in a checkpoint.
                saveable = saveable_state({"tracker": [[name, tracker.position()]]}, f"{name}.position()")
                positions.extend(saveable["tracker"])

        self._call("report its position", add)
        return positions

    def rewind(self, position: Sequence[Any]) -> None:
        """Lets each drop what it wrote after its position, whatever trackers were added, dropped or moved since."""
        saved = [entry for entry in position if isinstance(entry, list) and len(entry) == 2]
        if len(saved) != len(position):
            logger.warning(
                "The checkpoint has positions in an older form; nothing is dropped, and lines may be duplicated."
            )
        rewindable = [tracker for tracker in self._trackers if isinstance(tracker, Rewindable)]
        matches: dict[int, Any] = {}
        # By class and file first; the rest by class and order, since a run's folder may have been moved.
        for is_match in (_has_position_of, _is_of_class):
            for tracker in rewindable:
                entry = next((entry for entry in saved if is_match(tracker, entry)), None)
                if entry is not None and id(tracker) not in matches:
                    saved.remove(entry)
                    matches[id(tracker)] = entry[1]

        self._rewound = []

        def rewind(tracker: Tracker) -> None:
            # A tracker without a position of its own has None.
            if isinstance(tracker, Rewindable) and matches.get(id(tracker)) is not None:
                tracker.rewind(matches[id(tracker)])
                self._rewound.append(tracker)

        error = self._call("be rewound", rewind)
        if error is not None:
            self.undo_rewind()
            raise error

    def undo_rewind(self) -> None:
        """Lets each that can do so write again what it dropped in the last `rewind`."""

        def undo(tracker: Tracker) -> None:
            if tracker in self._rewound and hasattr(tracker, "undo_rewind"):
                tracker.undo_rewind()

        self._call("write again what it dropped", undo)

    def close(self) -> None:
        """Close each; nothing is left to be stopped by an error."""
        self._call("be closed", lambda tracker: tracker.close())

    def _call(self, what: str, call: Callable[[Tracker], None]) -> Exception | None:
        """Call each tracker; returns the first error of one that stops on errors, and logs all others."""
        stopping: Exception | None = None
        for index, tracker in enumerate(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # whatever a user's tracker raises
                if getattr(tracker, "stops_on_error", False):
                    stopping = stopping or error
                if (index, what) not in self._logged:
                    logger.warning("%s cannot %s: %r.", type(tracker).__name__, what, error)
                self._logged.add((index, what))
        return stopping


def _is_of_class(tracker: object, entry: Sequence[Any]) -> bool:
    """Whether a saved entry belongs to a tracker of this class."""
    return bool(entry[0] == type(tracker).__name__)


def _has_position_of(tracker: object, entry: Sequence[Any]) -> bool:
    """Whether a saved entry belongs to a tracker of this class that writes to this file."""
    path = getattr(tracker, "_path", None)
    position = entry[1]
    is_same_file = path is not None and isinstance(position, Mapping) and position.get("path") == str(path)
    return is_same_file and _is_of_class(tracker, entry)


def _appendable(path: str | Path) -> Path:
    """The path of a file to append to; its folder exists afterwards.

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
    """The size that a saved position holds.

    Raises:
        CheckpointError: It is damaged, or of an earlier version, which did not identify the file.
    """
    size = position.get("size") if isinstance(position, Mapping) else None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise CheckpointError(
            f"The checkpoint does not identify the file {str(path)!r}: its position is {shortened(position)}. Nothing "
            "is dropped from the file; new lines are appended."
        )
    return size


def _require_same_file(position: Mapping[str, Any], checksum: str, path: Path) -> None:
    """Rejects a saved position of another file.

    Raises:
        CheckpointError: The content before the position differs, or the path where nothing was written before it.
    """
    is_same = position.get("sha256") == checksum
    # All files begin alike where nothing has been written.
    if not position["size"]:
        is_same = is_same and position.get("path") == str(path)
    if not is_same:
        raise CheckpointError(
            f"{str(path)!r} is not the file of the checkpoint, {shortened(position.get('path'))}. Nothing is dropped "
            "from it; new lines are appended."
        )


def _ends_a_line(path: Path) -> bool:
    """Whether a file is missing, empty, or ends with the end of a line."""
    if not path.exists() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder that nothing was written to."""
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
    log_with: Sequence[str] = (),
) -> Tracker:
    """The trackers of a run's folder: `config.json`, `metrics.jsonl`, `transcripts.jsonl`, and others by name.

    Of several processes that learn together, only the main one writes.

    Args:
        run_dir: The folder.
        config: The run's settings.
        project: Project in Weights & Biases, which is used if a project is named here or in `WANDB_PROJECT`.
        mode: Mode of Weights & Biases: "online", "offline" or "disabled"; None honors `WANDB_MODE`.
        agent: The agent whose transcripts are recorded; None records none.
        log_with: "csv", or trackers that accelerate knows: "tensorboard", "wandb", "trackio", "mlflow", ...

    Raises:
        ConfigError: An argument has the wrong type, a tracker is unknown, its package is missing, or the folder is
            invalid or holds something else than a run; then no file has been written.
    """
    check_arguments(default_tracker, locals())
    require_text(run_dir=run_dir)
    folder = user_folder(run_dir, "run_dir")
    return trackers_of_run(folder, config, project, mode, agent=agent, log_with=log_with)


def trackers_of_run(
    folder: Path,
    config: Mapping[str, Any],
    project: str | None = None,
    mode: str | None = None,
    *,
    agent: Agent | None = None,
    log_with: Sequence[str] = (),
    run_id: str = "",
) -> MultiTracker:
    """The trackers of a run's folder; see `default_tracker`.

    Args:
        folder: The folder, as `user_folder` returns it.
        config: As for `default_tracker`.
        project: As for `default_tracker`.
        mode: As for `default_tracker`.
        agent: As for `default_tracker`.
        log_with: As for `default_tracker`.
        run_id: Id of the run; empty takes that of the folder, or a new one.

    Raises:
        ConfigError: As for `default_tracker`.
    """
    if not distributed.is_main_process():
        return MultiTracker()
    require_run_folder(folder)
    run_id = run_id or run_id_of(folder) or new_run_id()
    settings = {**as_json(dict(config)), MARK: mark_of(run_id)}
    if agent is not None:
        settings["dtype"] = str(agent.policy.model.pretrained_model.dtype).removeprefix("torch.")
    project = project or os.environ.get("WANDB_PROJECT")
    # Services write to a folder of the project's name, which may have slashes.
    for path in (Path(project), *Path(project).parents[:-1]) if project else ():
        if (folder / path).is_symlink():
            raise ConfigError(
                f"{str(folder / path)!r} is a symbolic link, which is never written to. Remove it, or pass another "
                "run_dir."
            )
    names = [*log_with, *(["wandb"] if project and "wandb" not in log_with else [])]
    services: list[Tracker] = []
    files: list[Tracker] = []
    try:
        with ExitStack() as on_error:
            on_error.callback(lambda: MultiTracker(*files, *services).close())
            # Services need their folder, and W&B writes elsewhere without it.
            if not folder.exists():
                folder.mkdir(parents=True)
                on_error.callback(_remove_if_empty, folder)
            table = [CsvTracker(folder / "metrics.csv")] if "csv" in names else []
            # Before all other files, since it marks the folder as that of a run, which may be killed at any moment.
            _write_settings(folder / CONFIG, settings, on_error)
            for name in names:
                if name != "csv":
                    options = {"mode": mode, "dir": str(folder)} if name == "wandb" else {}
                    services.append(ServiceTracker(name, folder, settings, project or "llamagym", agent, **options))
            files.append(JsonlTracker(folder / "metrics.jsonl"))
            if agent is not None:
                files.append(TranscriptTracker(folder / "transcripts.jsonl", agent))
            files += table
            on_error.pop_all()
    except OSError as error:
        raise ConfigError(f"run_dir={str(folder)!r} cannot be written: {error}. Pass another folder.") from error
    trackers = MultiTracker(*files, *services)
    trackers.run_id = run_id
    return trackers


def _write_settings(path: Path, settings: Mapping[str, Any], on_error: ExitStack) -> None:
    """Writes the settings of a run; an error that follows brings the older ones back."""
    if path.exists():
        on_error.callback(replace_file, path, path.read_bytes())
    else:
        on_error.callback(path.unlink)
    replace_file(path, json.dumps(json_safe(settings), indent=1) + "\n")
