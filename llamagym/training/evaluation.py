"""Evaluates an agent or another policy."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from gymnasium.vector import VectorEnv

from ..agent.agent import Agent, collector_of
from ..errors import ConfigError, excerpt
from ..options import as_number, as_seed, check_arguments, explains_wrong_calls, require_positive
from .environments import EnvSource, open_envs, require_env_timeout, resolve_num_envs
from .episodes import Judge, success_rate
from .play import Play
from .players import AgentPlayer, Player, Policy, PolicyPlayer
from .report.scores import Score

EVALUATION_SEED = 1_000_000
"""Default seed of evaluation episodes, far from usual training seeds."""
# A fixed seed, so that computing an interval again gives the same.
_BOOTSTRAP_SEED = 0
# Resampled returns that are held in memory at once.
_BOOTSTRAP_NUMBERS = 2**22


@dataclass(frozen=True)
class EvaluationResult:
    """Result of `evaluate`; `str()` of it is one line.

    Attributes:
        returns: Undiscounted return of each episode.
        lengths: Number of turns of each episode.
        invalid: Number of turns of each episode whose reply named no action; 0 for a policy that is not an agent.
        successes: Whether each episode succeeded, by the environment's info under "success", "won" or "is_success";
            None where it does not say.
        mean: Mean return.
        standard_error: Standard error of the mean return; NaN for a single episode.
        interval: 95 % confidence interval of the mean return; NaN for a single episode.
        mean_length: Mean number of turns.
        invalid_rate: Share of the turns whose reply named no action.
        success_rate: Share of successful episodes among those with a known outcome; None if none is known.
    """

    returns: list[float]
    lengths: list[int] = field(default_factory=list)
    invalid: list[int] = field(default_factory=list)
    successes: list[bool | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Checks the returns.

        Raises:
            ConfigError: `returns` is not a list, or is empty.
        """
        if not isinstance(self.returns, Sequence) or isinstance(self.returns, str) or not self.returns:
            raise ConfigError(
                f"returns must be a list of at least one number, got {excerpt(self.returns)} "
                f"({type(self.returns).__name__})."
            )

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def standard_error(self) -> float:
        """Standard error of the mean return."""
        if len(self.returns) < 2:
            return np.nan
        return float(np.std(self.returns, ddof=1) / np.sqrt(len(self.returns)))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the mean return; NaN for a single episode.

        Returns of two values, such as 0 and 1 for failure and success, have Wilson's interval of a share (Wilson 1927,
        https://doi.org/10.2307/2276774), also if all of them are 0 or all are 1. Other returns have the bias-corrected
        and accelerated bootstrap interval (Efron 1987, https://doi.org/10.2307/2289144), widened for few episodes as
        Student's distribution is.

        No interval accounts for outcomes that did not occur. If all returns are equal, and neither 0 nor 1, it has no
        width. If a rare episode decides the mean, the coverage is lower than 95 %; then play more episodes.
        docs/training.md has a table of the coverage by distribution and number of returns.
        """
        count = len(self.returns)
        values = set(self.returns)
        if count == 1:
            return np.nan, np.nan
        if values <= {0.0, 1.0}:
            return _interval_of_two_values(self.returns, 0.0, 1.0)
        if len(values) == 1:
            return self.mean, self.mean
        # With two episodes, two values do not suggest that there are no others.
        if len(values) == 2 and count > 2:
            return _interval_of_two_values(self.returns, *sorted(values))
        return _bootstrap_interval(self.returns)

    @property
    def mean_length(self) -> float:
        """Mean number of turns."""
        return float(np.mean(self.lengths)) if self.lengths else np.nan

    @property
    def invalid_rate(self) -> float:
        """Share of the turns whose reply named no action."""
        return sum(self.invalid) / sum(self.lengths) if self.lengths else np.nan

    @property
    def success_rate(self) -> float | None:
        """Share of successful episodes."""
        return success_rate(self.successes)

    def __str__(self) -> str:
        """Returns the means on one line."""
        low, high = self.interval
        parts = [f"mean return {self.mean:.3f} (95% interval {low:.3f} to {high:.3f})", f"{len(self.returns)} episodes"]
        if self.success_rate is not None:
            parts.append(f"success {self.success_rate:.1%}")
        parts += [f"{self.mean_length:.1f} turns each", f"invalid replies {self.invalid_rate:.1%}"]
        return ", ".join(parts)


def _interval_of_two_values(returns: Sequence[float], low: float, high: float) -> tuple[float, float]:
    """Returns Wilson's interval of the mean of returns that are `low` or `high`."""
    from scipy.stats import binomtest  # takes a second to import

    high_count = sum(value == high for value in returns)
    share = binomtest(high_count, len(returns)).proportion_ci(method="wilson")
    return low + (high - low) * float(share.low), low + (high - low) * float(share.high)


def _bootstrap_interval(returns: Sequence[float]) -> tuple[float, float]:
    """Returns the bootstrap interval of the mean, widened by the ratio of Student's quantile to the normal quantile.

    Without that it is too narrow for few episodes, because the bootstrap treats the sample's spread as the
    distribution's (Hesterberg 2015, https://doi.org/10.1080/00031305.2015.1089789, section 4.3).
    """
    from scipy.stats import bootstrap, norm, t

    count = len(returns)
    mean = float(np.mean(returns))
    batch = max(1, _BOOTSTRAP_NUMBERS // count)
    result = bootstrap((returns,), np.mean, batch=batch, rng=np.random.default_rng(_BOOTSTRAP_SEED))
    low, high = result.confidence_interval
    factor = t.ppf(0.975, count - 1) / norm.ppf(0.975) * math.sqrt(count / (count - 1))
    return mean + factor * (float(low) - mean), mean + factor * (float(high) - mean)


def as_score(result: object, owner: str = "result is") -> Score:
    """Converts a number, or a result of `evaluate`, to a score.

    Args:
        result: The number or result.
        owner: Beginning of the error's message.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(result, EvaluationResult):
        episodes = len(result.returns)
        if episodes == 1:
            return Score(result.mean, episodes=1, success_rate=result.success_rate)
        low, high = result.interval
        return Score(result.mean, result.standard_error, (float(low), float(high)), episodes, result.success_rate)
    # as_number() returns NaN for anything but a number.
    is_nan = isinstance(result, (float, np.floating)) and math.isnan(result)
    number = as_number(result)
    if math.isnan(number) and not is_nan:
        raise ConfigError(
            f"{owner} {excerpt(result)} ({type(result).__name__}); expected a number, or a result of "
            "llamagym.evaluate()."
        )
    return Score(number)


def side_by_side(results: Mapping[str, EvaluationResult]) -> str:
    """Returns a table of results, one row per name.

    Raises:
        ConfigError: `results` is not a dictionary of results of `evaluate`, or empty.

    >>> print(side_by_side({"agent": EvaluationResult([1.0, 1.0], [2, 4], [0, 0], [True, True])}))
    policy  mean return   95% interval  success  turns  invalid  episodes
    agent         1.000  0.342..1.000   100.0%    3.0     0.0%         2
    """
    is_usable = isinstance(results, Mapping) and len(results) > 0
    if not is_usable or not all(isinstance(result, EvaluationResult) for result in results.values()):
        raise ConfigError(f"results must be a dictionary of results of evaluate() by name, got {excerpt(results)}.")
    width = max(len(str(name)) for name in ("policy", *results))
    rows = [f"{'policy':<{width}}  mean return   95% interval  success  turns  invalid  episodes"]
    for name, result in results.items():
        low, high = result.interval
        success = "-" if result.success_rate is None else f"{result.success_rate:.1%}"
        rows.append(
            f"{name:<{width}}  {result.mean:11.3f}  {f'{low:.3f}..{high:.3f}':>12}  {success:>7}  "
            f"{result.mean_length:5.1f}  {result.invalid_rate:7.1%}  {len(result.returns):8d}"
        )
    return "\n".join(rows)


@explains_wrong_calls(positional=2)
def evaluate(
    agent: Agent | Policy,
    env: EnvSource,
    *,
    episodes: int,
    seed: int | None = None,
    num_envs: int | None = None,
    greedy: bool = True,
    judge: Judge | None = None,
    env_timeout: float | None = None,
) -> EvaluationResult:
    """Evaluates an agent or another policy; nothing is learned, and training continues as if this had not been called.

    Each environment plays the same number of episodes, or one more: counting the first episodes to end would favor
    short ones. With the same seed, all policies play the same episodes.

    Args:
        agent: An agent, which is switched to `eval(greedy)` and back; a function of the observation, and of the info if
            it has a parameter `info`, that returns an action; or "random", which draws from the action space, among the
            actions that `info["action_mask"]` allows if it is given.
        env: As for `train`.
        episodes: Number of episodes.
        seed: Seed of the episodes and of sampling; None draws one. `train` plays other episodes, unless it has this
            seed.
        num_envs: Number of environments that are stepped together; None as for `train`.
        greedy: Whether an agent takes the most likely choice or token instead of sampling.
        judge: As for `train`.
        env_timeout: As for `train`.

    Raises:
        ConfigError: An argument is of the wrong type or out of range, or `env` cannot be made, or not several times.
        EnvironmentTimeoutError: The environment took longer than `env_timeout`.
    """
    check_arguments(evaluate, locals())
    require_positive(episodes=episodes, num_envs=num_envs)
    require_env_timeout(env_timeout)
    base_seed = np.random.SeedSequence(as_seed(seed)).entropy
    assert isinstance(base_seed, int)
    num_envs = resolve_num_envs(env, num_envs)
    if not isinstance(env, VectorEnv):
        num_envs = min(num_envs, episodes)
    ids = [("evaluate", index) for index in range(num_envs)]
    quotas = [episodes // num_envs + (index < episodes % num_envs) for index in range(num_envs)]
    # Return, length, invalid turns and success by environment; the episodes themselves, with their texts, are dropped.
    outcomes: list[list[tuple[float, int, int, bool | None]]] = [[] for _ in ids]
    mode = evaluation_mode(agent, ids, greedy, base_seed) if isinstance(agent, Agent) else nullcontext()
    with open_envs(env, [num_envs], env_timeout) as parts, mode:
        player: Player
        if isinstance(agent, Agent):
            player = AgentPlayer(agent)
        else:
            player = PolicyPlayer(agent, parts[0].action_space, base_seed % 2**32)
        play = Play(player, parts, ids, base_seed, judge=judge)
        play.begin()
        is_done = np.array(quotas) == 0
        while not is_done.all():
            for episode in play.step().ended:
                index = episode.copy
                if len(outcomes[index]) < quotas[index]:
                    outcome = (episode.total_reward, episode.length, episode.invalid_turns, episode.success)
                    outcomes[index].append(outcome)
                is_done[index] = len(outcomes[index]) == quotas[index]
            play.pause(is_done)
    returns, lengths, invalid, successes = zip(*chain.from_iterable(outcomes), strict=True)
    return EvaluationResult(list(returns), list(lengths), list(invalid), list(successes))


@contextmanager
def evaluation_mode(agent: Agent, ids: Sequence[Hashable], greedy: bool, seed: int) -> Iterator[None]:
    """While open, an agent acts in `eval`, with random numbers and conversations of its own.

    Args:
        agent: The agent.
        ids: Environments whose conversations are dropped at both ends.
        greedy: As for `Agent.eval`.
        seed: Seed of the random numbers.
    """
    collector = collector_of(agent)
    actor = collector.actor
    is_as_loaded = collector.is_as_loaded
    was_learning = actor.is_learning
    was_greedy = actor.is_greedy
    rng = agent.policy.rng
    rng_state = rng.get_state()
    agent.eval(greedy)
    rng.manual_seed(seed % 2**63)
    try:
        with own_conversations(agent, ids), agent.policy.measuring():
            yield
    finally:
        rng.set_state(rng_state)
        # By the public methods, which a subclass may override.
        if was_learning:
            agent.train()
        else:
            agent.eval(was_greedy)
        collector.is_as_loaded = is_as_loaded


@contextmanager
def own_conversations(agent: Agent, ids: Sequence[Hashable]) -> Iterator[None]:
    """Drops these environments' conversations when opened and, also after an exception, when closed."""
    actor = collector_of(agent).actor
    actor.discard_episodes(ids)
    try:
        yield
    finally:
        actor.discard_episodes(ids)
