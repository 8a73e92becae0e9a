"""Measures an agent, or any other policy beside it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
from gymnasium.vector import VectorEnv

from ..agent import Agent
from ..errors import ConfigError
from ..options import as_seed, check_arguments
from .environments import EnvSource, copies_for, opened
from .play import Play
from .played import Judge, success_rate
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
        interval: 95 % confidence interval of the mean, by bootstrap; NaN for a single episode.
        mean_length: Mean number of turns.
        invalid_rate: Share of the turns whose reply named no action.
        success_rate: Share of successes among the episodes of which it is known; None if it is of none.
    """

    returns: list[float]
    lengths: list[int] = field(default_factory=list)
    invalid: list[int] = field(default_factory=list)
    successes: list[bool | None] = field(default_factory=list)

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
        """Bias-corrected and accelerated bootstrap interval (Efron 1987, https://doi.org/10.2307/2289144)."""
        if len(self.returns) == 1:
            return np.nan, np.nan
        if len(set(self.returns)) == 1:
            return self.mean, self.mean
        from scipy.stats import bootstrap  # takes a second to import

        batch = max(1, _BOOTSTRAP_NUMBERS // len(self.returns))
        found = bootstrap((self.returns,), np.mean, batch=batch, rng=np.random.default_rng(_BOOTSTRAP_SEED))
        return float(found.confidence_interval.low), float(found.confidence_interval.high)

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


def side_by_side(results: Mapping[str, EvaluationResult]) -> str:
    """Results as a table with a row for each, by name.

    >>> print(side_by_side({"agent": EvaluationResult([1.0, 1.0], [2, 4], [0, 0], [True, True])}))
    policy  mean return   95% interval  success  turns  invalid  episodes
    agent         1.000  1.000..1.000   100.0%    3.0     0.0%         2
    """
    width = max(map(len, ("policy", *results)))
    rows = [f"{'policy':<{width}}  mean return   95% interval  success  turns  invalid  episodes"]
    for name, result in results.items():
        low, high = result.interval
        success = "-" if result.success_rate is None else f"{result.success_rate:.1%}"
        rows.append(
            f"{name:<{width}}  {result.mean:11.3f}  {f'{low:.3f}..{high:.3f}':>12}  {success:>7}  "
            f"{result.mean_length:5.1f}  {result.invalid_rate:7.1%}  {len(result.returns):8d}"
        )
    return "\n".join(rows)


def evaluate(
    agent: Agent | Policy,
    env: EnvSource,
    episodes: int,
    seed: int | None = None,
    num_envs: int | None = None,
    greedy: bool = True,
    *,
    judge: Judge | None = None,
) -> EvaluationResult:
    """Measure an agent or another policy; nothing is learnt, and a training goes on as if this had not been called.

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
    num_envs = copies_for(env, num_envs)
    if not isinstance(env, VectorEnv):
        num_envs = min(num_envs, episodes)
    ids = [("evaluate", index) for index in range(num_envs)]
    quota = [episodes // num_envs + (index < episodes % num_envs) for index in range(num_envs)]
    played: list[list[tuple[float, int, int, bool | None]]] = [[] for _ in ids]
    measured = _measured(agent, ids, greedy, entropy) if isinstance(agent, Agent) else nullcontext()
    with opened(env, [num_envs]) as parts, measured:
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
