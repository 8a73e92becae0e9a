"""When episodes make a batch, and how a batch is cut into minibatches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..text.episode import Episode, Segment
from .config import LearnerConfig

# Where no batch size is given: so many turns that differ are enough, or so many in all.
_DIFFERENT_TURNS, _MOST_TURNS = 768, 8192


class Batching:
    """Takes batches of episodes.

    Attributes:
        config: How many turns a batch has.
    """

    config: LearnerConfig
    # Turns of the episodes and how many of them differ, when that was last counted.
    _counted = (0, 0)

    @property
    def group_size(self) -> int:
        """Episodes of one start that are compared."""
        return 1

    @property
    def turns_wanted(self) -> int:
        """How many turns that differ fill a batch."""
        return _DIFFERENT_TURNS if self.config.batch_size is None else self.config.batch_size

    def take(self, finished: list[Episode], under_way: Sequence[Episode] = ()) -> list[Episode]:
        """Take a batch out of the finished episodes: all, once they hold enough turns (see `batch_size`), else none.

        What is left would be learned from later, when it is further from the policy, and might pile up.

        Args:
            finished: Loses what is taken.
            under_way: What there is of other episodes; counted and taken as well, once one has finished.
        """
        complete = self.complete(finished)
        batch = [*complete, *under_way]
        if not complete or not self._is_full(batch):
            return []
        self._counted = (0, 0)
        taken = set(map(id, complete))
        finished[:] = [episode for episode in finished if id(episode) not in taken]
        return batch

    def complete(self, finished: Sequence[Episode]) -> list[Episode]:
        """Those of the finished episodes that can be learned from, in groups where groups are compared."""
        return [episode for unit in self._units(finished) for episode in unit]

    def why_no_update(self, finished: Sequence[Episode]) -> str:
        """Why no update has run yet: how full the batch is."""
        ready, size = sum(map(_count_turns, self._units(finished))), self.config.batch_size
        needed = f"{_DIFFERENT_TURNS} that differ or {_MOST_TURNS} in all" if size is None else str(size)
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
        # No turn adds more than one that differs, so there is nothing to count before as many have been added.
        before, different = self._counted
        if turns - before >= _DIFFERENT_TURNS - different:
            different = _count_different(batch)
            self._counted = (turns, different)
        return different >= _DIFFERENT_TURNS or turns >= _MOST_TURNS

    def _units(self, finished: Sequence[Episode]) -> list[list[Episode]]:
        """Episodes that can be learned from now, in the pieces that a batch is made of, the oldest first."""
        return [[episode] for episode in finished]


def _count_different(episodes: Sequence[Episode]) -> int:
    """The number of distinct turns; only turns that open a context can be equal."""
    turns = [turn for episode in episodes for turn in episode.turns]
    opening = [(turn.prompt.ids, turn.reply.ids) for turn in turns if turn.prompt.starts_context]
    return len(turns) - len(opening) + len(set(opening))


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
