"""Keeps what the model has read: keys and values by content, so that a conversation that grows is read once.

Shapes: L layers, S tokens of history after the prefix, B rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache

from .batching import TokenTree

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Recall:
    """What a tree's decisions need of its frozen layers.

    Attributes:
        entries: Keys and values of the history after the prefix, one layer after the other, (2L, heads, S, head size).
        hidden: Decision nodes' states where the adapted layers begin, (D, H).
    """

    entries: Tensor
    hidden: Tensor

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return self.entries.nbytes + self.hidden.nbytes


@dataclass(frozen=True, slots=True)
class Unread:
    """A history that is known up to `mark` tokens after the prefix."""

    tree: TokenTree
    mark: int
    known: Tensor | None

    @property
    def ids(self) -> tuple[int, ...]:
        """What is left to read."""
        return self.tree.history[self.mark :]


class Recent(Generic[K, V]):
    """A dictionary of bounded size in bytes, which forgets what was used least recently.

    >>> recent = Recent(len, max_bytes=4)
    >>> recent.put("a", "xx"), recent.put("b", "yy"), recent.get("a"), recent.put("c", "z")
    (None, None, 'xx', None)
    >>> recent.get("b"), recent.get("a"), recent.get("c"), recent.nbytes
    (None, 'xx', 'z', 3)
    """

    def __init__(self, size: Callable[[V], int], max_bytes: int) -> None:
        """Hold values of `size(value)` bytes, `max_bytes` in all."""
        self._size, self._max_bytes = size, max_bytes
        self._values: OrderedDict[K, V] = OrderedDict()
        self.nbytes = 0

    def put(self, key: K, value: V) -> None:
        """Add or replace a value, and forget others until all fit."""
        self.pop(key)
        self._values[key] = value
        self.nbytes += self._size(value)
        while self.nbytes > self._max_bytes:
            self.nbytes -= self._size(self._values.popitem(last=False)[1])

    def get(self, key: K) -> V | None:
        """The value, which counts as used now, or None."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def pop(self, key: K) -> V | None:
        """Remove and return a value, or None."""
        value = self._values.pop(key, None)
        if value is not None:
            self.nbytes -= self._size(value)
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
        self.nbytes = 0


def entries_of(cache: DynamicCache, start: int) -> Tensor:
    """Keys and values from column `start` on, layer after layer, (B, 2L, heads, S, head size)."""
    layers: list[Any] = cache.layers
    return torch.stack([part[:, :, start:] for layer in layers for part in (layer.keys, layer.values)], dim=1)


def cache_of(prefix: Tensor | None, histories: list[Tensor], size: int, first_layer: int = 0) -> DynamicCache:
    """A cache that holds the prefix and then each row's history, padded to `size` columns.

    Args:
        prefix: Entries (2L, heads, P, head size) that all rows share.
        histories: Entries (2L, heads, S, head size) of each row.
        size: At least the largest S.
        first_layer: The model's layer that the entries begin with.
    """
    cache, count = DynamicCache(), len(histories)
    layers, heads, _, width = histories[0].shape
    shared = 0 if prefix is None else prefix.shape[2]
    rows = histories[0].new_zeros(layers, count, heads, shared + size, width)
    if prefix is not None:
        rows[:, :, :, :shared] = prefix[:, None]
    for row, history in enumerate(histories):
        rows[:, row, :, shared : shared + history.shape[2]] = history
    for layer in range(layers // 2):
        cache.update(rows[2 * layer], rows[2 * layer + 1], first_layer + layer)
    return cache
