"""The prior of choices: the mean score of each over the contexts that offer it, under the reference.

It is measured where a choice is met first, then frozen. Where several processes meet it at once, each has its own
contexts, and the mean is taken over all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..engine.token_tree import TokenTree
from .score import Reading

Choice = tuple[int, ...]
Totals = dict[Choice, tuple[float, int]]
"""Scores of choices, added up, and of how many contexts."""


def unmeasured(trees: Sequence[TokenTree], prior: Mapping[Choice, float]) -> list[TokenTree]:
    """Contexts that offer choices without a prior."""
    return [tree for tree in trees if any(choice not in prior for choice in tree.decisions[0].choices or ())]


def total_scores(readings: Iterable[Reading], prior: Mapping[Choice, float]) -> Totals:
    """Of choices without a prior: the scores added up over the contexts that offer them, and how many these are."""
    sums: dict[Choice, list[float]] = {}
    for reading in readings:
        for choices, scores in zip(reading.plan.choices, reading.choice_scores.tolist(), strict=True):
            for choice, score in zip(choices, scores, strict=False):
                if choice not in prior:
                    sums.setdefault(choice, []).append(score)
    return {choice: (sum(scores), len(scores)) for choice, scores in sums.items()}


def mean_scores(measured: Iterable[Totals]) -> dict[Choice, float]:
    """Each choice's mean score over all contexts that it was measured in.

    >>> mean_scores([{(7,): (-3.0, 1)}, {(7,): (-3.0, 2), (8,): (1.0, 2)}])
    {(7,): -2.0, (8,): 0.5}
    """
    sums: Totals = {}
    for totals in measured:
        for choice, (total, count) in totals.items():
            before, counted = sums.get(choice, (0.0, 0))
            sums[choice] = before + total, counted + count
    return {choice: total / count for choice, (total, count) in sums.items()}
