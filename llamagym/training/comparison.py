"""Compares the agent before and after training with a random policy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from gymnasium.vector import AsyncVectorEnv

from ..agent.agent import Agent
from .env_specs import without_video
from .environments import EnvSource
from .episodes import Judge
from .evaluation import EVALUATION_SEED, EvaluationResult, as_score, evaluate
from .report.scores import Score

logger = logging.getLogger(__name__)


class Comparison:
    """Scores an agent before and after training, and a random policy, on the same episodes.

    An evaluation that fails is logged and left out: it must not end the training run. Of several processes that learn
    together, each evaluates, so that none of them waits.

    Attributes:
        scores: "before", "random" and, after training, "after".
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
        # An error of one environment would end the processes of all.
        self._has_random = not isinstance(getattr(env, "unwrapped", None), AsyncVectorEnv)
        self._evaluate: Callable[[Agent | str], EvaluationResult] = partial(
            evaluate,
            env=without_video(env),
            episodes=episodes,
            seed=EVALUATION_SEED,
            num_envs=num_envs,
            judge=judge,
            env_timeout=env_timeout,
        )
        self._is_enabled = episodes > 0
        self._note = note

    def evaluate_before(self) -> None:
        """Evaluates the agent and the random policy before the first step."""
        if self._is_enabled:
            self._note("evaluating before the first step")
            self._add("before", self._agent)
            if self._has_random:
                self._add("random", "random")

    def evaluate_after(self) -> None:
        """Evaluates the trained agent."""
        if self._is_enabled:
            self._add("after", self._agent)
            order = ("before", "after", "random")
            self.scores = {name: self.scores[name] for name in order if name in self.scores}

    def _add(self, name: str, policy: Agent | str) -> None:
        try:
            result = self._evaluate(policy)
        except Exception as error:  # an environment may raise anything, for an action that its agent never takes
            logger.warning("The evaluation %r failed, and is left out: %r", name, error)
            return
        self.scores[name] = as_score(result)
        self._note(f"{name}: {self.scores[name]}")
