"""Where statistics go: files, the trackers that accelerate knows, or several of these."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..agent import Agent
from ..learners import ranks
from ..options import as_json, as_statistics, check_arguments, explains_wrong_calls, require_text, user_path
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
        """Append to `path`, creating its folder."""
        path = user_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Metrics, step: int) -> None:
        """Append a line; a number that is not finite, which JSON has no word for, is left out."""
        row = as_statistics({"step": step, **metrics})
        finite = {name: value for name, value in row.items() if isinstance(value, str) or math.isfinite(value)}
        self._file.write(json.dumps(finite) + "\n")
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
        """Append to `path`, creating its folder."""
        self._path = user_path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._rows: list[dict[str, Any]] = []
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                self._rows = list(csv.DictReader(file))
        self._columns = list(self._rows[0]) if self._rows else ["step"]

    def log(self, metrics: Metrics, step: int) -> None:
        """Append a line."""
        row = {"step": step, **metrics}
        new = [name for name in row if name not in self._columns]
        self._rows.append(row)
        self._columns += new
        self._write(self._rows if new else [row], anew=bool(new))

    def position(self) -> int:
        """Lines written so far."""
        return len(self._rows)

    def rewind(self, position: int) -> None:
        """Drop the lines after a position."""
        del self._rows[position:]
        self._write(self._rows, anew=True)

    def close(self) -> None:
        """Nothing is pending."""

    def _write(self, rows: Sequence[Mapping[str, Any]], anew: bool) -> None:
        with self._path.open("w" if anew else "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            if anew:
                writer.writeheader()
            writer.writerows(rows)


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
            for transcript in self._agent.transcripts:
                self._file.write(json.dumps({"step": step, "update": update, **transcript}) + "\n")
            self._file.flush()


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
        ConfigError: An argument has the wrong type, a tracker is unknown, or its package is missing; then no file has
            been written.
    """
    check_arguments(default_tracker, locals())
    require_text(run_dir=run_dir)
    if not ranks.is_main_process():
        return MultiTracker()
    folder = user_path(run_dir, "run_dir")
    settings = as_json(dict(config))
    if agent is not None:
        settings["dtype"] = str(agent.policy.model.pretrained_model.dtype).removeprefix("torch.")
    project = project or os.environ.get("WANDB_PROJECT")
    names = [*log_with, *(["wandb"] if project and "wandb" not in log_with else [])]
    trackers: list[Tracker] = []
    with ExitStack() as on_error:
        on_error.callback(lambda: MultiTracker(*trackers).close())
        # Services need their folder, and W&B writes elsewhere without it.
        if not folder.exists():
            folder.mkdir(parents=True)
            on_error.callback(_remove_if_empty, folder)
        # Those that may fail come first.
        for name in names:
            if name != "csv":
                options = {"mode": mode, "dir": str(folder)} if name == "wandb" else {}
                trackers.append(ServiceTracker(name, folder, settings, project or "llamagym", agent, **options))
        on_error.pop_all()
    files: list[Tracker] = [JsonlTracker(folder / "metrics.jsonl")]
    if agent is not None:
        files.append(TranscriptTracker(folder / "transcripts.jsonl", agent))
    if "csv" in names:
        files.append(CsvTracker(folder / "metrics.csv"))
    (folder / "config.json").write_text(json.dumps(settings, indent=1, default=str) + "\n", encoding="utf-8")
    return MultiTracker(*files, *trackers)
