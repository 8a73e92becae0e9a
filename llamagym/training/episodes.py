"""A finished episode as callbacks and judges see it, and what a judge gives it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..options import as_number
from ..text.chat_template import Message
from ..text.episode import Turn

_SUCCESS = ("success", "won", "is_success")


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """What was seen, said, done and earned in an episode, in all three lists one item a turn.

    Attributes:
        copy: Number of the environment's copy.
        seed: Of its reset.
        actions: What was done.
        rewards: What each action earned; what a judge gave is in it once the judge has spoken.
        turns: What the model read and said as token ids, with log-probabilities and values; empty for a policy that is
            no agent.
        messages: The same as chat messages, the system prompt first; also empty for such a policy.
        terminated: Whether it reached a final state.
        truncated: Whether it was cut off.
        info: What the environment said last.
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
        """Turns played."""
        return len(self.actions)

    @property
    def total_reward(self) -> float:
        """Undiscounted return."""
        return sum(self.rewards)

    @property
    def invalid_turns(self) -> int:
        """Turns whose reply named no action."""
        return sum(not turn.valid for turn in self.turns)

    @property
    def success(self) -> bool | None:
        """Whether `info` speaks of success, under "success", "won" or "is_success"; None if it does not say."""
        for name in _SUCCESS:
            if as_number(self.info.get(name)) in (0.0, 1.0):
                return bool(self.info[name])
        return None


Judge = Callable[[PlayedEpisode], float | Sequence[float]]
"""Rewards a finished episode: a number for its last turn, or one for each turn, added to the environment's rewards."""


def judge_rewards(judge: Judge, episode: PlayedEpisode) -> list[float]:
    """What a judge gives each turn of an episode.

    Raises:
        ConfigError: It gives neither a number nor one for each turn.
    """
    given: Any = judge(episode)
    if math.isnan(number := as_number(given)):
        is_row = hasattr(given, "__iter__") and not isinstance(given, (str, bytes, Mapping))
        rewards = [as_number(reward) for reward in given] if is_row else []
    else:
        rewards = [0.0] * (episode.length - 1) + [number]
    if len(rewards) != episode.length or not all(map(math.isfinite, rewards)):
        raise ConfigError(
            f"The judge gave {given!r} to an episode of {episode.length} turns. Return a finite number, which is added "
            "to the last turn's reward, or a list of them, one for each turn."
        )
    return rewards


def success_rate(successes: list[bool | None]) -> float | None:
    """The share of successes among the episodes of which it is known; None if it is of none."""
    known = [success for success in successes if success is not None]
    return sum(known) / len(known) if known else None
