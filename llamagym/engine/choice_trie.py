"""Choices as a trie of tokens, with the branch points where they diverge.

Where only one token can follow there is nothing to decide, so the trie ends at a choice's last branch point.

Shapes: N nodes besides the root, where the reply begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

END = -1
"""Stands for the end of a choice that is a prefix of another; no token has this id."""

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch point: a node after which choices differ.

    Attributes:
        node: Its node; 0 is the root.
        path: Tokens from the root to it.
        targets: Tokens that may follow, among them `END` where a choice is complete.
        counts: Number of choices that continue with each target.
    """

    node: int
    path: Ids
    targets: Ids
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChoiceTrie:
    """The nodes that lead to branch points, parents first.

    Attributes:
        ids: Token of each node but the root, (N,).
        parents: Parent of each node but the root, (N,).
        branches: The branch points.
    """

    ids: Ids
    parents: tuple[int, ...]
    branches: tuple[Branch, ...]

    @classmethod
    def of(cls, choices: tuple[Ids, ...]) -> ChoiceTrie:
        """Builds the trie of distinct choices that are not empty.

        >>> trie = ChoiceTrie.of(((5, 6, 7), (5, 8, 9), (5, 8)))
        >>> trie.ids, trie.parents
        ((5, 8), (0, 1))
        >>> [(branch.path, branch.targets, branch.counts) for branch in trie.branches]
        [((5,), (6, 8), (1, 2)), ((5, 8), (9, -1), (1, 1))]
        """
        return trie_of(choices)

    def path_to(self, choice: Ids) -> ChoiceTrie:
        """The nodes and branch points on the way to one choice, a sequence.

        >>> ChoiceTrie.of(((5, 6), (5, 7), (8, 9))).path_to((8, 9)).ids
        ()
        """
        branches: list[Branch] = []
        depth = 0
        for branch in self.branches:
            length = len(branch.path)
            if branch.path == choice[:length]:
                branches.append(Branch(length, branch.path, branch.targets, branch.counts))
                depth = max(depth, length)
        return ChoiceTrie(choice[:depth], tuple(range(depth)), tuple(branches))


def branch_points(branches: Sequence[Branch], choices: Iterable[Ids]) -> list[list[tuple[int, int]]]:
    """For each choice, the branch points on its way and the target it takes at each: indices of both.

    >>> branch_points(ChoiceTrie.of(((5, 6), (5, 7), (5,))).branches, [(5,)])
    [[(0, 2)]]
    """
    index_of = {branch.path: index for index, branch in enumerate(branches)}
    taken: list[list[tuple[int, int]]] = []
    for choice in choices:
        steps: list[tuple[int, int]] = []
        for depth, token in enumerate((*choice, END)):
            index = index_of.get(choice[:depth])
            if index is not None:
                steps.append((index, branches[index].targets.index(token)))
        taken.append(steps)
    return taken


def repeat_counts(branches: Sequence[Branch], replies: Iterable[tuple[Ids, int]]) -> tuple[tuple[int, ...], ...]:
    """For each branch point, the number of replies that continue with each of its targets.

    Args:
        branches: Branch points.
        replies: Earlier replies, choices or not, with the number of times each was given.

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
def trie_of(choices: tuple[Ids, ...]) -> ChoiceTrie:
    """The trie of a list of choices, from a cache."""
    following: dict[Ids, Counter[int]] = {}
    for choice in choices:
        for depth, token in enumerate((*choice, END)):
            following.setdefault(choice[:depth], Counter())[token] += 1
    diverging = [path for path, tokens in following.items() if len(tokens) > 1]
    leading = {path[:depth] for path in diverging for depth in range(1, len(path) + 1)}
    paths = [path for path in following if path in leading]
    node_of = {path: node for node, path in enumerate([(), *paths])}
    branches: list[Branch] = []
    for path in diverging:
        targets = following[path]
        branches.append(Branch(node_of[path], path, tuple(targets), tuple(targets.values())))
    return ChoiceTrie(
        tuple(path[-1] for path in paths),
        tuple(node_of[path[:-1]] for path in paths),
        tuple(branches),
    )
