"""The prior of choices: how likely the reference finds their tokens on average, over the contexts that offer them.

It is measured where a choice is met first, then frozen. Where several processes meet it at once, each has its own
contexts, and the mean is taken over all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..engine.choice_trie import END, Ids
from ..engine.token_tree import TokenTree

Totals = dict[Ids, tuple[float, int]]
"""Log-probabilities of tokens after those before them, added up, and of how many contexts."""


def unmeasured(trees: Sequence[TokenTree], prior: Mapping[Ids, float]) -> list[TokenTree]:
    """Contexts that offer choices without a prior."""
    return [tree for tree in trees if any((*choice, END) not in prior for choice in tree.decisions[0].choices or ())]


def choices_in(prior: Mapping[Ids, float]) -> list[Ids]:
    """The choices that a prior is known of.

    >>> choices_in({(5,): -1.0, (5, 6): -0.5, (5, 6, END): -0.1})
    [(5, 6)]
    """
    return [path[:-1] for path in prior if path[-1] == END]


def total_logprobs(readings: Iterable[Sequence[tuple[Ids, float]]], prior: Mapping[Ids, float]) -> Totals:
    """What has no prior yet: log-probabilities added up over the contexts that were read, and how many these are."""
    sums: dict[Ids, list[float]] = {}
    for reading in readings:
        for path, logprob in reading:
            if path not in prior:
                sums.setdefault(path, []).append(logprob)
    return {path: (sum(logprobs), len(logprobs)) for path, logprobs in sums.items()}


def mean_logprobs(measured: Iterable[Totals]) -> dict[Ids, float]:
    """The mean log-probability of each over all contexts that it was measured in.

    >>> mean_logprobs([{(7,): (-3.0, 1)}, {(7,): (-3.0, 2), (8,): (1.0, 2)}])
    {(7,): -2.0, (8,): 0.5}
    """
    sums: Totals = {}
    for totals in measured:
        for path, (total, count) in totals.items():
            before, counted = sums.get(path, (0.0, 0))
            sums[path] = before + total, counted + count
    return {path: total / count for path, (total, count) in sums.items()}
