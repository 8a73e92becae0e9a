"""When finished episodes make a batch, and how a batch is cut into minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..text.episode import Episode, Segment
from .config import LearnerConfig

# Without `batch_size`, a batch is full with this many distinct turns, or with this many in all.
_DISTINCT_TURNS = 768
_MAX_TURNS = 8192


class Batching:
    """Takes batches of episodes out of a buffer.

    Attributes:
        config: The learner's options; `batch_size` is the number of turns in a batch.
    """

    config: LearnerConfig
    # At the latest count: all turns, and the distinct ones among them.
    _counted = (0, 0)

    @property
    def group_size(self) -> int:
        """Number of episodes from the same start that are compared with each other."""
        return 1

    @property
    def turns_wanted(self) -> int:
        """Number of distinct turns that fill a batch."""
        return _DISTINCT_TURNS if self.config.batch_size is None else self.config.batch_size

    def take(self, finished: list[Episode], under_way: Sequence[Episode] = ()) -> list[Episode]:
        """Takes all complete episodes once they hold enough turns (see `batch_size`); returns an empty list before.

        All are taken, since a rest would be trained on later, when it is further off-policy, and could pile up.

        Args:
            finished: The buffer; taken episodes are removed.
            under_way: Unfinished episodes, which count and are taken as well if any episode has finished.
        """
        indices = self._complete_indices(finished)
        batch = [*(finished[index] for index in indices), *under_way]
        if not indices or not self._is_full(batch):
            return []
        self._counted = (0, 0)
        taken = set(indices)
        finished[:] = [episode for index, episode in enumerate(finished) if index not in taken]
        return batch

    def complete(self, finished: Sequence[Episode]) -> list[Episode]:
        """The finished episodes that can be trained on: all, or complete groups if groups are compared."""
        return [finished[index] for index in self._complete_indices(finished)]

    def why_no_update(self, finished: Sequence[Episode]) -> str:
        """Explains why no update has run yet: how full the batch is."""
        ready = _count_turns(self.complete(finished))
        size = self.config.batch_size
        needed = f"{_DISTINCT_TURNS} that differ or {_MAX_TURNS} in all" if size is None else str(size)
        lower = "pass a batch_size" if size is None else "lower batch_size"
        return (
            f"No update yet: finished episodes hold {ready} turns, and a batch needs {needed}. Play more episodes, or "
            f"{lower}."
        )

    def _is_full(self, batch: Sequence[Episode]) -> bool:
        turns = _count_turns(batch)
        if self.config.batch_size is not None:
            return turns >= self.config.batch_size
        if turns < self._counted[0]:
            self._counted = (0, 0)
        # Each new turn adds at most one distinct turn, so a count before this many were added cannot fill the batch.
        turns_before, distinct = self._counted
        if turns - turns_before >= _DISTINCT_TURNS - distinct:
            distinct = _count_distinct(batch)
            self._counted = (turns, distinct)
        return distinct >= _DISTINCT_TURNS or turns >= _MAX_TURNS

    def _complete_indices(self, finished: Sequence[Episode]) -> list[int]:
        """Indices of the finished episodes that can be trained on, in the order in which they make a batch."""
        return list(range(len(finished)))


def _count_distinct(episodes: Sequence[Episode]) -> int:
    """The number of distinct turns; only turns that start a context can be equal."""
    turns = [turn for episode in episodes for turn in episode.turns]
    first_turns = [(turn.prompt.ids, turn.reply.ids) for turn in turns if turn.prompt.starts_context]
    return len(turns) - len(first_turns) + len(set(first_turns))


def _count_turns(episodes: Sequence[Episode]) -> int:
    return sum(len(episode.turns) for episode in episodes)


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


def epochs_of_minibatches(
    segments: Sequence[Segment], size: int, epochs: int, rng: np.random.Generator
) -> Iterator[list[Segment]]:
    """Minibatches of several epochs; each epoch is shuffled when it begins."""
    for _ in range(epochs):
        yield from minibatches(segments, size, rng)
