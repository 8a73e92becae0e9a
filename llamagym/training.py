"""The visible loop: an agent, many copies of an environment, a bar.

Every episode starts from a reset seed of its own, derived from the run's and counted in one order, so that a run can be
repeated and another seed plays other episodes. For learners that compare episodes of one start, `group_size` copies in
a row share these seeds: each copy takes the next one of its row when its episode ends, whether the others have ended or
not.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from .agent import Agent
from .conversation.interface import no_action_advice
from .errors import ConfigError
from .learners.base import Stats
from .tracking import Progress, Tracker

logger = logging.getLogger(__name__)

EnvSource = str | gymnasium.Env | Callable[[], gymnasium.Env]


@dataclass(frozen=True)
class TrainingResult:
    """What `train` did.

    Attributes:
        returns: Undiscounted return of each finished episode, in the order of their ends.
        updates: Statistics of each update.
        turns: Environment steps taken.
        message: Why no update ran; empty if one did.
    """

    returns: list[float]
    updates: list[Stats]
    turns: int
    message: str


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


def train(
    agent: Agent,
    env: EnvSource,
    episodes: int,
    num_envs: int = 1,
    seed: int | None = None,
    on_update: Callable[[Stats], bool | None] | None = None,
    tracker: Tracker | None = None,
    group_size: int | None = None,
) -> TrainingResult:
    """Let the agent act and learn for a number of episodes.

    Args:
        agent: Who learns; switched to `train()`.
        env: An environment's id, an environment, or a function that makes one. With `num_envs` > 1 an environment must
            have a spec to be copied from.
        episodes: Stop when this many have ended; unfinished ones are dropped.
        num_envs: Copies that are acted in at once.
        seed: Of the episodes' reset seeds; None draws one, from the agent's seed if it has one.
        on_update: Called with the statistics of each update; returning True ends the training.
        tracker: Receives them first.
        group_size: Episodes that share a reset seed, in a row of as many copies; None is what the learner compares, 1
            for a learner that compares none.

    Returns:
        Returns and statistics.

    Raises:
        ConfigError: `episodes` or `num_envs` is no positive number, `num_envs` is no multiple of `group_size`, or
            `env` cannot be copied.
    """
    _require_positive(episodes=episodes, num_envs=num_envs)
    size = agent.learner.group_size if group_size is None else group_size
    if size < 1 or num_envs % size:
        raise ConfigError(
            f"num_envs={num_envs} does not divide into groups of {size} episodes that start alike. Pass a multiple of "
            f"{max(size, 1)}, or another group_size."
        )
    agent.train()
    seed = agent.draw_seed() if seed is None else seed
    ids = list(range(num_envs))
    returns: list[float] = []
    updates: list[Stats] = []
    turns, stop = 0, False
    with _copies_of(env, num_envs) as envs, _conversations(agent, ids), Progress(episodes) as progress:
        for ended, stats in _steps(agent, envs, ids, seed, size):
            turns += num_envs
            new = [value for _, value in ended][: episodes - len(returns)]
            returns += new
            progress.advance(new, stats)
            if stats:
                updates.append(stats)
                if tracker:
                    tracker.log(stats, len(returns))
                if on_update:
                    stop = bool(on_update(stats))
            if stop or len(returns) >= episodes:
                break
    message = "" if updates else agent.why_no_update()
    if message:
        logger.warning(message)
    return TrainingResult(returns, updates, turns, message)


def evaluate(
    agent: Agent, env: EnvSource, episodes: int, seed: int | None = None, num_envs: int = 1, greedy: bool = True
) -> EvaluationResult:
    """Measure the agent without learning; what it was training on stays as it is.

    Every copy plays the same number of episodes, give or take one: taking the first to end would prefer short ones.

    Args:
        agent: Who acts; switched to `eval(greedy)`, and back afterwards.
        env: As for `train`.
        episodes: How many to play.
        seed: Of the episodes' reset seeds, apart from those of `train` with any other seed; None draws one.
        num_envs: Copies that are acted in at once.
        greedy: Take the most likely choice or token instead of sampling.
    """
    _require_positive(episodes=episodes, num_envs=num_envs)
    num_envs = min(num_envs, episodes)
    ids = [("evaluate", index) for index in range(num_envs)]
    quota = [episodes // num_envs + (index < episodes % num_envs) for index in range(num_envs)]
    returns: list[list[float]] = [[] for _ in ids]
    was_learning, was_greedy = agent.learning, agent.greedy
    agent.eval(greedy)
    try:
        with _copies_of(env, num_envs) as envs, _conversations(agent, ids):
            for ended, _ in _steps(agent, envs, ids, seed):
                for index, value in ended:
                    if len(returns[index]) < quota[index]:
                        returns[index].append(value)
                if all(len(done) == wanted for done, wanted in zip(returns, quota, strict=True)):
                    break
    finally:
        if was_learning:
            agent.train()
        else:
            agent.eval(was_greedy)
    return EvaluationResult([value for done in returns for value in done])


def _steps(
    agent: Agent, envs: SyncVectorEnv, ids: Sequence[Hashable], seed: int | None, group_size: int = 1
) -> Iterator[tuple[list[tuple[int, float]], Stats]]:
    """Step all copies forever; yields (copy, return) of the episodes that ended, and the statistics of an update."""
    rows = envs.num_envs // group_size
    entropy = np.random.SeedSequence(seed).entropy
    # The number of the group that each copy is in; a row's next group is `rows` further on.
    group = np.arange(envs.num_envs) // group_size
    seeds = [_reset_seed(entropy, number) for number in group.tolist()]
    observations, _ = envs.reset(seed=list(seeds))
    totals = np.zeros(envs.num_envs)
    space = envs.single_action_space
    while True:
        actions = agent.act_batch(list(iterate(envs.observation_space, observations)), ids)
        if any(action is None for action in actions):
            raise NotImplementedError(f"A reply names no action. {no_action_advice(agent)}")
        batch = concatenate(space, actions, create_empty_array(space, envs.num_envs))  # type: ignore[arg-type]
        observations, rewards, terminated, truncated, _ = envs.step(batch)
        agent.assign_rewards(rewards.tolist(), ids)
        totals += rewards
        over = terminated | truncated
        done = np.flatnonzero(over).tolist()
        stats: Stats = {}
        if done:
            cut = [bool(truncated[i] and not terminated[i]) for i in done]
            final = list(iterate(envs.observation_space, observations))
            groups = [seeds[i] if group_size > 1 else None for i in done]
            stats = agent.terminate_episodes([ids[i] for i in done], cut, [final[i] for i in done], groups=groups)
            group[done] += rows
            for i in done:
                seeds[i] = _reset_seed(entropy, int(group[i]))
            observations, _ = envs.reset(seed=list(seeds), options={"reset_mask": over})
        yield [(i, float(totals[i])) for i in done], stats
        totals[done] = 0.0


def _reset_seed(entropy: Any, number: int) -> int:
    """The seed of the episodes with this number; those of different runs have nothing to do with each other."""
    return int(np.random.SeedSequence(entropy, spawn_key=(number,)).generate_state(1)[0])


def _require_positive(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
            raise ConfigError(f"{name}={count!r}. Pass a whole number of at least 1.")


@contextmanager
def _conversations(agent: Agent, ids: Sequence[Hashable]) -> Iterator[None]:
    """While open, these environments' conversations belong to it: new ones, which end with it, whatever happens."""
    agent.discard_episodes(ids)
    try:
        yield
    finally:
        agent.discard_episodes(ids)


@contextmanager
def _copies_of(env: EnvSource, num_envs: int) -> Iterator[SyncVectorEnv]:
    """Copies of an environment, closed afterwards; one that the caller made is left open."""
    envs = _make_envs(env, num_envs)
    try:
        yield envs
    finally:
        if not any(copied is env for copied in envs.envs):
            envs.close()


def _make_envs(env: EnvSource, num_envs: int) -> SyncVectorEnv:
    if isinstance(env, str):
        name = env
        makers: list[Callable[[], Any]] = [lambda: gymnasium.make(name)] * num_envs
    elif isinstance(env, gymnasium.Env):
        single, spec = env, env.spec
        if num_envs == 1:
            makers = [lambda: single]
        elif spec is None:
            raise ConfigError(
                f"{num_envs} copies of {env} are wanted, but it was not made by gymnasium.make() and has no spec to "
                "copy. Pass a function that makes one."
            )
        else:
            makers = [lambda: gymnasium.make(copy.deepcopy(spec))] * num_envs
    else:
        makers = [env] * num_envs
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
