"""Choices as a trie of tokens: where they part, and what goes on there.

Where only one token can follow there is nothing to decide, so no more is read of a choice than leads to the last place
where it parts from others.

Shapes: N nodes besides the root, which is where the reply begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

END = -1
"""Stands for the end of a choice, where longer ones go on; no token has this id."""

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """A place where choices part.

    Attributes:
        node: Its node; 0 is the root.
        path: The tokens that lead there.
        targets: Tokens that go on, `END` among them where a choice is complete.
        counts: How many choices go on with each.
    """

    node: int
    path: Ids
    targets: Ids
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChoiceTrie:
    """The nodes that lead to branches, parents first.

    Attributes:
        ids: Token of each node but the root, (N,).
        parents: Parent of each of them, (N,).
        branches: Where choices part.
    """

    ids: Ids
    parents: tuple[int, ...]
    branches: tuple[Branch, ...]

    @classmethod
    def of(cls, choices: tuple[Ids, ...]) -> ChoiceTrie:
        """The trie of some choices, which are distinct and not empty.

        >>> trie = ChoiceTrie.of(((5, 6, 7), (5, 8, 9), (5, 8)))
        >>> trie.ids, trie.parents
        ((5, 8), (0, 1))
        >>> [(branch.path, branch.targets, branch.counts) for branch in trie.branches]
        [((5,), (6, 8), (1, 2)), ((5, 8), (9, -1), (1, 1))]
        """
        return _trie_of(choices)

    def along(self, choice: Ids) -> ChoiceTrie:
        """What of it lies on the way to a choice: a sequence.

        >>> ChoiceTrie.of(((5, 6), (5, 7), (8, 9))).along((8, 9)).ids
        ()
        """
        met = [branch for branch in self.branches if branch.path == choice[: len(branch.path)]]
        depth = max((len(branch.path) for branch in met), default=0)
        branches = tuple(Branch(len(branch.path), branch.path, branch.targets, branch.counts) for branch in met)
        return ChoiceTrie(choice[:depth], tuple(range(depth)), branches)


def turnings(branches: Sequence[Branch], choices: Iterable[Ids]) -> list[list[tuple[int, int]]]:
    """For each choice, which branches lead to it and with which of their targets: indices of both.

    >>> turnings(ChoiceTrie.of(((5, 6), (5, 7), (5,))).branches, [(5,)])
    [[(0, 2)]]
    """
    number_of = {branch.path: number for number, branch in enumerate(branches)}
    return [
        [
            (number, branches[number].targets.index(token))
            for depth, token in enumerate((*choice, END))
            if (number := number_of.get(choice[:depth])) is not None
        ]
        for choice in choices
    ]


def repeat_counts(branches: Sequence[Branch], replies: Iterable[tuple[Ids, int]]) -> tuple[tuple[int, ...], ...]:
    """Of each branch, how many replies go on with each of its targets.

    Args:
        branches: Where choices part.
        replies: Earlier replies, whether they are among the choices or not, and how often each was given.

    >>> branches = ChoiceTrie.of(((5, 6), (5, 7), (8,))).branches
    >>> repeat_counts(branches, [((5, 6), 2), ((5, 9), 1)])
    ((3, 0), (2, 0))
    """
    counts: Counter[Ids] = Counter()
    for reply, count in replies:
        ended = (*reply, END)
        for depth in range(1, len(ended) + 1):
            counts[ended[:depth]] += count
    return tuple(tuple(counts.get((*branch.path, token), 0) for token in branch.targets) for branch in branches)


# Lists of choices recur, and hundreds of choices take a millisecond.
@lru_cache(maxsize=256)
def _trie_of(choices: tuple[Ids, ...]) -> ChoiceTrie:
    following: dict[Ids, Counter[int]] = {}
    for choice in choices:
        for depth, token in enumerate((*choice, END)):
            following.setdefault(choice[:depth], Counter())[token] += 1
    parting = [path for path, tokens in following.items() if len(tokens) > 1]
    leading = {path[:depth] for path in parting for depth in range(1, len(path) + 1)}
    node_of = {(): 0} | {path: node for node, path in enumerate(filter(leading.__contains__, following), start=1)}
    return ChoiceTrie(
        tuple(path[-1] for path in node_of if path),
        tuple(node_of[path[:-1]] for path in node_of if path),
        tuple(Branch(node_of[path], path, tuple(following[path]), tuple(following[path].values())) for path in parting),
    )
