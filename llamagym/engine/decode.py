"""Decoding: many replies at once, token by token. Replies that begin alike share a row until they part.

A reply resumes from its longest beginning that was generated since the weights changed: the radix tree keeps what the
layers made of every reply.

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
from .radix_tree import Activations, Ids
from .token_tree import TokenTree

PartialReply = tuple[TokenTree, Ids]
"""A context, and the tokens generated so far."""


class Decoder:
    """Generates replies to a batch of contexts; the caller draws the tokens."""

    def __init__(self, backbone: Backbone, trees: Sequence[TokenTree], max_new_tokens: int) -> None:
        """Prepare replies of up to `max_new_tokens` tokens.

        Args:
            backbone: The model.
            trees: Contexts with one shared prefix and generation prompts of one length.
            max_new_tokens: Of a reply.
        """
        prompt_lengths = {tree.node_count for tree in trees}
        assert len(prompt_lengths) == 1, "a batch has generation prompts of one length"
        self._backbone = backbone
        # The first column of generation prompts.
        self._start = max(tree.context_length for tree in trees)
        self._prompt_length = prompt_lengths.pop()
        columns = self._start + self._prompt_length + max_new_tokens
        prefix = torch.cat(backbone.prefix(trees[0].prefix))
        is_shared = backbone.shares(prefix, len(trees))
        self._buffer = KVBuffer(prefix, len(trees), columns, is_shared)
        # Outputs of the trunk and of the layers above it, for each row's columns from `_start` on.
        self._states = backbone.new_states(2, len(trees), columns - self._start)
        self._rows: dict[PartialReply, int] = {}

    @torch.no_grad()
    def read(self, replies: Sequence[PartialReply]) -> Tensor:
        """The last hidden state of each reply, float (B, H).

        Args:
            replies: Distinct, all of one length: first 0, then one more at each call, each continuing one of the call
                before.
        """
        self._keep_all_but({_parent(reply) for reply in replies})
        length = self._prompt_length + len(replies[0][1])
        growing: list[PartialReply] = []
        resumed: dict[PartialReply, tuple[Activations, Activations]] = {}
        fresh: list[PartialReply] = []
        found: dict[PartialReply, Tensor] = {}
        for reply in replies:
            if _parent(reply) in self._rows:
                growing.append(reply)
                continue
            pieces = self._backbone.reply(*reply)
            of_trunk, known = (sum(map(len, part)) for part in pieces)
            if known == length:
                found[reply] = pieces[1][-1].hidden[-1]
            elif reply[1] and known == length - 1 == of_trunk:
                resumed[reply] = Activations.cat(pieces[0]), Activations.cat(pieces[1])
            else:
                fresh.append(reply)
        growing = self._take_rows(growing)
        below_fresh = self._open_rows([*resumed, *fresh], len(growing))
        for row, (below, above) in enumerate(resumed.values(), len(growing)):
            self._buffer.fill(row, self._start, [below])
            self._buffer.fill(row, self._start, [above], self._backbone.first_entry)
            self._states[0, row, : len(below)], self._states[1, row, : len(above)] = below.hidden, above.hidden
        continued = [*growing, *resumed]
        found |= self._run(continued, 0, self._start + length - 1)
        found |= self._run(fresh, len(continued), self._start, below_fresh)
        self._rows = {reply: row for row, reply in enumerate([*continued, *fresh])}
        return torch.stack([found[reply] for reply in replies])

    def close(self) -> None:
        """Hand all replies over to the prefix cache."""
        self._keep_all_but(set())

    def _keep_all_but(self, continued: AbstractSet[PartialReply]) -> None:
        """Hand replies that are not continued over to the prefix cache: their rows may be reused."""
        first_entry = self._backbone.first_entry
        for (tree, said), row in self._rows.items():
            if (tree, said) not in continued:
                length = self._prompt_length + len(said)
                entries = self._buffer.entries(row, self._start, self._start + length)
                below, above = self._states[:, row, :length]
                parts = Activations(entries[:first_entry], below), Activations(entries[first_entry:], above)
                self._backbone.keep_reply(tree, said, *parts)

    def _take_rows(self, growing: list[PartialReply]) -> list[PartialReply]:
        """Move the parents of these replies into the first rows; returns the replies in the order of their rows.

        Most stay in their row. The others move into rows of replies that have ended, or are copies where one parent has
        several children.
        """
        order: dict[int, PartialReply] = {}
        moving = []
        for reply in growing:
            row = self._rows[_parent(reply)]
            if row < len(growing) and row not in order:
                order[row] = reply
            else:
                moving.append(reply)
        for row in range(len(growing)):
            if row not in order:
                order[row] = moving.pop()
        ordered = [order[row] for row in range(len(growing))]
        for row, reply in enumerate(ordered):
            if row != (source := self._rows[_parent(reply)]):
                self._buffer.copy(source, row)
                self._states[:, row] = self._states[:, source]
        return ordered

    def _open_rows(self, replies: list[PartialReply], first: int) -> Tensor | None:
        """Fill the contexts of these replies into rows from `first` on.

        Returns the trunk's output for their generation prompts, (B, G, H), whose keys and values are filled in as well;
        None if there are no replies or they have begun.
        """
        if not replies:
            return None
        trees, has_begun = [tree for tree, _ in replies], bool(replies[0][1])
        known_of = self._backbone.prefill(trees, with_decisions=not has_begun)
        start, states = len(trees[0].prefix), []
        for row, known in enumerate(known_of, first):
            self._buffer.fill(row, start, known.trunk)
            self._buffer.fill(row, start, known.history, self._backbone.first_entry, until=self._start)
            if known.decisions is not None:
                self._buffer.fill(row, self._start, [known.decisions])
                states.append(known.decisions.hidden)
        return torch.stack(states) if states else None

    def _run(
        self, replies: list[PartialReply], first_row: int, first_column: int, below: Tensor | None = None
    ) -> dict[PartialReply, Tensor]:
        """Run the tokens from a column on, in rows from `first_row` on; returns each reply's last hidden state (H,).

        `below` is the trunk's output for these tokens, (B, T, H), if it has run over them.
        """
        if not replies:
            return {}
        end = self._start + self._prompt_length + len(replies[0][1])
        lengths = torch.tensor([tree.context_length for tree, _ in replies])[:, None]
        columns = torch.arange(end)
        key_positions = torch.where(columns < self._start, columns, lengths + columns - self._start)
        is_real = (columns < lengths) | (columns >= self._start)
        visible = is_real[:, None] & (columns <= columns[first_column:, None])
        ids = [(tree.decisions[0].ids + said)[first_column - self._start :] for tree, said in replies]
        rows = slice(first_row, first_row + len(replies))
        inputs = torch.tensor(ids) if below is None else below
        tokens = Tokens(inputs, key_positions[:, first_column:], visible, key_positions)
        hidden, below = self._backbone.decode(tokens, self._buffer.cache(rows, first_column))
        self._states[0, rows, first_column - self._start : end - self._start] = below
        self._states[1, rows, first_column - self._start : end - self._start] = hidden
        return dict(zip(replies, hidden[:, -1], strict=True))


def _parent(reply: PartialReply) -> PartialReply:
    """The reply that is one token shorter."""
    tree, said = reply
    return tree, said[:-1]
