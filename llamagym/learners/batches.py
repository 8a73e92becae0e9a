"""When finished episodes make a batch."""

from __future__ import annotations

from collections.abc import Sequence

from ..conversation.episode import Episode
from .config import LearnerConfig


class Batching:
    """Takes batches of whole episodes.

    Attributes:
        config: How many turns a batch has.
    """

    config: LearnerConfig

    @property
    def group_size(self) -> int:
        """Episodes of one start that are compared."""
        return 1

    def take(self, finished: list[Episode]) -> list[Episode]:
        """Take a batch out of the finished episodes: all, once they hold `batch_size` turns, else none.

        What is left would be learnt from later, when it is further from the policy, and might pile up.
        """
        batch = [episode for unit in self._units(finished) for episode in unit]
        if _count_turns(batch) < self.config.batch_size:
            return []
        taken = set(map(id, batch))
        finished[:] = [episode for episode in finished if id(episode) not in taken]
        return batch

    def why_no_update(self, finished: Sequence[Episode]) -> str:
        """Why no update has run yet: how full the batch is."""
        ready = sum(map(_count_turns, self._units(finished)))
        return (
            f"No update yet: finished episodes hold {ready} turns, and a batch needs {self.config.batch_size}. Play "
            "more episodes or lower batch_size."
        )

    def _units(self, finished: Sequence[Episode]) -> list[list[Episode]]:
        """Episodes that can be learnt from now, in the pieces that a batch is made of, the oldest first."""
        return [[episode] for episode in finished]


def _count_turns(episodes: Sequence[Episode]) -> int:
    return sum(len(episode.turns) for episode in episodes)
