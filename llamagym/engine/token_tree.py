"""Contexts as token trees, and batches of trees as rectangles for the model.

A tree is a history and the decisions that branch off it. A decision holds the generation prompt and the reply. Where a
turn offers choices, it holds what leads to the places where they part: for all of them while one is still to be
chosen, so that one pass scores all, and for the one that was said afterwards. A node attends to the history up to
where its decision branches off, to its ancestors and to itself. Past replies are also part of the history.

Shapes: B rows, P tokens of the prefix that all rows share, S tokens of history after it and D decision nodes (both
padded), N nodes that are no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..text.episode import Prompt, Reply, Segment
from .choice_trie import Branch, ChoiceTrie, repeat_counts
from .masks import Tokens


@dataclass(frozen=True, slots=True)
class Decision:
    """The tokens that give a turn its log-probability.

    Attributes:
        start: Length of the context before its first node.
        ids: Token id of each node: the generation prompt, then what is read of the reply or the choices.
        parents: Parent of each node, -1 for the first.
        prompt_end: Node of the last prompt token, where the value is read and the reply begins.
        said: The reply's tokens in free text, each predicted by the node before it; empty for choices.
        choices: The prompt's choices, or None for free text.
        branches: Where choices part, their nodes counted from `prompt_end`; they follow from choices and nodes.
        repeat_counts: Of each branch, how many of the replies shown go on with each target; they follow from the
            history.
    """

    start: int
    ids: tuple[int, ...]
    parents: tuple[int, ...]
    prompt_end: int
    said: tuple[int, ...] = ()
    choices: tuple[tuple[int, ...], ...] | None = None
    branches: tuple[Branch, ...] = field(default=(), compare=False)
    repeat_counts: tuple[tuple[int, ...], ...] = field(default=(), compare=False)

    @property
    def depth(self) -> int:
        """Tokens on the longest way from the first node to a last one."""
        if self.choices is None:
            return len(self.ids)
        return self.prompt_end + 1 + max((len(branch.path) for branch in self.branches), default=0)

    @classmethod
    def from_turn(cls, start: int, prompt: Prompt, reply: Reply | None) -> Decision:
        """Lay out a turn's decision."""
        opening = prompt.ids[-prompt.opening_length :]
        end = len(opening) - 1
        if prompt.choices is None:
            said = reply.ids if reply else ()
            ids = opening + said[:-1]
            return cls(start, ids, tuple(range(-1, len(ids) - 1)), end, said)
        trie = ChoiceTrie.of(prompt.choices)
        trie = trie.along(reply.ids) if reply else trie
        parents = (*range(-1, end), *(end + parent for parent in trie.parents))
        counts = repeat_counts(trie.branches, prompt.replies_shown)
        return cls(start, opening + trie.ids, parents, end, (), prompt.choices, trie.branches, counts)


@dataclass(frozen=True, slots=True)
class TokenTree:
    """One context with its decisions.

    Attributes:
        prefix: Leading token ids that other contexts share.
        history: The ids that follow, up to where the last decision begins.
        decisions: One per turn, or the pending prompt's alone.
    """

    prefix: tuple[int, ...]
    history: tuple[int, ...]
    decisions: tuple[Decision, ...]
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Hash all ids, once: a tree is looked up several times."""
        object.__setattr__(self, "_hash", hash((self.prefix, self.history, self.decisions)))

    def __hash__(self) -> int:
        """Of the ids, as equal trees have it."""
        return self._hash

    @property
    def context_length(self) -> int:
        """Tokens of prefix and history."""
        return len(self.prefix) + len(self.history)

    @property
    def undecided(self) -> tuple[object, ...]:
        """What is the same for trees that differ in which choices were taken alone."""
        openings = ((d.start, d.ids[: d.prompt_end + 1], d.said, d.choices) for d in self.decisions)
        return self.prefix, self.history, tuple(openings)

    @property
    def node_count(self) -> int:
        """Nodes of all decisions."""
        return sum(len(decision.ids) for decision in self.decisions)

    def paths(self) -> list[tuple[int, ...]]:
        """Of each node in turn: the ids from its decision's first node to itself."""
        paths: list[tuple[int, ...]] = []
        for decision in self.decisions:
            base = len(paths)
            for token, parent in zip(decision.ids, decision.parents, strict=True):
                paths.append((*(paths[base + parent] if parent >= 0 else ()), token))
        return paths

    @classmethod
    def from_segment(cls, segment: Segment) -> TokenTree:
        """Lay out a segment: its pending prompt's decision if it has one, otherwise those of all turns."""
        ids: list[int] = []
        decisions: list[Decision] = []
        shared, start = segment.prompts[0].shared_length, 0
        for index, prompt in enumerate(segment.prompts):
            reply = segment.turns[index].reply if index < len(segment.turns) else None
            ids += prompt.ids
            start = len(ids) - prompt.opening_length
            if reply is None or segment.pending is None:
                decisions.append(Decision.from_turn(start, prompt, reply))
            if reply is not None:
                ids += reply.ids
        return cls(tuple(ids[:shared]), tuple(ids[shared:start]), tuple(decisions))


@dataclass(frozen=True, slots=True)
class Batch:
    """Trees with the same prefix as padded rectangles; padding is id 0, and no other token attends to it.

    Attributes:
        prefix: The shared ids, int64 (1, P).
        history: Ids, int64 (B, S).
        nodes: Decision nodes, (B, D), whose keys are those of prefix, history and nodes, P + S + D.
        places: Flat index (row * D + column) of each node that is no padding, int64 (N,).
    """

    prefix: Tensor
    history: Tensor
    nodes: Tokens
    places: Tensor

    @property
    def prefix_length(self) -> int:
        """P."""
        return self.prefix.shape[1]

    @classmethod
    def from_trees(cls, trees: Sequence[TokenTree]) -> Batch:
        """Pad trees to one length."""
        prefix = trees[0].prefix
        assert all(tree.prefix == prefix for tree in trees), "a batch has one prefix"
        count, shared = len(trees), len(prefix)
        size, width = max(len(tree.history) for tree in trees), max(tree.node_count for tree in trees)
        history, ids, positions, starts = (np.zeros((count, of), np.int64) for of in (size, width, width, width))
        # Padding sees itself: a query without a key would be NaN.
        own = np.tile(np.eye(width, dtype=np.bool_), (count, 1, 1))
        for row, tree in enumerate(trees):
            history[row, : len(tree.history)] = tree.history
            base = 0
            for decision in tree.decisions:
                end = base + len(decision.ids)
                ids[row, base:end] = decision.ids
                starts[row, base:end] = positions[row, base:end] = decision.start
                for node, parent in enumerate(decision.parents, base):
                    if parent >= 0:
                        own[row, node] |= own[row, base + parent]
                        positions[row, node] = positions[row, base + parent] + 1
                base = end
        context = np.arange(shared + size)
        visible = np.concatenate([context < starts[:, :, None], own], axis=2)
        key_positions = np.concatenate([np.tile(context, (count, 1)), positions], axis=1)
        counts = np.array([tree.node_count for tree in trees])
        places = np.flatnonzero(np.arange(width) < counts[:, None])
        nodes = Tokens(*map(torch.from_numpy, (ids, positions, visible, key_positions)))
        return cls(torch.tensor([prefix], dtype=torch.long), torch.from_numpy(history), nodes, torch.from_numpy(places))
