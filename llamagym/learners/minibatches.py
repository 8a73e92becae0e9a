"""Cuts a batch into minibatches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..conversation.episode import Segment


def minibatches(segments: Sequence[Segment], size: int, rng: np.random.Generator) -> list[list[Segment]]:
    """Shuffled segments in groups of about `size` turns; a remainder below half of that joins the last group."""
    groups: list[list[Segment]] = [[]]
    left = sum(len(segment.turns) for segment in segments)
    count = 0
    for index in rng.permutation(len(segments)):
        groups[-1].append(segments[index])
        count += len(segments[index].turns)
        left -= len(segments[index].turns)
        if count >= size and left >= size // 2 and left:
            groups.append([])
            count = 0
    return groups
