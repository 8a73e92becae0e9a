"""A cache of distributions over choices, by context, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..engine.token_tree import TokenTree

# Log-probabilities (C,) of the choices, and the value.
ScoredChoices = tuple[Tensor, float]

# Approximate memory of the parts of a context: a token id with its slot in a tuple; a choice without its ids; a branch
# point and each of its targets; tree, decision, tuples and tensor.
_ID_BYTES = 40
_CHOICE_BYTES = 56
_BRANCH_BYTES = 260
_TARGET_BYTES = 16
_TREE_BYTES = 1000


class ChoiceCache:
    """Distributions over choices by context; the oldest entries are evicted to stay within a budget of bytes.

    Attributes:
        size: Approximate memory of all entries, in bytes.
        entries: The distribution and the value of each cached context, oldest first.
    """

    def __init__(self, max_bytes: int = 100 * 2**20) -> None:
        """Creates an empty cache of at most `max_bytes`."""
        self.size = 0
        self._max_bytes = max_bytes
        self.entries: dict[TokenTree, ScoredChoices] = {}

    def copy(self) -> ChoiceCache:
        """A cache with the same entries."""
        copied = ChoiceCache(self._max_bytes)
        copied.size = self.size
        copied.entries = dict(self.entries)
        return copied

    def __len__(self) -> int:
        """Number of cached contexts."""
        return len(self.entries)

    def __contains__(self, tree: TokenTree) -> bool:
        """Whether a context is cached."""
        return tree in self.entries

    def __getitem__(self, tree: TokenTree) -> ScoredChoices:
        """The distribution and the value of a cached context."""
        return self.entries[tree]

    def update(self, scored: Mapping[TokenTree, ScoredChoices]) -> None:
        """Adds new contexts; one that is larger than the whole budget is evicted at once."""
        for tree, choices in scored.items():
            self.entries[tree] = choices
            self.size += size_of(tree)
            while self.size > self._max_bytes:
                oldest = next(iter(self.entries))
                del self.entries[oldest]
                self.size -= size_of(oldest)

    def clear(self) -> None:
        """Removes all entries."""
        self.entries.clear()
        self.size = 0


def size_of(tree: TokenTree) -> int:
    """Approximate memory of a context, its choices and their distribution, in bytes."""
    choices = [choice for decision in tree.decisions for choice in decision.choices or ()]
    branches = [branch for decision in tree.decisions for branch in decision.branches]
    tokens = tree.context_length + tree.node_count + sum(map(len, choices)) + sum(len(each.path) for each in branches)
    targets = sum(len(branch.targets) for branch in branches)
    size = _TREE_BYTES + _ID_BYTES * tokens + _CHOICE_BYTES * len(choices)
    return size + _BRANCH_BYTES * len(branches) + _TARGET_BYTES * targets
