"""The prior of choices: how likely the reference finds their tokens where they part, over the contexts that offer them.

It is measured where choices part so for the first time, then frozen. Where several processes meet it at once, each has
its own contexts, and the mean is taken over all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..engine.choice_trie import Ids
from ..engine.token_tree import Decision, TokenTree

Totals = dict[Ids, tuple[float, int]]
"""What was measured of tokens after those before them, added up, and in how many contexts."""


def unmeasured(trees: Sequence[TokenTree], prior: Mapping[Ids, float]) -> list[TokenTree]:
    """Contexts in whose choices something goes on that has no prior."""

    def is_known(decision: Decision) -> bool:
        return all((*branch.path, token) in prior for branch in decision.branches for token in branch.targets)

    return [tree for tree in trees if not is_known(tree.decisions[0])]


def totals_of(readings: Iterable[Sequence[tuple[Ids, float]]], prior: Mapping[Ids, float]) -> Totals:
    """What has no prior yet, added up over the contexts that were read, and how many these are."""
    sums: dict[Ids, list[float]] = {}
    for reading in readings:
        for path, likelier in reading:
            if path not in prior:
                sums.setdefault(path, []).append(likelier)
    return {path: (sum(found), len(found)) for path, found in sums.items()}


def means_of(measured: Iterable[Totals]) -> dict[Ids, float]:
    """The mean of each over all contexts that it was measured in.

    >>> means_of([{(7,): (-3.0, 1)}, {(7,): (-3.0, 2), (8,): (1.0, 2)}])
    {(7,): -2.0, (8,): 0.5}
    """
    sums: Totals = {}
    for totals in measured:
        for path, (added, count) in totals.items():
            before, counted = sums.get(path, (0.0, 0))
            sums[path] = before + added, counted + count
    return {path: added / count for path, (added, count) in sums.items()}
