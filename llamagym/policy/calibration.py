"""The calibration of choices: a prior of each token, the effect of repetition, and the deviation of contexts from both.

All of it is part of the policy. It is estimated on a sample of the contexts that offer choices, again whenever the
sample has changed enough, and frozen when the policy begins to learn. Choices that are first offered later are measured
in that context.

Contexts of a conversation's later turns hold earlier replies, which a small model repeats. With one prior for all of
them most hands of Blackjack would begin with "stick", and nearly every later turn would be a "hit". So the prior is
that of a first turn, and what earlier replies add to it is measured apart (see `repetition`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from hashlib import blake2b
from typing import Any

from typing_extensions import Self

from ..engine.choice_trie import Branch, Ids
from ..engine.token_tree import TokenTree
from ..text.records import ids_from, number_from
from .repetition import Repetition, Row

# Contexts in the sample: those with the smallest hashes, so that each is equally likely to be included (a bottom-k
# sketch, Cohen and Kaplan 2007, https://doi.org/10.1145/1281100.1281133).
_CONTEXTS = 512

Sample = Mapping[str, Sequence[Row]]
"""The rows of each context, one per branch point, by the context's name."""


class Calibration:
    """What choices are measured against.

    Attributes:
        prior: Mean relative log-probability of each path in a first turn.
        repetition: Effect of earlier replies; 0 if the policy had learned before choices were first offered.
        deviation: Root mean square deviation of a context from prior and repetition at a branch point, in nats, at
            least 1. Logits are divided by it, so that an overconfident model explores.
        is_frozen: Whether the policy has begun to learn, so that the estimates stay.
        measured: Rows that were measured since several processes last agreed, by the context's name.
    """

    def __init__(self, is_frozen: bool = False) -> None:
        """Start uncalibrated.

        Args:
            is_frozen: Whether each choice is measured once, in the first context that offers it.
        """
        self.prior: dict[Ids, float] = {}
        self.repetition = Repetition()
        self.deviation = 1.0
        self.measured: dict[str, Sequence[Row]] = {}
        self.is_frozen = is_frozen
        self._sample: dict[str, Sequence[Row]] = {}
        # Contexts that have entered the sample, and the number at which the fit is repeated.
        self._taken = 0
        self._due = 1
        # The prior when several processes last agreed.
        self._agreed: dict[Ids, float] = {}

    def empty_copy(self) -> Calibration:
        """An uncalibrated copy, for other base weights."""
        return Calibration(self.is_frozen)

    def apart(self) -> Calibration:
        """A copy for read-only calls; new choices are measured into the copy."""
        apart = Calibration(self.is_frozen or bool(self.prior))
        apart.prior = dict(self.prior)
        apart.repetition = self.repetition
        apart.deviation = self.deviation
        return apart

    def expected(self, branch: Branch, counts: Sequence[int]) -> list[float]:
        """Prior and effect of repetition of each target of a branch; a prior that is missing counts as 0.

        Args:
            branch: Where choices part.
            counts: How many of the replies shown go on with each target.
        """
        priors = [self.prior.get((*branch.path, token), 0.0) for token in branch.targets]
        if not any(counts):
            return priors
        return [prior + self.repetition.effect(count) for prior, count in zip(priors, counts, strict=True)]

    def unmeasured(self, trees: Iterable[TokenTree], learns: bool) -> list[TokenTree]:
        """The contexts that have to be measured.

        Args:
            trees: Each with a pending prompt.
            learns: Whether the policy has begun to learn.
        """
        self.is_frozen |= learns
        if self.is_frozen:
            return [tree for tree in trees if not self._is_known(tree)]
        last = max(self._sample, default="") if len(self._sample) == _CONTEXTS else None
        names = {tree: _name(tree) for tree in trees}
        return [
            tree
            for tree, name in names.items()
            if name not in self._sample and (last is None or name < last or not self._is_known(tree))
        ]

    def add(self, found: Mapping[TokenTree, Sequence[Row]]) -> bool:
        """Add the measurements of new contexts.

        Returns:
            Whether earlier estimates have changed.
        """
        rows = {_name(tree): places for tree, places in found.items()}
        if self.is_frozen:
            self._note(rows)
            return False
        prior = self.prior
        fitted = self.repetition, self.deviation
        largest = max((count for places in rows.values() for row in places for _, _, count in row), default=0)
        self._take(rows)
        self._note(rows)
        self._taken += sum(name in self._sample for name in rows)
        # A small first batch of short episodes holds few later turns, all at its end: they are not to be missed.
        if self._taken >= self._due or largest > self.repetition.largest:
            self._due = self._taken + min(self._taken, _CONTEXTS // 2)
            self._fit()
        prior_changed = any(self.prior[path] != value for path, value in prior.items())
        return prior_changed or (bool(prior) and (self.repetition, self.deviation) != fitted)

    def agree(self, measured: Sequence[Sample], learns: bool) -> bool:
        """Combine what several processes, this one among them, measured since they last agreed.

        Args:
            measured: The measurements of each process.
            learns: Whether the policy has begun to learn.

        Returns:
            Whether anything was measured; turns sampled before are then off-policy.
        """
        self.measured = {}
        self.is_frozen |= learns
        if not self.is_frozen:
            for of_one in measured:
                self._take(of_one)
            # First, since priors are computed with it.
            self.repetition = Repetition.fit(self._rows)
        # Without what this process alone made of what it measured since.
        self.prior = self._agreed | self._means(places for of_one in measured for places in of_one.values())
        if not self.is_frozen:
            self._fit()
        self._agreed = self.prior
        return any(measured)

    def record(self, learns: bool) -> dict[str, Any]:
        """What to save: the sample of contexts too, while it changes.

        Args:
            learns: Whether the policy has begun to learn.
        """
        self.is_frozen |= learns
        names = [name for name in self.measured if name in self._sample]
        late = {name: places for name, places in self.measured.items() if name not in self._sample}
        sample = None if self.is_frozen else [self._taken, self._due, self._sample, names, late]
        return {
            "choice_prior": list(self.prior.items()),
            "choice_repetition": astuple(self.repetition),
            "choice_deviation": self.deviation,
            "choice_contexts": sample,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Restore a calibration from `record`."""
        sample = record["choice_contexts"]
        known = cls(is_frozen=sample is None)
        known.prior = known._agreed = {ids_from(path): number_from(value) for path, value in record["choice_prior"]}
        first, per_doubling, largest = map(number_from, record["choice_repetition"])
        known.repetition = Repetition(first, per_doubling, int(largest))
        known.deviation = number_from(record["choice_deviation"])
        if sample is not None:
            known._taken, known._due, rows, names, late = sample
            known._sample = {name: list(map(_row, places)) for name, places in rows.items()}
            known.measured = {name: known._sample[name] for name in names}
            known.measured |= {name: list(map(_row, places)) for name, places in late.items()}
        return known

    def _take(self, rows: Sample) -> None:
        """Add contexts to the sample, and drop those with the largest hashes."""
        sample = {**self._sample, **rows}
        self._sample = {name: sample[name] for name in sorted(sample)[:_CONTEXTS]}

    def _note(self, rows: Sample) -> None:
        """Add priors of new choices, and note what other processes need."""
        for name, places in rows.items():
            # Of a context that is not in the sample only what is offered there for the first time counts.
            new = places if name in self._sample else self._unknown(places)
            if new:
                self.measured[name] = new
        # What is known stays.
        self.prior = self._means(rows.values()) | self.prior

    def _is_known(self, tree: TokenTree) -> bool:
        branches = tree.decisions[0].branches
        return all((*branch.path, token) in self.prior for branch in branches for token in branch.targets)

    def _unknown(self, places: Sequence[Row]) -> list[Row]:
        """The targets without a prior, as in a first turn; the rest of their rows is not kept."""
        rows = (
            [(path, value, 0) for path, value in self.repetition.removed(row) if path not in self.prior]
            for row in places
        )
        return [row for row in rows if row]

    @property
    def _rows(self) -> list[Row]:
        """All rows of the sample."""
        return [row for places in self._sample.values() for row in places]

    def _fit(self) -> None:
        """Fit repetition, prior and deviation to the sample."""
        self.repetition = Repetition.fit(self._rows)
        self.prior = self.prior | self._means(self._sample.values())
        squares = [
            _square_of_deviation([value - self.prior[path] for path, value in self.repetition.removed(row)])
            for row in self._rows
        ]
        self.deviation = max(1.0, math.sqrt(math.fsum(squares) / max(1, len(squares))))

    def _means(self, contexts: Iterable[Sequence[Row]]) -> dict[Ids, float]:
        """The mean of each path over all rows that contain it, as in a first turn."""
        found: dict[Ids, list[float]] = {}
        for path, value in (each for places in contexts for row in places for each in self.repetition.removed(row)):
            found.setdefault(path, []).append(value)
        return {path: math.fsum(values) / len(values) for path, values in found.items()}


def _name(tree: TokenTree) -> str:
    """A context's hash, equally short for long conversations."""
    return blake2b(repr(tree.prompt_key).encode(), digest_size=16).hexdigest()


def _row(saved: Iterable[Sequence[Any]]) -> Row:
    """A row from its JSON."""
    return [(ids_from(path), number_from(value), int(number_from(count))) for path, value, count in saved]


def _square_of_deviation(values: Sequence[float]) -> float:
    """Mean squared deviation of values from their mean.

    >>> _square_of_deviation([-1.0, 3.0])
    4.0
    """
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values)
