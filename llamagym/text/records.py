"""Converts episodes and conversations to records for checkpoints: JSON values, and tensors of token ids.

Prompts, replies and choices recur, so each distinct sequence of ids is stored once and referred to by its number. The
same holds for distributions over choices, which recur with their contexts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .episode import Conversation, Episode, Prompt, Reply, Turn

Ids = tuple[int, ...]
Logprobs = tuple[float, ...]


class IdTable:
    """Numbers distinct sequences of token ids, and distinct distributions, in the order of their first use."""

    def __init__(self, sequences: Sequence[Ids] = (), distributions: Sequence[Logprobs] = ()) -> None:
        """Creates a table of distinct sequences and distinct distributions."""
        self._sequences = list(sequences)
        self._distributions = list(distributions)
        self._sequence_numbers = {ids: number for number, ids in enumerate(sequences)}
        self._distribution_numbers = {logprobs: number for number, logprobs in enumerate(distributions)}

    def number(self, ids: Ids) -> int:
        """Returns the number of a sequence, adding the sequence if it is new."""
        return _number_in(self._sequence_numbers, self._sequences, ids)

    def __getitem__(self, number: int) -> Ids:
        """Returns the sequence with a number."""
        return self._sequences[number]

    def distribution_number(self, logprobs: Logprobs) -> int:
        """Returns the number of a distribution, whose log-probabilities float32 must represent exactly."""
        return _number_in(self._distribution_numbers, self._distributions, logprobs)

    def distribution(self, number: int) -> Logprobs:
        """Returns the distribution with a number."""
        return self._distributions[number]

    def state_dict(self) -> dict[str, Any]:
        """Returns ids (int64) and log-probabilities (float32), both concatenated, with the lengths of their parts."""
        ids, lengths = _concatenate(self._sequences, torch.int64)
        logprobs, counts = _concatenate(self._distributions, torch.float32)
        return {"ids": ids, "lengths": lengths, "logprobs": logprobs, "counts": counts}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> IdTable:
        """Returns the table that `state_dict` was called on."""
        sequences = _split(state["ids"], state["lengths"])
        distributions = _split(state["logprobs"], state["counts"])
        return cls(sequences, distributions)


def _number_in(numbers: dict[Any, int], values: list[Any], value: Any) -> int:
    if value not in numbers:
        numbers[value] = len(values)
        values.append(value)
    return numbers[value]


def _concatenate(values: Sequence[Sequence[float]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the concatenated values and the length of each."""
    flat = list(chain.from_iterable(values))
    lengths = list(map(len, values))
    return torch.tensor(flat, dtype=dtype), torch.tensor(lengths, dtype=torch.int64)


def _split(flat: Tensor, lengths: Tensor) -> list[tuple[Any, ...]]:
    return [tuple(part.tolist()) for part in flat.split(lengths.tolist())]


def episode_record(episode: Episode, table: IdTable) -> dict[str, Any]:
    """Returns an episode as JSON values, with its ids in the table."""
    # The table numbers ids in the order of these calls.
    turns = [_turn_record(turn, table) for turn in episode.turns]
    final_prompt = None
    if episode.final_prompt is not None:
        final_prompt = _prompt_record(episode.final_prompt, table)
    return {
        "turns": turns,
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "final_prompt": final_prompt,
        "group": episode.group,
        "rank": episode.rank,
        "earlier": [_turn_record(turn, table) for turn in episode.earlier],
    }


def episode_from(record: Mapping[str, Any], table: IdTable) -> Episode:
    """Returns the episode of a record from `episode_record`."""
    final_prompt = None
    if record["final_prompt"] is not None:
        final_prompt = _prompt_from(record["final_prompt"], table)
    return Episode(
        turns=tuple(_turn_from(turn, table) for turn in record["turns"]),
        terminated=record["terminated"],
        truncated=record["truncated"],
        final_prompt=final_prompt,
        group=key_from(record["group"]),
        rank=record["rank"],
        earlier=tuple(_turn_from(turn, table) for turn in record["earlier"]),
    )


def conversation_record(conversation: Conversation, table: IdTable) -> dict[str, Any]:
    """Returns a conversation without pending prompt as JSON values, with its ids in the table."""
    return {
        "system_prompt": conversation.system_prompt,
        "turns": [_turn_record(turn, table) for turn in conversation.turns],
        "messages": conversation.messages,
        "first_shown": conversation.first_shown,
        "learned_turns": conversation.learned_turns,
        "learns": conversation.learns,
        "awaits_reward": conversation.awaits_reward,
    }


def restore_conversation(conversation: Conversation, record: Mapping[str, Any], table: IdTable) -> None:
    """Restores a recorded conversation into a new one."""
    conversation.system_prompt = record["system_prompt"]
    conversation.turns = [_turn_from(turn, table) for turn in record["turns"]]
    conversation.first_shown = record["first_shown"]
    conversation.learned_turns = record["learned_turns"]
    conversation.messages = record["messages"]
    conversation.learns = record["learns"]
    conversation.awaits_reward = record["awaits_reward"]


def key_from(value: Any) -> Hashable:
    """Returns an environment's id or a group with the tuples that JSON stored as lists."""
    return tuple(map(key_from, value)) if isinstance(value, list) else value


def ids_from(value: Any) -> Ids:
    """Returns token ids from a record, -1 at the end of a choice; raises a TypeError for other values."""
    if not isinstance(value, (list, tuple)) or not all(type(token) is int for token in value):
        raise TypeError(f"{str(value)[:80]!r} are not token ids")
    return tuple(value)


def number_from(value: Any) -> float:
    """Returns a number from a record; raises a TypeError for other values."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{str(value)[:80]!r} is not a number")
    return value


def _turn_record(turn: Turn, table: IdTable) -> list[Any]:
    reply = turn.reply
    reply_record = [
        table.number(reply.ids),
        reply.logprobs,
        reply.value,
        reply.finish_reason,
        reply.choice_index,
        reply.weights_version,
        table.distribution_number(reply.choice_logprobs) if reply.choice_logprobs else None,
    ]
    return [_prompt_record(turn.prompt, table), reply_record, turn.reward, turn.penalty, turn.valid]


def _turn_from(record: Sequence[Any], table: IdTable) -> Turn:
    prompt_record, reply_record, reward, penalty, valid = record
    ids_number, logprobs, value, finish_reason, choice_index, weights_version, distribution_number = reply_record
    reply = Reply(
        ids=table[ids_number],
        logprobs=tuple(map(number_from, logprobs)),
        value=None if value is None else number_from(value),
        finish_reason=finish_reason,
        choice_index=None if choice_index is None else int(number_from(choice_index)),
        weights_version=int(number_from(weights_version)),
        choice_logprobs=() if distribution_number is None else table.distribution(distribution_number),
    )
    prompt = _prompt_from(prompt_record, table)
    _require_consistent(prompt, reply)
    return Turn(prompt, reply, number_from(reward), number_from(penalty), bool(valid))


def _require_consistent(prompt: Prompt, reply: Reply) -> None:
    """Raises a ValueError for a reply that does not fit its prompt, which an update would notice only later."""
    if not (0 <= prompt.shared_length <= len(prompt.ids) and 0 <= prompt.opening_length <= len(prompt.ids)):
        raise ValueError(f"a prompt of {len(prompt.ids)} tokens shares {prompt.shared_length} of them")
    if prompt.choices is None:
        if reply.choice_index is not None or len(reply.logprobs) != len(reply.ids):
            raise ValueError(f"{len(reply.logprobs)} log-probabilities of {len(reply.ids)} tokens of a free reply")
        return
    index = reply.choice_index
    if index is None:
        raise ValueError("a reply is not one of its choices")
    if not 0 <= index < len(prompt.choices) or prompt.choices[index] != reply.ids or len(reply.logprobs) != 1:
        raise ValueError(f"a reply is not the choice {index} of {len(prompt.choices)}")
    if len(reply.choice_logprobs) != len(prompt.choices):
        raise ValueError(f"{len(reply.choice_logprobs)} log-probabilities of {len(prompt.choices)} choices")


def _prompt_record(prompt: Prompt, table: IdTable) -> list[Any]:
    choices = None
    if prompt.choices is not None:
        choices = [table.number(choice) for choice in prompt.choices]
    return [
        table.number(prompt.ids),
        prompt.starts_context,
        choices,
        prompt.shared_length,
        prompt.opening_length,
        [(table.number(reply), count) for reply, count in prompt.replies_shown],
    ]


def _prompt_from(record: Sequence[Any], table: IdTable) -> Prompt:
    ids, starts_context, choices, shared_length, opening_length, replies_shown = record
    choice_ids = None
    if choices is not None:
        choice_ids = tuple(table[number] for number in ids_from(choices))
    # Both must be ints, as token ids are.
    shared_length, opening_length = ids_from([shared_length, opening_length])
    replies = tuple((table[reply], int(number_from(count))) for reply, count in replies_shown)
    return Prompt(table[ids], bool(starts_context), choice_ids, shared_length, opening_length, replies)
