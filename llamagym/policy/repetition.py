"""The effect of earlier replies in a conversation on the probability of repeating them.

Small models repeat themselves: for a 135M model in Blackjack, one earlier "hit" makes "hit" 4 nats more likely, while
the player's hand changes it by 0.5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from ..engine.choice_trie import Ids

Row = Sequence[tuple[Ids, float, int]]
"""A branch point in a context: for each target its path, its relative log-probability (see `choices.relative`), and the
number of replies shown that continue with it."""

# Ridge strength, which shrinks the effect if few contexts show it: about the variance of single contexts (0.5) divided
# by that of the effect (5), in squared nats.
_RIDGE = 0.1
# Passes over rows and paths until both have mean 0. One suffices if all contexts offer the same choices.
_CENTERINGS = 20


@dataclass(frozen=True)
class Repetition:
    """The effect of earlier replies on a choice's log-probability, in nats.

    Attributes:
        first: Effect of one earlier reply that continued with this token.
        per_doubling: Additional effect of each doubling of the number of such replies.
        largest: The largest number measured; larger ones have the same effect.
    """

    first: float = 0.0
    per_doubling: float = 0.0
    largest: int = 0

    def effect(self, count: int) -> float:
        """The effect of `count` earlier replies that continued with a token.

        >>> Repetition(4.0, 3.0, largest=2).effect(0), Repetition(4.0, 3.0, largest=2).effect(9)
        (0.0, 7.0)
        """
        counted = min(count, self.largest)
        return self.first + self.per_doubling * math.log2(counted) if counted else 0.0

    def removed(self, row: Row) -> list[tuple[Ids, float]]:
        """Paths and relative log-probabilities as they would be in a first turn."""
        effects = [self.effect(count) for _, _, count in row]
        if not any(effects):
            return [(path, relative) for path, relative, _ in row]
        without = [relative - effect for (_, relative, _), effect in zip(row, effects, strict=True)]
        # Relative to the mean of all again.
        shift = _log_mean_exp([relative for _, relative, _ in row]) - _log_mean_exp(without)
        return [(path, relative + shift) for (path, _, _), relative in zip(row, without, strict=True)]

    @classmethod
    def fit(cls, rows: Iterable[Row]) -> Self:
        """Ridge regression of relative log-probabilities on (count > 0, log2 count), within rows and within paths.

        Sums are exact or sequential: ranks on different processors get the same result.

        Args:
            rows: Rows of many contexts. Those with values that are not finite are left out.

        >>> Repetition.fit([[((1,), 0.5, 0), ((2,), -0.5, 0)]])
        Repetition(first=0.0, per_doubling=0.0, largest=0)
        """
        finite = [row for row in rows if all(math.isfinite(relative) for _, relative, _ in row)]
        largest = max((count for row in finite for _, _, count in row), default=0)
        if not largest:
            return cls()
        paths: dict[Ids, int] = {}
        row_of = np.array([number for number, row in enumerate(finite) for _ in row])
        path_of = np.array([paths.setdefault(path, len(paths)) for row in finite for path, _, _ in row])
        counts = [count for row in finite for _, _, count in row]
        relative = _centered([value for row in finite for _, value, _ in row], row_of, path_of)
        repeated = _centered([float(count > 0) for count in counts], row_of, path_of)
        doublings = _centered([math.log2(max(count, 1)) for count in counts], row_of, path_of)
        # The normal equations of two regressors x and z for y, in closed form.
        xx = _dot(repeated, repeated) + _RIDGE
        zz = _dot(doublings, doublings) + _RIDGE
        xz = _dot(repeated, doublings)
        xy = _dot(repeated, relative)
        zy = _dot(doublings, relative)
        determinant = xx * zz - xz * xz
        first = (zz * xy - xz * zy) / determinant
        per_doubling = (xx * zy - xz * xy) / determinant
        return cls(first, per_doubling, largest)


def _centered(values: Sequence[float], rows: NDArray[np.int64], paths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Values minus the means of their row and of their path."""
    centered = np.array(values)
    for _ in range(_CENTERINGS):
        for groups in (rows, paths):
            # Sequential sums: NumPy's other sums depend on the CPU.
            means = np.bincount(groups, centered) / np.bincount(groups)
            centered -= means[groups]
    return centered


def _dot(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return math.fsum((one * other).tolist())


def _log_mean_exp(values: Sequence[float]) -> float:
    most = max(values)
    return most + math.log(math.fsum(math.exp(value - most) for value in values) / len(values))
