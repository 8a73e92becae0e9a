"""Measures an agent, or any other policy beside it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
from gymnasium.vector import VectorEnv

from ..agent.agent import Agent
from ..errors import ConfigError, excerpt
from ..options import as_seed, check_arguments, explains_wrong_calls, require_positive
from .environments import EnvSource, open_envs, resolve_num_envs
from .episodes import Judge, success_rate
from .play import Play
from .policies import Policy, PolicyPlayer

# Of the resampling: an interval that is looked at twice is the same, and memory for this many numbers at once is fine.
_BOOTSTRAP_SEED, _BOOTSTRAP_NUMBERS = 0, 2**22


@dataclass(frozen=True)
class EvaluationResult:
    """What `evaluate` measured; printed, a line.

    Attributes:
        returns: Undiscounted return of each episode.
        lengths: Turns of each.
        invalid: Turns of each whose reply named no action; none of a policy that is no agent.
        successes: Whether each succeeded, by the environment's info under "success", "won" or "is_success"; None where
            it does not say.
        mean: Mean return.
        standard_error: Of the mean; NaN for a single episode.
        interval: 95 % confidence interval of the mean; NaN for a single episode.
        mean_length: Mean number of turns.
        invalid_rate: Share of the turns whose reply named no action.
        success_rate: Share of successes among the episodes of which it is known; None if it is of none.
    """

    returns: list[float]
    lengths: list[int] = field(default_factory=list)
    invalid: list[int] = field(default_factory=list)
    successes: list[bool | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Checks that there are returns.

        Raises:
            ConfigError: There are none.
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
        return float(np.std(self.returns, ddof=1) / np.sqrt(len(self.returns))) if len(self.returns) > 1 else np.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the mean return; NaN for a single episode.

        Returns of two values, such as 0 and 1 for failure and success, have Wilson's interval of a share (Wilson 1927,
        https://doi.org/10.2307/2276774), also if all of them are 0 or all are 1. Other returns have the bias-corrected
        and accelerated bootstrap interval (Efron 1987, https://doi.org/10.2307/2289144), widened as Student's
        distribution is for few episodes.

        No interval accounts for what was never met. If all returns are equal, and neither 0 nor 1, it has no width.
        Where a rare episode decides the mean, it covers the mean less often than it says: with 20 episodes of which one
        in 50 earns a hundred times what others do, 3 times in 10. docs/training.md has a table of the coverage by the
        kind and number of returns. Then play more episodes.
        """
        count, values = len(self.returns), set(self.returns)
        if count == 1:
            return np.nan, np.nan
        if values <= {0.0, 1.0}:
            return _interval_of_two_values(self.returns, 0.0, 1.0)
        if len(values) == 1:
            return self.mean, self.mean
        # Two returns that differ need not be all there is.
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
        """Share of successes."""
        return success_rate(self.successes)

    def __str__(self) -> str:
        """The measurements in a line."""
        (low, high), success = self.interval, self.success_rate
        parts = [f"mean return {self.mean:.3f} (95% interval {low:.3f} to {high:.3f})", f"{len(self.returns)} episodes"]
        parts += [] if success is None else [f"success {success:.1%}"]
        return ", ".join([*parts, f"{self.mean_length:.1f} turns each", f"invalid replies {self.invalid_rate:.1%}"])


def _interval_of_two_values(returns: Sequence[float], low: float, high: float) -> tuple[float, float]:
    """Wilson's interval of the share of `high` among returns that are `low` or `high`, as returns."""
    from scipy.stats import binomtest  # takes a second to import

    share = binomtest(sum(value == high for value in returns), len(returns)).proportion_ci(method="wilson")
    return low + (high - low) * float(share.low), low + (high - low) * float(share.high)


def _bootstrap_interval(returns: Sequence[float]) -> tuple[float, float]:
    """Bootstrap interval of the mean, on either side as much wider as Student's is than the normal distribution's.

    The bootstrap takes the spread for known: of 5 episodes it covers the mean in 86 of 100 cases (Hesterberg 2015,
    https://doi.org/10.1080/00031305.2015.1089789, section 4.3).
    """
    from scipy.stats import bootstrap, norm, t

    count, mean = len(returns), float(np.mean(returns))
    batch = max(1, _BOOTSTRAP_NUMBERS // count)
    found = bootstrap((returns,), np.mean, batch=batch, rng=np.random.default_rng(_BOOTSTRAP_SEED))
    low, high = found.confidence_interval
    wider = t.ppf(0.975, count - 1) / norm.ppf(0.975) * math.sqrt(count / (count - 1))
    return mean + wider * (float(low) - mean), mean + wider * (float(high) - mean)


def side_by_side(results: Mapping[str, EvaluationResult]) -> str:
    """Results as a table with a row for each, by name.

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
) -> EvaluationResult:
    """Measure an agent or another policy; nothing is learned, and training continues as if this had not been called.

    Every copy plays the same number of episodes, give or take one, then rests: taking the first to end would prefer
    short ones.
    With the same seed all policies play the same episodes.

    Args:
        agent: Who acts. An agent is switched to `eval(greedy)`, and back afterwards. A function gives an action for an
            observation, or, with a second parameter `info`, for both. "random" draws from the action space, within
            `info["action_mask"]` where there is one.
        env: As for `train`.
        episodes: How many to play.
        seed: Of the episodes' reset seeds, apart from those of `train` with any other seed, and of sampling; None draws
            one.
        num_envs: Copies that are acted in at once; None as for `train`.
        greedy: Take the most likely choice or token instead of sampling.
        judge: As for `train`.

    Raises:
        ConfigError: An argument is of the wrong type or out of range, or `env` cannot be made or copied.
    """
    check_arguments(evaluate, locals())
    require_positive(episodes=episodes, num_envs=num_envs)
    entropy = np.random.SeedSequence(as_seed(seed)).entropy
    assert isinstance(entropy, int)
    num_envs = resolve_num_envs(env, num_envs)
    if not isinstance(env, VectorEnv):
        num_envs = min(num_envs, episodes)
    ids = [("evaluate", index) for index in range(num_envs)]
    quota = [episodes // num_envs + (index < episodes % num_envs) for index in range(num_envs)]
    played: list[list[tuple[float, int, int, bool | None]]] = [[] for _ in ids]
    measured = _measured(agent, ids, greedy, entropy) if isinstance(agent, Agent) else nullcontext()
    with open_envs(env, [num_envs]) as parts, measured:
        player = agent if isinstance(agent, Agent) else PolicyPlayer(agent, parts[0].action_space, entropy % 2**32)
        play = Play(player, parts, ids, entropy, judge=judge)
        play.begin()
        resting = np.array(quota) == 0
        while not resting.all():
            for episode in play.step().ended:
                if len(played[episode.copy]) < quota[episode.copy]:
                    # The episode itself, with all its texts, is not kept.
                    outcome = (episode.total_reward, episode.length, episode.invalid_turns, episode.success)
                    played[episode.copy].append(outcome)
                resting[episode.copy] = len(played[episode.copy]) == quota[episode.copy]
            play.rest(resting)
    returns, lengths, invalid, successes = zip(*(outcome for done in played for outcome in done), strict=True)
    return EvaluationResult(list(returns), list(lengths), list(invalid), list(successes))


@contextmanager
def _measured(agent: Agent, ids: Sequence[Hashable], greedy: bool, seed: int) -> Iterator[None]:
    """While open, an agent acts in `eval`, with random numbers and conversations of its own."""
    was_learning, was_greedy, rng = agent.learning, agent.greedy, agent.policy.rng
    drawn = rng.get_state()
    agent.eval(greedy)
    rng.manual_seed(seed % 2**63)
    try:
        with own_conversations(agent, ids), agent.policy.measuring():
            yield
    finally:
        rng.set_state(drawn)
        if was_learning:
            agent.train()
        else:
            agent.eval(was_greedy)


@contextmanager
def own_conversations(agent: Agent, ids: Sequence[Hashable]) -> Iterator[None]:
    """While open, these environments' conversations belong to it: new ones, which end with it, whatever happens."""
    agent.discard_episodes(ids)
    try:
        yield
    finally:
        agent.discard_episodes(ids)
