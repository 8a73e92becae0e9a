"""Scores of policies, and the file that keeps them in a run's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...options import as_number, json_safe
from ...saving.atomic import replace_file

_FIELDS = ("mean", "standard_error", "interval", "episodes", "success_rate")


class Score(NamedTuple):
    """A measurement of a policy.

    Attributes:
        mean: The mean return, or another score, in the unit of the function that computed it.
        standard_error: Its standard error; 0 if the score is computed exactly.
        interval: 95 % confidence interval of the mean; None if the score is computed exactly, or of a single episode.
        episodes: Number of played episodes; 0 if the score is computed exactly.
        success_rate: Share of successful episodes; None if unknown.
    """

    mean: float
    standard_error: float = 0.0
    interval: tuple[float, float] | None = None
    episodes: int = 0
    success_rate: float | None = None

    def __str__(self) -> str:
        """Returns the mean, and its interval and number of episodes if it is not exact.

        >>> print(Score(-0.0472))
        -0.047
        >>> print(Score(0.5, 0.1, (0.31, 0.69), 25))
        0.500 (95% interval 0.310 to 0.690, 25 episodes)
        """
        if not self.episodes:
            return f"{self.mean:.3f}"
        interval = ""
        if self.interval is not None:
            interval = f"95% interval {self.interval[0]:.3f} to {self.interval[1]:.3f}, "
        return f"{self.mean:.3f} ({interval}{self.episodes} episodes)"


def saved_score(record: Any) -> Score | None:
    """Returns the score that `Score._asdict` and JSON have saved; None if it is damaged."""
    if not isinstance(record, Mapping) or set(record) != set(_FIELDS):
        return None
    interval = record["interval"]
    is_pair = isinstance(interval, (list, tuple)) and len(interval) == 2
    if interval is not None and not is_pair:
        return None
    numbers = [record["mean"], record["standard_error"], record["episodes"], *(interval or ())]
    numbers += [] if record["success_rate"] is None else [record["success_rate"]]
    if not all(isinstance(number, (int, float)) for number in numbers):
        return None
    values = {**record, "interval": None if interval is None else tuple(interval)}
    return Score(**values)


def write_scores(folder: Path, scores: Mapping[str, Score]) -> None:
    """Writes the scores of a run into its folder."""
    records = {name: score._asdict() for name, score in scores.items()}
    replace_file(folder / "scores.json", json.dumps(json_safe(records), indent=1) + "\n")


def read_scores(path: Path) -> dict[str, Score]:
    """Returns the scores in a file; without those that are damaged or not finite, which no page can show."""
    records = None
    with suppress(OSError, ValueError, RecursionError):
        records = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(records, dict):
        return {}
    scores = {name: saved_score(record) for name, record in records.items()}
    return {name: score for name, score in scores.items() if score is not None and _is_finite(score)}


def _is_finite(score: Score) -> bool:
    numbers = [score.mean, score.standard_error, score.episodes, *(score.interval or ())]
    return all(math.isfinite(as_number(number)) for number in numbers)
