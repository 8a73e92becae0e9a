"""What choices are measured against: how likely the reference finds their tokens anyway, and how far contexts differ.

Both are part of the policy. They are measured over a sample of all contexts that offer choices, again whenever it has
changed enough, and frozen when the policy begins to learn. What is offered for the first time later is measured where
that happens.

The sample must be of all turns. In a conversation that holds a reply many times, a small model says nothing else any
more; measured at the beginnings of episodes alone, that would be left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from typing_extensions import Self

from ..conversation.records import ids_from, number_from
from ..engine.choice_trie import Ids
from ..engine.token_tree import TokenTree

# Contexts in the sample: those whose names, which are hashes, come first in order. So all are as likely to be in it,
# whenever and wherever they are met (a bottom-k sketch, Cohen and Kaplan 2007, https://doi.org/10.1145/1281100.1281133).
_CONTEXTS = 512

Row = Sequence[tuple[Ids, float]]
"""A place where choices part: the tokens up to each that may follow, and how likely that is, see `choices.relative`."""
Sample = Mapping[str, Sequence[Row]]
"""The places of contexts, by the contexts' names."""


class Calibration:
    """The prior of choices, and how far single contexts are from it.

    Attributes:
        prior: The mean over contexts of how much likelier than what else may follow the last of some tokens is.
        deviation: Of single contexts from it, within a place where choices part: root mean square in nats, at least 1.
            A model that repeats what a conversation holds already is far from it, and would explore nothing.
        is_frozen: Whether the policy has begun to learn, so that what is known stays.
        measured: What was measured since several processes last agreed, by the context's name.
    """

    def __init__(self, is_frozen: bool = False) -> None:
        """Nothing is known.

        Args:
            is_frozen: Whether each choice is measured once, where it is offered first.
        """
        self.prior: dict[Ids, float] = {}
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
        apart.prior, apart.deviation = dict(self.prior), self.deviation
        return apart

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
        prior, deviation = self.prior, self.deviation
        self._take(rows)
        self._note(rows)
        self._taken += sum(name in self._sample for name in rows)
        if self._taken >= self._due:
            self._due = self._taken + min(self._taken, _CONTEXTS // 2)
            self._fit()
        known_is_another = any(self.prior[path] != likelier for path, likelier in prior.items())
        return known_is_another or (bool(prior) and self.deviation != deviation)

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
        # Without what this process alone made of what it measured since.
        self.prior = self._agreed | _means(places for of_one in measured for places in of_one.values())
        if not self.is_frozen:
            for of_one in measured:
                self._take(of_one)
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
        return {"choice_prior": list(self.prior.items()), "choice_deviation": self.deviation, "choice_contexts": sample}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """What `record` was given of."""
        # Older records name the sample otherwise; what it came to stays as it is.
        sample = record.get("choice_contexts")
        known = cls(is_frozen=sample is None)
        known.prior = known._agreed = dict(_row(record["choice_prior"]))
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
        self.prior = _means(rows.values()) | self.prior

    def _is_known(self, tree: TokenTree) -> bool:
        branches = tree.decisions[0].branches
        return all((*branch.path, token) in self.prior for branch in branches for token in branch.targets)

    def _unknown(self, places: Sequence[Row]) -> list[Row]:
        """What has no prior yet."""
        rows = ([each for each in row if each[0] not in self.prior] for row in places)
        return [row for row in rows if row]

    def _fit(self) -> None:
        """Take prior and deviation from the sample."""
        self.prior = self.prior | _means(self._sample.values())
        squares = [
            _square_of_deviation([likelier - self.prior[path] for path, likelier in row])
            for places in self._sample.values()
            for row in places
        ]
        self.deviation = max(1.0, math.sqrt(math.fsum(squares) / max(1, len(squares))))


def _name(tree: TokenTree) -> str:
    """A context's name, as short where conversations are long."""
    return blake2b(repr(tree.undecided).encode(), digest_size=16).hexdigest()


def _row(saved: Iterable[tuple[Sequence[int], float]]) -> Row:
    """What a row was, as JSON gives it back."""
    return [(ids_from(path), number_from(likelier)) for path, likelier in saved]


def _means(contexts: Iterable[Sequence[Row]]) -> dict[Ids, float]:
    """The mean of each over all places that hold it."""
    found: dict[Ids, list[float]] = {}
    for path, likelier in (each for places in contexts for row in places for each in row):
        found.setdefault(path, []).append(likelier)
    return {path: math.fsum(values) / len(values) for path, values in found.items()}


def _square_of_deviation(values: Sequence[float]) -> float:
    """Of values from their mean, the mean over all of them.

    >>> _square_of_deviation([-1.0, 3.0])
    4.0
    """
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values)
