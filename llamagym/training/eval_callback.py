"""Evaluations in the course of a training, of which the best agent is kept."""

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
    """Evaluates the agent every so many updates or episodes, and keeps the best.

    Weights change at updates only, so that is where it evaluates: after `every` of them, or at the first update after
    `every_episodes` more episodes; and once more at the end of a training, unless the last update has been evaluated.
    The statistics of the update get `eval_return`, `eval_standard_error`, `eval_length`, `eval_invalid_rate` and, where
    it is known, `eval_success_rate`.

    Attributes:
        results: What was measured, by the number of the update: (update, result).
        best_mean: The best mean return so far; -inf before the first evaluation.
        best_update: The update that it was measured after.
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
        """Prepare to evaluate.

        Args:
            env: As for `evaluate`; not the very object that is trained in.
            episodes: How many an evaluation plays, the same ones each time.
            every: Updates from one evaluation to the next; None with `every_episodes`, else 10.
            every_episodes: Episodes instead.
            best_dir: Where the best agent is kept, as `agent.save` writes it: new, empty or an agent's; None keeps
                none.
            seed: Of the episodes; see `evaluate`.
            num_envs: As for `evaluate`.
            greedy: As for `evaluate`.
            on_best: Called with each result that is better than all before; returning False ends the training.

        Raises:
            ConfigError: An argument is of the wrong type or out of range, or both intervals are given.
            CheckpointError: `best_dir` holds something else.
        """
        check_arguments(EvalCallback.__init__, locals())
        require_text(best_dir=best_dir)
        require_positive(episodes=episodes, every=every, every_episodes=every_episodes, num_envs=num_envs)
        if every is not None and every_episodes is not None:
            raise ConfigError(f"every={every} and every_episodes={every_episodes}. Pass one of them.")
        self._env, self._episodes, self._seed, self._num_envs = env, episodes, as_seed(seed), num_envs
        self._greedy, self._on_best = greedy, on_best
        self._best_dir = None if best_dir is None else user_folder(best_dir, "best_dir")
        if self._best_dir is not None:
            require_replaceable(self._best_dir, KIND)
        self._every = 10 if every is None else every
        self._every_episodes = every_episodes
        self.on_training_start(None)

    def on_training_start(self, run: Run | None) -> None:
        """Begin again."""
        self.results: list[tuple[int, EvaluationResult]] = []
        self.best_mean, self.best_update = -math.inf, 0
        self._last_update = self._last_episodes = 0

    def on_update(self, run: Run, stats: Stats) -> bool | None:
        """Evaluate if it is time."""
        if self._every_episodes is None:
            is_due = len(run.updates) - self._last_update >= self._every
        else:
            is_due = len(run.returns) - self._last_episodes >= self._every_episodes
        if not is_due:
            return None
        result, is_best = self._evaluate(run)
        measured = {
            "eval_return": result.mean,
            "eval_standard_error": result.standard_error,
            "eval_length": result.mean_length,
            "eval_invalid_rate": result.invalid_rate,
            "eval_success_rate": result.success_rate,
        }
        stats |= {name: value for name, value in measured.items() if value is not None and math.isfinite(value)}
        return self._on_best(result) if is_best and self._on_best is not None else None

    def on_training_end(self, run: Run) -> None:
        """Evaluate what the last updates made."""
        if run.is_over and run.updates and self._last_update < len(run.updates):
            self._evaluate(run)

    def _evaluate(self, run: Run) -> tuple[EvaluationResult, bool]:
        result = evaluate(
            run.agent,
            self._env,
            episodes=self._episodes,
            seed=self._seed,
            num_envs=self._num_envs,
            greedy=self._greedy,
        )
        self._last_update, self._last_episodes = len(run.updates), len(run.returns)
        self.results.append((self._last_update, result))
        logger.info("after update %d: %s", self._last_update, result)
        is_best = result.mean > self.best_mean
        if is_best:
            if self._best_dir is not None:
                run.agent.save(self._best_dir)
            self.best_mean, self.best_update = result.mean, self._last_update
        return result, is_best

    def state_dict(self) -> dict[str, Any]:
        """How good the best was, and when the last evaluation was."""
        best = None if self.best_mean == -math.inf else self.best_mean
        return {"best": [best, self.best_update], "last": [self._last_update, self._last_episodes]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; `results` are those of this process.

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
