"""Positions of a batch's outputs: where logits are needed, and for which decisions.

Shapes: N turns, F tokens of free text, B branch points, K targets per branch point (padded).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ..engine.choice_trie import END, Branch, branch_points
from ..engine.token_tree import Decision, TokenTree


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Positions of a batch's outputs, and their decisions.

    A node is a token of a tree; nodes of all trees are numbered in order, without padding.

    Attributes:
        decisions: The decisions of all trees, N.
        value_nodes: Node at the end of each decision's prompt, int64 (N,).
        text_nodes: Nodes that predict a token of free text, int64 (F,).
        text_targets: The predicted tokens, int64 (F,).
        text_slots: Decision and offset of each predicted token, int64 (F, 2).
        branches: The branch points, B.
        repeat_counts: Number of earlier replies that continue with each target, per branch point.
        branch_nodes: Node of each branch point, int64 (B,).
        branch_targets: Targets of each branch point, int64 (B, K), padded with 0.
        log_counts: Logarithm of the number of choices that continue with each target, float (B, K); -inf for padding.
        branch_turns: Decision of each branch point, int64 (B,).
        first_branches: Index of each decision's first branch point.
    """

    decisions: tuple[Decision, ...]
    value_nodes: Tensor
    text_nodes: Tensor
    text_targets: Tensor
    text_slots: Tensor
    branches: tuple[Branch, ...]
    repeat_counts: tuple[tuple[int, ...], ...]
    branch_nodes: Tensor
    branch_targets: Tensor
    log_counts: Tensor
    branch_turns: Tensor
    first_branches: tuple[int, ...]

    def to(self, device: torch.device) -> ReadPlan:
        """A copy with its tensors on `device`."""
        values = {name: getattr(self, name) for name in self.__slots__}
        tensors = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]

    @classmethod
    def from_trees(cls, trees: Sequence[TokenTree], closing_id: int) -> ReadPlan:
        """Creates the plan of a batch.

        Args:
            trees: Token trees of the batch.
            closing_id: Token that ends a choice which is a prefix of another.
        """
        decisions = tuple(decision for tree in trees for decision in tree.decisions)
        bases = accumulate((len(decision.ids) for decision in decisions), initial=0)
        ends = [base + decision.prompt_end for base, decision in zip(bases, decisions, strict=False)]
        text_slots = [
            (turn, offset) for turn, decision in enumerate(decisions) for offset in range(len(decision.text_ids))
        ]
        branches = [(turn, branch) for turn, decision in enumerate(decisions) for branch in decision.branches]
        width = max((len(branch.targets) for _, branch in branches), default=0)
        targets = []
        log_counts = []
        for _, branch in branches:
            padding = width - len(branch.targets)
            tokens = [closing_id if token == END else token for token in branch.targets]
            targets.append(tokens + [0] * padding)
            log_counts.append([math.log(count) for count in branch.counts] + [-math.inf] * padding)
        branch_counts = [len(decision.branches) for decision in decisions]
        return cls(
            decisions=decisions,
            value_nodes=torch.tensor(ends, dtype=torch.long),
            text_nodes=torch.tensor([ends[turn] + offset for turn, offset in text_slots], dtype=torch.long),
            text_targets=torch.tensor(
                [decisions[turn].text_ids[offset] for turn, offset in text_slots], dtype=torch.long
            ),
            text_slots=torch.tensor(text_slots, dtype=torch.long).reshape(-1, 2),
            branches=tuple(branch for _, branch in branches),
            repeat_counts=tuple(counts for decision in decisions for counts in decision.repeat_counts),
            branch_nodes=torch.tensor([ends[turn] + branch.node for turn, branch in branches], dtype=torch.long),
            branch_targets=torch.tensor(targets, dtype=torch.long).reshape(len(branches), width),
            log_counts=torch.tensor(log_counts).reshape(len(branches), width),
            branch_turns=torch.tensor([turn for turn, _ in branches], dtype=torch.long),
            first_branches=tuple(accumulate(branch_counts[:-1], initial=0)) if decisions else (),
        )

    def branch_points(self, chosen: Iterable[tuple[int, Iterable[int]]]) -> tuple[Tensor, Tensor, Tensor]:
        """The branch points on the way to some choices.

        Args:
            chosen: Pairs of a decision and indices of some of its choices.

        Returns:
            For each branch point on the way to a choice: the choice's position in `chosen`, the branch point, and the
            target taken there; int64 (T,) each.
        """
        rows: list[tuple[int, int, int]] = []
        position = 0
        for turn, indices in chosen:
            offered = self.decisions[turn].choices
            assert offered is not None, "choices are offered"
            for way in branch_points(self.decisions[turn].branches, [offered[index] for index in indices]):
                rows += [(position, self.first_branches[turn] + branch, target) for branch, target in way]
                position += 1
        flat = torch.tensor(rows, dtype=torch.long, device=self.branch_nodes.device).reshape(-1, 3)
        of_choice, branch, target = flat.unbind(1)
        return of_choice, branch, target
