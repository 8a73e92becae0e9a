"""Segments as token trees, each laid out once while it is read again and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..engine.token_tree import TokenTree
from ..text.episode import Segment


class Trees:
    """Lays segments out.

    An update needs each segment's tree twice an epoch. Where observations are few, building it every time would take
    longer than the model's products.
    """

    def __init__(self) -> None:
        """Keep none."""
        self._known: dict[int, tuple[Segment, TokenTree]] | None = None
        self._equal: dict[TokenTree, TokenTree] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While open, segments' trees are kept, and those that are equal are one object."""
        self._known = {}
        try:
            yield
        finally:
            self._known = None
            self._equal.clear()

    def of(self, segments: Sequence[Segment]) -> list[TokenTree]:
        """The segments' trees."""
        if self._known is None:
            return [TokenTree.from_segment(segment) for segment in segments]
        for segment in segments:
            if id(segment) not in self._known:
                tree = TokenTree.from_segment(segment)
                # The segment is held as well: another one at its address would be taken for it.
                self._known[id(segment)] = segment, self._equal.setdefault(tree, tree)
        return [self._known[id(segment)][1] for segment in segments]
