"""Callbacks: a user's own code at the steps, ends of episodes and updates of a training run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError, excerpt
from ..learners.base import Stats
from ..options import as_statistics, check_arguments, require_positive
from ..saving.state_files import saveable_state
from .episodes import PlayedEpisode
from .run import Run

logger = logging.getLogger(__name__)

# Names that trackers add to an update's statistics.
_TRACKER_NAMES = ("step", "minutes")


class Callback:
    """Base class whose methods `train` calls; override those you need.

    `on_step`, `on_episode_end` and `on_update` end the training after the current step by returning False; anything
    else, such as None or 0, continues it. They are called in this order, after `run` has counted the step.

    An exception ends the training once the step's other callbacks and the trackers have been called: with a
    `checkpoint_dir` the state after the step is saved. With `stops_on_error = False` it is logged the first time, and
    training continues.

    A callback whose state a resumed run needs returns it from `state_dict`: JSON values, and NumPy's numbers and
    arrays, which are loaded as Python's numbers and lists.

    Attributes:
        stops_on_error: Whether an exception of the callback ends the training.
    """

    stops_on_error: bool = True

    def on_training_start(self, run: Run) -> None:
        """Called before the first step; when a run is resumed, `run` counts what was done before."""

    def on_step(self, run: Run) -> bool | None:
        """Called after a step in every environment."""

    def on_episode_end(self, run: Run, episode: PlayedEpisode) -> bool | None:
        """Called after an episode has ended."""

    def on_update(self, run: Run, stats: Stats) -> bool | None:
        """Called after an update; numbers and strings added to `stats` under new names are logged and kept."""

    def on_training_end(self, run: Run) -> None:
        """Called at the end, whatever ended the training; `run.is_over` is False after an error or a signal."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to save with a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; called after `on_training_start`."""


class StopOnReturn(Callback):
    """Ends the training once the mean return of the latest episodes is high enough."""

    def __init__(self, mean_return: float, episodes: int = 100) -> None:
        """Sets the goal.

        Args:
            mean_return: Mean return that ends the training.
            episodes: Number of latest episodes in the mean; with fewer, training continues.

        Raises:
            ConfigError: An argument has the wrong type, or `episodes` is below 1.
        """
        check_arguments(StopOnReturn.__init__, locals())
        require_positive(episodes=episodes)
        self._mean_return = mean_return
        self._episodes = episodes

    def on_episode_end(self, run: Run, episode: PlayedEpisode) -> bool:
        """Returns False once the mean is reached."""
        latest = run.returns[-self._episodes :]
        return len(latest) < self._episodes or sum(latest) / len(latest) < self._mean_return


class Callbacks:
    """Calls several callbacks in order; all are called, whatever one of them returns or raises."""

    def __init__(self, callbacks: Sequence[Callback] | Callback | None) -> None:
        """Wraps callbacks; None means no callbacks.

        Raises:
            ConfigError: One is not a callback.
        """
        if callbacks is None:
            self._callbacks = []
        elif isinstance(callbacks, Callback):
            self._callbacks = [callbacks]
        else:
            self._callbacks = list(callbacks)
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"callbacks holds {excerpt(callback)}. Pass objects of classes derived from llamagym.Callback; a "
                    "function of an update's statistics is passed as on_update."
                )
        self._error: Exception | None = None
        self._logged: set[tuple[int, str]] = set()

    def on_training_start(self, run: Run) -> None:
        """Calls each callback."""
        self._call("on_training_start", lambda callback: callback.on_training_start(run))

    def on_step(self, run: Run) -> bool:
        """Calls each callback; returns False if one does."""
        return self._call("on_step", lambda callback: callback.on_step(run))

    def on_episode_end(self, run: Run, episode: PlayedEpisode) -> bool:
        """Calls each callback; returns False if one does."""
        return self._call("on_episode_end", lambda callback: callback.on_episode_end(run, episode))

    def on_update(self, run: Run, stats: Stats) -> bool:
        """Calls each callback; returns False if one does. Statistics that callbacks add become Python's own numbers."""
        own = dict(stats)

        def update(callback: Callback) -> bool | None:
            try:
                return callback.on_update(run, stats)
            finally:
                make_plain_(stats, own, f"{type(callback).__name__}.on_update()")

        return self._call("on_update", update)

    def on_training_end(self, run: Run) -> None:
        """Calls each callback."""
        self._call("on_training_end", lambda callback: callback.on_training_end(run))

    def state_dict(self) -> dict[str, Any]:
        """Returns the class name and the state of each callback; None as the state of one that raises an error."""
        states: list[Any] = []

        def save(callback: Callback) -> None:
            name = type(callback).__name__
            # Callbacks of one class are matched by their order, so each needs an entry, even after an error.
            states.append([name, None])
            states[-1][1] = saveable_state(callback.state_dict(), f"{name}.state_dict()")

        self._call("state_dict", save)
        return {"callbacks": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores each callback's state by the name of its class; several of one class by their order."""
        saved = list(state["callbacks"])

        def restore(callback: Callback) -> None:
            name = type(callback).__name__
            match = next((entry for entry in saved if entry[0] == name), None)
            if match is not None:
                saved.remove(match)
            if match is not None and match[1] is not None:
                callback.load_state_dict(match[1])
            elif callback.state_dict():
                logger.warning("The checkpoint has no state for %s; it starts fresh.", name)

        self._call("load_state_dict", restore)
        for name, unused in saved:
            if unused:
                logger.warning("The checkpoint has a state of %s, but no such callback was passed.", name)

    def raise_error(self) -> None:
        """Raises the first error of a callback with `stops_on_error`, if there was one since the last call."""
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def _call(self, name: str, call: Callable[[Callback], bool | None]) -> bool:
        """Calls each callback; returns False if one does. Keeps an error for `raise_error`, or logs it."""
        continues = True
        for index, callback in enumerate(self._callbacks):
            try:
                answer = call(callback)
            except Exception as error:  # a user's callback may raise anything
                if callback.stops_on_error:
                    self._error = self._error or error
                elif (index, name) not in self._logged:
                    logger.warning("%s.%s() failed: %r. Training goes on.", type(callback).__name__, name, error)
                    self._logged.add((index, name))
            else:
                continues &= not is_false(answer)
        return continues


def is_false(answer: object) -> bool:
    """Whether a callback returned Python's or NumPy's False; None and 0 are not."""
    return isinstance(answer, (bool, np.bool_)) and not answer


def make_plain_(stats: Stats, own: Stats, owner: str) -> None:
    """Converts statistics that users added to Python's own numbers, so that they can be logged and saved.

    Args:
        stats: Statistics of an update; changed in place.
        own: The update's own statistics, which users may not change: the loop and checkpoints depend on them.
        owner: Name of the function that added to `stats`, for the error.

    Raises:
        ConfigError: Some are neither numbers nor strings, or have names of the library's own; they are dropped, so that
            the others can be saved.
    """
    reserved = [name for name in _TRACKER_NAMES if stats.pop(name, None) is not None]
    for name, value in own.items():
        if stats.get(name) is not value:
            reserved.append(name)
            stats[name] = value
    faults: list[str] = []
    for name in list(stats):
        value = stats.pop(name)
        try:
            stats.update(as_statistics({name: value}))
        except ConfigError as fault:
            faults.append(str(fault))
    if reserved:
        faults.insert(0, f"{excerpt(reserved)} are the library's own and keep their values: use other names.")
    if faults:
        raise ConfigError(f"{owner} set statistics of an update that cannot be logged: {' '.join(faults)}")
