"""Which hidden states of a batch give log-probabilities of which tokens, and which turns these belong to.

Shapes: N decision nodes, M of them that predict tokens, K targets a node, S steps, C choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ..engine.token_tree import TokenTree


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
