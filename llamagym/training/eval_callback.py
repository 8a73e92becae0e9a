"""Evaluates the agent during training and saves the best one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..agent.export import KIND
from ..errors import ConfigError
from ..learners.base import Stats
from ..options import as_seed, check_arguments, explains_wrong_calls, require_positive, require_text
from ..saving.atomic import require_replaceable
from ..saving.paths import user_folder
from .callbacks import Callback
from .environments import EnvSource
from .evaluation import EvaluationResult, evaluate
from .loop_state import is_count, is_real, require_part
from .run import Run

logger = logging.getLogger(__name__)


class EvalCallback(Callback):
    """Evaluates the agent at regular intervals and saves the best one.

    Weights change at updates only, so it evaluates after updates: every `every` updates, or at the first update after
    `every_episodes` more episodes; and at the end of the training unless the last update has been evaluated. The
    statistics of the update get `eval_return`, `eval_standard_error`, `eval_length`, `eval_invalid_rate` and, where it
    is known, `eval_success_rate`.

    Attributes:
        results: Evaluations of this process as (number of the update, result).
        best_mean: Best mean return so far; -inf before the first evaluation.
        best_update: Number of the update after which it was measured.
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
        seed: int = 1_000_000,
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
        logger.info("after update %d: %s", self._last_update, result)
        is_best = result.mean > self.best_mean
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
