"""Transcripts: a few episodes of each batch in words, with what the policy thought of them, for people to read."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from ..text.chat_template import Message
from ..text.episode import Episode, Turn

Transcript = dict[str, Any]
"""An episode as JSON holds it: `system`, `return`, `length`, `truncated` and `turns` (of many, both ends).

A turn has its number `turn`, `read`, `reply`, `choices` (text and probability of each, likeliest first; None for free
text), `reward`, `penalty`, `valid`, `value` and `advantage` (None unless the latest update learned from it)."""

# Episodes of a batch, turns at either end of an episode, choices of a turn, characters of a text: enough to look at.
_EPISODES, _TURNS, _CHOICES, _CHARACTERS = 4, 20, 12, 2000


class EpisodeSample:
    """An even sample of the episodes that end between two updates (reservoir sampling: Vitter 1985, algorithm R)."""

    def __init__(self, seed: int) -> None:
        """Begin again; drawn from random numbers of its own, so that acting does not depend on it."""
        self._rng, self._seen = random.Random(seed), 0
        self._kept: list[tuple[Episode, list[Message]]] = []

    def copy(self) -> EpisodeSample:
        """The same sample, to go back to."""
        twin = EpisodeSample(0)
        twin._rng.setstate(self._rng.getstate())
        twin._seen, twin._kept = self._seen, list(self._kept)
        return twin

    def add(self, episode: Episode, messages: Sequence[Message]) -> None:
        """Take in an episode that has ended, and its chat messages."""
        whole = (episode, list(messages))
        self._seen += 1
        if len(self._kept) < _EPISODES:
            self._kept.append(whole)
        elif (slot := self._rng.randrange(self._seen)) < _EPISODES:
            self._kept[slot] = whole

    def transcripts(
        self, batch: Sequence[Episode], advantages: Sequence[Sequence[float]], decode: Callable[[list[int]], str]
    ) -> list[Transcript]:
        """The sample in words, the best episode first.

        Args:
            batch: The episodes of the latest update.
            advantages: Advantages of their turns, one list per episode.
            decode: Text of token ids.
        """
        told = []
        for episode, messages in self._kept:
            # Earlier turns were trained on by earlier updates, and so were episodes outside of the batch.
            of_turns: list[float | None] = [None] * len(episode.all_turns)
            for trained, of_trained in zip(batch, advantages, strict=True):
                if trained is episode:
                    of_turns[len(episode.earlier) :] = of_trained
            told.append(_transcript(episode, messages, of_turns, decode))
        return sorted(told, key=lambda transcript: -float(transcript["return"]))


def _transcript(
    episode: Episode,
    messages: Sequence[Message],
    advantages: Sequence[float | None],
    decode: Callable[[list[int]], str],
) -> Transcript:
    by_role = {role: [m["content"] for m in messages if m["role"] == role] for role in ("system", "user", "assistant")}
    played = episode.all_turns
    count = len(played)
    shown = [number for number in range(count) if number < _TURNS or number >= count - _TURNS]
    turns = []
    for number in shown:
        turn = played[number]
        turns.append(
            {
                "turn": number + 1,
                "read": by_role["user"][number][:_CHARACTERS],
                "reply": by_role["assistant"][number][:_CHARACTERS],
                "choices": _choices(turn, decode),
                "reward": turn.reward,
                "penalty": turn.penalty,
                "valid": turn.valid,
                "value": turn.reply.value,
                "advantage": advantages[number],
            }
        )
    return {
        "system": "".join(by_role["system"])[:_CHARACTERS],
        "return": sum(turn.reward for turn in played),
        "length": count,
        "truncated": episode.truncated,
        "turns": turns,
    }


def _choices(turn: Turn, decode: Callable[[list[int]], str]) -> list[tuple[str, float]] | None:
    """Text and probability of the likeliest choices, and of the one taken; None for free text."""
    if turn.prompt.choices is None or not turn.reply.choice_logprobs:
        return None
    logprobs, taken = turn.reply.choice_logprobs, turn.reply.choice_index
    ranked = sorted(range(len(logprobs)), key=lambda index: -logprobs[index])
    shown = ranked[:_CHOICES] + [index for index in ranked[_CHOICES:] if index == taken]
    return [(decode(list(turn.prompt.choices[index])), math.exp(logprobs[index])) for index in shown]
