"""Compares the agent before and after a training with a random policy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from .. import distributed
from ..agent.agent import Agent
from .environments import EnvSource
from .episodes import Judge
from .evaluation import EVALUATION_SEED, EvaluationResult, as_score, evaluate
from .report.scores import Score

logger = logging.getLogger(__name__)


class Comparison:
    """The agent before and after a training, and a random policy, in the same episodes.

    Of several processes that learn together, only the first evaluates.

    Attributes:
        scores: "before", "random" and, after the training, "after".
    """

    def __init__(
        self,
        agent: Agent,
        env: EnvSource,
        episodes: int,
        num_envs: int | None,
        judge: Judge | None,
        env_timeout: float | None,
        note: Callable[[str], None],
    ) -> None:
        """Prepares the evaluations.

        Args:
            agent: The agent that is trained.
            env: As for `train`.
            episodes: Number of episodes of each evaluation; 0 evaluates nothing.
            num_envs: As for `train`.
            judge: As for `train`.
            env_timeout: As for `train`.
            note: Prints a line.
        """
        self.scores: dict[str, Score] = {}
        self._agent = agent
        self._evaluate: Callable[[Agent | str], EvaluationResult] = partial(
            evaluate,
            env=env,
            episodes=episodes,
            seed=EVALUATION_SEED,
            num_envs=num_envs,
            judge=judge,
            env_timeout=env_timeout,
        )
        self._is_measured = episodes > 0 and distributed.is_main_process()
        self._note = note

    def before(self) -> None:
        """Evaluates the agent and the random policy before the first step."""
        if not self._is_measured:
            return
        self._note("evaluating before the training")
        self._take("before", self._evaluate(self._agent))
        try:
            self._take("random", self._evaluate("random"))
        except Exception as error:  # an environment may raise anything if an action is none that the agent would take
            logger.warning("A random policy cannot be evaluated in this environment: %r", error)

    def after(self) -> None:
        """Evaluates the trained agent."""
        if self._is_measured:
            self._take("after", self._evaluate(self._agent))
            order = ("before", "after", "random")
            self.scores = {name: self.scores[name] for name in order if name in self.scores}

    def _take(self, name: str, result: EvaluationResult) -> None:
        self.scores[name] = as_score(result)
        self._note(f"{name}: {self.scores[name]}")
