"""What happens beside a training: your own code at its steps, ends of episodes and updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError, excerpt
from ..learners.base import Stats
from ..options import as_statistics, check_arguments, require_positive
from ..saving.saveable import saveable_state
from .episodes import PlayedEpisode
from .run import Run

logger = logging.getLogger(__name__)

# Names that an update's statistics get when they are logged.
_NAMES_OF_TRACKERS = ("step", "minutes")


class Callback:
    """Is told what happens in a training; override what you need.

    `on_step`, `on_episode_end` and `on_update` end the training after the step under way by returning False; anything
    else, such as None or 0, lets it go on. They are called in this order, after all has been counted in `run`.

    An exception ends the training once the step's other callbacks and the trackers have been called: with a
    `checkpoint_dir` the state after the step is saved. With `stops_on_error = False` it is logged the first time, and
    training goes on.

    A callback that a resumed run must find as it was left returns its state from `state_dict`: what JSON holds, and
    numbers and arrays of NumPy, which are read again as Python's numbers and lists.

    Attributes:
        stops_on_error: Whether an exception of the callback ends the training.
    """

    stops_on_error: bool = True

    def on_training_start(self, run: Run) -> None:
        """Before the first step; of a resumed run too, with all that was done before counted in `run`."""

    def on_step(self, run: Run) -> bool | None:
        """After a step in every copy of the environment."""

    def on_episode_end(self, run: Run, episode: PlayedEpisode) -> bool | None:
        """After an episode has ended; `episode` holds all that was read, said, done and earned in it."""

    def on_update(self, run: Run, stats: Stats) -> bool | None:
        """After an update; numbers and strings added to `stats` by new names are logged and kept with its own."""

    def on_training_end(self, run: Run) -> None:
        """After the last step, whatever ended the training: `run.is_over` is False after an error or a signal."""

    def state_dict(self) -> dict[str, Any]:
        """What to save with a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave, after `on_training_start`."""


class StopOnReturn(Callback):
    """Ends a training once the mean return of the last episodes is high enough."""

    def __init__(self, mean_return: float, episodes: int = 100) -> None:
        """Stop when the mean over the last `episodes`, as many at least, reaches `mean_return`.

        Raises:
            ConfigError: An argument has the wrong type, or there are no episodes to take the mean of.
        """
        check_arguments(StopOnReturn.__init__, locals())
        require_positive(episodes=episodes)
        self._mean_return, self._episodes = mean_return, episodes

    def on_episode_end(self, run: Run, episode: PlayedEpisode) -> bool:
        """Look at the last returns."""
        last = run.returns[-self._episodes :]
        return len(last) < self._episodes or sum(last) / len(last) < self._mean_return


class Callbacks:
    """Calls several callbacks in order; all are called, whatever one answers or raises."""

    def __init__(self, callbacks: Sequence[Callback] | Callback | None) -> None:
        """Call `callbacks`.

        Raises:
            ConfigError: One is not a callback.
        """
        given = [] if callbacks is None else [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
        for callback in given:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"callbacks holds {excerpt(callback)}. Pass objects of classes derived from llamagym.Callback; a "
                    "function of an update's statistics is passed as on_update."
                )
        self._callbacks = given
        self._error: Exception | None = None
        self._logged: set[tuple[int, str]] = set()

    def on_training_start(self, run: Run) -> None:
        """Call each."""
        self._call("on_training_start", lambda callback: callback.on_training_start(run))

    def on_step(self, run: Run) -> bool:
        """Call each; False if one returns False."""
        return self._call("on_step", lambda callback: callback.on_step(run))

    def on_episode_end(self, run: Run, episode: PlayedEpisode) -> bool:
        """Call each; False if one returns False."""
        return self._call("on_episode_end", lambda callback: callback.on_episode_end(run, episode))

    def on_update(self, run: Run, stats: Stats) -> bool:
        """Call each; False if one returns False. Statistics that callbacks added become Python's own numbers."""
        own = dict(stats)

        def update(callback: Callback) -> bool | None:
            try:
                return callback.on_update(run, stats)
            finally:
                make_plain_(stats, own, f"{type(callback).__name__}.on_update()")

        return self._call("on_update", update)

    def on_training_end(self, run: Run) -> None:
        """Call each."""
        self._call("on_training_end", lambda callback: callback.on_training_end(run))

    def state_dict(self) -> dict[str, Any]:
        """The state of each, with the name of its class; None for one that raises an error."""
        states: list[Any] = []

        def save(callback: Callback) -> None:
            name = type(callback).__name__
            # Several of one class are told apart by their order, so each has an entry.
            states.append([name, None])
            states[-1][1] = saveable_state(callback.state_dict(), f"{name}.state_dict()")

        self._call("state_dict", save)
        return {"callbacks": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore each callback's state by the name of its class; several of one class in their order."""
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
                logger.warning("The checkpoint has a state of %s, and no such callback was passed.", name)

    def raise_error(self) -> None:
        """Raise the first error of a callback that stops on errors, if there was one since the last call."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _call(self, name: str, call: Callable[[Callback], bool | None]) -> bool:
        """Call each callback; False if one returns False. Errors are kept for `raise_error`, or logged."""
        goes_on = True
        for index, callback in enumerate(self._callbacks):
            try:
                answer = call(callback)
            except Exception as error:  # whatever a user's callback raises
                if callback.stops_on_error:
                    self._error = self._error or error
                elif (index, name) not in self._logged:
                    logger.warning("%s.%s() failed: %r. Training goes on.", type(callback).__name__, name, error)
                    self._logged.add((index, name))
            else:
                goes_on &= not is_false(answer)
        return goes_on


def is_false(answer: object) -> bool:
    """Whether a callback returned False, Python's or NumPy's; nothing else ends a training, such as None or 0."""
    return isinstance(answer, (bool, np.bool_)) and not answer


def make_plain_(stats: Stats, own: Stats, owner: str) -> None:
    """Makes Python's own numbers of statistics that users added, so that they can be logged and saved.

    Args:
        stats: Of an update.
        own: Those of the update itself, which users may not change: the loop and checkpoints depend on them.
        owner: What has added to them, for the error.

    Raises:
        ConfigError: Some are neither numbers nor strings, or have names of the library's own; they are dropped, so that
            the rest can be saved.
    """
    taken = [name for name in _NAMES_OF_TRACKERS if stats.pop(name, None) is not None]
    for name, value in own.items():
        if stats.get(name) is not value:
            taken.append(name)
            stats[name] = value
    faults: list[str] = []
    for name in list(stats):
        value = stats.pop(name)
        try:
            stats.update(as_statistics({name: value}))
        except ConfigError as fault:
            faults.append(str(fault))
    if taken:
        faults.insert(0, f"{excerpt(taken)} are the library's own and keep their values: use other names.")
    if faults:
        raise ConfigError(f"{owner} set statistics of an update that cannot be logged: {' '.join(faults)}")
