"""A finished episode as callbacks and judges see it, and the rewards of a judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..options import as_number
from ..text.chat_template import Message
from ..text.episode import Turn

# Names in an info under which environments report success.
_SUCCESS = ("success", "won", "is_success")


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """A finished episode; `actions`, `rewards` and `turns` have one item per turn.

    Attributes:
        copy: Number of the environment.
        seed: Seed of its reset.
        actions: Actions taken.
        rewards: Reward of each action, with the judge's once the judge has been called.
        turns: Token ids that the model read and sampled, with log-probabilities and values; empty for a policy that is
            not an agent.
        messages: The same as chat messages, beginning with the system prompt; also empty for such a policy.
        terminated: Whether it reached a final state.
        truncated: Whether it was cut off.
        info: Info of the last step.
    """

    copy: int
    seed: int
    actions: tuple[Any, ...]
    rewards: tuple[float, ...]
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]

    @property
    def length(self) -> int:
        """Number of turns."""
        return len(self.actions)

    @property
    def total_reward(self) -> float:
        """Undiscounted return."""
        return sum(self.rewards)

    @property
    def invalid_turns(self) -> int:
        """Number of turns whose reply named no action."""
        return sum(not turn.valid for turn in self.turns)

    @property
    def success(self) -> bool | None:
        """Whether `info` reports success under "success", "won" or "is_success"; None without such a flag."""
        for name in _SUCCESS:
            if as_number(self.info.get(name)) in (0.0, 1.0):
                return bool(self.info[name])
        return None


Judge = Callable[[PlayedEpisode], float | Sequence[float]]
"""Rewards a finished episode: a number for its last turn, or one for each turn, added to the environment's rewards."""


def judge_rewards(judge: Judge, episode: PlayedEpisode) -> list[float]:
    """Returns the judge's reward for each turn of an episode.

    Raises:
        ConfigError: The judge returned neither a number nor one for each turn.
    """
    returned: Any = judge(episode)
    number = as_number(returned)
    rewards = []
    if not math.isnan(number):
        rewards = [0.0] * (episode.length - 1) + [number]
    elif hasattr(returned, "__iter__") and not isinstance(returned, (str, bytes, Mapping)):
        rewards = [as_number(reward) for reward in returned]
    if len(rewards) != episode.length or not all(map(math.isfinite, rewards)):
        raise ConfigError(
            f"The judge returned {returned!r} for an episode of {episode.length} turns. Return a finite number, which "
            "is added to the last turn's reward, or a list of them, one for each turn."
        )
    return rewards


def success_rate(successes: list[bool | None]) -> float | None:
    """Returns the share of successes among the episodes with a known outcome; None if no outcome is known."""
    known = [success for success in successes if success is not None]
    return sum(known) / len(known) if known else None
