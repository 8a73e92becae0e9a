"""A cache of distributions over choices, by context, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..engine.token_tree import TokenTree

# Log-probabilities (C,) of the choices, and the value.
ScoredChoices = tuple[Tensor, float]

# A token: its place in a tuple, and the number itself.
_ID_BYTES = 40
# A choice: its tuple of ids and the places of that, its log-probability.
_CHOICE_BYTES = 56
# A place where choices part, and what goes on there: tokens and their counts.
_BRANCH_BYTES, _TARGET_BYTES = 260, 16
# A context: tree, decision, tuples, tensor.
_TREE_BYTES = 1000


class ChoiceCache:
    """Distributions over choices by context; the oldest entries are evicted to stay within a budget of bytes.

    Attributes:
        size: About how many bytes are held.
    """

    def __init__(self, most: int = 100 * 2**20) -> None:
        """Hold at most `most` bytes."""
        self._most, self.size = most, 0
        self._known: dict[TokenTree, ScoredChoices] = {}

    def copy(self) -> ChoiceCache:
        """A cache that holds the same contexts."""
        copied = ChoiceCache(self._most)
        copied._known, copied.size = dict(self._known), self.size
        return copied

    def __len__(self) -> int:
        """How many contexts are held."""
        return len(self._known)

    def __contains__(self, tree: TokenTree) -> bool:
        """Whether a context is held."""
        return tree in self._known

    def __getitem__(self, tree: TokenTree) -> ScoredChoices:
        """The distribution and the value of a cached context."""
        return self._known[tree]

    def update(self, scored: Mapping[TokenTree, ScoredChoices]) -> None:
        """Add contexts that are new; one that is larger than the whole budget is not kept."""
        for tree, choices in scored.items():
            self._known[tree] = choices
            self.size += size_of(tree)
            while self.size > self._most:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self.size -= size_of(oldest)

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
        self.size = 0


def size_of(tree: TokenTree) -> int:
    """About how many bytes a context, its choices and their distribution take."""
    choices = [choice for decision in tree.decisions for choice in decision.choices or ()]
    branches = [branch for decision in tree.decisions for branch in decision.branches]
    tokens = tree.context_length + tree.node_count + sum(map(len, choices)) + sum(len(each.path) for each in branches)
    targets = sum(len(branch.targets) for branch in branches)
    size = _TREE_BYTES + _ID_BYTES * tokens + _CHOICE_BYTES * len(choices)
    return size + _BRANCH_BYTES * len(branches) + _TARGET_BYTES * targets
