"""The KV cache of replies under way: a preallocated buffer, filled from the prefix cache, in which rows grow in place.

Shapes: L layers, S tokens of history after the prefix, B rows, P columns of a prefix that all rows share.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicLayer

from ..models.transformers_internals import InitializedLayer
from .radix_tree import Activations


class KVBuffer:
    """Keys and values of several rows, with columns free for more; the first columns are a prefix of all rows."""

    def __init__(self, prefix: Tensor, rows: int, columns: int, is_shared: bool) -> None:
        """Allocate it, filled with the prefix alone.

        Args:
            prefix: Entries (2L, heads, P, head size) that all rows begin with.
            rows: How many.
            columns: How many entries a row can hold, those of the prefix included.
            is_shared: Whether all rows attend to one prefix (see `attention`); otherwise each row has a copy.
        """
        layers, heads, length, width = prefix.shape
        self._prefix = prefix if is_shared else None
        self._first = length if is_shared else 0
        self._entries = prefix.new_empty(layers, rows, heads, columns - self._first, width)
        if not is_shared:
            self._entries[..., :length, :] = prefix[:, None]

    def fill(
        self, row: int, column: int, pieces: Iterable[Activations], first: int = 0, until: int | None = None
    ) -> None:
        """Put entries into a row's columns, one piece behind the other.

        Args:
            row: Which.
            column: The first, behind the prefix.
            pieces: What some of the layers made of consecutive tokens.
            first: Index of these layers' first keys among the buffer's 2L keys and values.
            until: All layers get zeros from there up to this column: even what a mask hides must be finite.
        """
        for piece in pieces:
            start, column = column, column + len(piece)
            self.entries(row, start, column)[first : first + len(piece.entries)] = piece.entries
        if until is not None:
            self.entries(row, column, until).zero_()

    def entries(self, row: int, start: int, stop: int) -> Tensor:
        """What a row's columns behind the prefix hold, (2L, heads, stop - start, head size), as a view."""
        return self._entries[:, row, :, start - self._first : stop - self._first]

    def copy(self, source: int, row: int) -> None:
        """Copy one row over another."""
        self._entries[:, row] = self._entries[:, source]

    def cache(self, rows: slice, columns: int, first_layer: int = 0) -> BufferCache:
        """A cache of the first `columns` of some rows, to which new keys and values are appended in place.

        Args:
            rows: Which.
            columns: How many are filled, those of the prefix included.
            first_layer: The model's layer that the entries begin with.
        """
        below: list[Any] = [DynamicLayer() for _ in range(first_layer)]
        pairs = self._entries[:, rows].unflatten(0, (-1, 2))
        layers = [_BufferLayer(keys, values, columns - self._first) for keys, values in pairs]
        prefix = None if self._prefix is None else [None] * first_layer + list(self._prefix.unflatten(0, (-1, 2)))
        return BufferCache([*below, *layers], prefix)


class BufferCache(Cache):
    """A view of a `KVBuffer` as transformers takes it.

    Attributes:
        prefix: For each layer, keys and values (2, heads, P, head size) that all rows share; None if they share
            none.
        keeps_gradients: Whether gradients flow back through the cached keys and values.
    """

    def __init__(self, layers: list[Any], prefix: list[Any] | None) -> None:
        """Wrap layers and a shared prefix."""
        super().__init__(layers=layers)
        self.prefix = prefix
        self.keeps_gradients = False

    def grow(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, heads, S, head size) of a layer, the last `count` columns new and yet to be filled."""
        of_layer: Any = self.layers[layer]
        kept: tuple[Tensor, Tensor] = of_layer.grow(count)
        return kept


class _BufferLayer(InitializedLayer):
    """Keys and values that grow in place, unless gradients must flow through them."""

    def __init__(self, keys: Tensor, values: Tensor, columns: int) -> None:
        super().__init__(keys)
        self._room = keys, values
        self._show(columns)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append entries (B, heads, T, head size); returns all."""
        # A model may switch gradients off for some layers in the middle of a pass that has them.
        if torch.is_grad_enabled() or self._room[0].requires_grad:
            result: tuple[Tensor, Tensor] = super().update(key_states, value_states)
            return result
        start = self.get_seq_length()
        shown = self.grow(key_states.shape[2])
        for kept, new in zip(shown, (key_states, value_states), strict=True):
            kept[:, :, start:] = new
        return shown

    def grow(self, count: int) -> tuple[Tensor, Tensor]:
        """Show `count` more columns, whatever they hold; returns all."""
        return self._show(self.get_seq_length() + count)

    def _show(self, columns: int) -> tuple[Tensor, Tensor]:
        keys, values = (part[:, :, :columns] for part in self._room)
        self.keys, self.values = keys, values
        return keys, values


def entries_of(cache: Cache, columns: slice, first_layer: int = 0) -> Tensor:
    """Keys and values in some columns, layer after layer, (B, 2L, heads, S, head size)."""
    layers: list[Any] = cache.layers[first_layer:]
    return torch.stack([part[:, :, columns] for layer in layers for part in (layer.keys, layer.values)], dim=1)
