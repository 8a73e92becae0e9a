"""Contexts as token trees, and batches of trees as rectangles for the model.

A tree's trunk is the context as the model sees it. Where a turn offers choices, their tokens grow as branches from the
end of its prompt, so that every choice is scored with the context computed once. Each node sees its ancestors and
itself, nothing else, whatever lies beside it in the row.

Shapes: B rows, T nodes a row (padded), P tokens of the prefix that all rows share, M nodes that are read, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .conversation import Prompt, Reply, Segment


@dataclass(frozen=True, slots=True)
class Step:
    """One next-token prediction: the logits at `node` give `target` its log-probability."""

    node: int
    target: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What a turn's log-probability is made of.

    Attributes:
        prompt_end: Node of the last prompt token, where the value is read.
        outcomes: For free text one outcome, the reply's tokens. For choices one outcome per choice.
        choices: The prompt's choices, or None for free text.
    """

    prompt_end: int
    outcomes: tuple[tuple[Step, ...], ...]
    choices: tuple[tuple[int, ...], ...] | None


@dataclass(frozen=True, slots=True)
class TokenTree:
    """One context with its branches.

    Attributes:
        ids: Token id of each node, trunk first.
        parents: Parent of each node, -1 for the root; a trunk node's parent is the node before it.
        trunk_length: Number of trunk nodes.
        decisions: One per turn, or the pending prompt's alone.
    """

    ids: tuple[int, ...]
    parents: tuple[int, ...]
    trunk_length: int
    decisions: tuple[Decision, ...]

    def __len__(self) -> int:
        """Number of nodes."""
        return len(self.ids)

    @classmethod
    def from_segment(cls, segment: Segment) -> TokenTree:
        """Lay out a segment, leaving out tokens that nothing is read from.

        With a pending prompt only that prompt's decision is read; otherwise those of all turns.
        """
        ids: list[int] = []
        ends: list[int] = []
        for index, prompt in enumerate(segment.prompts):
            ids += prompt.ids
            ends.append(len(ids) - 1)
            if index < len(segment.turns):
                said = segment.turns[index].reply.ids
                is_last = index == len(segment.prompts) - 1
                # After the last decision only the tokens that predict a sampled one are needed.
                ids += said if not is_last else () if prompt.choices else said[:-1]
        trunk_length = len(ids)
        parents = list(range(-1, trunk_length - 1))
        open_decisions: list[tuple[int, Prompt, Reply | None]]
        if segment.pending is not None:
            open_decisions = [(ends[-1], segment.pending, None)]
        else:
            open_decisions = [(end, turn.prompt, turn.reply) for end, turn in zip(ends, segment.turns, strict=True)]
        decisions = []
        for end, prompt, reply in open_decisions:
            if prompt.choices is not None:
                outcomes = _grow_branches(ids, parents, end, prompt.choices)
                decisions.append(Decision(end, outcomes, prompt.choices))
            else:
                steps = tuple(Step(end + offset, token) for offset, token in enumerate(reply.ids if reply else ()))
                decisions.append(Decision(end, (steps,), None))
        return cls(tuple(ids), tuple(parents), trunk_length, tuple(decisions))


def _grow_branches(
    ids: list[int], parents: list[int], end: int, choices: Sequence[tuple[int, ...]]
) -> tuple[tuple[Step, ...], ...]:
    """Append the choices' tokens to the tree as a trie below `end`; choices that begin alike share nodes."""
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


def shared_prefix_length(trees: Sequence[TokenTree]) -> int:
    """How many leading tokens all trees share, every prompt's last token excluded (its output is read)."""
    limit = min(tree.decisions[0].prompt_end for tree in trees)
    first, *others = trees
    for tree in others:
        while tree.ids[:limit] != first.ids[:limit]:
            limit = next(i for i in range(limit) if tree.ids[i] != first.ids[i])
    return limit


@dataclass(frozen=True, slots=True)
class Batch:
    """Trees as padded rectangles, the first `prefix_length` nodes of each left out.

    Attributes:
        ids: Token ids, int64 (B, T); padding is 0 and masked.
        positions: Depth of each node in its tree, int64 (B, T).
        visible: True where a node (query) sees another (key), bool (B, T, P + T); padding sees itself only.
        prefix_ids: The shared prefix, int64 (1, P).
        lengths: Real nodes per row, int64 (B,).
    """

    ids: Tensor
    positions: Tensor
    visible: Tensor
    prefix_ids: Tensor
    lengths: Tensor

    @property
    def prefix_length(self) -> int:
        """P, the number of shared tokens."""
        return self.prefix_ids.shape[1]

    @classmethod
    def from_trees(cls, trees: Sequence[TokenTree], prefix_length: int) -> Batch:
        """Pad the trees, less their first `prefix_length` nodes, to one length."""
        count, width = len(trees), max(len(tree) for tree in trees) - prefix_length
        ids = torch.zeros(count, width, dtype=torch.long)
        positions = torch.zeros(count, width, dtype=torch.long)
        own = torch.eye(width, dtype=torch.bool).repeat(count, 1, 1)
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        for row, tree in enumerate(trees):
            size, trunk = len(tree) - prefix_length, tree.trunk_length - prefix_length
            ids[row, :size] = torch.tensor(tree.ids[prefix_length:])
            positions[row, :trunk] = torch.arange(prefix_length, tree.trunk_length)
            own[row, :trunk, :trunk] = causal[:trunk, :trunk]
            for node in range(trunk, size):
                parent = tree.parents[node + prefix_length] - prefix_length
                own[row, node] |= own[row, parent]
                positions[row, node] = positions[row, parent] + 1
        lengths = torch.tensor([len(tree) - prefix_length for tree in trees])
        to_prefix = (torch.arange(width) < lengths[:, None])[:, :, None].expand(-1, -1, prefix_length)
        visible = torch.cat([to_prefix, own], dim=2)
        prefix_ids = torch.tensor(trees[0].ids[:prefix_length], dtype=torch.long)[None]
        return cls(ids, positions, visible, prefix_ids, lengths)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Where in a batch outputs are read, and how the readings make up the turns' decisions.

    Attributes:
        value_nodes: Flat index (row * T + node) of each decision's prompt end, int64 (N,).
        nodes: Flat indices of the nodes whose next-token distribution is needed, int64 (M,).
        targets: Tokens to read at each node, padded with 0, int64 (M, K).
        is_text: True at nodes that predict free text, bool (M,).
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
    def from_trees(cls, trees: Sequence[TokenTree], prefix_length: int, width: int) -> ReadPlan:
        """Collect all readings of a batch whose rows hold `width` nodes after the prefix."""
        decisions = [
            (row * width - prefix_length, decision) for row, tree in enumerate(trees) for decision in tree.decisions
        ]
        choosing = [(turn, d) for turn, (_, d) in enumerate(decisions) if d.choices is not None]
        choice_width = max((len(d.outcomes) for _, d in choosing), default=0)
        table_row = {turn: row for row, (turn, _) in enumerate(choosing)}

        targets: dict[int, list[int]] = {}
        is_text: dict[int, bool] = {}
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
            steps=torch.tensor([(row_of[node], column) for node, column in steps], dtype=torch.long).reshape(-1, 2),
            text_slots=torch.tensor(text_slots, dtype=torch.long).reshape(-1, 3),
            choice_slots=torch.tensor(choice_slots, dtype=torch.long).reshape(-1, 2),
            choice_turns=torch.tensor([turn for turn, _ in choosing], dtype=torch.long),
            choices=tuple(d.choices for _, d in choosing if d.choices is not None),
        )
