"""Episodes and conversations as plain lists, to be saved: what JSON holds, and tensors of token ids.

Prompts, replies and choices recur, so each distinct sequence of ids is stored once and known by its number.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from .episode import Conversation, Episode, Prompt, Reply, Turn

Ids = tuple[int, ...]


class IdTable:
    """Distinct sequences of token ids, numbered in the order of their first use."""

    def __init__(self, sequences: Sequence[Ids] = ()) -> None:
        """Begin with some sequences, all different."""
        self._sequences = list(sequences)
        self._numbers = {ids: number for number, ids in enumerate(self._sequences)}

    def number(self, ids: Ids) -> int:
        """The number of a sequence."""
        if ids not in self._numbers:
            self._numbers[ids] = len(self._sequences)
            self._sequences.append(ids)
        return self._numbers[ids]

    def __getitem__(self, number: int) -> Ids:
        """The sequence with a number."""
        return self._sequences[number]

    def state_dict(self) -> dict[str, Any]:
        """All ids in a row, int64, and how many belong to each sequence."""
        flat = [token for ids in self._sequences for token in ids]
        lengths = [len(ids) for ids in self._sequences]
        return {"ids": torch.tensor(flat, dtype=torch.int64), "lengths": torch.tensor(lengths, dtype=torch.int64)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> IdTable:
        """The table that `state_dict` gave."""
        parts = state["ids"].split(state["lengths"].tolist())
        return cls([tuple(part.tolist()) for part in parts])


def episode_record(episode: Episode, table: IdTable) -> dict[str, Any]:
    """An episode as JSON holds it."""
    return {
        "turns": [_turn_record(turn, table) for turn in episode.turns],
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "final_value": episode.final_value,
        "group": episode.group,
        "rank": episode.rank,
        "earlier": [_turn_record(turn, table) for turn in episode.earlier],
    }


def episode_from(record: Mapping[str, Any], table: IdTable) -> Episode:
    """The episode that `episode_record` gave."""
    turns = tuple(_turn_from(turn, table) for turn in record["turns"])
    ended = (record["terminated"], record["truncated"], record["final_value"])
    # Older records have no rank, and no earlier turns.
    earlier = tuple(_turn_from(turn, table) for turn in record.get("earlier", []))
    return Episode(turns, *ended, key_from(record["group"]), record.get("rank", 0), earlier)


def conversation_record(conversation: Conversation, table: IdTable) -> dict[str, Any]:
    """What has been said and earned in a conversation that awaits no reply, as JSON holds it."""
    return {
        "system_prompt": conversation.system_prompt,
        "turns": [_turn_record(turn, table) for turn in conversation.turns],
        "messages": conversation.messages,
        "learnt_turns": conversation.learnt_turns,
        "learns": conversation.learns,
        "awaits_reward": conversation.awaits_reward,
    }


def restore_conversation(conversation: Conversation, record: Mapping[str, Any], table: IdTable) -> None:
    """Let a new conversation go on where the one that was recorded stood."""
    conversation.system_prompt = record["system_prompt"]
    conversation.turns = [_turn_from(turn, table) for turn in record["turns"]]
    conversation.learnt_turns = record.get("learnt_turns", 0)
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
    prompt, reply = turn.prompt, turn.reply
    choices = None if prompt.choices is None else [table.number(choice) for choice in prompt.choices]
    of_prompt = [table.number(prompt.ids), prompt.starts_context, choices, prompt.shared_length, prompt.opening_length]
    of_reply = [
        table.number(reply.ids),
        reply.logprobs,
        reply.value,
        reply.finish_reason,
        reply.choice_index,
        reply.weights_version,
    ]
    return [of_prompt, of_reply, turn.reward, turn.penalty, turn.valid]


def _turn_from(record: Sequence[Any], table: IdTable) -> Turn:
    of_prompt, of_reply, reward, penalty, valid = record
    ids, starts_context, choices, *lengths = of_prompt
    said, logprobs, value, finish_reason, choice_index, weights_version = of_reply
    offered = None if choices is None else tuple(table[number] for number in ids_from(choices))
    prompt = Prompt(table[ids], bool(starts_context), offered, *ids_from(lengths))
    reply = Reply(
        table[said],
        tuple(map(number_from, logprobs)),
        number_from(value),
        finish_reason,
        choice_index if choice_index is None else int(number_from(choice_index)),
        int(number_from(weights_version)),
    )
    return Turn(prompt, reply, number_from(reward), number_from(penalty), bool(valid))
