"""What is kept within bounds: what was used recently, and memory itself."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


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


class Space:
    """Memory for one tensor at a time, kept for the next: fresh memory takes longer to come by than to fill."""

    def __init__(self, max_bytes: int) -> None:
        """Keep `max_bytes` at most."""
        self._max_bytes = max_bytes
        self._kept = torch.empty(0)

    def take(self, like: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """A tensor of these sizes, in the number format and on the device of another, that holds anything.

        What was taken before must not be looked at any more.
        """
        kept, count = self._kept, math.prod(sizes)
        if (kept.dtype, kept.device) != (like.dtype, like.device) or len(kept) < count:
            # What inference mode makes could not be filled outside of it.
            with torch.inference_mode(False):
                kept = like.new_empty(count)
            if kept.nbytes <= self._max_bytes:
                self._kept = kept
        return kept[:count].view(sizes)
