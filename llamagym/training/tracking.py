"""Where statistics go: the terminal, files, the trackers that accelerate knows, or several of these."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from tqdm import tqdm

from ..agent import Agent
from ..learners import ranks
from ..options import as_json
from .services import ServiceTracker

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float | str]
_NOTEBOOK_COLUMNS = 100
_SKIPPED = ("skipped_steps", "replay_skipped_steps")


@runtime_checkable
class Tracker(Protocol):
    """Takes metrics as they arise."""

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
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def log(self, metrics: Metrics, step: int) -> None:
        """Append a line; a number that is not finite, which JSON has no word for, is left out."""
        finite = {name: value for name, value in metrics.items() if isinstance(value, str) or math.isfinite(value)}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
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
        self._path = Path(path)
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
    """Passes everything on to several trackers; with none it is the null tracker. One that fails stops no other."""

    def __init__(self, *trackers: Tracker) -> None:
        """Pass on to `trackers`."""
        self._trackers = trackers
        self._failing: set[int] = set()

    def log(self, metrics: Metrics, step: int) -> None:
        """Log to each; the first time that one fails, that is said."""
        for index, tracker in enumerate(self._trackers):
            try:
                tracker.log(metrics, step)
            except Exception as error:
                if index not in self._failing:
                    logger.warning("%s cannot log: %r. Training goes on.", type(tracker).__name__, error)
                self._failing.add(index)

    def position(self) -> list[Any]:
        """How much each has written; None for those that cannot say."""
        return [tracker.position() if isinstance(tracker, Rewindable) else None for tracker in self._trackers]

    def rewind(self, position: Sequence[Any]) -> None:
        """Let each drop what it wrote after a position, if it can."""
        for tracker, written in zip(self._trackers, position, strict=False):
            if isinstance(tracker, Rewindable) and written is not None:
                tracker.rewind(written)

    def close(self) -> None:
        """Close each."""
        for tracker in self._trackers:
            tracker.close()


class _CellOutput:
    """A file that shows the last line written to it in one output of a notebook's cell, which is updated in place.

    A stream would show a bar again after everything that is printed in between, and a widget needs ipywidgets.
    """

    def __init__(self, display: Any) -> None:
        """Open an output by IPython's `display`."""
        self._output = display({"text/plain": ""}, raw=True, display_id=True)

    def write(self, text: str) -> None:
        """Show a line, unless it is empty."""
        if line := text.strip():
            self._output.update({"text/plain": line}, raw=True)

    def flush(self) -> None:
        """Nothing is pending."""


def _make_bar(total: int | None, unit: str) -> Any:
    """A bar in a notebook or a terminal; elsewhere a disabled one."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if hasattr(shell, "kernel"):  # a notebook's, not IPython's in a terminal
        from IPython.display import display

        return tqdm(total=total, unit=unit, file=_CellOutput(display), ncols=_NOTEBOOK_COLUMNS)
    return tqdm(total=total, unit=unit, disable=not sys.stderr.isatty())


def default_tracker(
    run_dir: str | Path,
    config: Mapping[str, Any],
    project: str | None = None,
    mode: str | None = None,
    *,
    agent: Agent | None = None,
    log_with: Sequence[str] = (),
) -> MultiTracker:
    """What a run writes to its folder: `config.json`, `metrics.jsonl`, `transcripts.jsonl`, and more if asked for.

    Of several processes that learn together, only the first writes any.

    Args:
        run_dir: The folder.
        config: The run's settings.
        project: Of Weights & Biases, which is used if one is named here or in `WANDB_PROJECT`.
        mode: Of Weights & Biases: "online", "offline" or "disabled"; None honours `WANDB_MODE`.
        agent: Whose transcripts are recorded; None records none.
        log_with: "csv", or trackers that accelerate knows: "tensorboard", "wandb", "trackio", "mlflow", ...

    Raises:
        ConfigError: A tracker is unknown, or its package is missing.
    """
    if not ranks.is_first():
        return MultiTracker()
    folder = Path(run_dir)
    trackers: list[Tracker] = [JsonlTracker(folder / "metrics.jsonl")]
    settings = as_json(dict(config))
    if agent is not None:
        trackers.append(TranscriptTracker(folder / "transcripts.jsonl", agent))
        settings["dtype"] = str(agent.policy.model.pretrained_model.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(settings, indent=1, default=str) + "\n", encoding="utf-8")
    project = project or os.environ.get("WANDB_PROJECT")
    names = [*log_with, *(["wandb"] if project and "wandb" not in log_with else [])]
    with ExitStack() as on_error:
        on_error.callback(lambda: MultiTracker(*trackers).close())
        for name in names:
            if name == "csv":
                trackers.append(CsvTracker(folder / "metrics.csv"))
            else:
                options = {"mode": mode, "dir": str(folder)} if name == "wandb" else {}
                trackers.append(ServiceTracker(name, folder, settings, project or "llamagym", agent, **options))
        on_error.pop_all()
    return MultiTracker(*trackers)


class Progress:
    """How far a run is: a bar in a notebook or a terminal, elsewhere (a file, a pipe, CI) one line per update."""

    def __init__(self, episodes: int | None, unit: str = "episode", window: int = 100) -> None:
        """Begin; of several processes only the first shows anything.

        Args:
            episodes: How many there will be; None is unknown.
            unit: What an episode is called.
            window: Over how many of the last episodes the mean return is taken.
        """
        self._is_shown = ranks.is_first()
        self._bar = _make_bar(episodes, unit) if self._is_shown else tqdm(disable=True)
        self._has_bar = not self._bar.disable
        self._recent: deque[float] = deque(maxlen=window)
        self._unit, self._total, self._done, self._updates = unit, episodes, 0, 0
        self._started = time.perf_counter()

    def __enter__(self) -> Progress:
        """It has begun."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the bar as it stands."""
        self._bar.close()

    def resume(self, returns: Sequence[float], updates: int) -> None:
        """Count what a run that goes on had done before."""
        self._updates = updates
        self.advance(returns, {})

    def advance(self, returns: Sequence[float], stats: Mapping[str, float]) -> None:
        """Count episodes that ended, by their returns, and an update if there are statistics of one."""
        new = len(returns) if self._total is None else min(len(returns), self._total - self._done)
        self._done += new
        self._recent.extend(returns)
        self._updates += bool(stats)
        self._bar.update(new)
        mean = float(np.mean(self._recent)) if self._recent else math.nan
        self._bar.set_postfix_str(f"mean return {mean:+.3f}, updates {self._updates}", refresh=False)
        if stats and not self._has_bar:
            named = [f"{name} {stats[name]:.3g}" for name in ("entropy", "approx_kl") if name in stats]
            # Steps that were not finite, which should not happen.
            named += [f"{name} {stats[name]:.0f}" for name in _SKIPPED if stats.get(name)]
            parts = [f"{self._done} {self._unit}s", f"mean return of the last {len(self._recent)} {mean:+.3f}", *named]
            self.note(f"update {self._updates}: {', '.join(parts)}, {time.perf_counter() - self._started:.0f} s")

    def note(self, line: str) -> None:
        """Show a line, above the bar if there is one."""
        if self._has_bar:
            self._bar.write(line, file=sys.stderr)
        elif self._is_shown:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
