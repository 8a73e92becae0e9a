"""What happens beside a training: your own code at its steps, ends of episodes and updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError, excerpt
from ..learners.base import Stats
from ..options import as_json, as_statistics, check_arguments, require_positive
from .played import PlayedEpisode
from .run import Run

logger = logging.getLogger(__name__)


class Callback:
    """Is told what happens in a training; override what you need.

    `on_step`, `on_episode_end` and `on_update` end the training after the step under way by returning False; anything
    else, such as None or 0, lets it go on. They are called in this order, after all has been counted in `run`. An
    exception ends the training like one of the environment: with a `checkpoint_dir` the state after the step is saved.

    A callback that a resumed run must find as it was left returns its state from `state_dict`: what JSON holds, and
    numbers and arrays of NumPy, which are read again as Python's numbers and lists.
    """

    def on_training_start(self, run: Run) -> None:
        """Before the first step; of a resumed run too, with all that was done before counted in `run`."""

    def on_step(self, run: Run) -> bool | None:
        """After a step in every copy of the environment."""

    def on_episode_end(self, run: Run, episode: PlayedEpisode) -> bool | None:
        """After an episode has ended; `episode` holds all that was read, said, done and earned in it."""

    def on_update(self, run: Run, stats: Stats) -> bool | None:
        """After an update; numbers and strings that are added to `stats` are logged and kept with its own."""

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


class Callbacks(Callback):
    """Passes everything on to several callbacks, in order; one that ends the training keeps no other from hearing."""

    def __init__(self, callbacks: Sequence[Callback] | Callback | None) -> None:
        """Pass on to `callbacks`.

        Raises:
            ConfigError: One is no callback.
        """
        given = [] if callbacks is None else [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
        for callback in given:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"callbacks holds {excerpt(callback)}. Pass objects of classes derived from llamagym.Callback; a "
                    "function of an update's statistics is passed as on_update."
                )
        self._callbacks = given

    def on_training_start(self, run: Run) -> None:
        """Tell each."""
        for callback in self._callbacks:
            callback.on_training_start(run)

    def on_step(self, run: Run) -> bool:
        """Tell each; False if one says so."""
        return self._go_on(lambda callback: callback.on_step(run))

    def on_episode_end(self, run: Run, episode: PlayedEpisode) -> bool:
        """Tell each; False if one says so."""
        return self._go_on(lambda callback: callback.on_episode_end(run, episode))

    def on_update(self, run: Run, stats: Stats) -> bool:
        """Call each; False if one returned False. Statistics that callbacks added become Python's own numbers.

        Raises:
            ConfigError: A callback added a statistic that is neither a number nor a string; it is dropped.
        """
        goes_on = self._go_on(lambda callback: callback.on_update(run, stats))
        make_plain_(stats)
        return goes_on

    def on_training_end(self, run: Run) -> None:
        """Tell each."""
        for callback in self._callbacks:
            callback.on_training_end(run)

    def state_dict(self) -> dict[str, Any]:
        """The state of each, with the name of its class."""
        states = [[type(callback).__name__, as_json(callback.state_dict())] for callback in self._callbacks]
        return {"callbacks": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore each callback's state by the name of its class; several of one class in their order."""
        saved = list(state["callbacks"])
        for callback in self._callbacks:
            name = type(callback).__name__
            match = next((entry for entry in saved if entry[0] == name), None)
            if match is not None:
                saved.remove(match)
                callback.load_state_dict(match[1])
            elif callback.state_dict():
                logger.warning("The checkpoint has no state for %s; it starts fresh.", name)

    def _go_on(self, call: Callable[[Callback], bool | None]) -> bool:
        answers = [call(callback) for callback in self._callbacks]
        return not any(map(is_false, answers))


def is_false(answer: object) -> bool:
    """Whether a callback returned False, Python's or NumPy's; nothing else ends a training, such as None or 0."""
    return isinstance(answer, (bool, np.bool_)) and not answer


def make_plain_(stats: Stats) -> None:
    """Makes Python's own numbers of statistics that users added, so that they can be logged and saved.

    Raises:
        ConfigError: One is neither a number nor a string; it is dropped, so that the rest can be saved.
    """
    problems: list[ConfigError] = []
    for name in list(stats):
        value = stats.pop(name)
        try:
            stats.update(as_statistics({name: value}))
        except ConfigError as problem:
            problems.append(problem)
    if problems:
        raise problems[0]
