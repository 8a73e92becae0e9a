"""Callbacks of a training run: base class, `StopOnReturn`, `ScoreCallback`, `EvalCallback`, and their dispatcher."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..agent.agent import Agent
from ..agent.export import KIND
from ..errors import ConfigError, excerpt
from ..learners.base import Stats
from ..options import (
    as_seed,
    as_statistics,
    check_arguments,
    explains_wrong_calls,
    require_positive,
    require_text,
)
from ..saving.atomic import require_replaceable
from ..saving.paths import user_folder
from ..saving.state_files import saveable_state
from .environments import EnvSource
from .episodes import PlayedEpisode
from .evaluation import EVALUATION_SEED, EvaluationResult, as_score, evaluate
from .loop_state import is_count, is_real, require_part
from .report.scores import Score, saved_score
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

    @property
    def score_the_agent(self) -> bool:
        """Whether a callback scores the agent before and after the training."""
        return any(isinstance(callback, ScoreCallback) for callback in self._callbacks)

    @property
    def scores(self) -> dict[str, Score]:
        """The scores of the first callback that scores the agent, by name."""
        for callback in self._callbacks:
            if isinstance(callback, ScoreCallback):
                return callback.scores
        return {}

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


class ScoreCallback(Callback):
    """Scores the agent before the first step, after every few updates, and after the last one.

    Where the expected return of a policy can be computed, this replaces `EvalCallback`, which plays episodes, and the
    evaluations of `train`. A resumed run keeps the score from before its first step.

    Attributes:
        before: Score before the first step; None until then, and in a run that was started without this callback.
        after: Latest score; that of the trained agent once the training is over.
    """

    def __init__(
        self,
        score: Callable[[Agent], float | EvaluationResult],
        every: int = 10,
        name: str = "expected_return",
        baselines: Mapping[str, float] | None = None,
    ) -> None:
        """Sets how and when to score.

        Args:
            score: Function of the agent; returns a number, or a result of `evaluate`.
            every: Updates between two scores.
            name: Key of the score in the statistics of an update; a score by `evaluate` adds `standard_error`.
            baselines: Exact scores of other policies by name, such as "random" and "optimum", for the report.

        Raises:
            ConfigError: An argument has the wrong type, or `every` is below 1.
        """
        check_arguments(ScoreCallback.__init__, locals())
        require_positive(every=every)
        require_text(name=name)
        self._function = score
        self._every = every
        self._name = name
        self._baselines: dict[str, Score] = {}
        for policy, value in (baselines or {}).items():
            if not isinstance(policy, str) or policy in ("before", "after"):
                raise ConfigError(f'baselines has the key {policy!r}. Use other policies\' names, such as "random".')
            self._baselines[policy] = as_score(value, f"baselines[{policy!r}] is")
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

    @property
    def scores(self) -> dict[str, Score]:
        """The scores by name: "before" and "after", as far as they are known, and the baselines."""
        own = {"before": self.before, "after": self.after}
        return {name: score for name, score in own.items() if score is not None} | self._baselines

    def state_dict(self) -> dict[str, Any]:
        """Returns the scores and the number of the last scored update."""
        before = None if self.before is None else self.before._asdict()
        after = None if self.after is None else self.after._asdict()
        return {"before": before, "after": after, "last_update": self._last_update}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: The state is damaged.
        """
        where = f"callbacks/{type(self).__name__}/"
        for name in ("before", "after"):
            is_valid = name in state and (state[name] is None or saved_score(state[name]) is not None)
            require_part(is_valid, state, name, "a score, or None", where)
        require_part(is_count(state.get("last_update")), state, "last_update", "a count", where)
        self.before = saved_score(state["before"])
        self.after = saved_score(state["after"])
        self._last_update = state["last_update"]

    def _score(self, run: Run) -> Score:
        self._last_update = len(run.updates)
        return as_score(self._function(run.agent), "The score function returned")


class EvalCallback(Callback):
    """Evaluates the agent at regular intervals and saves the best one.

    Weights change at updates only, so it evaluates after updates: every `every` updates, or at the first update after
    `every_episodes` more episodes; and at the end of the training unless the last update has been evaluated. The
    statistics of the update get `eval_return`, `eval_standard_error`, `eval_length`, `eval_invalid_rate` and, where it
    is known, `eval_success_rate`.

    Attributes:
        results: Evaluations of this process as (number of the update, result).
        best_mean: Best mean return so far; -inf before the first evaluation.
        best_update: Number of the update with the best mean; 0 before the first evaluation.
    """

    @explains_wrong_calls(positional=2)
    def __init__(
        self,
        env: EnvSource,
        *,
        episodes: int = 64,
        every: int | None = None,
        every_episodes: int | None = None,
        best_dir: str | Path | None = None,
        seed: int = EVALUATION_SEED,
        num_envs: int | None = None,
        greedy: bool = True,
        on_best: Callable[[EvaluationResult], bool | None] | None = None,
    ) -> None:
        """Sets when and where to evaluate.

        Args:
            env: As for `evaluate`; not the object that the agent is trained in.
            episodes: Episodes per evaluation, the same ones each time.
            every: Updates between two evaluations; None is 10, unless `every_episodes` is set.
            every_episodes: Episodes between two evaluations.
            best_dir: Folder for the best agent, as `agent.save` writes it: new, empty or an agent's; None saves none.
            seed: Seed of the episodes; see `evaluate`.
            num_envs: As for `evaluate`.
            greedy: As for `evaluate`.
            on_best: Called with each result that is better than all before; returning False ends the training.

        Raises:
            ConfigError: An argument has the wrong type or is out of range, or both intervals are set.
            CheckpointError: `best_dir` holds something else.
        """
        check_arguments(EvalCallback.__init__, locals())
        require_text(best_dir=best_dir)
        require_positive(episodes=episodes, every=every, every_episodes=every_episodes, num_envs=num_envs)
        if every is not None and every_episodes is not None:
            raise ConfigError(f"every={every} and every_episodes={every_episodes}. Pass one of them.")
        self._env = env
        self._episodes = episodes
        self._seed = as_seed(seed)
        self._num_envs = num_envs
        self._greedy = greedy
        self._on_best = on_best
        self._best_dir: Path | None = None
        if best_dir is not None:
            self._best_dir = user_folder(best_dir, "best_dir")
            require_replaceable(self._best_dir, KIND)
        self._every = every or 10
        self._every_episodes = every_episodes
        self.on_training_start(None)

    def on_training_start(self, run: Run | None) -> None:
        """Forgets all results; `load_state_dict` restores those of a resumed run."""
        self.results: list[tuple[int, EvaluationResult]] = []
        self.best_mean = -math.inf
        self.best_update = 0
        self._last_update = 0
        self._last_episodes = 0

    def on_update(self, run: Run, stats: Stats) -> bool | None:
        """Evaluates if it is due, and adds the result to the statistics."""
        if self._every_episodes is None:
            is_due = len(run.updates) - self._last_update >= self._every
        else:
            is_due = len(run.returns) - self._last_episodes >= self._every_episodes
        if not is_due:
            return None
        result, is_best = self._evaluate(run)
        values = {
            "eval_return": result.mean,
            "eval_standard_error": result.standard_error,
            "eval_length": result.mean_length,
            "eval_invalid_rate": result.invalid_rate,
            "eval_success_rate": result.success_rate,
        }
        stats |= {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        if is_best and self._on_best is not None:
            return self._on_best(result)
        return None

    def on_training_end(self, run: Run) -> None:
        """Evaluates the trained agent, unless its last update has been evaluated."""
        if run.is_over and run.updates and self._last_update < len(run.updates):
            self._evaluate(run)

    def _evaluate(self, run: Run) -> tuple[EvaluationResult, bool]:
        """Evaluates the agent and saves it if it is the best; returns the result, and whether it is the best."""
        result = evaluate(
            run.agent,
            self._env,
            episodes=self._episodes,
            seed=self._seed,
            num_envs=self._num_envs,
            greedy=self._greedy,
        )
        self._last_update = len(run.updates)
        self._last_episodes = len(run.returns)
        self.results.append((self._last_update, result))
        is_best = result.mean > self.best_mean
        run.note(f"evaluation after update {self._last_update}: {result}{', the best so far' if is_best else ''}")
        if is_best:
            if self._best_dir is not None:
                run.agent.save(self._best_dir)
            self.best_mean = result.mean
            self.best_update = self._last_update
        return result, is_best

    def state_dict(self) -> dict[str, Any]:
        """Returns the best result, and when the last evaluation was."""
        best = None if self.best_mean == -math.inf else self.best_mean
        return {"best": [best, self.best_update], "last": [self._last_update, self._last_episodes]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; `results` stays empty.

        Raises:
            CheckpointError: The state is damaged.
        """
        best: Any = state.get("best")
        last: Any = state.get("last")
        where = f"callbacks/{type(self).__name__}/"
        is_valid = isinstance(best, list) and len(best) == 2 and (best[0] is None or is_real(best[0]))
        require_part(is_valid and is_count(best[1]), state, "best", "a mean return or None, and an update", where)
        is_valid = isinstance(last, list) and len(last) == 2 and all(map(is_count, last))
        require_part(is_valid, state, "last", "an update and a number of episodes", where)
        self.best_mean = -math.inf if best[0] is None else best[0]
        self.best_update = best[1]
        self._last_update, self._last_episodes = last
