"""Measures an agent."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from gymnasium.vector import VectorEnv

from ..agent import Agent
from ..errors import ConfigError
from ..options import as_seed, check_arguments
from .environments import EnvSource, copies_for, opened
from .play import Play


@dataclass(frozen=True)
class EvaluationResult:
    """What `evaluate` measured.

    Attributes:
        returns: Undiscounted return of each episode.
        mean: Their mean.
        standard_error: Of the mean; NaN for a single episode.
    """

    returns: list[float]

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def standard_error(self) -> float:
        """Standard error of the mean return."""
        return float(np.std(self.returns, ddof=1) / np.sqrt(len(self.returns))) if len(self.returns) > 1 else np.nan


def evaluate(
    agent: Agent,
    env: EnvSource,
    episodes: int,
    seed: int | None = None,
    num_envs: int | None = None,
    greedy: bool = True,
) -> EvaluationResult:
    """Measure the agent without learning; what it was training on stays as it is.

    Every copy plays the same number of episodes, give or take one: taking the first to end would prefer short ones.

    Args:
        agent: Who acts; switched to `eval(greedy)`, and back afterwards.
        env: As for `train`.
        episodes: How many to play.
        seed: Of the episodes' reset seeds, apart from those of `train` with any other seed; None draws one.
        num_envs: Copies that are acted in at once; None as for `train`.
        greedy: Take the most likely choice or token instead of sampling.

    Raises:
        ConfigError: An argument is of the wrong type or out of range, or `env` cannot be made or copied.
    """
    check_arguments(evaluate, locals())
    require_positive(episodes=episodes, num_envs=num_envs)
    seed = as_seed(seed)
    num_envs = copies_for(env, num_envs)
    if not isinstance(env, VectorEnv):
        num_envs = min(num_envs, episodes)
    ids = [("evaluate", index) for index in range(num_envs)]
    quota = [episodes // num_envs + (index < episodes % num_envs) for index in range(num_envs)]
    returns: list[list[float]] = [[] for _ in ids]
    was_learning, was_greedy = agent.learning, agent.greedy
    agent.eval(greedy)
    try:
        with opened(env, num_envs) as copies, own_conversations(agent, ids):
            play = Play(agent, copies, ids, seed)
            play.begin()
            while any(len(done) < wanted for done, wanted in zip(returns, quota, strict=True)):
                for episode in play.step()[0]:
                    if len(returns[episode.copy]) < quota[episode.copy]:
                        returns[episode.copy].append(episode.total_reward)
    finally:
        if was_learning:
            agent.train()
        else:
            agent.eval(was_greedy)
    return EvaluationResult([value for done in returns for value in done])


def require_positive(**counts: int | None) -> None:
    """Refuse counts below 1; None is no count.

    Raises:
        ConfigError: One is.
    """
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{name}={count!r}. Pass a whole number of at least 1.")


@contextmanager
def own_conversations(agent: Agent, ids: Sequence[Hashable]) -> Iterator[None]:
    """While open, these environments' conversations belong to it: new ones, which end with it, whatever happens."""
    agent.discard_episodes(ids)
    try:
        yield
    finally:
        agent.discard_episodes(ids)
