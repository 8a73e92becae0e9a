"""Decoding of many replies at once. Replies with a common beginning share a row until they diverge.

A pass runs each row's last token and a draft of the next ones (see `policy.drafts`), so rows grow by different lengths.
New tokens take the same columns in all rows; columns of tokens that were not accepted stay unused, which a mask hides.

A reply resumes from its longest beginning that was generated since the weights changed: the prefix cache keeps the
activations of every reply.

Shapes: R rows, P tokens of the shared prefix, S of history after it (padded), G of the generation prompt, T tokens run
in one pass, D tokens of a draft, C columns of keys and values, H width. The columns are P, S, and then those of
generation prompt and reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ..models.hardware import min_rows
from .backbone import Backbone
from .kv_cache import KVBuffer
from .masks import Tokens
from .radix_tree import Activations, Ids, token_count
from .token_tree import TokenTree

PartialReply = tuple[TokenTree, Ids]
"""A context, and the tokens generated so far."""

# Spare columns for tokens of drafts that were not accepted, in drafts. When they are full, rows are compacted.
_UNUSED_DRAFTS = 2
# Columns for padding of passes with few tokens, which later passes overwrite.
_PADDING = 1


@dataclass(frozen=True, slots=True)
class _LastRun:
    """The tokens that ran last in a row, in consecutive columns.

    Attributes:
        tokens_before: Number of the row's tokens before them, from the generation prompt on.
        column: Column of the first one.
    """

    tokens_before: int
    column: int

    def end(self, token_count: int) -> int:
        """The column after the row's first tokens from the generation prompt on, the last of which ran last."""
        return self.column + token_count - self.tokens_before


def spare_columns(max_draft_tokens: int) -> int:
    """Columns that decoding reserves for a row beside its context and reply."""
    return _UNUSED_DRAFTS * max_draft_tokens + _PADDING


class Decoder:
    """Generates replies to a batch of contexts; the caller samples the tokens."""

    def __init__(
        self, backbone: Backbone, trees: Sequence[TokenTree], max_new_tokens: int, max_draft_tokens: int = 0
    ) -> None:
        """Prepares replies.

        Args:
            backbone: The model.
            trees: Contexts with one shared prefix and generation prompts of one length.
            max_new_tokens: Maximum tokens of a reply.
            max_draft_tokens: Maximum tokens of a draft.
        """
        prompt_lengths = {tree.node_count for tree in trees}
        assert len(prompt_lengths) == 1, "a batch has generation prompts of one length"
        self.backbone = backbone
        self._trunk_entries = backbone.transformer.trunk_entries
        # The first column of generation prompts.
        self._start = max(tree.context_length for tree in trees)
        self._prompt_length = prompt_lengths.pop()
        columns = self._start + self._prompt_length + max_new_tokens + spare_columns(max_draft_tokens)
        prefix = torch.cat(backbone.prefix(trees[0].prefix))
        is_shared = backbone.transformer.shares(prefix, len(trees))
        self._buffer = KVBuffer(prefix, len(trees), columns, is_shared)
        # Outputs of trunk and top for each row's columns from `_start` on.
        self._states = backbone.transformer.new_states(2, len(trees), columns - self._start)
        # The columns that a row's next tokens attend to, and the positions of all columns.
        self._visible = np.zeros((len(trees), columns), np.bool_)
        self._positions = np.zeros((len(trees), columns), np.int64)
        # The first column that no row uses.
        self._end = self._start
        # The row of each reply that can be continued; the row's later tokens, of a draft, are then dropped.
        self._rows: dict[PartialReply, int] = {}
        self._last_runs: dict[int, _LastRun] = {}

    @torch.no_grad()
    def hidden_states(self, replies: Mapping[PartialReply, Ids]) -> list[Tensor]:
        """Hidden states after each reply's last token and after each token of its draft, float (1 + D, H).

        Args:
            replies: Distinct replies, empty at the first call, with their drafts. Later, a reply continues one of the
                previous call by any number of its draft's tokens and one more.

        Returns:
            One tensor per reply. It has fewer than 1 + D rows if only a part of the draft is cached.
        """
        growing: list[PartialReply] = []
        resumed: dict[PartialReply, tuple[Activations, Activations]] = {}
        fresh: list[PartialReply] = []
        states: dict[PartialReply, Tensor] = {}
        for reply, draft in replies.items():
            if _parent(reply) in self._rows:
                growing.append(reply)
                continue
            tree, ids = reply
            trunk, top = self.backbone.prefix_cache.find_reply(tree, ids + draft)
            nodes = self._prompt_length + len(ids)
            known = min(token_count(trunk), token_count(top))
            if known >= nodes:
                states[reply] = _last_hidden(top, token_count(top) - nodes + 1)[: known - nodes + 1]
            elif ids and known == nodes - 1:
                resumed[reply] = Activations.cat(trunk)[:known], Activations.cat(top)[:known]
            else:
                fresh.append(reply)
        growing = self._move_rows(growing)
        self._rows = {}
        self._last_runs = {}
        continued = [*growing, *resumed]
        self._make_room(len(growing), 1 + max((len(replies[reply]) for reply in continued), default=0))
        column = max([self._end, *(self._start + len(trunk) for trunk, _ in resumed.values())])
        self._zero(range(len(growing)), self._end, column)
        self._end = column
        self._fill_contexts(list(resumed), len(growing))
        for row, activations in enumerate(resumed.values(), len(growing)):
            self._fill_reply(row, *activations, column)
        drafts = [replies[reply] for reply in continued]
        states |= self._run(continued, drafts, 0, column)
        states |= self._run_fresh(fresh, [replies[reply] for reply in fresh], len(continued))
        return [states[reply] for reply in replies]

    def finish(self, replies: Iterable[PartialReply]) -> None:
        """Stores finished replies, without their last token, in the prefix cache.

        Args:
            replies: Replies of the previous call, continued like those of the next one.
        """
        for tree, ids in dict.fromkeys(map(_parent, replies)):
            row = self._rows.get((tree, ids))
            if row is None:
                # Its activations came from the cache.
                continue
            columns = self._columns(row, self._prompt_length + len(ids))
            entries = self._buffer.entries(row, self._start, self._end)[:, :, columns]
            states = self._states[:, row, columns]
            trunk = Activations(entries[: self._trunk_entries], states[0])
            top = Activations(entries[self._trunk_entries :], states[1])
            self.backbone.prefix_cache.put_reply(tree, ids, trunk, top)

    def _columns(self, row: int, nodes: int) -> slice | Tensor:
        """Columns, counted from `_start`, of a row's first tokens from the generation prompt on."""
        last = self._last_runs[row]
        used = np.flatnonzero(self._visible[row, self._start : last.end(nodes)])
        if used[-1] == nodes - 1:
            return slice(0, nodes)
        return torch.from_numpy(used)

    def _move_rows(self, growing: list[PartialReply]) -> list[PartialReply]:
        """Moves the rows that these replies continue to the front, and returns the replies in the order of their rows.

        Most stay in their row. The others move to rows of replies that have ended, or are copied where one row has
        several continuations. Tokens of drafts that were not accepted are dropped.
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
        sources = [self._rows[_parent(reply)] for reply in ordered]
        for row, source in enumerate(sources):
            if row != source:
                self._buffer.copy(source, row)
                self._states[:, row] = self._states[:, source]
                self._visible[row] = self._visible[source]
                self._positions[row] = self._positions[source]
        for row, (source, (_, ids)) in enumerate(zip(sources, ordered, strict=True)):
            end = self._last_runs[source].end(self._prompt_length + len(ids) - 1)
            self._visible[row, end:] = False
        return ordered

    def _make_room(self, rows: int, width: int) -> None:
        """Compacts the used columns of the first rows, if there is no room for `width` more."""
        if self._end + width + _PADDING <= self._visible.shape[1]:
            return
        end = self._start
        for row in range(rows):
            used = np.flatnonzero(self._visible[row, self._start :])
            columns = torch.from_numpy(used)
            entries = self._buffer.entries(row, self._start, self._end)
            entries[:, :, : len(used)] = entries[:, :, columns]
            self._states[:, row, : len(used)] = self._states[:, row, columns]
            stop = self._start + len(used)
            self._positions[row, self._start : stop] = self._positions[row, self._start + used]
            self._visible[row, self._start : stop] = True
            self._visible[row, stop:] = False
            end = max(end, stop)
        self._end = end

    def _fill_contexts(
        self, replies: Sequence[PartialReply], first_row: int, drafts: Sequence[Ids] | None = None
    ) -> list[Activations]:
        """Fills the contexts of replies into rows from `first_row` on.

        Args:
            replies: Replies without a row.
            first_row: The first of their rows.
            drafts: Their drafts, if the trunk runs over generation prompts and drafts, too.

        Returns:
            The trunk's activations of each generation prompt and draft; empty without drafts.
        """
        if not replies:
            return []
        trees = [tree for tree, _ in replies]
        if drafts is not None:
            trees = [_with_draft(tree, draft) for tree, draft in zip(trees, drafts, strict=True)]
        contexts = self.backbone.prefill(trees, with_decisions=drafts is not None)
        column = len(trees[0].prefix)
        decisions: list[Activations] = []
        for row, (tree, context) in enumerate(zip(trees, contexts, strict=True), first_row):
            self._buffer.fill(row, column, context.trunk)
            self._buffer.fill(row, column, context.history, self._trunk_entries, pad_to=self._start)
            self._visible[row] = np.arange(self._visible.shape[1]) < tree.context_length
            self._positions[row, : self._start] = np.arange(self._start)
            if context.decisions is not None:
                decisions.append(context.decisions)
        return decisions

    def _fill_reply(self, row: int, trunk: Activations, top: Activations, stop: int) -> None:
        """Fills activations from the generation prompt on into a row, and zeros up to the column `stop`."""
        self._buffer.fill(row, self._start, [trunk])
        self._buffer.fill(row, self._start, [top], self._trunk_entries, pad_to=stop)
        self._states[0, row, : len(trunk)] = trunk.hidden
        self._states[1, row, : len(top)] = top.hidden
        end = self._start + len(trunk)
        self._visible[row, self._start : end] = True
        context_length = int(self._visible[row, : self._start].sum())
        self._positions[row, self._start : end] = context_length + np.arange(len(trunk))

    def _zero(self, rows: range, start: int, stop: int) -> None:
        """Fills columns with zeros: even what a mask hides must be finite."""
        for row in rows if stop > start else ():
            self._buffer.entries(row, start, stop).zero_()

    def _run_fresh(
        self, replies: Sequence[PartialReply], drafts: Sequence[Ids], first_row: int
    ) -> dict[PartialReply, Tensor]:
        """Runs replies and drafts without a row from their generation prompts on; see `_run`."""
        if not replies:
            return {}
        is_new = not replies[0][1]
        trunks = self._fill_contexts(replies, first_row, drafts if is_new else None)
        if not trunks:
            return self._run(replies, drafts, first_row, self._start)
        end = self._start + max(map(len, trunks))
        for row, trunk in enumerate(trunks, first_row):
            self._buffer.fill(row, self._start, [trunk], pad_to=end)
        trunk_states = pad_sequence([trunk.hidden for trunk in trunks], batch_first=True)
        return self._run(replies, drafts, first_row, self._start, trunk_states)

    def _run(
        self,
        replies: Sequence[PartialReply],
        drafts: Sequence[Ids],
        first_row: int,
        column: int,
        trunk_states: Tensor | None = None,
    ) -> dict[PartialReply, Tensor]:
        """Runs the tokens of replies and drafts that their rows lack.

        Args:
            replies: Replies in consecutive rows.
            drafts: Their drafts.
            first_row: Row of the first one.
            column: Column of the first token to run: `_start` for rows that only hold a context.
            trunk_states: The trunk's output for these tokens, (R, T, H), if it has run over them.

        Returns:
            Hidden states of each reply's last token and of its draft, (1 + D, H).
        """
        if not replies:
            return {}
        rows = slice(first_row, first_row + len(replies))
        new_ids: list[Ids] = []
        for row, ((tree, ids), draft) in enumerate(zip(replies, drafts, strict=True), first_row):
            all_ids = tree.decisions[0].ids + ids + draft
            nodes = 0 if column == self._start else len(all_ids) - len(draft) - 1
            new_ids.append(all_ids[nodes:])
            self._last_runs[row] = _LastRun(nodes, column)
            for length in range(len(draft) + 1):
                self._rows[tree, ids + draft[:length]] = row
        width = max(map(len, new_ids))
        used_end = column + width
        if len(replies) * width < min_rows(self._states):
            width += _PADDING
            if trunk_states is not None:
                trunk_states = pad(trunk_states, (0, 0, 0, _PADDING))
        end = column + width
        inputs = np.zeros((len(replies), width), np.int64)
        visible = np.zeros((len(replies), width, end), np.bool_)
        visible[:, :, :column] = self._visible[rows, None, :column]
        visible[:, :, column:] = np.tri(width, dtype=np.bool_)
        for index, ((tree, _), own_ids) in enumerate(zip(replies, new_ids, strict=True)):
            row = first_row + index
            inputs[index, : len(own_ids)] = own_ids
            first_position = tree.context_length + self._last_runs[row].tokens_before
            self._positions[row, column:end] = np.arange(first_position, first_position + width)
            self._visible[row, column : column + len(own_ids)] = True
        key_positions = torch.from_numpy(self._positions[rows, :end])
        tokens = Tokens(
            torch.from_numpy(inputs) if trunk_states is None else trunk_states,
            key_positions[:, column:],
            torch.from_numpy(visible),
            key_positions,
        )
        top_states, trunk_states = self.backbone.decode(tokens, self._buffer.cache(rows, column))
        new = slice(column - self._start, end - self._start)
        self._states[0, rows, new] = trunk_states
        self._states[1, rows, new] = top_states
        self._zero(range(first_row, rows.stop), end, self._end)
        self._zero(range(first_row), self._end, used_end)
        self._end = max(self._end, used_end)
        states: dict[PartialReply, Tensor] = {}
        for index, (reply, draft) in enumerate(zip(replies, drafts, strict=True)):
            last = len(new_ids[index])
            states[reply] = top_states[index, last - len(draft) - 1 : last]
        return states


def _last_hidden(pieces: Sequence[Activations], count: int) -> Tensor:
    """Hidden states of the last tokens, (count, H)."""
    last: list[Tensor] = []
    for piece in reversed(pieces):
        last.insert(0, piece.hidden[-count:])
        count -= len(piece)
        if count <= 0:
            break
    return torch.cat(last)


def _parent(reply: PartialReply) -> PartialReply:
    """The reply without its last token."""
    tree, ids = reply
    return tree, ids[:-1]


def _with_draft(tree: TokenTree, draft: Ids) -> TokenTree:
    """A context whose generation prompt is continued by a draft."""
    if not draft:
        return tree
    decision = tree.decisions[0]
    ids = decision.ids + draft
    return replace(tree, decisions=(replace(decision, ids=ids, parents=tuple(range(-1, len(ids) - 1))),))
