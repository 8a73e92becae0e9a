"""Scores an agent before, during and after training by a user's function, such as an exact computation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..agent.agent import Agent
from ..errors import ConfigError, excerpt
from ..learners.base import Stats
from ..options import as_number, check_arguments, require_positive, require_text
from .callbacks import Callback
from .evaluation import EvaluationResult
from .loop_state import is_count, is_real, require_part
from .run import Run


class Score(NamedTuple):
    """A measurement of an agent.

    Attributes:
        mean: The score, in the unit of the function that computed it.
        standard_error: Its standard error; 0 if the score is computed exactly.
    """

    mean: float
    standard_error: float = 0.0


class ScoreCallback(Callback):
    """Scores the agent before the first step, after every few updates, and after the last one.

    Where the expected return of a policy can be computed, this replaces `EvalCallback`, which plays episodes. A resumed
    run keeps the score from before its first step.

    Attributes:
        before: Score before the first step; None until then, and in a run that was started without this callback.
        after: Latest score; that of the trained agent once the training is over.
    """

    def __init__(
        self, score: Callable[[Agent], float | EvaluationResult], every: int = 10, name: str = "expected_return"
    ) -> None:
        """Sets how and when to score.

        Args:
            score: Function of the agent; returns a number, or a result of `evaluate`.
            every: Updates between two scores.
            name: Key of the score in the statistics of an update; a score by `evaluate` adds `standard_error`.

        Raises:
            ConfigError: An argument has the wrong type, or `every` is below 1.
        """
        check_arguments(ScoreCallback.__init__, locals())
        require_positive(every=every)
        require_text(name=name)
        self._function = score
        self._every = every
        self._name = name
        self._last_update = 0
        self.before: Score | None = None
        self.after: Score | None = None

    def on_training_start(self, run: Run) -> None:
        """Scores the agent of a new run; `load_state_dict` restores the scores of a resumed one."""
        self._last_update = len(run.updates)
        if not run.is_resumed:
            self.before = self.after = self._score(run)

    def on_update(self, run: Run, stats: Stats) -> None:
        """Scores the agent if it is due, and adds the score to the statistics."""
        if len(run.updates) - self._last_update >= self._every:
            self.after = self._score(run)
            stats[self._name] = self.after.mean
            if self.after.standard_error:
                stats["standard_error"] = self.after.standard_error

    def on_training_end(self, run: Run) -> None:
        """Scores the trained agent, unless its last update has been scored."""
        if run.is_over and self._last_update < len(run.updates):
            self.after = self._score(run)

    def state_dict(self) -> dict[str, Any]:
        """Returns the scores and the number of the last scored update."""
        return {"before": self.before, "after": self.after, "last_update": self._last_update}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: The state is damaged.
        """
        where = f"callbacks/{type(self).__name__}/"
        for name in ("before", "after"):
            score = state.get(name, ())
            is_pair = isinstance(score, (list, tuple)) and len(score) == 2 and all(map(is_real, score))
            require_part(score is None or is_pair, state, name, "a score and its standard error, or None", where)
        require_part(is_count(state.get("last_update")), state, "last_update", "a count", where)
        self.before = None if state["before"] is None else Score(*state["before"])
        self.after = None if state["after"] is None else Score(*state["after"])
        self._last_update = state["last_update"]

    def _score(self, run: Run) -> Score:
        self._last_update = len(run.updates)
        result = self._function(run.agent)
        if isinstance(result, EvaluationResult):
            return Score(result.mean, result.standard_error)
        # as_number() returns NaN for anything but a number.
        is_nan = isinstance(result, (float, np.floating)) and math.isnan(result)
        score = as_number(result)
        if math.isnan(score) and not is_nan:
            raise ConfigError(
                f"The score function returned {excerpt(result)} ({type(result).__name__}). Return a number, or the "
                "result of llamagym.evaluate()."
            )
        return Score(score)
