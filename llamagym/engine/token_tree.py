"""Contexts as token trees, and batches of trees as rectangles for the model.

A tree is a history and the decisions that branch off it. A decision holds the generation prompt and the reply, or,
where a turn offers choices, the tokens of all choices as a trie, so that one pass scores all of them. A node attends to
the history up to where its decision branches off, to its ancestors and to itself. Past replies are also part of the
history.

Shapes: B rows, P tokens of the prefix that all rows share, S tokens of history after it and D decision nodes (both
padded), N nodes that are no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..conversation.episode import Prompt, Reply, Segment


@dataclass(frozen=True, slots=True)
class Step:
    """One next-token prediction: the logits at `node` give `target` its log-probability."""

    node: int
    target: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The tokens that give a turn its log-probability.

    Attributes:
        start: Length of the context before its first node.
        ids: Token id of each node: the generation prompt, then the reply or the choices.
        parents: Parent of each node, -1 for the first.
        prompt_end: Node of the last prompt token, where the value is read.
        outcomes: For free text one outcome, the reply's tokens. For choices one outcome per choice.
        choices: The prompt's choices, or None for free text.
    """

    start: int
    ids: tuple[int, ...]
    parents: tuple[int, ...]
    prompt_end: int
    outcomes: tuple[tuple[Step, ...], ...]
    choices: tuple[tuple[int, ...], ...] | None

    @classmethod
    def from_turn(cls, start: int, prompt: Prompt, reply: Reply | None) -> Decision:
        """Lay out a turn's decision, leaving out tokens that nothing is read from."""
        ids = list(prompt.ids[-prompt.opening_length :])
        parents = list(range(-1, len(ids) - 1))
        end = len(ids) - 1
        if prompt.choices is not None:
            outcomes = _grow_branches(ids, parents, end, prompt.choices)
        else:
            said = reply.ids if reply else ()
            outcomes = (tuple(Step(end + offset, token) for offset, token in enumerate(said)),)
            ids += said[:-1]
            parents += range(end, end + len(said[:-1]))
        return cls(start, tuple(ids), tuple(parents), end, outcomes, prompt.choices)


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

    @property
    def context_length(self) -> int:
        """Tokens of prefix and history."""
        return len(self.prefix) + len(self.history)

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


def _grow_branches(
    ids: list[int], parents: list[int], end: int, choices: Sequence[tuple[int, ...]]
) -> tuple[tuple[Step, ...], ...]:
    """Append the choices' tokens as a trie below `end`; choices that begin alike share nodes."""
    nodes: dict[tuple[int, ...], int] = {(): end}
    outcomes = []
    for choice in choices:
        steps = []
        for depth, token in enumerate(choice):
            prefix = choice[:depth]
            if prefix not in nodes:
                parents.append(nodes[prefix[:-1]])
                ids.append(prefix[-1])
                nodes[prefix] = len(ids) - 1
            steps.append(Step(nodes[prefix], token))
        outcomes.append(tuple(steps))
    return tuple(outcomes)


@dataclass(frozen=True, slots=True)
class Batch:
    """Trees with the same prefix as padded rectangles; padding is id 0, and no other token attends to it.

    Attributes:
        prefix: The shared ids, int64 (1, P).
        history: Ids, int64 (B, S).
        ids: Decision nodes, int64 (B, D).
        positions: Where each node stands in its context, int64 (B, D).
        visible: True where a node (query) sees a key, bool (B, D, P + S + D).
        places: Flat index (row * D + column) of each node that is no padding, int64 (N,).
    """

    prefix: Tensor
    history: Tensor
    ids: Tensor
    positions: Tensor
    visible: Tensor
    places: Tensor

    @property
    def prefix_length(self) -> int:
        """P."""
        return self.prefix.shape[1]

    @property
    def key_positions(self) -> Tensor:
        """Positions of prefix, history and decision nodes, int64 (B, P + S + D)."""
        count, size = self.history.shape
        context = torch.arange(self.prefix_length + size).expand(count, -1)
        return torch.cat([context, self.positions], dim=1)

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
        seen = np.arange(shared + size) < starts[:, :, None]
        visible = np.concatenate([seen, own], axis=2)
        counts = np.array([tree.node_count for tree in trees])
        places = np.flatnonzero(np.arange(width) < counts[:, None])
        parts = np.array([prefix], np.int64), history, ids, positions, visible, places
        return cls(*map(torch.from_numpy, parts))
