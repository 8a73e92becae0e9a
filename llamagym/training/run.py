"""Progress and budget of a training run, and what Ctrl-C and SIGTERM do to it.

A budget limits the episodes, turns or minutes of one call of `train`; the first limit that is reached ends the call.
A call that resumes a run has its own budget, in addition to what the run used before. There is one exception: after
an interrupt, an error or a kill, a call with the same budget continues the unfinished budget of the call before. Then
the run computes what it would have computed without the stop, cooldown included.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from .. import distributed
from ..agent.agent import Agent
from ..errors import ConfigError
from ..learners.base import Stats, UpdateStats
from ..options import as_json, check_arguments, require_positive
from .episodes import PlayedEpisode, success_rate

logger = logging.getLogger(__name__)


def require_budget(episodes: int | None, turns: int | None, minutes: float | None) -> None:
    """Rejects a budget without a limit, or with a limit that is not positive."""
    require_positive(episodes=episodes, turns=turns)
    if episodes is None and turns is None and minutes is None:
        raise ConfigError(
            "train() needs a budget. Pass minutes=10, episodes=20_000 or turns=100_000, or several of them; the "
            "first that is used up ends the training."
        )
    if minutes is not None and not 0 < minutes < math.inf:
        raise ConfigError(f"minutes={minutes}. Pass a positive number, or None for no limit.")


class Run:
    """A running training, as callbacks see it.

    Attributes:
        agent: The agent that learns.
        returns: Undiscounted return of each finished episode, in the order of their ends.
        successes: Whether each episode succeeded; None where the environment does not report it.
        updates: Statistics of each update.
        turns: Environment steps taken, over all environments.
        is_resumed: Whether the run continues from a checkpoint.
        is_finished: Whether the call has used up its budget and completed what follows the last step.
        note: Function that prints a line above the progress bar.
    """

    def __init__(self, agent: Agent, episodes: int | None, turns: int | None, minutes: float | None) -> None:
        """Starts a run with a budget.

        Args:
            agent: The agent that is trained.
            episodes: Number of episodes after which the run ends; None is no limit.
            turns: Number of turns after which it ends; None is no limit.
            minutes: Time after which it ends; None is no limit.

        Raises:
            ConfigError: All limits are None, or an argument has the wrong type or is not positive.
        """
        check_arguments(Run.__init__, locals())
        require_budget(episodes, turns, minutes)
        self.agent = agent
        self.returns: list[float] = []
        self.successes: list[bool | None] = []
        self.updates: list[Stats] = []
        self.turns = 0
        self.is_resumed = False
        self._budget: dict[str, float | None] = as_json({"episodes": episodes, "turns": turns, "minutes": minutes})
        # What the run had used when the budget began.
        self._before: dict[str, float] = dict.fromkeys(self._budget, 0)
        self._started = time.perf_counter()
        # Index of the first episode that is not in the success rate of an update yet.
        self._uncounted = 0
        self._was_stopped = False
        self._has_failed = False
        self.is_finished = False
        self.note: Callable[[str], None] = logger.info

    def __str__(self) -> str:
        """Returns what has been done so far."""
        return f"{len(self.returns):,} episodes, {self.turns:,} turns, {self.minutes:.1f} minutes"

    @property
    def minutes(self) -> float:
        """Minutes since the run began, without the time while it was stopped."""
        return (time.perf_counter() - self._started) / 60

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While open, the minutes of the run stand still."""
        paused_at = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - paused_at

    @property
    def _used(self) -> dict[str, float]:
        """Episodes, turns and minutes that the run has used since it began."""
        return {"episodes": len(self.returns), "turns": self.turns, "minutes": self.minutes}

    @property
    def progress(self) -> float:
        """Share of the budget that is used, 0 to 1; of several limits, the largest share."""
        used = self._used
        shares = [
            (used[name] - self._before[name]) / limit for name, limit in self._budget.items() if limit is not None
        ]
        return min(1.0, max(shares))

    @property
    def is_over(self) -> bool:
        """Whether the budget is used up or `stop` was called; False once an error or a signal has ended the run."""
        return not self._has_failed and (self._was_stopped or self.progress == 1)

    @contextmanager
    def paces_learner(self) -> Iterator[None]:
        """While open, the learner's cooldown follows the progress of the run."""
        self._set_cooldown(0.0)
        try:
            yield
        finally:
            self._set_cooldown(0.0)

    def _set_cooldown(self, progress: float) -> None:
        """Passes to the learner the progress at the start of its batch; so a single update has the full rate."""
        self.agent.learner.cooldown.progress = progress

    def _progress_of_all(self) -> float:
        """Returns the largest progress of all processes, since their clocks differ."""
        return max(distributed.gather_objects(self.progress))

    def stop(self) -> None:
        """Ends the run after this step."""
        self._was_stopped = True

    def fail(self) -> None:
        """Records that an error or a signal ends the run."""
        self._has_failed = True

    def finish(self) -> None:
        """Records that nothing is left to do; if the budget is used up, the next call gets its own."""
        self.is_finished = self._progress_of_all() == 1

    def take(self, ended: Sequence[PlayedEpisode], stats: Stats, turns: int) -> list[PlayedEpisode]:
        """Counts a step's turns, ended episodes and update; returns the episodes within the budget.

        Args:
            ended: Episodes that ended.
            stats: Statistics of an update; empty without one.
            turns: Actions taken.
        """
        self.turns += turns
        counted = list(ended)
        limit = self._budget["episodes"]
        if limit is not None:
            counted = counted[: int(self._before["episodes"] + limit - len(self.returns))]
        self.returns += [episode.total_reward for episode in counted]
        self.successes += [episode.success for episode in counted]
        if stats:
            rate = success_rate(self.successes[self._uncounted :])
            if rate is not None:
                stats["success_rate"] = rate
            self._uncounted = len(self.successes)
            self.updates.append(stats)
            self._set_cooldown(self._progress_of_all())
        return counted

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to save with a checkpoint."""
        return {
            "returns": self.returns,
            "successes": self.successes,
            "uncounted": self._uncounted,
            "updates": self.updates,
            "turns": self.turns,
            "seconds": 60 * self.minutes,
            "progress_at_batch_start": self.agent.learner.cooldown.progress,
            "budget": {"limits": self._budget, "before": self._before, "is_finished": self.is_finished},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        self.is_resumed = True
        self.returns = state["returns"]
        self.updates = [UpdateStats(stats) for stats in state["updates"]]
        self.turns = state["turns"]
        self.successes = state["successes"]
        self._uncounted = state["uncounted"]
        self._started = time.perf_counter() - state["seconds"]
        budget = state["budget"]
        continues = budget["limits"] == self._budget and not budget["is_finished"]
        self._before = budget["before"] if continues else self._used
        # The progress of all is 0 where a new budget begins.
        self._set_cooldown(min(state["progress_at_batch_start"], self._progress_of_all()))


INTERRUPTED_EXIT_CODE = 130
"""Exit status of a program that Ctrl-C or SIGTERM stopped: the one that shells report for Ctrl-C."""


class Interrupts:
    """While open, the first Ctrl-C or SIGTERM only sets `stops`. Python delivers signals to the main thread only.

    Attributes:
        stops: Whether a signal asked to stop.
    """

    def __init__(self, listens: bool) -> None:
        """Prepares to handle signals; with `listens=False`, or outside the main thread, leaves them as they are."""
        self._listens = listens and threading.current_thread() is threading.main_thread()
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self.stops = False

    def __enter__(self) -> Interrupts:
        """Installs the handlers."""
        if self._listens:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._request_stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restores the previous handlers."""
        self._restore()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """While open, signals have their usual effect: Ctrl-C raises KeyboardInterrupt at once."""
        handlers = dict(self._previous_handlers)
        self._restore()
        try:
            yield
        finally:
            if handlers:
                self.__enter__()

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self.stops = True
        # The previous handlers act on the next signal.
        self._restore()
        logger.warning(
            "%s: stopping after the current step and saving. Press Ctrl-C again to stop immediately.",
            signal.Signals(number).name,
        )

    def _restore(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}
