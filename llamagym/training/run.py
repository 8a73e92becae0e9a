"""How far a training has come, and when it is over.

A budget is what one call of `train` may use: episodes, turns or minutes, the first of which to be used up ends it. A
call that resumes a run has a budget of its own, on top of what the run used before. The exception makes it possible to
continue after an interrupt, an error or a kill: the same budget as that of the call before, if that call did not use
it up or did not return, continues where it stood. So the run then does what it would have done without the stop,
cooldown included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .. import distributed
from ..agent.agent import Agent
from ..errors import ConfigError
from ..learners.base import Stats
from ..options import as_json, check_arguments, require_positive
from .episodes import PlayedEpisode, success_rate


def require_budget(episodes: int | None, turns: int | None, minutes: float | None) -> None:
    """Rejects a budget without a limit, or with a limit that is not positive.

    Raises:
        ConfigError: It is such a budget.
    """
    require_positive(episodes=episodes, turns=turns)
    if episodes is None and turns is None and minutes is None:
        raise ConfigError(
            "train() needs a budget. Pass minutes=10, episodes=20_000 or turns=100_000, or several of them; the "
            "first that is used up ends the training."
        )
    if minutes is not None and not 0 < minutes < math.inf:
        raise ConfigError(f"minutes={minutes}. Pass a positive number, or None for no limit.")


class Run:
    """A training under way, as callbacks see it.

    Attributes:
        agent: Who learns.
        returns: Undiscounted return of each finished episode, in the order of their ends.
        successes: Whether each succeeded; None where the environment does not say.
        updates: Statistics of each update.
        turns: Environment steps taken, over all copies.
        is_resumed: Whether the run continues from a checkpoint.
        is_finished: Whether the call has used up its budget and done all that follows the last step.
    """

    def __init__(self, agent: Agent, episodes: int | None, turns: int | None, minutes: float | None) -> None:
        """Begin; the first budget that is spent ends the run, and None is no limit.

        Raises:
            ConfigError: There is no limit at all, or an argument has the wrong type or is not positive.
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
        # How much the run had used of each when the budget began.
        self._before: dict[str, float] = dict.fromkeys(self._budget, 0)
        self._began = time.perf_counter()
        # Of the first episode that no update's success rate counts yet.
        self._uncounted = 0
        self._was_stopped = False
        self._has_failed = False
        self.is_finished = False

    def __str__(self) -> str:
        """What has been done so far."""
        return f"{len(self.returns):,} episodes, {self.turns:,} turns, {self.minutes:.1f} minutes"

    @property
    def minutes(self) -> float:
        """Since the run began, without the time in which it was stopped."""
        return (time.perf_counter() - self._began) / 60

    @property
    def _used(self) -> dict[str, float]:
        """What the run has used since it began, of what a budget may limit."""
        return {"episodes": len(self.returns), "turns": self.turns, "minutes": self.minutes}

    @property
    def progress(self) -> float:
        """Share of the budget that is used, 0 to 1: of several limits, of the one that is nearest."""
        used = self._used
        limits = {name: limit for name, limit in self._budget.items() if limit is not None}
        return min(1.0, max((used[name] - self._before[name]) / limit for name, limit in limits.items()))

    @property
    def is_over(self) -> bool:
        """Whether enough has been played; False once an error or a signal has ended the run."""
        return not self._has_failed and (self._was_stopped or self.progress == 1)

    @contextmanager
    def paces_learner(self) -> Iterator[None]:
        """While open, the learner knows how far the run has come."""
        self._pace(0.0)
        try:
            yield
        finally:
            self._pace(0.0)

    def _pace(self, progress: float) -> None:
        """Say how far the run had come when the batch under way began: a single update learns at the full rate."""
        self.agent.learner.cooldown.progress = progress

    def _progress_of_all(self) -> float:
        """The same in all processes, whose clocks are not."""
        return max(distributed.gather_objects(self.progress))

    def stop(self) -> None:
        """End the run after this step."""
        self._was_stopped = True

    def fail(self) -> None:
        """Note that an error or a signal ends the run."""
        self._has_failed = True

    def finish(self) -> None:
        """Note that nothing is left to do: if the budget is used up, the next call has one of its own."""
        self.is_finished = self._progress_of_all() == 1

    def take(self, ended: Sequence[PlayedEpisode], stats: Stats, turns: int) -> list[PlayedEpisode]:
        """Count a step in so many copies: episodes that ended, and an update if there was one.

        Returns:
            The episodes that count; those beyond the budget do not.
        """
        self.turns += turns
        counted = list(ended)
        if (episodes := self._budget["episodes"]) is not None:
            counted = counted[: int(self._before["episodes"] + episodes - len(self.returns))]
        self.returns += [episode.total_reward for episode in counted]
        self.successes += [episode.success for episode in counted]
        if stats:
            rate = success_rate(self.successes[self._uncounted :])
            stats |= {} if rate is None else {"success_rate": rate}
            self._uncounted = len(self.successes)
            self.updates.append(stats)
            self._pace(self._progress_of_all())
        return counted

    def state_dict(self) -> dict[str, Any]:
        """What to save."""
        return {
            "returns": self.returns,
            "successes": self.successes,
            "uncounted": self._uncounted,
            "updates": self.updates,
            "turns": self.turns,
            "seconds": 60 * self.minutes,
            "batch_began": self.agent.learner.cooldown.progress,
            "budget": {"limits": self._budget, "before": self._before, "is_finished": self.is_finished},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was saved."""
        self.is_resumed = True
        self.returns, self.updates, self.turns = state["returns"], state["updates"], state["turns"]
        self.successes = state["successes"]
        self._uncounted = state["uncounted"]
        self._began = time.perf_counter() - state["seconds"]
        budget = state["budget"]
        continues = budget["limits"] == self._budget and not budget["is_finished"]
        self._before = budget["before"] if continues else self._used
        # 0 where a new budget begins.
        self._pace(min(state["batch_began"], self._progress_of_all()))
