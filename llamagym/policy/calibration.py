"""What choices are measured against: how likely the reference finds their tokens anyway, and how far contexts differ.

Both are part of the policy. They are measured over the first contexts that offer choices, again whenever these have
doubled, and frozen when there are enough or the policy begins to learn. What is offered for the first time later is
measured where that happens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from typing_extensions import Self

from ..engine.choice_trie import Ids
from ..engine.token_tree import TokenTree

# Contexts that are taken as a sample of all.
_CONTEXTS = 512

Row = Sequence[tuple[Ids, float]]
"""A place where choices part: the tokens up to each that may follow, and how likely that is, see `choices.relative`."""


class Calibration:
    """The prior of choices, and how far single contexts are from it.

    Attributes:
        prior: The mean over contexts of how much likelier than what else may follow the last of some tokens is.
        deviation: Of single contexts from it, within a place where choices part: root mean square in nats, at least 1.
            A model that repeats what a conversation holds already is far from it, and would explore nothing.
        measured: What was measured since several processes last agreed.
    """

    def __init__(self, is_frozen: bool = False) -> None:
        """Nothing is known.

        Args:
            is_frozen: Whether each choice is measured once, where it is offered first.
        """
        self.prior: dict[Ids, float] = {}
        self.deviation = 1.0
        self.measured: list[Row] = []
        self._is_frozen = is_frozen
        self._agreed: list[Row] = []
        self._contexts: set[str] = set()
        self._due = 1

    def anew(self) -> Calibration:
        """One of another reference, of which nothing is known."""
        return Calibration(self._is_frozen)

    def unmeasured(self, trees: Iterable[TokenTree], learns: bool) -> list[TokenTree]:
        """Those of these contexts that are to be measured.

        Args:
            trees: Each with a pending prompt.
            learns: Whether the policy has begun to learn.
        """
        self._is_frozen |= learns
        if self._is_open:
            return [tree for tree in trees if _name(tree) not in self._contexts]
        return [tree for tree in trees if not self._is_known(tree)]

    def add(self, trees: Sequence[TokenTree], found: Sequence[Row]) -> bool:
        """Take what was measured in contexts that had not been.

        Returns:
            Whether what had been measured before is another now.
        """
        if self._is_open:
            self.measured += found
            self._contexts.update(map(_name, trees))
            if len(self._contexts) >= self._due:
                self._due = 2 * len(self._contexts)
                return self._fit([*self._agreed, *self.measured])
        else:
            late = ([each for each in row if each[0] not in self.prior] for row in found)
            self.measured += filter(None, late)
        # What is known stays.
        self.prior = _means(found) | self.prior
        return False

    def agree(self, measured: Sequence[Sequence[Row]], learns: bool) -> bool:
        """Take what several processes, this one among them, measured since they last agreed.

        Args:
            measured: By each of them.
            learns: Whether the policy has begun to learn.

        Returns:
            Whether anything was: then what each of them sampled counts as another policy's.
        """
        rows = [row for of_one in measured for row in of_one]
        self.measured = []
        self._is_frozen |= learns
        if self._is_frozen:
            self.prior |= _means(rows)
        else:
            self._agreed += rows
            self._fit(self._agreed)
        return bool(rows)

    def record(self, learns: bool) -> dict[str, Any]:
        """What to save: the sample of contexts too, while it grows.

        Args:
            learns: Whether the policy has begun to learn.
        """
        self._is_frozen |= learns
        sample = [self._due, sorted(self._contexts), self._agreed, self.measured] if self._is_open else None
        return {"choice_prior": list(self.prior.items()), "choice_deviation": self.deviation, "choice_sample": sample}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """What `record` was given of."""
        known = cls(is_frozen=record["choice_sample"] is None)
        known.prior = dict(_row(record["choice_prior"]))
        known.deviation = record["choice_deviation"]
        if not known._is_frozen:
            known._due, contexts, *rows = record["choice_sample"]
            known._contexts = set(contexts)
            known._agreed, known.measured = (list(map(_row, part)) for part in rows)
        return known

    @property
    def _is_open(self) -> bool:
        return not self._is_frozen and len(self._contexts) < _CONTEXTS

    def _is_known(self, tree: TokenTree) -> bool:
        branches = tree.decisions[0].branches
        return all((*branch.path, token) in self.prior for branch in branches for token in branch.targets)

    def _fit(self, rows: Sequence[Row]) -> bool:
        """Prior and deviation of a sample; says whether they replace others."""
        before = self.prior, self.deviation
        self.prior = self.prior | _means(rows)
        squares = [_square_of_deviation([likelier - self.prior[path] for path, likelier in row]) for row in rows]
        self.deviation = max(1.0, math.sqrt(math.fsum(squares) / max(1, len(squares))))
        return bool(before[0]) and before != (self.prior, self.deviation)


def _name(tree: TokenTree) -> str:
    """A context's name, as short where conversations are long."""
    return blake2b(repr(tree.undecided).encode(), digest_size=16).hexdigest()


def _row(saved: Iterable[tuple[Sequence[int], float]]) -> Row:
    """What a row was, as JSON gives it back."""
    return [(tuple(path), likelier) for path, likelier in saved]


def _means(rows: Iterable[Row]) -> dict[Ids, float]:
    """The mean of each over all rows that hold it."""
    found: dict[Ids, list[float]] = {}
    for path, likelier in (each for row in rows for each in row):
        found.setdefault(path, []).append(likelier)
    return {path: math.fsum(values) / len(values) for path, values in found.items()}


def _square_of_deviation(values: Sequence[float]) -> float:
    """Of values from their mean, the mean over all of them.

    >>> _square_of_deviation([-1.0, 3.0])
    4.0
    """
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values)
