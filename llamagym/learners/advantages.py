"""The scale of advantages, and whether a batch holds any information at all.

Both look beyond the batch's own advantages. Once every action earns the same, what is left of the advantages is the
critic's error; at unit variance it would move the policy as hard as rewards did before.

Shapes: E episodes, T turns of the longest episode.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median, pstdev

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..text.episode import Episode, Segment
from .losses import discounted_returns, masked_mean, masked_var
from .state import Stateful

# Turns that determine a gradient well enough for full steps, whatever its noise.
FULL_BATCH = 768
# A turn counts as no less than this many bits, so that a policy that is certain of the wrong reply can still move.
_LEAST_BITS = 0.01
# Number of recent updates whose median is the reference scale. A median ignores outliers, and follows a lasting change
# after half of them.
_MEMORY = 20
# A batch's deviation counts as no less than these shares: of the usual deviation of advantages, and of the usual spread
# of returns. The second one is smaller, since a good critic explains most of the spread.
_LEAST_SHARE, _LEAST_SHARE_OF_SPREAD = 0.25, 0.05
# Nor as less than this share of the size of returns: in float32, values and their differences carry rounding errors.
_ROUNDING = 1e-5
# Keeps a division from being one by 0.
_EPSILON = 1e-8


class Whitening(Stateful):
    """Normalizes a batch's advantages to mean 0 and deviation 1, or less where the returns do not support that.

    Attributes:
        is_small: Whether the last batch's deviation was below what counts as least.
    """

    saved = ("_deviations", "_spreads", "_single_returns")

    def __init__(self) -> None:
        """Start without a history."""
        self.is_small = False
        self._deviations: list[float] = []
        self._spreads: list[float] = []
        # First returns of the latest batches in which a single episode finished.
        self._single_returns: list[float] = []

    def __call__(self, advantages: Tensor, mask: Tensor, returns: Returns, shift_mean: bool = True) -> Tensor:
        """Normalizes advantages.

        A single turn has no mean to be compared with: it is only scaled.

        Args:
            advantages: Float (E, T).
            mask: True at turns, bool (E, T).
            returns: The batch's returns.
            shift_mean: Whether the mean is removed. Not where each group has its own: what is 0 there must stay 0.
        """
        is_single = int(mask.sum()) == 1
        mean = masked_mean(advantages, mask) if shift_mean and not is_single else 0.0
        deviation = advantages[mask].abs().item() if is_single else masked_var(advantages, mask).sqrt().item()
        if math.isfinite(deviation):
            self._deviations = [*self._deviations, deviation][-_MEMORY:]
        self._spreads = [*self._spreads, self._spread_of(returns)][-_MEMORY:]
        least = max(
            _LEAST_SHARE * median(self._deviations or [0.0]),
            _LEAST_SHARE_OF_SPREAD * median(self._spreads),
            _ROUNDING * returns.size,
        )
        self.is_small = deviation < least
        return (advantages - mean).masked_fill(~mask, 0.0) / max(deviation, least, _EPSILON)

    def _spread_of(self, returns: Returns) -> float:
        """The batch's spread; of a single finished episode, which has none, that of the latest single ones."""
        if len(returns.by_turn) == 0 or len(returns.by_turn[0]) != 1:
            return returns.spread
        self._single_returns = [*self._single_returns, returns.by_turn[0][0]][-_MEMORY:]
        return pstdev(self._single_returns)


class Returns:
    """What a batch's episodes earned, compared turn by turn.

    Attributes:
        by_turn: Per turn index, the discounted returns from it on of finished episodes that decided something there.
        spread: Root mean square of their differences from the mean at the same index, at turns that leave something to
            decide; 0 without any.
        size: Root mean square of all these returns.
        resolution: Differences up to this are rounding: rewards are sums of float32 numbers at best.
        is_outlived: Whether an unfinished episode earned something later than a terminated one could.
    """

    def __init__(self, episodes: Sequence[Episode], gamma: float) -> None:
        """Compute the returns of the finished ones among some episodes; penalties count as rewards."""
        self._rewards = [[turn.reward + turn.penalty for turn in episode.all_turns] for episode in episodes]
        self._are_finished = all(episode.is_over for episode in episodes)
        largest = max(abs(reward) for rewards in self._rewards for reward in rewards)
        self.resolution = torch.finfo(torch.float32).eps * largest
        self.is_outlived = self._is_outlived(episodes)
        self.by_turn: list[list[float]] = []
        self.spread = 0.0
        self.size = 0.0
        finished = [episode.all_turns for episode in episodes if episode.is_over]
        if not finished:
            return
        mask = _padded([[True] * len(turns) for turns in finished])
        decides = _padded([[turn.decision_count > 0 for turn in turns] for turns in finished])
        rewards = _padded([[turn.reward + turn.penalty for turn in turns] for turns in finished], torch.float64)
        returns = discounted_returns(rewards, gamma)
        mean = (returns * mask).sum(0) / mask.sum(0)
        self.by_turn = [column[decided].tolist() for column, decided in zip(returns.T, decides.T, strict=True)]
        if decides.any():
            self.spread = (returns - mean)[decides].square().mean().sqrt().item()
        self.size = returns[mask].square().mean().sqrt().item()

    def _is_outlived(self, episodes: Sequence[Episode]) -> bool:
        lengths = [
            len(episode.all_turns)
            for episode in episodes
            if episode.terminated and any(turn.decision_count for turn in episode.all_turns)
        ]
        if not lengths:
            return False
        shortest = min(lengths)
        later = [
            reward
            for episode, rewards in zip(episodes, self._rewards, strict=True)
            if not episode.is_over
            for reward in rewards[shortest:]
        ]
        return any(abs(reward) > self.resolution for reward in later)

    @property
    def rewards_by_turn(self) -> list[list[float]]:
        """Per turn index, the rewards of all episodes that reach it; empty if all have finished, and have returns."""
        if self._are_finished:
            return []
        longest = max(map(len, self._rewards))
        return [[rewards[turn] for rewards in self._rewards if turn < len(rewards)] for turn in range(longest)]


class Information(Stateful):
    """Tells batches whose outcomes differ from those in which every episode earned the same.

    Outcomes are the discounted returns from the turns on at which finished episodes decided something, and where
    episodes are unfinished the reward at each turn, and that they outlived one that was terminated. Where they are
    equal at every turn index, nothing tells a good action from a bad one, whatever the critic estimates. A batch of one
    episode is compared with the latest batches.
    """

    saved = ("_latest",)

    def __init__(self) -> None:
        """Start without a history."""
        # Of each of the latest batches, the first reward and the first return at each turn index.
        self._latest: list[list[list[float]]] = []

    def is_in(self, returns: Returns, episodes: Sequence[Episode]) -> bool:
        """Whether a batch holds information.

        Args:
            returns: Its returns.
            episodes: Its episodes.
        """
        rewards = returns.rewards_by_turn
        resolution = returns.resolution
        differs = returns.is_outlived or _any_differs(rewards, resolution) or _any_differs(returns.by_turn, resolution)
        first = [[column[0] for column in columns if column] for columns in (rewards, returns.by_turn)]
        earlier = self._latest
        self._latest = [*earlier, first][-_MEMORY:]
        if differs or len(episodes) > 1:
            return differs
        return any(_has_changed(first, before, resolution) for before in earlier)


def _has_changed(now: list[list[float]], before: list[list[float]], resolution: float) -> bool:
    """Whether rewards or returns of one batch differ from those of another at a turn that both have."""
    pairs = zip(now, before, strict=True)
    return any(_any_differs(zip(of_now, of_before, strict=False), resolution) for of_now, of_before in pairs)


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.bool) -> Tensor:
    """Rows of different lengths as a rectangle, with zeros at their ends."""
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


def _any_differs(columns: Iterable[Sequence[float]], resolution: float) -> bool:
    """Whether any column holds numbers that differ by more than rounding."""
    return any(abs(value - column[0]) > resolution for column in columns for value in column)


def step_share(advantages: Tensor, segments: Sequence[Segment], entropy: float) -> float:
    """The share of a full step's KL that a batch supports, above 0 and at most 1.

    With batches of n turns there are 1 / n as many updates, each with more noise. Adam's steps in proportion to sqrt(n)
    keep what they add up to (Malladi et al. 2022, https://arxiv.org/abs/2205.10287), and the KL of an update is in
    proportion to their square. Steps have full size from `FULL_BATCH` turns on, and earlier where less noise has to be
    averaged out: noise is what differs between advantages of the same reply to the same context.

    Turns of a nearly certain policy show little more than what it does anyway. They count in proportion to their
    entropy, up to one bit. Otherwise a few noisy batches could make the policy certain for good: the KL to a policy
    that never tries the unlikely reply again is close to 0.

    Args:
        advantages: Float (N,).
        segments: With the turns that they belong to, in order. Turns that leave nothing to decide do not count.
        entropy: Mean entropy of the turns that leave something to decide, in nats.
    """
    # The rows of each reply to each context. A context with its reply is known by a number.
    rows: dict[int, list[int]] = {}
    numbers: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    row = 0
    for segment in segments:
        before = -1
        for turn in segment.turns:
            before = numbers.setdefault((before, turn.prompt.ids, turn.reply.ids), len(numbers))
            if turn.decision_count:
                rows.setdefault(before, []).append(row)
            row += 1
    deciding = [row for group in rows.values() for row in group]
    count = len(deciding)
    if not count:
        return 1.0
    total = advantages[deciding].var(correction=0).item() * count
    within = sum(advantages[group].var(correction=0).item() * len(group) for group in rows.values())
    repetitions = count - len(rows)
    noise = 1.0
    if repetitions and total:
        # Turns that recur tell how much of the variance is noise; of all others it may be all.
        noise_of_repeated = min(1.0, within / repetitions / (total / count))
        noise -= repetitions / count * (1.0 - noise_of_repeated)
    informative = count * min(1.0, max(entropy / math.log(2.0), _LEAST_BITS))
    return min(1.0, informative / (FULL_BATCH * noise))
