"""State that sampling uses: the calibration of choices, the choices that were offered, and caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..engine.prefix_cache import PrefixCache
from ..engine.token_tree import TokenTree
from .calibration import Calibration
from .drafts import Drafter

# Log-probabilities (C,) of the choices, and the value.
ScoredChoices = tuple[Tensor, float]

# 100 MB, at 40 bytes for a token in a tuple. A context and a choice take as much as some tokens.
_MAX_TOKENS = 2_500_000
_TOKENS_PER_CONTEXT = 25
_TOKENS_PER_CHOICE = 4


class ChoiceCache:
    """Distributions over choices by context; the oldest entries are evicted.

    Attributes:
        size: Approximate memory of all entries, in tokens of 40 bytes.
        entries: The distribution and the value of each cached context, oldest first.
    """

    def __init__(self, max_tokens: int = _MAX_TOKENS) -> None:
        """Creates an empty cache of at most `max_tokens`."""
        self.size = 0
        self._max_tokens = max_tokens
        self.entries: dict[TokenTree, ScoredChoices] = {}

    def copy(self) -> ChoiceCache:
        """A cache with the same entries."""
        copied = ChoiceCache(self._max_tokens)
        copied.size = self.size
        copied.entries = dict(self.entries)
        return copied

    def update(self, scored: Mapping[TokenTree, ScoredChoices]) -> None:
        """Adds new contexts; one that is larger than the whole cache is evicted at once."""
        for tree, choices in scored.items():
            self.entries[tree] = choices
            self.size += _size_of(tree)
            while self.size > self._max_tokens:
                oldest = next(iter(self.entries))
                del self.entries[oldest]
                self.size -= _size_of(oldest)

    def clear(self) -> None:
        """Removes all entries."""
        self.entries.clear()
        self.size = 0


def _size_of(tree: TokenTree) -> int:
    """Approximate memory of a context and its choices, in tokens of 40 bytes."""
    size = _TOKENS_PER_CONTEXT + tree.context_length + tree.node_count
    for decision in tree.decisions:
        for choice in decision.choices or ():
            size += _TOKENS_PER_CHOICE + len(choice)
    return size


@dataclass(eq=False)
class Workspace:
    """Calibration and caches of acting.

    Learning has one; evaluation and other read-only calls work on another. A cached number is rounded differently than
    a recomputed one, so with shared caches a run would depend on whether it was evaluated.

    Attributes:
        calibration: Calibration of choices; None without it.
        offered: Every choice that was ever offered.
        choices: Cached distributions over choices.
        prefix_cache: Cached activations of tokens.
        recalibrations: How often the calibration has changed.
        drafter: Guesses of replies' next tokens, from earlier replies.
    """

    calibration: Calibration | None
    offered: dict[tuple[int, ...], None]
    choices: ChoiceCache
    prefix_cache: PrefixCache
    recalibrations: int = 0
    drafter: Drafter = field(default_factory=Drafter)

    def copy(self) -> Workspace:
        """An independent copy, which starts without drafts."""
        calibration = self.calibration and self.calibration.separate_copy()
        return Workspace(calibration, dict(self.offered), self.choices.copy(), self.prefix_cache.copy())
