"""KV caches that are filled from the prefix cache.

`KVBuffer` holds the rows of a decode, which grow in place. `GatheringCache` serves one pass over many rows and, on a
CPU, gathers one layer at a time: for long conversations the keys and values of all layers would be hundreds of MB, new
in each pass, and touching new memory takes as long as filling it. On a GPU, where each copy is a call of its own, it
gathers all layers at once.

Shapes: L layers, B rows, P columns of a prefix that all rows share, S columns of a row, T new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicLayer

from ..models.transformers_internals import InitializedLayer
from .radix_tree import Activations


class KVBuffer:
    """Preallocated keys and values of several rows, whose first columns are a prefix of all rows."""

    def __init__(self, prefix: Tensor, rows: int, columns: int, is_shared: bool) -> None:
        """Allocates the buffer and fills in the prefix.

        Args:
            prefix: Entries (2L, heads, P, head size) that all rows begin with.
            rows: Number of rows.
            columns: Number of entries per row, including the prefix.
            is_shared: Whether all rows attend to one prefix (see `attention`); otherwise each row has a copy.
        """
        layers, heads, length, head_size = prefix.shape
        self._prefix = prefix if is_shared else None
        self._first_column = length if is_shared else 0
        self._entries = prefix.new_empty(layers, rows, heads, columns - self._first_column, head_size)
        if not is_shared:
            self._entries[..., :length, :] = prefix[:, None]

    def fill(
        self,
        row: int,
        column: int,
        pieces: Iterable[Activations],
        first_entry: int = 0,
        pad_to: int | None = None,
    ) -> None:
        """Writes entries into a row, one piece after the other.

        Args:
            row: Row to fill.
            column: First column, after the prefix.
            pieces: Activations of consecutive tokens by some of the layers.
            first_entry: Index of these layers' first keys among the buffer's 2L keys and values.
            pad_to: Column up to which all layers are filled with zeros: even what a mask hides must be finite.
        """
        for piece in pieces:
            end = column + len(piece)
            self.entries(row, column, end)[first_entry : first_entry + len(piece.entries)] = piece.entries
            column = end
        if pad_to is not None:
            self.entries(row, column, pad_to).zero_()

    def entries(self, row: int, start: int, stop: int) -> Tensor:
        """A view of some columns of a row after the prefix, (2L, heads, stop - start, head size)."""
        return self._entries[:, row, :, start - self._first_column : stop - self._first_column]

    def copy(self, source: int, row: int) -> None:
        """Copies one row over another."""
        self._entries[:, row] = self._entries[:, source]

    def cache(self, rows: slice, columns: int) -> BufferCache:
        """A cache of the first columns of some rows, to which new keys and values are appended in place.

        Args:
            rows: Rows of the cache.
            columns: Number of filled columns, including the prefix.
        """
        views = _ColumnViews(self._entries[:, rows])
        layer_count = len(self._entries) // 2
        layers = [_BufferLayer(views, index, columns - self._first_column) for index in range(layer_count)]
        prefix = None if self._prefix is None else self._prefix.unflatten(0, (-1, 2))
        return BufferCache(layers, prefix)


class BufferCache(Cache):
    """Layers of keys and values as transformers takes them.

    Attributes:
        prefix: For each layer, keys and values (2, heads, P, head size) that all rows share; None without a shared
            prefix.
        keeps_gradients: Whether gradients flow back through the cached keys and values.
    """

    def __init__(self, layers: list[Any], prefix: Tensor | None, first_layer: int = 0) -> None:
        """Wraps layers.

        Args:
            layers: Cache layers.
            prefix: Shared keys and values of these layers, (L, 2, heads, P, head size).
            first_layer: Number of the model's layer that they begin with; the cache is empty below it.
        """
        below: list[Any] = [DynamicLayer() for _ in range(first_layer)]
        super().__init__(layers=[*below, *layers])
        self.prefix: list[Any] | None = None
        if prefix is not None:
            self.prefix = [*[None] * first_layer, *prefix]
        self.keeps_gradients = False

    def grow(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, heads, S, head size) of a layer with `count` more columns, which are yet to be filled."""
        cache_layer: Any = self.layers[layer]
        grown: tuple[Tensor, Tensor] = cache_layer.grow(count)
        return grown


class _ColumnViews:
    """Views of the first columns of all layers, created together: two operations instead of two per layer."""

    def __init__(self, entries: Tensor) -> None:
        """Wraps entries (2L, B, heads, S, head size)."""
        self.entries = entries
        self._columns = -1
        self._views: Sequence[Tensor] = ()

    def layer(self, index: int, columns: int) -> tuple[Tensor, Tensor]:
        """A layer's first keys and values, (B, heads, columns, head size) each."""
        if columns != self._columns:
            self._columns = columns
            self._views = self.entries[..., :columns, :].unbind()
        return self._views[2 * index], self._views[2 * index + 1]


class _BufferLayer(InitializedLayer):
    """Keys and values that grow in place, unless gradients must flow through them."""

    def __init__(self, views: _ColumnViews, index: int, columns: int) -> None:
        super().__init__(views.entries)
        self._views = views
        self._index = index
        self._show(columns)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends entries (B, heads, T, head size), and returns all."""
        # A model may disable gradients for some layers in the middle of a pass that has them.
        if torch.is_grad_enabled() or self._views.entries.requires_grad:
            updated: tuple[Tensor, Tensor] = super().update(key_states, value_states)
            return updated
        start = self.get_seq_length()
        keys, values = self.grow(key_states.shape[2])
        keys[:, :, start:] = key_states
        values[:, :, start:] = value_states
        return keys, values

    def grow(self, count: int) -> tuple[Tensor, Tensor]:
        """Shows `count` more columns, whatever they hold, and returns all."""
        return self._show(self.get_seq_length() + count)

    def _show(self, columns: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._views.layer(self._index, columns)
        return self.keys, self.values


class GatheringCache(BufferCache):
    """KV cache of one pass over several rows, whose layers are gathered when they run.

    Attributes:
        layers_at_once: Number of layers that are gathered together.
    """

    def __init__(
        self,
        prefix: Tensor,
        histories: Sequence[Sequence[Activations]],
        size: int,
        new_columns: int,
        is_shared: bool,
        first_layer: int = 0,
    ) -> None:
        """Prepares the cache; nothing is gathered yet.

        Args:
            prefix: Entries (2L, heads, P, head size) that all rows begin with.
            histories: These layers' activations of each row after the prefix, in pieces.
            size: Columns for each history, which is padded to it.
            new_columns: Tokens per row in the pass, T.
            is_shared: Whether all rows attend to one prefix (see `attention`); otherwise each row has a copy.
            first_layer: Number of the model's layer that the entries begin with.
        """
        pairs = prefix.unflatten(0, (-1, 2))
        self._prefix = None if is_shared else pairs
        self._first_column = 0 if is_shared else prefix.shape[2]
        self._columns = self._first_column + size
        self._histories = [[piece.entries.unflatten(0, (-1, 2)) for piece in pieces] for pieces in histories]
        heads = prefix.shape[1]
        head_size = prefix.shape[3]
        self._shape = 2, len(histories), heads, self._columns + new_columns, head_size
        self.layers_at_once = 1 if prefix.device.type == "cpu" else len(pairs)
        # The layers that are gathered, and the buffer that holds them.
        self._gathered = range(0)
        self._buffer: Tensor | None = None
        # The backward pass reads each layer again.
        self._keeps_layers = torch.is_grad_enabled()
        # The new columns of all layers that have run.
        self._new = prefix.new_empty(2 * len(pairs), len(histories), heads, new_columns, head_size)
        layers = [_GatheredLayer(self, index, prefix, self._columns) for index in range(len(pairs))]
        super().__init__(layers, pairs if is_shared else None, first_layer)

    def gather(self, index: int) -> Tensor:
        """Keys and values (2, B, heads, S + T, head size) of one layer, whose last T columns are uninitialized.

        Those of the layers before are overwritten, unless gradients may flow through them.
        """
        if index not in self._gathered:
            self._gather(range(index, min(index + self.layers_at_once, len(self._new) // 2)))
        assert self._buffer is not None
        return self._buffer[index - self._gathered.start]

    @torch.no_grad()
    def _gather(self, indices: range) -> None:
        self._save_new_columns()
        self._gathered = indices
        layers = slice(indices.start, indices.stop)
        if self._buffer is None or self._keeps_layers:
            self._buffer = self._new.new_empty(len(indices), *self._shape)
        if self._prefix is not None:
            self._buffer[..., : self._first_column, :] = self._prefix[layers, :, None]
        for row, pieces in enumerate(self._histories):
            stop = self._first_column + sum(piece.shape[3] for piece in pieces)
            if pieces:
                history = self._buffer[:, :, row, :, self._first_column : stop]
                torch.cat([piece[layers] for piece in pieces], dim=3, out=history)
            if stop < self._columns:
                # Even what a mask hides must be finite.
                self._buffer[:, :, row, :, stop : self._columns].zero_()

    def new_entries(self, row: int) -> Tensor:
        """A view of the pass's new entries in a row, (2L, heads, T, head size); to be called after the pass."""
        self._save_new_columns()
        return self._new[:, row]

    def _save_new_columns(self) -> None:
        """Saves the new columns of the layers in the buffer, and marks it as empty."""
        if self._gathered and not self._keeps_layers:
            assert self._buffer is not None
            new = self._buffer[..., self._columns :, :].flatten(0, 1)
            self._new[2 * self._gathered.start : 2 * self._gathered.stop] = new
        self._gathered = range(0)


class _GatheredLayer(InitializedLayer):
    """Keys and values of a layer, which are gathered when it runs."""

    def __init__(self, cache: GatheringCache, index: int, like: Tensor, columns: int) -> None:
        super().__init__(like)
        self._cache = cache
        self._index = index
        self._columns = columns

    def get_seq_length(self) -> int:
        """Number of columns before the pass."""
        return self._columns

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends entries (B, heads, T, head size), and returns all."""
        keys, values = self._cache.gather(self._index)
        if torch.is_grad_enabled():
            keys = torch.cat([keys[:, :, : self._columns], key_states], dim=2)
            values = torch.cat([values[:, :, : self._columns], value_states], dim=2)
        else:
            keys[:, :, self._columns :] = key_states
            values[:, :, self._columns :] = value_states
        return keys, values

    def grow(self, count: int) -> tuple[Tensor, Tensor]:
        """All columns, the last `count` yet to be filled."""
        keys, values = self._cache.gather(self._index)
        assert keys.shape[2] == self._columns + count
        return keys, values


def entries_of(cache: Cache, columns: slice) -> Tensor:
    """Some columns of keys and values, layer after layer, (B, 2L, heads, S, head size)."""
    entries: list[Tensor] = []
    layers: list[Any] = cache.layers
    for layer in layers:
        entries.append(layer.keys[:, :, columns])
        entries.append(layer.values[:, :, columns])
    return torch.stack(entries, dim=1)
