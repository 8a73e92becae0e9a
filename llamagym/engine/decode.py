"""Writes replies token by token: what begins alike is written once, and keys and values grow in place.

Whatever was written since the weights changed is known: a reply that begins as one did is run through the model only
from where it departs from it.

Shapes: B beginnings, P tokens of the shared prefix, S of history after it, O of what opens a reply (both padded),
t tokens said, T tokens run in one pass, H width. A row's columns of keys and values are P, S, O and t, in
this order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .backbone import Backbone
from .kv_cache import Room, Written
from .token_tree import Ids, TokenTree

Beginning = tuple[TokenTree, Ids]


class Writer:
    """What the model makes of replies in the making."""

    def __init__(self, backbone: Backbone, trees: Sequence[TokenTree], max_new_tokens: int) -> None:
        """Prepare replies of up to `max_new_tokens` tokens to `trees`, which share one prefix.

        No other writer may be at work with the same `backbone`.
        """
        self._backbone = backbone
        self._max_new_tokens = max_new_tokens
        self._context = len(trees[0].prefix) + max(len(tree.history) for tree in trees)
        self._opening = max(tree.node_count for tree in trees)
        self._max_rows = len(trees)
        self._room: Room | None = None
        self._rows: dict[Beginning, int] = {}

    @torch.no_grad()
    def read(self, beginnings: Sequence[Beginning]) -> Tensor:
        """The last hidden state of each beginning, float (B, H).

        Args:
            beginnings: Distinct, all of one length: first 0, then one more at each call, each going on from one of the
                call before.
        """
        found: dict[Beginning, Written] = {}
        growing: list[Beginning] = []
        resumed: dict[Beginning, list[Tensor]] = {}
        fresh: list[Beginning] = []
        for beginning in beginnings:
            if _parent(beginning) in self._rows:
                growing.append(beginning)
            elif (known := self._backbone.written.get(_key(beginning))) is not None:
                found[beginning] = known
            elif beginning[1] and (parts := self._backbone.spoken(*_key(_parent(beginning)))):
                resumed[beginning] = [part.entries for part in parts]
            else:
                fresh.append(beginning)
        growing = self._take_rows(growing)
        below = self._open_rows([*resumed, *fresh], len(growing))
        self._fill_parts(resumed.values(), len(growing))
        going_on = [*growing, *resumed]
        last = self._context + self._opening + len(beginnings[0][1]) - 1
        found |= self._run(going_on, 0, last) | self._run(fresh, len(going_on), self._context, below)
        self._rows = {beginning: row for row, beginning in enumerate([*going_on, *fresh])}
        return torch.stack([found[beginning].state for beginning in beginnings])

    def _fill_parts(self, parts_of_rows: Iterable[list[Tensor]], first: int) -> None:
        """Fill the opening and all tokens but the last of rows from `first` on."""
        for row, (opening, *others) in enumerate(parts_of_rows, first):
            assert self._room is not None
            self._room.fill(row, self._context, opening)
            if others:
                self._room.fill(row, self._context + self._opening, torch.cat(others, dim=2))

    def _take_rows(self, growing: list[Beginning]) -> list[Beginning]:
        """Put the entries that these go on from into the first rows, and return them in the order of their rows.

        Most stay in the row where they are; one of them replaces a reply that has ended, or is a second one's copy.
        """
        order: dict[int, Beginning] = {}
        moving = []
        for beginning in growing:
            row = self._rows[_parent(beginning)]
            if row < len(growing) and row not in order:
                order[row] = beginning
            else:
                moving.append(beginning)
        for row in range(len(growing)):
            if row not in order:
                order[row] = moving.pop()
        ordered = [order[row] for row in range(len(growing))]
        if self._room is not None:
            self._room.rearrange([self._rows[_parent(beginning)] for beginning in ordered])
        return ordered

    def _open_rows(self, fresh: list[Beginning], first: int) -> Tensor | None:
        """Fill rows from `first` on with the contexts of these, and with what the frozen layers make of openings.

        Returns the states (B, O, H) of these where the top begins; None where there is none or more has been said.
        """
        if not fresh:
            return None
        trees, is_begun = [tree for tree, _ in fresh], bool(fresh[0][1])
        histories, openings = (self._backbone.read(trees), []) if is_begun else self._backbone.open(trees)
        prefix = self._backbone.read_prefix(trees[0].prefix)
        if self._room is None:
            columns = self._context + self._opening + self._max_new_tokens
            is_shared = self._backbone.shares(prefix, self._max_rows)
            self._room = Room(prefix, self._max_rows, columns, is_shared, self._backbone.space)
        for row, history in enumerate(histories, first):
            self._room.fill(row, prefix.shape[2], history, self._context + self._opening)
        for row, opening in enumerate(openings, first):
            self._room.fill(row, self._context, opening.entries)
        return pad_sequence([opening.below for opening in openings], batch_first=True) if openings else None

    def _run(
        self, beginnings: list[Beginning], first_row: int, first_column: int, below: Tensor | None = None
    ) -> dict[Beginning, Written]:
        """Run the tokens from a column on, in rows from `first_row` on; returns what is known at their ends.

        Where the top begins, `below` are the tokens' states (B, T, H), if they are known.
        """
        if not beginnings:
            return {}
        assert self._room is not None
        said = len(beginnings[0][1])
        end = self._context + self._opening + said
        contexts = torch.tensor([tree.context_length for tree, _ in beginnings])[:, None]
        openings = torch.tensor([tree.node_count for tree, _ in beginnings])[:, None]
        columns = torch.arange(end)
        opened = columns - self._context
        is_said = opened >= self._opening
        is_real = torch.where(opened < 0, columns < contexts, is_said | (opened < openings))
        behind = contexts + torch.where(is_said, openings + opened - self._opening, opened)
        key_positions = torch.where(opened < 0, columns, behind)
        spelled = [self._spell(beginning)[first_column - self._context :] for beginning in beginnings]
        visible = is_real[:, None] & (columns <= columns[first_column:, None])
        hidden, below = self._backbone.write(
            torch.tensor(spelled) if below is None else below,
            key_positions[:, first_column:],
            visible,
            key_positions,
            self._room.cache(slice(first_row, first_row + len(beginnings)), first_column),
        )
        states = hidden[:, -1] if said else hidden[torch.arange(len(beginnings)), openings[:, 0].to(hidden.device) - 1]
        found = {}
        for row, beginning in enumerate(beginnings):
            new = (end - 1, end) if said else (self._context, self._context + beginning[0].node_count)
            states_below = below[row, -1:] if said else below[row, : openings[row]]
            found[beginning] = Written(
                states[row].clone(), self._room.copy(first_row + row, *new), states_below.clone()
            )
            self._backbone.written.put(_key(beginning), found[beginning])
        return found

    def _spell(self, beginning: Beginning) -> Ids:
        """A beginning's tokens: what opens it, padded, and what has been said."""
        tree, said = beginning
        opening = tree.decisions[0].ids
        return opening + (0,) * (self._opening - len(opening)) + said


def _key(beginning: Beginning) -> tuple[Ids, Ids, Ids, Ids]:
    """What a beginning is known by: its tokens."""
    tree, said = beginning
    return *tree.context, tree.decisions[0].ids, said


def _parent(beginning: Beginning) -> Beginning:
    """The beginning that is one token shorter."""
    tree, said = beginning
    return tree, said[:-1]
