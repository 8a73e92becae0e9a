"""Where statistics go: the terminal, a JSONL file, Weights & Biases, or several of these."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from tqdm import tqdm

from ..learners import ranks

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float | str]
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


class WandbTracker:
    """A Weights & Biases run."""

    def __init__(self, project: str, config: Mapping[str, Any], mode: str | None = None) -> None:
        """Start a run.

        Args:
            project: Its project.
            config: Settings to show beside it.
            mode: "online", "offline" or "disabled"; None honours `WANDB_MODE`.
        """
        import wandb

        self._run = wandb.init(project=project, config=dict(config), mode=mode)  # type: ignore[arg-type]

    def log(self, metrics: Metrics, step: int) -> None:
        """Send metrics."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


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


def default_tracker(
    run_dir: str | Path, config: Mapping[str, Any], project: str | None = None, mode: str | None = None
) -> MultiTracker:
    """`metrics.jsonl` in the run's folder, and W&B if a project is named here or in `WANDB_PROJECT`.

    Of several processes that learn together, only the first gets any.
    """
    if not ranks.is_first():
        return MultiTracker()
    trackers: list[Tracker] = [JsonlTracker(Path(run_dir) / "metrics.jsonl")]
    project = project or os.environ.get("WANDB_PROJECT")
    if project:
        trackers.append(WandbTracker(project, config, mode))
    return MultiTracker(*trackers)


class Progress:
    """How far a run is, on stderr: a bar in a terminal, elsewhere (a file, a pipe, CI) one line per update."""

    def __init__(self, episodes: int | None, unit: str = "episode", window: int = 100) -> None:
        """Begin; of several processes only the first shows anything.

        Args:
            episodes: How many there will be; None is unknown.
            unit: What an episode is called.
            window: Over how many of the last episodes the mean return is taken.
        """
        self._is_shown = ranks.is_first()
        self._has_bar = self._is_shown and sys.stderr.isatty()
        self._bar = tqdm(total=episodes, unit=unit, disable=not self._has_bar)
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
