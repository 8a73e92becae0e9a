"""The KV cache of a pass over many rows: what is known of their histories, gathered a layer at a time.

For long conversations, keys and values of all layers at once would be hundreds of MB, new in each pass, and on a
processor to touch new memory takes as long as to fill it. Without gradients one layer's is enough: the next layer's
takes its place. An accelerator, where each copy is a call of its own, gathers all layers' at once.

Shapes: L layers, B rows, P columns of a prefix that all rows share, S columns of a row's history, T new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicLayer

from ..models.transformers_internals import InitializedLayer
from .kv_cache import BufferCache
from .radix_tree import Activations


class GatheringCache(BufferCache):
    """Keys and values of several rows, each layer's from when it runs on; for one pass."""

    def __init__(
        self,
        prefix: Tensor,
        histories: Sequence[Sequence[Activations]],
        size: int,
        new_columns: int,
        is_shared: bool,
        first_layer: int = 0,
    ) -> None:
        """Say what there is to gather.

        Args:
            prefix: Entries (2L, heads, P, head size) that all rows begin with.
            histories: What these layers made of each row, in pieces, S tokens together.
            size: At least the largest S; shorter histories are padded to it.
            new_columns: How many tokens the pass has in each row.
            is_shared: Whether all rows attend to one prefix (see `attention`); otherwise each row has a copy.
            first_layer: The model's layer that the entries begin with.
        """
        pairs = prefix.unflatten(0, (-1, 2))
        self._prefix = None if is_shared else pairs
        self._first = 0 if is_shared else prefix.shape[2]
        self._columns = self._first + size
        self._histories = [[piece.entries.unflatten(0, (-1, 2)) for piece in pieces] for pieces in histories]
        heads, width = prefix.shape[1], prefix.shape[3]
        self._shape = 2, len(histories), heads, self._columns + new_columns, width
        # Of as many layers as are gathered at once, and which; of all that have run before them, their new columns.
        self._at_once = 1 if prefix.device.type == "cpu" else len(pairs)
        self._buffer: Tensor | None = None
        self._held = range(0)
        # The backward pass reads them again.
        self._keeps_layers = torch.is_grad_enabled()
        self._new = prefix.new_empty(2 * len(pairs), len(histories), heads, new_columns, width)
        below: list[Any] = [DynamicLayer() for _ in range(first_layer)]
        layers = [_GatheredLayer(self, index, prefix, self._columns) for index in range(len(pairs))]
        super().__init__([*below, *layers], [None] * first_layer + list(pairs) if is_shared else None)

    def gather(self, index: int) -> Tensor:
        """Keys and values (2, B, heads, columns, head size) of one layer, whose last T columns hold anything.

        Those of the layer before are gone then, unless gradients may flow through them.
        """
        if index not in self._held:
            self._gather(range(index, min(index + self._at_once, len(self._new) // 2)))
        assert self._buffer is not None
        return self._buffer[index - self._held.start]

    @torch.no_grad()
    def _gather(self, held: range) -> None:
        self._put_aside()
        self._held, of_layers = held, slice(held.start, held.stop)
        if self._buffer is None or self._keeps_layers:
            self._buffer = self._new.new_empty(len(held), *self._shape)
        if self._prefix is not None:
            self._buffer[..., : self._first, :] = self._prefix[of_layers, :, None]
        for row, pieces in enumerate(self._histories):
            stop = self._first + sum(piece.shape[3] for piece in pieces)
            if pieces:
                of_row = self._buffer[:, :, row, :, self._first : stop]
                torch.cat([piece[of_layers] for piece in pieces], dim=3, out=of_row)
            if stop < self._columns:
                # Even what a mask hides must be finite.
                self._buffer[:, :, row, :, stop : self._columns].zero_()

    def new_entries(self, row: int) -> Tensor:
        """What the layers made of the pass's tokens in a row, (2L, heads, T, head size), as a view; after the pass."""
        self._put_aside()
        return self._new[:, row]

    def _put_aside(self) -> None:
        """Keep the new columns of the layers in the buffer, which holds none then."""
        if self._held and not self._keeps_layers:
            assert self._buffer is not None
            new = self._buffer[..., self._columns :, :].flatten(0, 1)
            self._new[2 * self._held.start : 2 * self._held.stop] = new
        self._held = range(0)


class _GatheredLayer(InitializedLayer):
    """A layer's keys and values, which are gathered when it runs."""

    def __init__(self, cache: GatheringCache, index: int, like: Tensor, columns: int) -> None:
        super().__init__(like)
        self._cache, self._index, self._columns = cache, index, columns

    def get_seq_length(self) -> int:
        """How many columns there are before the pass."""
        return self._columns

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append entries (B, heads, T, head size); returns all."""
        keys, values = self._cache.gather(self._index)
        if torch.is_grad_enabled():
            known = (part[:, :, : self._columns] for part in (keys, values))
            keys, values = (torch.cat(pair, dim=2) for pair in zip(known, (key_states, value_states), strict=True))
        else:
            keys[:, :, self._columns :], values[:, :, self._columns :] = key_states, value_states
        return keys, values

    def grow(self, count: int) -> tuple[Tensor, Tensor]:
        """All columns, the last `count` yet to be filled."""
        keys, values = self._cache.gather(self._index)
        assert keys.shape[2] == self._columns + count
        return keys, values
