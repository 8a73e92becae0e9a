"""Where statistics go: files, the trackers that accelerate knows, or several of these."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..agent import Agent
from ..errors import ConfigError
from ..learners import ranks
from ..models.atomic import own_version, replace_file
from ..models.checkpoints import manifests
from ..models.paths import user_folder
from ..options import (
    as_json,
    as_statistics,
    check_arguments,
    explains_wrong_calls,
    json_safe,
    require_text,
    user_path,
)
from .services import ServiceTracker

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float | str]

# The setting by which a run's folder is recognized.
_MARK = "llamagym"
_FILES = ("config.json", "metrics.jsonl", "metrics.csv", "transcripts.jsonl")


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

    def position(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def rewind(self, position: int) -> None:
        """Drop what was written after a position: a run that is resumed writes it again."""
        if position <= self._file.tell():
            self._file.truncate(position)
            self._file.seek(position)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CsvTracker:
    """A table for spreadsheets: a line per update, a column per metric; a new metric adds a column."""

    def __init__(self, path: str | Path) -> None:
        """Append to `path`, creating its folder.

        Raises:
            ConfigError: The path is invalid, or the file cannot be read and written as a table.
        """
        self._path = _appendable(path)
        self._rows: list[dict[str, Any]] = []
        if self._path.exists():
            try:
                with self._path.open(newline="", encoding="utf-8") as file:
                    self._rows = list(csv.DictReader(file, restval=""))
            except (OSError, ValueError, csv.Error) as error:
                raise ConfigError(
                    f"{str(self._path)!r} cannot be read as a table: {error}. Move it away, or pass another path."
                ) from error
        # A line that is too long has its rest under None.
        self._columns = [name for name in self._rows[0] if name is not None] if self._rows else ["step"]
        # A killed process left a part of a line; the next one must not continue it.
        self._is_stale = not _ends_a_line(self._path)

    def log(self, metrics: Metrics, step: int) -> None:
        """Append a line."""
        row = {"step": step, **metrics}
        new = [name for name in row if name not in self._columns]
        self._rows.append(row)
        self._columns += new
        if new or self._is_stale:
            self._rewrite()
            return
        line = io.StringIO(newline="")
        csv.DictWriter(line, self._columns, extrasaction="ignore").writerow(row)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            file.write(line.getvalue())

    def position(self) -> int:
        """Lines written so far."""
        return len(self._rows)

    def rewind(self, position: int) -> None:
        """Drop the lines after a position."""
        if position < len(self._rows):
            del self._rows[position:]
            self._rewrite()

    def close(self) -> None:
        """Nothing is pending."""

    def _rewrite(self) -> None:
        """Write all lines again; a process that is killed meanwhile leaves the file as it was."""
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, self._columns, extrasaction="ignore")
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
            self._append(*(json_safe({"step": step, "update": update, **told}) for told in self._agent.transcripts))


class MultiTracker:
    """Passes everything on to several trackers; with none it is the null tracker.

    An error of a tracker is logged the first time, and everything goes on, unless the tracker's `stops_on_error` is
    True: then it is raised, once all trackers have been called.
    """

    # Within another one: what it raises is what its trackers want to be raised.
    stops_on_error = True

    def __init__(self, *trackers: Tracker) -> None:
        """Pass on to `trackers`."""
        self._trackers = trackers
        self._logged: set[tuple[int, str]] = set()

    def log(self, metrics: Metrics, step: int) -> None:
        """Log to each."""
        error = self._call("log", lambda tracker: tracker.log(metrics, step))
        if error is not None:
            raise error

    def position(self) -> list[Any]:
        """How much each has written; None for those that cannot say."""
        positions: list[Any] = []

        def ask(tracker: Tracker) -> None:
            positions.append(None)
            if isinstance(tracker, Rewindable):
                positions[-1] = tracker.position()

        self._call("say how much it has written", ask)
        return positions

    def rewind(self, position: Sequence[Any]) -> None:
        """Let each drop what it wrote after a position, if it can."""
        positions = iter(position)

        def rewind(tracker: Tracker) -> None:
            written = next(positions, None)
            if isinstance(tracker, Rewindable) and written is not None:
                tracker.rewind(written)

        error = self._call("be rewound", rewind)
        if error is not None:
            raise error

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


def is_run_folder(folder: Path) -> bool:
    """Whether a folder is one that `default_tracker` wrote to."""
    path = folder / "config.json"
    if path.is_file() and not path.is_symlink():
        with suppress(OSError, ValueError, RecursionError):
            settings = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(settings, dict) and _MARK in settings:
                return True
    # Older versions wrote no mark.
    return any(True for _ in manifests(folder / "checkpoints"))


def require_run_folder(folder: Path) -> None:
    """Reject a folder for a run that holds something else.

    Args:
        folder: The folder, as `user_folder` returns it.

    Raises:
        ConfigError: It is neither new, nor empty, nor that of a run.
    """
    names = sorted(os.listdir(folder)) if folder.exists() else []
    if names and not is_run_folder(folder):
        raise ConfigError(
            f"run_dir={str(folder)!r} holds files that are not of a run ({', '.join(map(repr, names[:3]))}"
            f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}). Pass a new or empty folder."
        )
    # A run may come from somebody else: what is appended to a link would end up in a file elsewhere.
    for name in {*names} & {*_FILES}:
        if (folder / name).is_symlink() or not (folder / name).is_file():
            raise ConfigError(f"{str(folder / name)!r} is a link, or not a file. Remove it, or pass another folder.")


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
) -> MultiTracker:
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
    if not ranks.is_main_process():
        return MultiTracker()
    folder = user_folder(run_dir, "run_dir")
    require_run_folder(folder)
    settings = {**as_json(dict(config)), _MARK: own_version()}
    if agent is not None:
        settings["dtype"] = str(agent.policy.model.pretrained_model.dtype).removeprefix("torch.")
    project = project or os.environ.get("WANDB_PROJECT")
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
            # Those that may fail come first.
            table = [CsvTracker(folder / "metrics.csv")] if "csv" in names else []
            for name in names:
                if name != "csv":
                    options = {"mode": mode, "dir": str(folder)} if name == "wandb" else {}
                    services.append(ServiceTracker(name, folder, settings, project or "llamagym", agent, **options))
            # Before other files: it marks the folder as that of a run.
            replace_file(folder / "config.json", json.dumps(json_safe(settings), indent=1) + "\n")
            files.append(JsonlTracker(folder / "metrics.jsonl"))
            if agent is not None:
                files.append(TranscriptTracker(folder / "transcripts.jsonl", agent))
            files += table
            on_error.pop_all()
    except OSError as error:
        raise ConfigError(f"run_dir={str(folder)!r} cannot be written: {error}. Pass another folder.") from error
    return MultiTracker(*files, *services)
