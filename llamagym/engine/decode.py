"""Decoding of many replies at once, token by token. Replies with a common beginning share a row until they diverge.

A reply resumes from its longest beginning that was generated since the weights changed: the prefix cache keeps the
activations of every reply.

Shapes: B replies, P tokens of the shared prefix, S of history after it (padded), G of the generation prompt, t tokens
generated, T tokens run in one pass, H width. A row's columns of keys and values are P, S, G and t, in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from .backbone import Backbone
from .kv_cache import KVBuffer
from .masks import Tokens
from .radix_tree import Activations, Ids, token_count
from .token_tree import TokenTree

PartialReply = tuple[TokenTree, Ids]
"""A context, and the tokens generated so far."""


class Decoder:
    """Generates replies to a batch of contexts; the caller samples the tokens."""

    def __init__(self, backbone: Backbone, trees: Sequence[TokenTree], max_new_tokens: int) -> None:
        """Prepares replies.

        Args:
            backbone: The model.
            trees: Contexts with one shared prefix and generation prompts of one length.
            max_new_tokens: Maximum tokens of a reply.
        """
        prompt_lengths = {tree.node_count for tree in trees}
        assert len(prompt_lengths) == 1, "a batch has generation prompts of one length"
        self.backbone = backbone
        self._trunk_entries = backbone.transformer.trunk_entries
        # The first column of generation prompts.
        self._start = max(tree.context_length for tree in trees)
        self._prompt_length = prompt_lengths.pop()
        columns = self._start + self._prompt_length + max_new_tokens
        prefix = torch.cat(backbone.prefix(trees[0].prefix))
        is_shared = backbone.transformer.shares(prefix, len(trees))
        self._buffer = KVBuffer(prefix, len(trees), columns, is_shared)
        # Outputs of trunk and top for each row's columns from `_start` on.
        self._states = backbone.transformer.new_states(2, len(trees), columns - self._start)
        self._rows: dict[PartialReply, int] = {}

    @torch.no_grad()
    def hidden_states(self, replies: Sequence[PartialReply]) -> Tensor:
        """Last hidden state of each reply, float (B, H).

        Args:
            replies: Distinct replies of one length: first 0, then one more at each call. Each continues one of the
                previous call.
        """
        self._store_except({_parent(reply) for reply in replies})
        length = self._prompt_length + len(replies[0][1])
        growing: list[PartialReply] = []
        resumed: dict[PartialReply, tuple[Activations, Activations]] = {}
        fresh: list[PartialReply] = []
        states: dict[PartialReply, Tensor] = {}
        for reply in replies:
            if _parent(reply) in self._rows:
                growing.append(reply)
                continue
            trunk, top = self.backbone.prefix_cache.find_reply(*reply)
            trunk_length = token_count(trunk)
            top_length = token_count(top)
            if top_length == length:
                states[reply] = top[-1].hidden[-1]
            elif reply[1] and top_length == trunk_length == length - 1:
                resumed[reply] = Activations.cat(trunk), Activations.cat(top)
            else:
                fresh.append(reply)
        growing = self._move_rows(growing)
        prompt_states = self._fill_contexts([*resumed, *fresh], len(growing))
        for row, (trunk_part, top_part) in enumerate(resumed.values(), len(growing)):
            self._buffer.fill(row, self._start, [trunk_part])
            self._buffer.fill(row, self._start, [top_part], self._trunk_entries)
            self._states[0, row, : len(trunk_part)] = trunk_part.hidden
            self._states[1, row, : len(top_part)] = top_part.hidden
        continued = [*growing, *resumed]
        states |= self._run(continued, 0, self._start + length - 1)
        states |= self._run(fresh, len(continued), self._start, prompt_states)
        self._rows = {reply: row for row, reply in enumerate([*continued, *fresh])}
        return torch.stack([states[reply] for reply in replies])

    def close(self) -> None:
        """Stores all replies in the prefix cache."""
        self._store_except(set())

    def _store_except(self, continued: AbstractSet[PartialReply]) -> None:
        """Stores replies that are not continued in the prefix cache, since their rows may be reused."""
        for (tree, ids), row in self._rows.items():
            if (tree, ids) in continued:
                continue
            length = self._prompt_length + len(ids)
            entries = self._buffer.entries(row, self._start, self._start + length)
            trunk = Activations(entries[: self._trunk_entries], self._states[0, row, :length])
            top = Activations(entries[self._trunk_entries :], self._states[1, row, :length])
            self.backbone.prefix_cache.put_reply(tree, ids, trunk, top)

    def _move_rows(self, growing: list[PartialReply]) -> list[PartialReply]:
        """Moves the parents of these replies to the first rows, and returns the replies in the order of their rows.

        Most stay in their row. The others move to rows of replies that have ended, or are copied where one parent has
        several children.
        """
        reply_of: dict[int, PartialReply] = {}
        moving: list[PartialReply] = []
        for reply in growing:
            row = self._rows[_parent(reply)]
            if row < len(growing) and row not in reply_of:
                reply_of[row] = reply
            else:
                moving.append(reply)
        for row in range(len(growing)):
            if row not in reply_of:
                reply_of[row] = moving.pop()
        ordered = [reply_of[row] for row in range(len(growing))]
        for row, reply in enumerate(ordered):
            source = self._rows[_parent(reply)]
            if row != source:
                self._buffer.copy(source, row)
                self._states[:, row] = self._states[:, source]
        return ordered

    def _fill_contexts(self, replies: list[PartialReply], first_row: int) -> Tensor | None:
        """Fills the contexts of these replies into rows from `first_row` on.

        Returns:
            The trunk's output for the generation prompts, (B, G, H), whose keys and values are filled in as well. None
            if there are no replies or they have tokens already.
        """
        if not replies:
            return None
        trees = [tree for tree, _ in replies]
        is_new = not replies[0][1]
        contexts = self.backbone.prefill(trees, with_decisions=is_new)
        column = len(trees[0].prefix)
        prompt_states: list[Tensor] = []
        for row, context in enumerate(contexts, first_row):
            self._buffer.fill(row, column, context.trunk)
            self._buffer.fill(row, column, context.history, self._trunk_entries, pad_to=self._start)
            if context.decisions is not None:
                self._buffer.fill(row, self._start, [context.decisions])
                prompt_states.append(context.decisions.hidden)
        return torch.stack(prompt_states) if prompt_states else None

    def _run(
        self,
        replies: list[PartialReply],
        first_row: int,
        first_column: int,
        trunk_states: Tensor | None = None,
    ) -> dict[PartialReply, Tensor]:
        """Runs the tokens of replies from a column on, and returns each reply's last hidden state (H,).

        Args:
            replies: Replies of one length, in consecutive rows.
            first_row: Row of the first one.
            first_column: Column of the first token to run.
            trunk_states: The trunk's output for these tokens, (B, T, H), if it has run over them.
        """
        if not replies:
            return {}
        end = self._start + self._prompt_length + len(replies[0][1])
        lengths = torch.tensor([tree.context_length for tree, _ in replies])[:, None]
        columns = torch.arange(end)
        key_positions = torch.where(columns < self._start, columns, lengths + columns - self._start)
        is_token = (columns < lengths) | (columns >= self._start)
        visible = is_token[:, None] & (columns <= columns[first_column:, None])
        inputs = trunk_states
        if inputs is None:
            skipped = first_column - self._start
            inputs = torch.tensor([(tree.decisions[0].ids + ids)[skipped:] for tree, ids in replies])
        rows = slice(first_row, first_row + len(replies))
        tokens = Tokens(inputs, key_positions[:, first_column:], visible, key_positions)
        top_states, trunk_states = self.backbone.decode(tokens, self._buffer.cache(rows, first_column))
        new = slice(first_column - self._start, end - self._start)
        self._states[0, rows, new] = trunk_states
        self._states[1, rows, new] = top_states
        return dict(zip(replies, top_states[:, -1], strict=True))


def _parent(reply: PartialReply) -> PartialReply:
    """The reply without its last token."""
    tree, ids = reply
    return tree, ids[:-1]
