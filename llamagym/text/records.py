"""Episodes and conversations as plain lists, to be saved: what JSON holds, and tensors of token ids.

Prompts, replies and choices recur, so each distinct sequence of ids is stored once and known by its number; so are the
distributions over choices, which are the same wherever the same context recurs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .episode import Conversation, Episode, Prompt, Reply, Turn

Ids = tuple[int, ...]
Logprobs = tuple[float, ...]


class IdTable:
    """Distinct sequences of token ids and distinct distributions, numbered in the order of their first use."""

    def __init__(self, sequences: Sequence[Ids] = (), distributions: Sequence[Logprobs] = ()) -> None:
        """Begin with some sequences and distributions, all different."""
        self._sequences = {ids: number for number, ids in enumerate(sequences)}
        self._distributions = {logprobs: number for number, logprobs in enumerate(distributions)}
        self._ids, self._logprobs = list(sequences), list(distributions)

    def number(self, ids: Ids) -> int:
        """The number of a sequence."""
        return _number_in(self._sequences, self._ids, ids)

    def __getitem__(self, number: int) -> Ids:
        """The sequence with a number."""
        return self._ids[number]

    def distribution_number(self, logprobs: Logprobs) -> int:
        """The number of a distribution, given as log-probabilities that float32 holds."""
        return _number_in(self._distributions, self._logprobs, logprobs)

    def distribution(self, number: int) -> Logprobs:
        """The distribution with a number."""
        return self._logprobs[number]

    def state_dict(self) -> dict[str, Any]:
        """All ids in a row, int64, and how many belong to each sequence; log-probabilities likewise, float32."""
        ids, lengths = _flat(self._ids, torch.int64)
        logprobs, counts = _flat(self._logprobs, torch.float32)
        return {"ids": ids, "lengths": lengths, "logprobs": logprobs, "counts": counts}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> IdTable:
        """The table that `state_dict` gave."""
        sequences = _parts(state["ids"], state["lengths"])
        distributions = _parts(state["logprobs"], state["counts"])
        return cls(sequences, distributions)


def _number_in(numbers: dict[Any, int], values: list[Any], value: Any) -> int:
    if value not in numbers:
        numbers[value] = len(values)
        values.append(value)
    return numbers[value]


def _flat(values: Sequence[Sequence[float]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All numbers in a row, and how many belong to each value."""
    flat = [number for value in values for number in value]
    lengths = [len(value) for value in values]
    return torch.tensor(flat, dtype=dtype), torch.tensor(lengths, dtype=torch.int64)


def _parts(flat: Tensor, lengths: Tensor) -> list[tuple[Any, ...]]:
    return [tuple(part.tolist()) for part in flat.split(lengths.tolist())]


def episode_record(episode: Episode, table: IdTable) -> dict[str, Any]:
    """An episode as JSON holds it."""
    return {
        "turns": [_turn_record(turn, table) for turn in episode.turns],
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "final_prompt": None if episode.final_prompt is None else _prompt_record(episode.final_prompt, table),
        "group": episode.group,
        "rank": episode.rank,
        "earlier": [_turn_record(turn, table) for turn in episode.earlier],
    }


def episode_from(record: Mapping[str, Any], table: IdTable) -> Episode:
    """The episode that `episode_record` gave."""
    turns = tuple(_turn_from(turn, table) for turn in record["turns"])
    final = record["final_prompt"]
    final_prompt = None if final is None else _prompt_from(final, table)
    ended = (record["terminated"], record["truncated"], final_prompt)
    earlier = tuple(_turn_from(turn, table) for turn in record["earlier"])
    return Episode(turns, *ended, key_from(record["group"]), record["rank"], earlier)


def conversation_record(conversation: Conversation, table: IdTable) -> dict[str, Any]:
    """What has been said and earned in a conversation that awaits no reply, as JSON holds it."""
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
    """Let a new conversation go on where the one that was recorded stood."""
    conversation.system_prompt = record["system_prompt"]
    conversation.turns = [_turn_from(turn, table) for turn in record["turns"]]
    conversation.first_shown = record["first_shown"]
    conversation.learned_turns = record["learned_turns"]
    conversation.messages = record["messages"]
    conversation.learns, conversation.awaits_reward = record["learns"], record["awaits_reward"]


def key_from(part: Any) -> Hashable:
    """An environment's id or a group as it was before JSON made its tuples lists."""
    return tuple(map(key_from, part)) if isinstance(part, list) else part


def ids_from(part: Any) -> Ids:
    """Token ids, -1 among them where a choice ends.

    Raises:
        TypeError: They are something else.
    """
    if not isinstance(part, (list, tuple)) or not all(type(token) is int for token in part):
        raise TypeError(f"{str(part)[:80]!r} are not token ids")
    return tuple(part)


def number_from(part: Any) -> float:
    """A number as it was saved.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(part, bool) or not isinstance(part, (int, float)):
        raise TypeError(f"{str(part)[:80]!r} is not a number")
    return part


def _turn_record(turn: Turn, table: IdTable) -> list[Any]:
    reply = turn.reply
    of_reply = [
        table.number(reply.ids),
        reply.logprobs,
        reply.value,
        reply.finish_reason,
        reply.choice_index,
        reply.weights_version,
        table.distribution_number(reply.choice_logprobs) if reply.choice_logprobs else None,
    ]
    return [_prompt_record(turn.prompt, table), of_reply, turn.reward, turn.penalty, turn.valid]


def _turn_from(record: Sequence[Any], table: IdTable) -> Turn:
    prompt, of_reply, reward, penalty, valid = record
    said, logprobs, value, finish_reason, choice_index, weights_version, distribution = of_reply
    choice_logprobs = () if distribution is None else table.distribution(distribution)
    reply = Reply(
        table[said],
        tuple(map(number_from, logprobs)),
        number_from(value),
        finish_reason,
        choice_index if choice_index is None else int(number_from(choice_index)),
        int(number_from(weights_version)),
        choice_logprobs,
    )
    read = _prompt_from(prompt, table)
    _require_consistent(read, reply)
    return Turn(read, reply, number_from(reward), number_from(penalty), bool(valid))


def _require_consistent(prompt: Prompt, reply: Reply) -> None:
    """Rejects a reply that was not possible after its prompt, which learning would notice late.

    Raises:
        ValueError: It is such a reply.
    """
    if not (0 <= prompt.shared_length <= len(prompt.ids) and 0 <= prompt.opening_length <= len(prompt.ids)):
        raise ValueError(f"a prompt of {len(prompt.ids)} tokens shares {prompt.shared_length} of them")
    if prompt.choices is None:
        if reply.choice_index is not None or len(reply.logprobs) != len(reply.ids):
            raise ValueError(f"{len(reply.logprobs)} log-probabilities of {len(reply.ids)} tokens of a free reply")
        return
    index = reply.choice_index
    if index is None:
        raise ValueError("a reply is none of its choices")
    if not 0 <= index < len(prompt.choices) or prompt.choices[index] != reply.ids or len(reply.logprobs) != 1:
        raise ValueError(f"a reply is not the choice {index} of {len(prompt.choices)}")
    if len(reply.choice_logprobs) != len(prompt.choices):
        raise ValueError(f"{len(reply.choice_logprobs)} log-probabilities of {len(prompt.choices)} choices")


def _prompt_record(prompt: Prompt, table: IdTable) -> list[Any]:
    choices = None if prompt.choices is None else [table.number(choice) for choice in prompt.choices]
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
    offered = None if choices is None else tuple(table[number] for number in ids_from(choices))
    shared, opening = ids_from([shared_length, opening_length])
    replies = tuple((table[reply], int(number_from(count))) for reply, count in replies_shown)
    return Prompt(table[ids], bool(starts_context), offered, shared, opening, replies)
