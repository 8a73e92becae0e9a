"""The calibration of choices: a prior of each token, the effect of repetition, and the deviation of contexts from both.

The calibration is part of the policy. It is estimated on a sample of the contexts that offer choices, again whenever
the sample has changed enough, and frozen when the policy begins to learn. Choices that are first offered later are
measured in that context.

Later turns of a conversation contain earlier replies, which small models repeat: for a 135M model in Blackjack, one
earlier "hit" makes "hit" 4 nats more likely, while the player's hand changes it by 0.5. With one prior for all turns,
most hands would begin with "stick", and nearly every later turn would be a "hit". So the prior is that of a first turn,
and the effect of earlier replies is a separate term.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from ..engine.choice_trie import Branch, Ids
from ..engine.token_tree import TokenTree
from ..text.records import ids_from, number_from

# Size of the sample of contexts: those with the smallest hashes, so that each is equally likely to be included (a
# bottom-k sketch, Cohen and Kaplan 2007, https://doi.org/10.1145/1281100.1281133).
_CONTEXTS = 512

Row = Sequence[tuple[Ids, float, int]]
"""A branch point in a context: for each target its path, its relative log-probability (see `choices.relative`), and the
number of replies shown that continue with it."""

Sample = Mapping[str, Sequence[Row]]
"""Rows of each context, one per branch point, by the context's hash."""


# Ridge strength of the fit of repetition, which shrinks the effect if few contexts show it: about the variance of
# single contexts (0.5) divided by that of the effect (5), in squared nats.
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


class Calibration:
    """Expected log-probabilities of choices, and the deviation of contexts from them.

    Attributes:
        prior: Mean relative log-probability of each path in a first turn.
        repetition: Effect of earlier replies; 0 if the policy had learned before choices were first offered.
        deviation: Root mean square deviation of contexts from prior and repetition at a branch point, in nats, at least
            1. Logits are divided by it, so that an overconfident model explores.
        is_frozen: Whether the policy has begun to learn, so that estimates do not change.
        sample: Rows of the contexts that the estimates are fitted to, by the context's hash.
        measured: Rows that were measured since several processes last agreed, by the context's hash.
    """

    def __init__(self, is_frozen: bool = False) -> None:
        """Starts without estimates.

        Args:
            is_frozen: Whether each choice is measured once, in the first context that offers it.
        """
        self.prior: dict[Ids, float] = {}
        self.repetition = Repetition()
        self.deviation = 1.0
        self.measured: dict[str, Sequence[Row]] = {}
        self.is_frozen = is_frozen
        self.sample: dict[str, Sequence[Row]] = {}
        # Number of contexts that have entered the sample, and the number at which the next fit is due.
        self._sampled_count = 0
        self._next_fit = 1
        # The prior when several processes last agreed.
        self._agreed_prior: dict[Ids, float] = {}

    def empty_copy(self) -> Calibration:
        """An uncalibrated copy, for other base weights."""
        return Calibration(self.is_frozen)

    def separate_copy(self) -> Calibration:
        """A copy for read-only calls; new choices are measured into the copy."""
        copied = Calibration(self.is_frozen or bool(self.prior))
        copied.prior = dict(self.prior)
        copied.repetition = self.repetition
        copied.deviation = self.deviation
        return copied

    def expected(self, branch: Branch, counts: Sequence[int]) -> list[float]:
        """Prior plus effect of repetition of each target of a branch point; a missing prior is 0.

        Args:
            branch: The branch point.
            counts: Number of replies shown that continue with each target.
        """
        priors = [self.prior.get((*branch.path, token), 0.0) for token in branch.targets]
        if not any(counts):
            return priors
        return [prior + self.repetition.effect(count) for prior, count in zip(priors, counts, strict=True)]

    def unmeasured(self, trees: Iterable[TokenTree], learns: bool) -> list[TokenTree]:
        """The contexts that have to be measured: new in the sample, or with choices that have no prior yet.

        Args:
            trees: Contexts with a pending prompt.
            learns: Whether the policy has begun to learn.
        """
        self.is_frozen |= learns
        if self.is_frozen:
            return [tree for tree in trees if not self._has_priors(tree)]
        is_full = len(self.sample) == _CONTEXTS
        largest = max(self.sample, default="")
        unmeasured = []
        for tree in trees:
            key = _hash(tree)
            if key in self.sample:
                continue
            if not is_full or key < largest or not self._has_priors(tree):
                unmeasured.append(tree)
        return unmeasured

    def add(self, measured: Mapping[TokenTree, Sequence[Row]]) -> bool:
        """Adds the rows of new contexts.

        Returns:
            Whether earlier estimates have changed.
        """
        contexts = {_hash(tree): rows for tree, rows in measured.items()}
        if self.is_frozen:
            self._add_priors(contexts)
            return False
        prior_before = self.prior
        fitted_before = (self.repetition, self.deviation)
        largest = max((count for rows in contexts.values() for row in rows for _, _, count in row), default=0)
        self._add_to_sample(contexts)
        self._add_priors(contexts)
        self._sampled_count += sum(key in self.sample for key in contexts)
        # A small first batch of short episodes holds few later turns, all at its end. They must enter the fit.
        if self._sampled_count >= self._next_fit or largest > self.repetition.largest:
            self._next_fit = self._sampled_count + min(self._sampled_count, _CONTEXTS // 2)
            self._fit()
        if any(self.prior[path] != value for path, value in prior_before.items()):
            return True
        return bool(prior_before) and (self.repetition, self.deviation) != fitted_before

    def agree(self, measured: Sequence[Sample], learns: bool) -> bool:
        """Combines the rows that all processes measured since they last agreed.

        Args:
            measured: The rows of each process, this one's included.
            learns: Whether the policy has begun to learn.

        Returns:
            Whether anything was measured; turns sampled before are then off-policy.
        """
        self.measured = {}
        self.is_frozen |= learns
        if not self.is_frozen:
            for contexts in measured:
                self._add_to_sample(contexts)
            # Before the priors, which depend on it.
            self.repetition = Repetition.fit(self._rows)
        # Replaces the priors that this process has computed alone since then.
        self.prior = self._agreed_prior | self._means(rows for contexts in measured for rows in contexts.values())
        if not self.is_frozen:
            self._fit()
        self._agreed_prior = self.prior
        return any(measured)

    def record(self, learns: bool) -> dict[str, Any]:
        """The state to save; it includes the sample until the calibration is frozen.

        Args:
            learns: Whether the policy has begun to learn.
        """
        self.is_frozen |= learns
        in_sample = [key for key in self.measured if key in self.sample]
        outside = {key: rows for key, rows in self.measured.items() if key not in self.sample}
        sample = None if self.is_frozen else [self._sampled_count, self._next_fit, self.sample, in_sample, outside]
        return {
            "choice_prior": list(self.prior.items()),
            "choice_repetition": astuple(self.repetition),
            "choice_deviation": self.deviation,
            "choice_contexts": sample,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Restores a calibration from `record`."""
        sample = record["choice_contexts"]
        restored = cls(is_frozen=sample is None)
        restored.prior = {ids_from(path): number_from(value) for path, value in record["choice_prior"]}
        restored._agreed_prior = restored.prior
        first, per_doubling, largest = map(number_from, record["choice_repetition"])
        restored.repetition = Repetition(first, per_doubling, int(largest))
        restored.deviation = number_from(record["choice_deviation"])
        if sample is not None:
            restored._sampled_count, restored._next_fit, contexts, in_sample, outside = sample
            restored.sample = {key: list(map(_row_from, rows)) for key, rows in contexts.items()}
            restored.measured = {key: restored.sample[key] for key in in_sample}
            restored.measured |= {key: list(map(_row_from, rows)) for key, rows in outside.items()}
        return restored

    def _add_to_sample(self, contexts: Sample) -> None:
        """Adds contexts to the sample, and removes those with the largest hashes."""
        sample = {**self.sample, **contexts}
        self.sample = {key: sample[key] for key in sorted(sample)[:_CONTEXTS]}

    def _add_priors(self, contexts: Sample) -> None:
        """Adds priors of new choices, and records rows for the other processes."""
        for key, rows in contexts.items():
            # Outside the sample, only choices that are offered for the first time count.
            new_rows = rows if key in self.sample else self._without_prior(rows)
            if new_rows:
                self.measured[key] = new_rows
        # Earlier priors stay.
        self.prior = self._means(contexts.values()) | self.prior

    def _has_priors(self, tree: TokenTree) -> bool:
        branches = tree.decisions[0].branches
        return all((*branch.path, token) in self.prior for branch in branches for token in branch.targets)

    def _without_prior(self, rows: Sequence[Row]) -> list[Row]:
        """The targets without a prior, with values as in a first turn; rows without such targets are left out."""
        new_rows: list[Row] = []
        for row in rows:
            targets = [(path, value, 0) for path, value in self.repetition.removed(row) if path not in self.prior]
            if targets:
                new_rows.append(targets)
        return new_rows

    @property
    def _rows(self) -> list[Row]:
        """All rows of the sample."""
        return [row for rows in self.sample.values() for row in rows]

    def _fit(self) -> None:
        """Fits repetition, prior and deviation to the sample."""
        self.repetition = Repetition.fit(self._rows)
        self.prior = self.prior | self._means(self.sample.values())
        variances = []
        for row in self._rows:
            differences = [value - self.prior[path] for path, value in self.repetition.removed(row)]
            variances.append(_variance(differences))
        self.deviation = max(1.0, math.sqrt(math.fsum(variances) / max(1, len(variances))))

    def _means(self, contexts: Iterable[Sequence[Row]]) -> dict[Ids, float]:
        """The mean value of each path over all rows that contain it, as in a first turn."""
        values_of: dict[Ids, list[float]] = {}
        for rows in contexts:
            for row in rows:
                for path, value in self.repetition.removed(row):
                    values_of.setdefault(path, []).append(value)
        return {path: math.fsum(values) / len(values) for path, values in values_of.items()}


def _hash(tree: TokenTree) -> str:
    """A context's hash, of the same length for long conversations."""
    return blake2b(repr(tree.prompt_key).encode(), digest_size=16).hexdigest()


def _row_from(saved: Iterable[Sequence[Any]]) -> Row:
    """A row from JSON."""
    return [(ids_from(path), number_from(value), int(number_from(count))) for path, value, count in saved]


def _variance(values: Sequence[float]) -> float:
    """Mean squared deviation of values from their mean.

    >>> _variance([-1.0, 3.0])
    4.0
    """
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values)
