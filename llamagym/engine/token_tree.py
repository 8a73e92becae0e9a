"""Contexts as token trees, and batches of trees as rectangles for the model.

A tree is a history and the decisions that branch off it. A decision consists of the generation prompt and the reply. If
a turn has choices, it consists of the tokens that lead to their branch points: of all choices while one is still to be
sampled, so that one pass scores all, and of the sampled one afterwards. A node attends to the history up to where its
decision branches off, to its ancestors and to itself. Past replies are also part of the history.

Shapes: B rows, P tokens of the prefix that all rows share, S tokens of history after it and D decision nodes (both
padded), N nodes without padding.
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
    """The tokens from which a turn's log-probability is computed.

    Attributes:
        start: Length of the context before its first node.
        ids: Token id of each node: the generation prompt, then the reply or the nodes of the choices' trie.
        parents: Parent of each node, -1 for the first.
        prompt_end: Node of the last prompt token, where the value is read and the reply begins.
        text_ids: The reply's tokens in free text, each predicted by the node before it; empty for choices.
        choices: The prompt's choices; None for free text.
        branches: Branch points of the choices, their nodes counted from `prompt_end`; derived from choices and nodes.
        repeat_counts: For each branch point, how many of the replies shown continue with each target; derived from the
            history.
    """

    start: int
    ids: tuple[int, ...]
    parents: tuple[int, ...]
    prompt_end: int
    text_ids: tuple[int, ...] = ()
    choices: tuple[tuple[int, ...], ...] | None = None
    branches: tuple[Branch, ...] = field(default=(), compare=False)
    repeat_counts: tuple[tuple[int, ...], ...] = field(default=(), compare=False)

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path of nodes."""
        if self.choices is None:
            return len(self.ids)
        return self.prompt_end + 1 + max((len(branch.path) for branch in self.branches), default=0)

    @classmethod
    def from_turn(cls, start: int, prompt: Prompt, reply: Reply | None) -> Decision:
        """Lays out a turn's decision, or a pending prompt's if there is no reply."""
        generation_prompt = prompt.ids[-prompt.opening_length :]
        end = len(generation_prompt) - 1
        if prompt.choices is None:
            text_ids = reply.ids if reply else ()
            ids = generation_prompt + text_ids[:-1]
            return cls(start, ids, tuple(range(-1, len(ids) - 1)), end, text_ids)
        trie = ChoiceTrie.of(prompt.choices)
        if reply:
            trie = trie.path_to(reply.ids)
        parents = (*range(-1, end), *(end + parent for parent in trie.parents))
        counts = repeat_counts(trie.branches, prompt.replies_shown)
        return cls(start, generation_prompt + trie.ids, parents, end, (), prompt.choices, trie.branches, counts)


@dataclass(frozen=True, slots=True)
class TokenTree:
    """One context with its decisions.

    Attributes:
        prefix: Leading token ids that other contexts share.
        history: The ids that follow, up to where the last decision begins.
        decisions: One per turn, or the pending prompt's only.
    """

    prefix: tuple[int, ...]
    history: tuple[int, ...]
    decisions: tuple[Decision, ...]
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Computes the hash once: a tree is looked up several times."""
        object.__setattr__(self, "_hash", hash((self.prefix, self.history, self.decisions)))

    def __hash__(self) -> int:
        """Hash of all ids."""
        return self._hash

    @property
    def context_length(self) -> int:
        """Number of tokens of prefix and history."""
        return len(self.prefix) + len(self.history)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """All token ids up to where a pending prompt's reply in free text begins."""
        return self.prefix + self.history + self.decisions[0].ids

    @property
    def prompt_key(self) -> tuple[object, ...]:
        """Equal for trees that differ only in which choices were taken."""
        prompts = ((d.start, d.ids[: d.prompt_end + 1], d.text_ids, d.choices) for d in self.decisions)
        return self.prefix, self.history, tuple(prompts)

    @property
    def node_count(self) -> int:
        """Number of nodes of all decisions."""
        return sum(len(decision.ids) for decision in self.decisions)

    def paths(self) -> list[tuple[int, ...]]:
        """For each node, the ids from its decision's first node to itself."""
        paths: list[tuple[int, ...]] = []
        for decision in self.decisions:
            base = len(paths)
            for token, parent in zip(decision.ids, decision.parents, strict=True):
                before = paths[base + parent] if parent >= 0 else ()
                paths.append((*before, token))
        return paths

    @classmethod
    def from_segment(cls, segment: Segment) -> TokenTree:
        """Lays out a segment: its pending prompt's decision if it has one, otherwise those of all turns."""
        ids: list[int] = []
        decisions: list[Decision] = []
        prefix_length = segment.prompts[0].shared_length
        start = 0
        for index, prompt in enumerate(segment.prompts):
            reply = segment.turns[index].reply if index < len(segment.turns) else None
            ids += prompt.ids
            start = len(ids) - prompt.opening_length
            if reply is None or segment.pending is None:
                decisions.append(Decision.from_turn(start, prompt, reply))
            if reply is not None:
                ids += reply.ids
        return cls(tuple(ids[:prefix_length]), tuple(ids[prefix_length:start]), tuple(decisions))


@dataclass(frozen=True, slots=True)
class Batch:
    """Trees with one prefix as padded rectangles; padding has id 0, and no other token attends to it.

    Attributes:
        prefix: Ids of the shared prefix, int64 (1, P).
        history: Ids of the histories, int64 (B, S).
        nodes: Decision nodes, (B, D), whose keys are those of prefix, history and nodes, P + S + D.
        places: Flat index (row * D + column) of each node without padding, int64 (N,).
    """

    prefix: Tensor
    history: Tensor
    nodes: Tokens
    places: Tensor

    @property
    def prefix_length(self) -> int:
        """Length of the shared prefix, P."""
        return self.prefix.shape[1]

    @classmethod
    def from_trees(cls, trees: Sequence[TokenTree]) -> Batch:
        """Pads trees to one length."""
        prefix = trees[0].prefix
        assert all(tree.prefix == prefix for tree in trees), "a batch has one prefix"
        count = len(trees)
        size = max(len(tree.history) for tree in trees)
        width = max(tree.node_count for tree in trees)
        history = np.zeros((count, size), np.int64)
        ids = np.zeros((count, width), np.int64)
        positions = np.zeros((count, width), np.int64)
        starts = np.zeros((count, width), np.int64)
        # Padding attends to itself: a query without a key would give NaN.
        visible_nodes = np.tile(np.eye(width, dtype=np.bool_), (count, 1, 1))
        for row, tree in enumerate(trees):
            history[row, : len(tree.history)] = tree.history
            base = 0
            for decision in tree.decisions:
                end = base + len(decision.ids)
                ids[row, base:end] = decision.ids
                starts[row, base:end] = decision.start
                positions[row, base:end] = decision.start
                for node, parent in enumerate(decision.parents, base):
                    if parent >= 0:
                        visible_nodes[row, node] |= visible_nodes[row, base + parent]
                        positions[row, node] = positions[row, base + parent] + 1
                base = end
        context = np.arange(len(prefix) + size)
        visible = np.concatenate([context < starts[:, :, None], visible_nodes], axis=2)
        key_positions = np.concatenate([np.tile(context, (count, 1)), positions], axis=1)
        node_counts = np.array([tree.node_count for tree in trees])
        places = np.flatnonzero(np.arange(width) < node_counts[:, None])
        nodes = Tokens(*map(torch.from_numpy, (ids, positions, visible, key_positions)))
        return cls(torch.tensor([prefix], dtype=torch.long), torch.from_numpy(history), nodes, torch.from_numpy(places))
