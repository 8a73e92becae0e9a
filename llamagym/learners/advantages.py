"""The scale of advantages, and whether a batch holds any information at all.

Both depend on more than the batch's own advantages. Once every action earns the same, the remaining advantages are the
critic's error; at unit variance they would move the policy as much as rewards did before.

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

# Number of turns from which steps have full size, however noisy the gradient.
FULL_BATCH = 768
# Minimum entropy that a turn counts with, in bits, so that a policy that is certain of the wrong reply can still move.
_MIN_BITS = 0.01
# Number of recent updates whose median is the reference scale. A median ignores outliers, and follows a lasting change
# after half of them.
_MEMORY = 20
# Lower bounds of a batch's deviation: shares of the median deviation of advantages and of the median spread of returns.
# The second one is smaller, since a good critic explains most of the spread.
_MIN_SHARE_OF_DEVIATION = 0.25
_MIN_SHARE_OF_SPREAD = 0.05
# The third lower bound is a share of the size of returns: in float32, values and their differences are rounded.
_MIN_SHARE_OF_SIZE = 1e-5
# Prevents division by 0.
_EPSILON = 1e-8


class Whitening(Stateful):
    """Normalizes a batch's advantages to mean 0 and deviation 1, or to a smaller deviation for nearly equal returns.

    Attributes:
        is_small: Whether the latest batch's deviation was below its lower bound.
    """

    saved = ("_deviations", "_spreads", "_single_returns")

    def __init__(self) -> None:
        """Starts without a history."""
        self.is_small = False
        self._deviations: list[float] = []
        self._spreads: list[float] = []
        # First return of each of the latest batches with a single finished episode.
        self._single_returns: list[float] = []

    def __call__(self, advantages: Tensor, mask: Tensor, returns: Returns, shift_mean: bool = True) -> Tensor:
        """Normalizes advantages.

        A single turn is only scaled, since its mean is itself.

        Args:
            advantages: Float (E, T).
            mask: True at turns, bool (E, T).
            returns: The batch's returns.
            shift_mean: Whether the mean is removed. False if each group has lost its own mean: a 0 must stay 0.
        """
        mean: Tensor | float = 0.0
        if int(mask.sum()) == 1:
            deviation = advantages[mask].abs().item()
        else:
            deviation = masked_var(advantages, mask).sqrt().item()
            if shift_mean:
                mean = masked_mean(advantages, mask)
        if math.isfinite(deviation):
            self._deviations = [*self._deviations, deviation][-_MEMORY:]
        self._spreads = [*self._spreads, self._spread_of(returns)][-_MEMORY:]
        lower_bound = max(
            _MIN_SHARE_OF_DEVIATION * median(self._deviations or [0.0]),
            _MIN_SHARE_OF_SPREAD * median(self._spreads),
            _MIN_SHARE_OF_SIZE * returns.size,
        )
        self.is_small = deviation < lower_bound
        return (advantages - mean).masked_fill(~mask, 0.0) / max(deviation, lower_bound, _EPSILON)

    def _spread_of(self, returns: Returns) -> float:
        """The batch's spread. A single finished episode has none; then that of the latest single episodes."""
        if len(returns.by_turn) == 0 or len(returns.by_turn[0]) != 1:
            return returns.spread
        self._single_returns = [*self._single_returns, returns.by_turn[0][0]][-_MEMORY:]
        return pstdev(self._single_returns)


class Returns:
    """Returns of a batch's episodes, turn by turn.

    Attributes:
        by_turn: Discounted returns at each turn index, of finished episodes that decided something there.
        spread: Root mean square difference of these from the mean at the same index; 0 without any.
        size: Root mean square of the returns at all turns.
        resolution: Differences up to this are rounding, since rewards may be sums in float32.
        is_outlived: Whether an unfinished episode earned something after the turn at which another terminated.
    """

    def __init__(self, episodes: Sequence[Episode], gamma: float) -> None:
        """Computes the returns of the finished episodes; penalties count as rewards."""
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
        """Rewards of all episodes at each turn index; empty if all episodes have finished and so have returns."""
        if self._are_finished:
            return []
        longest = max(map(len, self._rewards))
        return [[rewards[turn] for rewards in self._rewards if turn < len(rewards)] for turn in range(longest)]


class Information(Stateful):
    """Detects batches in which every episode earned the same.

    The outcomes of finished episodes are the discounted returns at turns that decided something. Those of unfinished
    episodes are the reward at each turn, and whether they outlived a terminated one. If outcomes are equal at every
    turn index, nothing tells a good action from a bad one, whatever the critic estimates. A batch of one episode is
    compared with the latest batches.
    """

    saved = ("_latest",)

    def __init__(self) -> None:
        """Starts without a history."""
        # For each of the latest batches, the first reward and the first return at each turn index.
        self._latest: list[list[list[float]]] = []

    def is_in(self, returns: Returns, episodes: Sequence[Episode]) -> bool:
        """Whether a batch holds information.

        Args:
            returns: The batch's returns.
            episodes: The batch's episodes.
        """
        rewards = returns.rewards_by_turn
        resolution = returns.resolution
        differs = returns.is_outlived or _any_differs(rewards, resolution) or _any_differs(returns.by_turn, resolution)
        first_rewards = [column[0] for column in rewards if column]
        first_returns = [column[0] for column in returns.by_turn if column]
        first = [first_rewards, first_returns]
        earlier = self._latest
        self._latest = [*earlier, first][-_MEMORY:]
        if differs or len(episodes) > 1:
            return differs
        return any(_has_changed(first, before, resolution) for before in earlier)


def _has_changed(current: list[list[float]], earlier: list[list[float]], resolution: float) -> bool:
    """Whether rewards or returns of one batch differ from those of another at a turn that both have."""
    pairs = zip(current, earlier, strict=True)
    return any(_any_differs(zip(*pair, strict=False), resolution) for pair in pairs)


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.bool) -> Tensor:
    """Rows of different lengths as a tensor, padded with zeros."""
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


def _any_differs(columns: Iterable[Sequence[float]], resolution: float) -> bool:
    """Whether the numbers in any column differ by more than `resolution`."""
    return any(abs(value - column[0]) > resolution for column in columns for value in column)


def step_share(advantages: Tensor, segments: Sequence[Segment], entropy: float) -> float:
    """The share of a full step's KL that a batch supports, above 0 and at most 1.

    Smaller batches mean more updates, each with more noise. With n turns per batch, Adam's steps in proportion to
    sqrt(n) keep the sum of the updates (Malladi et al. 2022, https://arxiv.org/abs/2205.10287), and an update's KL is
    in proportion to n. Steps have full size from `FULL_BATCH` turns on, and earlier with less noise, which is measured
    by how much advantages of the same reply to the same context differ.

    Turns of a nearly certain policy carry little information, so turns count in proportion to their entropy, up to one
    bit. Otherwise a few noisy batches could make the policy certain for good: the KL to a policy that never tries the
    unlikely reply again is close to 0.

    Args:
        advantages: Float (N,).
        segments: The segments of these turns, in order. Turns with nothing to decide do not count.
        entropy: Mean entropy of the turns with something to decide, in nats.
    """
    # Rows of each reply to each context. A context with its reply has a number.
    rows: dict[int, list[int]] = {}
    numbers: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    row = 0
    for segment in segments:
        number = -1
        for turn in segment.turns:
            number = numbers.setdefault((number, turn.prompt.ids, turn.reply.ids), len(numbers))
            if turn.decision_count:
                rows.setdefault(number, []).append(row)
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
        # Repeated turns measure how much of the variance is noise; for the others it may be all.
        noise_of_repeated = min(1.0, within / repetitions / (total / count))
        noise -= repetitions / count * (1.0 - noise_of_repeated)
    informative = count * min(1.0, max(entropy / math.log(2.0), _MIN_BITS))
    return min(1.0, informative / (FULL_BATCH * noise))
