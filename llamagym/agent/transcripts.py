"""Transcripts: a few episodes of each batch as text for people to read, with the policy's probabilities and values."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from ..text.chat_template import Message
from ..text.episode import Episode, Turn

Transcript = dict[str, Any]
"""An episode in JSON types: `system`, `return`, `length`, `truncated` and `turns` (of a long episode, both ends).

A turn has its number `turn`, `read`, `reply`, `choices` (text and probability, most likely first; None for free text),
`reward`, `penalty`, `valid`, `value` and `advantage` (None unless the latest update learned from it)."""

# Episodes per batch.
_EPISODES = 4
# Turns at either end of an episode.
_TURNS = 20
# Choices per turn.
_CHOICES = 12
# Characters per text.
_CHARACTERS = 2000


class EpisodeSample:
    """A uniform sample of the episodes that end between two updates (reservoir sampling: Vitter 1985, algorithm R)."""

    def __init__(self, seed: int) -> None:
        """Creates an empty sample.

        Args:
            seed: Seed of its own random numbers, so that sampling does not affect acting.
        """
        self._rng = random.Random(seed)
        self._count = 0
        self._episodes: list[tuple[Episode, list[Message]]] = []

    def copy(self) -> EpisodeSample:
        """Returns a copy, to restore the sample from."""
        copied = EpisodeSample(0)
        copied._rng.setstate(self._rng.getstate())
        copied._count = self._count
        copied._episodes = list(self._episodes)
        return copied

    def add(self, episode: Episode, messages: Sequence[Message]) -> None:
        """Offers a finished episode, with its chat messages, to the sample."""
        entry = (episode, list(messages))
        self._count += 1
        if len(self._episodes) < _EPISODES:
            self._episodes.append(entry)
            return
        index = self._rng.randrange(self._count)
        if index < _EPISODES:
            self._episodes[index] = entry

    def transcripts(
        self, batch: Sequence[Episode], advantages: Sequence[Sequence[float]], decode: Callable[[list[int]], str]
    ) -> list[Transcript]:
        """Returns the sample as transcripts, highest return first.

        Args:
            batch: The episodes of the latest update.
            advantages: Advantages of their turns, one list per episode.
            decode: Returns the text of token ids.
        """
        transcripts = []
        for episode, messages in self._episodes:
            # Earlier turns were trained by earlier updates; other episodes by none.
            turn_advantages: list[float | None] = [None] * len(episode.all_turns)
            for trained, of_trained in zip(batch, advantages, strict=True):
                if trained is episode:
                    turn_advantages[len(episode.earlier) :] = of_trained
            transcripts.append(_transcript(episode, messages, turn_advantages, decode))
        return sorted(transcripts, key=lambda transcript: -float(transcript["return"]))


def _transcript(
    episode: Episode,
    messages: Sequence[Message],
    advantages: Sequence[float | None],
    decode: Callable[[list[int]], str],
) -> Transcript:
    texts: dict[str, list[str]] = {"system": [], "user": [], "assistant": []}
    for message in messages:
        texts[message["role"]].append(message["content"])
    turns = episode.all_turns
    shown = []
    for index, turn in enumerate(turns):
        if _TURNS <= index < len(turns) - _TURNS:
            continue
        shown.append(
            {
                "turn": index + 1,
                "read": texts["user"][index][:_CHARACTERS],
                "reply": texts["assistant"][index][:_CHARACTERS],
                "choices": choice_probabilities(turn, decode),
                "reward": turn.reward,
                "penalty": turn.penalty,
                "valid": turn.valid,
                "value": turn.reply.value,
                "advantage": advantages[index],
            }
        )
    return {
        "system": "".join(texts["system"])[:_CHARACTERS],
        "return": sum(turn.reward for turn in turns),
        "length": len(turns),
        "truncated": episode.truncated,
        "turns": shown,
    }


def choice_probabilities(turn: Turn, decode: Callable[[list[int]], str]) -> list[tuple[str, float]] | None:
    """Returns text and probability of the most likely choices, and of the one taken; None for free text."""
    logprobs = turn.reply.choice_logprobs
    if turn.prompt.choices is None or not logprobs:
        return None
    ranked = sorted(range(len(logprobs)), key=lambda index: -logprobs[index])
    shown = ranked[:_CHOICES]
    if turn.reply.choice_index not in shown:
        shown += [index for index in ranked if index == turn.reply.choice_index]
    return [(decode(list(turn.prompt.choices[index])), math.exp(logprobs[index])) for index in shown]
