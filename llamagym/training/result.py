"""The result of a training run: what it learned, in numbers, in five lines, and as a page in a notebook."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..learners.base import Stats
from .episodes import success_rate
from .report.scores import Score

# Number of episodes at each end of a run whose mean return is shown.
_WINDOW = 100
_REPORT_HEIGHT = 720


@dataclass(frozen=True, repr=False)
class TrainingResult:
    """Result of `train`, including the part before a resume; `print` shows it in five lines.

    Attributes:
        returns: Undiscounted return of each finished episode, in the order of their ends.
        updates: Statistics of each update.
        turns: Environment steps taken.
        message: Why no update ran; empty if one did.
        successes: Whether each episode succeeded; None where the environment does not say.
        minutes: Training time, without pauses and without the evaluations before and after.
        report: The HTML report in `run_dir`; None without a folder.
        scores: Of the agent "before" and "after", and of other policies such as "random", by name; empty without
            evaluations.
        success_rate: Share of successful episodes among those with a known outcome; None if none is known.
    """

    returns: list[float]
    updates: list[Stats]
    turns: int
    message: str
    successes: list[bool | None] = field(default_factory=list)
    minutes: float = field(default=math.nan, compare=False)
    report: Path | None = field(default=None, compare=False)
    scores: dict[str, Score] = field(default_factory=dict, compare=False)

    @property
    def success_rate(self) -> float | None:
        """Share of successful episodes."""
        return success_rate(self.successes)

    def __str__(self) -> str:
        """Returns the scores, what was done, and where the report is, a line each."""
        lines = score_lines(self.scores)
        if not lines and self.returns:
            lines.append(self._mean_returns())
        lines.append(
            f"{len(self.returns):,} episodes, {self.turns:,} turns, {len(self.updates):,} updates, "
            f"{self.minutes:.1f} minutes"
        )
        if self.message:
            lines.append(self.message)
        if self.report is not None:
            lines.append(f"Report: {self.report}")
        return "\n".join(lines)

    def _mean_returns(self) -> str:
        """Returns the mean return at the beginning and at the end, or of all episodes if they are few."""
        if len(self.returns) <= 2 * _WINDOW:
            return f"mean return {np.mean(self.returns):+.3f}"
        first = np.mean(self.returns[:_WINDOW])
        last = np.mean(self.returns[-_WINDOW:])
        return f"mean return {first:+.3f} of the first {_WINDOW} episodes, {last:+.3f} of the last"

    def __repr__(self) -> str:
        """Returns what was done, without the lists of a long run."""
        return f"<TrainingResult: {len(self.returns)} episodes, {self.turns} turns, {len(self.updates)} updates>"

    def _repr_html_(self) -> str:
        """Returns the lines and the report, as a notebook shows the last value of a cell."""
        lines = f"<pre>{html.escape(str(self))}</pre>"
        if self.report is None or not self.report.is_file():
            return lines
        page = html.escape(self.report.read_text(encoding="utf-8"), quote=True)
        style = f"width:100%;height:{_REPORT_HEIGHT}px;border:0"
        return lines + f'<iframe title="Report" srcdoc="{page}" style="{style}"></iframe>'


def score_lines(scores: dict[str, Score]) -> list[str]:
    """Returns a line for each score, the means below each other."""
    lines = []
    name_width = max(map(len, scores), default=0)
    mean_width = max((len(f"{score.mean:.3f}") for score in scores.values()), default=0)
    for name, score in scores.items():
        mean, _, rest = str(score).partition(" ")
        lines.append(f"{name:<{name_width}}  {mean:>{mean_width}} {rest}".rstrip())
    return lines
