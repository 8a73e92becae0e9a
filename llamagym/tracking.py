"""Where statistics go: a JSONL file, Weights & Biases, or several of these."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

Metrics = Mapping[str, float | str]


class Tracker(Protocol):
    """Takes metrics as they arise."""

    def log(self, metrics: Metrics, step: int) -> None:
        """Record metrics that belong to `step` (episodes finished so far)."""

    def close(self) -> None:
        """Write out what is pending."""


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
    """Passes everything on to several trackers; with none it is the null tracker."""

    def __init__(self, *trackers: Tracker) -> None:
        """Pass on to `trackers`."""
        self._trackers = trackers

    def log(self, metrics: Metrics, step: int) -> None:
        """Log to each."""
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def close(self) -> None:
        """Close each."""
        for tracker in self._trackers:
            tracker.close()


def default_tracker(
    run_dir: str | Path, config: Mapping[str, Any], project: str | None = None, mode: str | None = None
) -> MultiTracker:
    """`metrics.jsonl` in the run's folder, and W&B if a project is named here or in `WANDB_PROJECT`."""
    trackers: list[Tracker] = [JsonlTracker(Path(run_dir) / "metrics.jsonl")]
    project = project or os.environ.get("WANDB_PROJECT")
    if project:
        trackers.append(WandbTracker(project, config, mode))
    return MultiTracker(*trackers)
