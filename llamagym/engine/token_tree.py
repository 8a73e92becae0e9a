"""Contexts as token trees, and batches of trees as rectangles for the model.

A tree is a history, which is only read, and decisions that branch off it: the tokens that open a reply and the reply's
own, or every choice's where a turn offers choices, so that all are scored with the history read once. A node of a
decision sees the history up to where the decision branches off, its ancestors and itself, nothing else. Past replies
stand in the history once more, as text to be read.

Shapes: B rows, P tokens of the prefix that all rows share, S tokens of history after it and D decision nodes (both
padded), N nodes that are no padding, M of them that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

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
    """What a turn's log-probability is made of.

    Attributes:
        start: Length of the context before its first node.
        ids: Token id of each node: the tokens that open the reply, then the reply's or the choices'.
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
    """Trees with the same prefix as padded rectangles; padding is id 0 and is seen by nobody else.

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


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Which nodes of a batch, counted without padding, are read, and how the readings make up the turns' decisions.

    Attributes:
        value_nodes: Each decision's prompt end, int64 (decisions,).
        nodes: Those that predict tokens, int64 (M,).
        targets: Tokens to read at each node, padded with 0, int64 (M, K).
        is_text: True at nodes that predict free text, bool (M,).
        is_fork: True at nodes that all choices of a turn branch off, bool (M,).
        steps: For each step its row and column in `targets`, int64 (S, 2).
        text_slots: For each free-text step its index among the steps, its decision and its offset, int64 (F, 3).
        choice_slots: For each choice step its index among the steps and its flat slot in the choice table, (C, 2).
        choice_turns: Decisions that offer choices, int64 (D,).
        choices: The choices of these turns.
    """

    value_nodes: Tensor
    nodes: Tensor
    targets: Tensor
    is_text: Tensor
    is_fork: Tensor
    steps: Tensor
    text_slots: Tensor
    choice_slots: Tensor
    choice_turns: Tensor
    choices: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def choice_width(self) -> int:
        """Columns of the choice table: the largest number of choices that any turn offers."""
        return max((len(choices) for choices in self.choices), default=0)

    def to(self, device: torch.device) -> ReadPlan:
        """The same plan with its tensors on `device`."""
        tensors = {
            name: value.to(device) for name in self.__slots__ if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **tensors)  # type: ignore[arg-type]

    @classmethod
    def from_trees(cls, trees: Sequence[TokenTree]) -> ReadPlan:
        """Collect all readings of a batch."""
        every = [decision for tree in trees for decision in tree.decisions]
        decisions = list(zip(accumulate((len(decision.ids) for decision in every), initial=0), every, strict=False))
        choosing = [(turn, d) for turn, (_, d) in enumerate(decisions) if d.choices is not None]
        choice_width = max((len(d.outcomes) for _, d in choosing), default=0)
        table_row = {turn: row for row, (turn, _) in enumerate(choosing)}

        targets: dict[int, list[int]] = {}
        is_text: dict[int, bool] = {}
        is_fork: dict[int, bool] = {}
        steps: list[tuple[int, int]] = []
        text_slots, choice_slots = [], []
        for turn, (base, decision) in enumerate(decisions):
            for outcome_index, outcome in enumerate(decision.outcomes):
                for offset, step in enumerate(outcome):
                    node = base + step.node
                    if decision.choices is None:
                        text_slots.append((len(steps), turn, offset))
                    else:
                        choice_slots.append((len(steps), table_row[turn] * choice_width + outcome_index))
                    is_text[node] = decision.choices is None
                    is_fork[node] = decision.choices is not None and offset == 0
                    columns = targets.setdefault(node, [])
                    steps.append((node, len(columns)))
                    columns.append(step.target)
        row_of = {node: row for row, node in enumerate(targets)}
        most = max((len(columns) for columns in targets.values()), default=0)
        padded = [columns + [0] * (most - len(columns)) for columns in targets.values()]
        return cls(
            value_nodes=torch.tensor([base + decision.prompt_end for base, decision in decisions]),
            nodes=torch.tensor(list(targets), dtype=torch.long),
            targets=torch.tensor(padded, dtype=torch.long).reshape(len(targets), most),
            is_text=torch.tensor(list(is_text.values()), dtype=torch.bool),
            is_fork=torch.tensor(list(is_fork.values()), dtype=torch.bool),
            steps=torch.tensor([(row_of[node], column) for node, column in steps], dtype=torch.long).reshape(-1, 2),
            text_slots=torch.tensor(text_slots, dtype=torch.long).reshape(-1, 3),
            choice_slots=torch.tensor(choice_slots, dtype=torch.long).reshape(-1, 2),
            choice_turns=torch.tensor([turn for turn, _ in choosing], dtype=torch.long),
            choices=tuple(d.choices for _, d in choosing if d.choices is not None),
        )
