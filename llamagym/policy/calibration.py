"""What choices are measured against: how likely the reference finds their tokens anyway, and how far contexts differ.

All of it is part of the policy. It is measured over a sample of all contexts that offer choices, again whenever the
sample has changed enough, and frozen when the policy begins to learn. What is offered for the first time later is
measured where that happens.

A small model repeats what the conversation holds: in Blackjack a 135M model finds "hit" 4 nats likelier after one "hit"
and 3 more after another, while what it reads about the hand moves it by 0.5. With one mean over all turns, every hand
would begin with "stick" and then go on with "hit" to the end. So the prior says how much likelier a choice is that the
conversation holds, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from ..conversation.records import ids_from, number_from
from ..engine.choice_trie import Branch, Ids
from ..engine.token_tree import TokenTree

# Contexts in the sample: those whose names, which are hashes, come first in order. So all are as likely to be in it,
# whenever and wherever they are met (a bottom-k sketch, Cohen and Kaplan 2007, https://doi.org/10.1145/1281100.1281133).
_CONTEXTS = 512

# The prior is taken anew when the sample has grown by this share: a small first batch of short episodes holds few later
# turns, and all at its end.
_GROWTH = 0.25
# Weighs against an effect of repetition where few contexts show one, as much as this many squared differences of 1.
_RIDGE = 1.0

Row = Sequence[tuple[Ids, float, int]]
"""A place where choices part: the tokens up to each that may follow, how likely that is (see `choices.relative`), and
how often the conversation holds choices that go on so."""
Sample = Mapping[str, Sequence[Row]]
"""The places of contexts, by the contexts' names."""


class Calibration:
    """The prior of choices, and how far single contexts are from it.

    Attributes:
        prior: The mean over contexts of how much likelier than what else may follow the last of some tokens is, where
            the conversation holds none of the choices.
        repetition: How many nats likelier is what the conversation holds: once, and for each doubling of that.
        deviation: Of single contexts from it, within a place where choices part: root mean square in nats, at least 1.
            A model that is far from it would explore nothing.
        is_frozen: Whether the policy has begun to learn, so that what is known stays.
        measured: What was measured since several processes last agreed, by the context's name.
    """

    def __init__(self, is_frozen: bool = False) -> None:
        """Nothing is known.

        Args:
            is_frozen: Whether each choice is measured once, where it is offered first.
        """
        self.prior: dict[Ids, float] = {}
        self.repetition = 0.0, 0.0
        self.deviation = 1.0
        self.measured: dict[str, Sequence[Row]] = {}
        self.is_frozen = is_frozen
        self._sample: dict[str, Sequence[Row]] = {}
        # How many contexts have come into the sample, and at how many it is to be looked at again.
        self._taken, self._due = 0, 1
        # The prior when several processes last agreed.
        self._agreed: dict[Ids, float] = {}

    def anew(self) -> Calibration:
        """One of another reference, of which nothing is known."""
        return Calibration(self.is_frozen)

    def apart(self) -> Calibration:
        """One to look at the policy with: what is known stays, and choices that are new to it are measured into it."""
        apart = Calibration(self.is_frozen or bool(self.prior))
        apart.prior, apart.repetition, apart.deviation = dict(self.prior), self.repetition, self.deviation
        return apart

    def expected(self, branch: Branch, said_counts: Sequence[int]) -> list[float]:
        """How much likelier each target of a branch is in a usual context; a prior that is missing is 0.

        Args:
            branch: Where choices part.
            said_counts: How often the conversation holds choices that go on with each target.
        """
        return [
            self.prior.get((*branch.path, token), 0.0) + self._of_repetition(count)
            for token, count in zip(branch.targets, said_counts, strict=True)
        ]

    def unmeasured(self, trees: Iterable[TokenTree], learns: bool) -> list[TokenTree]:
        """Those of these contexts that are to be measured.

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
        """Take what was measured in contexts that had not been.

        Returns:
            Whether what had been measured before is another now.
        """
        rows = {_name(tree): places for tree, places in found.items()}
        if self.is_frozen:
            self._note(rows)
            return False
        prior, others = self.prior, (self.repetition, self.deviation)
        self._take(rows)
        self._note(rows)
        self._taken += sum(name in self._sample for name in rows)
        if self._taken >= self._due:
            self._due = self._taken + max(1, int(_GROWTH * min(self._taken, _CONTEXTS)))
            self._fit()
        known_is_another = any(self.prior[path] != likelier for path, likelier in prior.items())
        return known_is_another or (bool(prior) and (self.repetition, self.deviation) != others)

    def agree(self, measured: Sequence[Sample], learns: bool) -> bool:
        """Take what several processes, this one among them, measured since they last agreed.

        Args:
            measured: By each of them.
            learns: Whether the policy has begun to learn.

        Returns:
            Whether anything was: then what each of them sampled counts as another policy's.
        """
        self.measured = {}
        self.is_frozen |= learns
        if not self.is_frozen:
            for of_one in measured:
                self._take(of_one)
            # Before any prior, which is measured beside it.
            self.repetition = effect_of_repetition(self._rows)
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
            "choice_repetition": self.repetition,
            "choice_deviation": self.deviation,
            "choice_contexts": sample,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """What `record` was given of."""
        # Older records name the sample otherwise; what it came to stays as it is.
        sample = record.get("choice_contexts")
        known = cls(is_frozen=sample is None)
        known.prior = known._agreed = {ids_from(path): number_from(value) for path, value in record["choice_prior"]}
        # Older records have none.
        once, doubled = map(number_from, record.get("choice_repetition", (0.0, 0.0)))
        known.repetition = once, doubled
        known.deviation = number_from(record["choice_deviation"])
        if sample is not None:
            known._taken, known._due, rows, names, *late = sample
            known._sample = {name: list(map(_row, places)) for name, places in rows.items()}
            known.measured = {name: known._sample[name] for name in names}
            # Older records have none of these.
            for of_names in late:
                known.measured |= {name: list(map(_row, places)) for name, places in of_names.items()}
        return known

    def _take(self, rows: Sample) -> None:
        """Take contexts into the sample, as far as they belong there."""
        sample = {**self._sample, **rows}
        self._sample = {name: sample[name] for name in sorted(sample)[:_CONTEXTS]}

    def _note(self, rows: Sample) -> None:
        """Take a prior for what has none, and note what other processes have to be told."""
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
        """What has no prior yet."""
        rows = ([each for each in row if each[0] not in self.prior] for row in places)
        return [row for row in rows if row]

    @property
    def _rows(self) -> list[Row]:
        """All places of the sample."""
        return [row for places in self._sample.values() for row in places]

    def _fit(self) -> None:
        """Take prior, repetition and deviation from the sample."""
        self.repetition = effect_of_repetition(self._rows)
        self.prior = self.prior | self._means(self._sample.values())
        squares = [
            _square_of_deviation([likelier - self.prior[path] for path, likelier in self._without_repetition(row)])
            for row in self._rows
        ]
        self.deviation = max(1.0, math.sqrt(math.fsum(squares) / max(1, len(squares))))

    def _of_repetition(self, count: int) -> float:
        """How many nats likelier is what the conversation holds so often."""
        once, doubled = self.repetition
        return once + doubled * math.log2(count) if count else 0.0

    def _without_repetition(self, row: Row) -> list[tuple[Ids, float]]:
        """How likely each would be in a conversation that holds none of them, beside their mean, which stays."""
        effects = [self._of_repetition(count) for _, _, count in row]
        mean = math.fsum(effects) / len(effects)
        return [(path, likelier - effect + mean) for (path, likelier, _), effect in zip(row, effects, strict=True)]

    def _means(self, contexts: Iterable[Sequence[Row]]) -> dict[Ids, float]:
        """The mean of each over all places that hold it."""
        found: dict[Ids, list[float]] = {}
        for path, likelier in (each for places in contexts for row in places for each in self._without_repetition(row)):
            found.setdefault(path, []).append(likelier)
        return {path: math.fsum(values) / len(values) for path, values in found.items()}


def _name(tree: TokenTree) -> str:
    """A context's name, as short where conversations are long."""
    return blake2b(repr(tree.undecided).encode(), digest_size=16).hexdigest()


def effect_of_repetition(rows: Sequence[Row]) -> tuple[float, float]:
    """How many nats likelier is what a conversation holds: once, and for each doubling of that.

    Ridge regression of how likely each is on its count, both centred within the place and then, so that it is what the
    same tokens differ by from context to context, within each path.

    Args:
        rows: Places where choices part, of many contexts.

    >>> effect_of_repetition([[((1,), 0.5, 0), ((2,), -0.5, 0)]])
    (0.0, 0.0)
    """
    if all(count == row[0][2] for row in rows for _, _, count in row):
        return 0.0, 0.0
    paths: dict[Ids, int] = {}
    numbers: list[int] = []
    centred: list[NDArray[np.float64]] = []
    for row in rows:
        numbers += [paths.setdefault(path, len(paths)) for path, _, _ in row]
        of_row = np.array([(likelier, count > 0, math.log2(max(count, 1))) for _, likelier, count in row], float)
        centred.append(of_row - of_row.mean(0))
    values = np.concatenate(centred)
    sums = np.zeros((len(paths), 3))
    np.add.at(sums, numbers, values)
    values -= (sums / np.bincount(numbers)[:, None])[numbers]
    likelier, features = values[:, 0], values[:, 1:]
    once, doubled = np.linalg.solve(features.T @ features + _RIDGE * np.eye(2), features.T @ likelier)
    return float(once), float(doubled)


def _row(saved: Iterable[Sequence[Any]]) -> Row:
    """What a row was, as JSON gives it back; older ones have no counts."""
    return [
        (ids_from(path), number_from(likelier), int(number_from(next(iter(count), 0))))
        for path, likelier, *count in saved
    ]


def _square_of_deviation(values: Sequence[float]) -> float:
    """Of values from their mean, the mean over all of them.

    >>> _square_of_deviation([-1.0, 3.0])
    4.0
    """
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values)
