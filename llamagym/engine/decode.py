"""Decoding: many replies at once, token by token. What begins alike is run once, and keys and values grow in place.

A reply that begins as one did since the weights changed goes through the model only from where it departs from it: the
radix tree keeps what the layers made of every reply.

Shapes: B replies, P tokens of the shared prefix, S of history after it, O of what opens a reply (both padded), t tokens
said, T tokens run in one pass, H width. A row's columns of keys and values are P, S, O and t, in this order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .backbone import Backbone
from .kv_cache import KVBuffer
from .radix_tree import Activations, Ids
from .token_tree import TokenTree

PartialReply = tuple[TokenTree, Ids]
"""A context, and what has been said so far."""


class Decoder:
    """Replies in the making."""

    def __init__(self, backbone: Backbone, trees: Sequence[TokenTree], max_new_tokens: int) -> None:
        """Prepare replies of up to `max_new_tokens` tokens to `trees`, which share one prefix.

        No other decoder may be at work with the same `backbone`.
        """
        self._backbone = backbone
        self._context = len(trees[0].prefix) + max(len(tree.history) for tree in trees)
        self._opening = max(tree.node_count for tree in trees)
        self._columns = self._context + self._opening + max_new_tokens
        self._max_rows = len(trees)
        self._buffer: KVBuffer | None = None
        # Of each row's columns behind the context: what the trunk returned, and what the top did.
        self._states = backbone.new_states(2, len(trees), self._columns - self._context)
        self._rows: dict[PartialReply, int] = {}

    @torch.no_grad()
    def read(self, replies: Sequence[PartialReply]) -> Tensor:
        """The last hidden state of each reply, float (B, H).

        Args:
            replies: Distinct, all of one length: first 0, then one more at each call, each going on from one of the
                call before.
        """
        self._keep({_parent(reply) for reply in replies})
        growing: list[PartialReply] = []
        resumed: dict[PartialReply, tuple[list[Activations], list[Activations]]] = {}
        fresh: list[PartialReply] = []
        found: dict[PartialReply, Tensor] = {}
        for reply in replies:
            if _parent(reply) in self._rows:
                growing.append(reply)
                continue
            below, above = self._backbone.reply(*reply)
            size, known = reply[0].node_count + len(reply[1]), sum(map(len, above))
            if known == size:
                found[reply] = above[-1].hidden[-1]
            elif reply[1] and known == size - 1 == sum(map(len, below)):
                resumed[reply] = below, above
            else:
                fresh.append(reply)
        growing = self._take_rows(growing)
        below_fresh = self._open_rows([*resumed, *fresh], len(growing))
        for row, (reply, known_parts) in enumerate(resumed.items(), len(growing)):
            self._resume(row, reply[0].node_count, *map(Activations.cat, known_parts))
        going_on = [*growing, *resumed]
        last = self._context + self._opening + len(replies[0][1]) - 1
        found |= self._run(going_on, 0, last) | self._run(fresh, len(going_on), self._context, below_fresh)
        self._rows = {reply: row for row, reply in enumerate([*going_on, *fresh])}
        return torch.stack([found[reply] for reply in replies])

    def close(self) -> None:
        """Keep what was made of all replies."""
        self._keep(set())

    def _keep(self, continued: set[PartialReply]) -> None:
        """Let the prefix cache keep all rows but those of replies that go on."""
        bottom = self._backbone.first_entry
        for (tree, said), row in self._rows.items():
            if (tree, said) not in continued:
                assert self._buffer is not None
                opened, begun = self._context + tree.node_count, self._context + self._opening
                parts = (self._context, opened), (begun, begun + len(said))
                entries = torch.cat([self._buffer.entries(row, *part) for part in parts], dim=2)
                columns = [slice(start - self._context, stop - self._context) for start, stop in parts]
                below, last = torch.cat([self._states[:, row, part] for part in columns], dim=1)
                self._backbone.keep_reply(
                    tree, said, Activations(entries[:bottom], below), Activations(entries[bottom:], last)
                )

    def _take_rows(self, growing: list[PartialReply]) -> list[PartialReply]:
        """Put what these go on from into the first rows, and return them in the order of their rows.

        Most stay in the row where they are; one of them replaces a reply that has ended, or is a second one's copy.
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
                assert self._buffer is not None
                self._buffer.copy(source, row)
                self._states[:, row] = self._states[:, source]
        return ordered

    def _open_rows(self, fresh: list[PartialReply], first: int) -> Tensor | None:
        """Fill rows from `first` on with the contexts of these, and with what the trunk made of what opens replies.

        Returns the states (B, O, H) that the trunk returned; None where there is none or more has been said.
        """
        if not fresh:
            return None
        trees, is_begun = [tree for tree, _ in fresh], bool(fresh[0][1])
        known_of = self._backbone.prefill(trees, with_decisions=not is_begun)
        below, above = self._backbone.prefix(trees[0].prefix)
        if self._buffer is None:
            prefix = torch.cat([below, above])
            is_shared = self._backbone.shares(prefix, self._max_rows)
            self._buffer = KVBuffer(prefix, self._max_rows, self._columns, is_shared, self._backbone.space)
        openings = []
        for row, known in enumerate(known_of, first):
            for pieces, layer in ((known.trunk, 0), (known.history, self._backbone.first_entry)):
                end = self._buffer.fill(row, below.shape[2], [piece.entries for piece in pieces], layer)
            self._buffer.clear(row, end, self._context + self._opening)
            if known.decisions is not None:
                self._buffer.fill(row, self._context, [known.decisions.entries])
                openings.append(known.decisions.hidden)
        return pad_sequence(openings, batch_first=True) if openings else None

    def _resume(self, row: int, opened: int, below: Activations, above: Activations) -> None:
        """Fill in a reply, of which all but the last token is known."""
        assert self._buffer is not None
        begun = self._context + self._opening
        for known, layer in ((below, 0), (above, self._backbone.first_entry)):
            self._buffer.fill(row, self._context, [known[:opened].entries], layer)
            self._buffer.fill(row, begun, [known[opened:].entries], layer)
        for part, known in enumerate((below, above)):
            self._states[part, row, :opened] = known.hidden[:opened]
            self._states[part, row, self._opening : self._opening + len(known) - opened] = known.hidden[opened:]

    def _run(
        self, replies: list[PartialReply], first_row: int, first_column: int, below: Tensor | None = None
    ) -> dict[PartialReply, Tensor]:
        """Run the tokens from a column on, in rows from `first_row` on; returns each reply's last hidden state (H,).

        What the trunk returned for them is `below` (B, T, H), if it has run over them.
        """
        if not replies:
            return {}
        assert self._buffer is not None
        said = len(replies[0][1])
        end = self._context + self._opening + said
        contexts = torch.tensor([tree.context_length for tree, _ in replies])[:, None]
        openings = torch.tensor([tree.node_count for tree, _ in replies])[:, None]
        columns = torch.arange(end)
        opened = columns - self._context
        is_said = opened >= self._opening
        is_real = torch.where(opened < 0, columns < contexts, is_said | (opened < openings))
        behind = contexts + torch.where(is_said, openings + opened - self._opening, opened)
        key_positions = torch.where(opened < 0, columns, behind)
        spelled = [self._spell(reply)[first_column - self._context :] for reply in replies]
        visible = is_real[:, None] & (columns <= columns[first_column:, None])
        rows = slice(first_row, first_row + len(replies))
        hidden, below = self._backbone.decode(
            torch.tensor(spelled) if below is None else below,
            key_positions[:, first_column:],
            visible,
            key_positions,
            self._buffer.cache(rows, first_column),
        )
        self._states[0, rows, first_column - self._context : end - self._context] = below
        self._states[1, rows, first_column - self._context : end - self._context] = hidden
        last = torch.full((len(replies),), -1) if said else openings[:, 0] - 1
        states = hidden[torch.arange(len(replies)), last.to(hidden.device)]
        return dict(zip(replies, states, strict=True))

    def _spell(self, reply: PartialReply) -> Ids:
        """A reply's tokens: what opens it, padded, and what has been said."""
        tree, said = reply
        opening = tree.decisions[0].ids
        return opening + (0,) * (self._opening - len(opening)) + said


def _parent(reply: PartialReply) -> PartialReply:
    """The reply that is one token shorter."""
    tree, said = reply
    return tree, said[:-1]
