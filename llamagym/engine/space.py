"""A reusable memory block: fresh pages take longer to fault in than to fill."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Space:
    """Memory for one tensor at a time, reused for the next."""

    def __init__(self, max_bytes: int) -> None:
        """Retain at most `max_bytes` between tensors."""
        self._max_bytes = max_bytes
        self._kept = torch.empty(0)

    def take(self, like: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """An uninitialised tensor of these sizes, with the dtype and device of another.

        It invalidates the tensor that was taken before.
        """
        kept, count = self._kept, math.prod(sizes)
        if (kept.dtype, kept.device) != (like.dtype, like.device) or len(kept) < count:
            # What inference mode makes could not be filled outside of it.
            with torch.inference_mode(False):
                kept = like.new_empty(count)
            if kept.nbytes <= self._max_bytes:
                self._kept = kept
        return kept[:count].view(sizes)
