"""Which hidden states of a batch give log-probabilities of which tokens, and which turns these belong to.

Shapes: N turns, F tokens of free text, B branches (places where choices part), K targets a branch (padded).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ..engine.choice_trie import END, Branch, turnings
from ..engine.token_tree import Decision, TokenTree


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Which nodes of a batch, counted without padding, are read, and how the readings make up the turns' decisions.

    Attributes:
        decisions: Of all trees in turn, N.
        value_nodes: Each decision's prompt end, int64 (N,).
        text_nodes: Those that predict a token of free text, int64 (F,).
        text_targets: These tokens, int64 (F,).
        text_slots: Decision and offset of each, int64 (F, 2).
        branches: Where choices part, B.
        repeat_counts: Of each, how many of the replies shown go on with each target, K a branch.
        branch_nodes: Their nodes, int64 (B,).
        branch_targets: Tokens that go on there, padded with 0, int64 (B, K).
        log_counts: Logarithm of how many choices go on with each, -inf for padding, float (B, K).
        branch_turns: The decision of each, int64 (B,).
        first_branches: Which branch of B is each decision's first.
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
        """The same plan with its tensors on `device`."""
        tensors = {
            name: value.to(device) for name in self.__slots__ if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **tensors)  # type: ignore[arg-type]

    @classmethod
    def from_trees(cls, trees: Sequence[TokenTree], closing_id: int) -> ReadPlan:
        """Collect all readings of a batch.

        Args:
            trees: What is read.
            closing_id: The token that ends a choice where longer ones go on.
        """
        decisions = tuple(decision for tree in trees for decision in tree.decisions)
        bases = accumulate((len(decision.ids) for decision in decisions), initial=0)
        ends = [base + decision.prompt_end for base, decision in zip(bases, decisions, strict=False)]
        said = [(turn, offset) for turn, decision in enumerate(decisions) for offset in range(len(decision.said))]
        met = [(turn, branch) for turn, decision in enumerate(decisions) for branch in decision.branches]
        most = max((len(branch.targets) for _, branch in met), default=0)
        targets = [
            [closing_id if token == END else token for token in branch.targets] + [0] * (most - len(branch.targets))
            for _, branch in met
        ]
        counts = [
            [math.log(count) for count in branch.counts] + [-math.inf] * (most - len(branch.counts))
            for _, branch in met
        ]
        return cls(
            decisions=decisions,
            value_nodes=torch.tensor(ends, dtype=torch.long),
            text_nodes=torch.tensor([ends[turn] + offset for turn, offset in said], dtype=torch.long),
            text_targets=torch.tensor([decisions[turn].said[offset] for turn, offset in said], dtype=torch.long),
            text_slots=torch.tensor(said, dtype=torch.long).reshape(-1, 2),
            branches=tuple(branch for _, branch in met),
            repeat_counts=tuple(counts for decision in decisions for counts in decision.repeat_counts),
            branch_nodes=torch.tensor([ends[turn] + branch.node for turn, branch in met], dtype=torch.long),
            branch_targets=torch.tensor(targets, dtype=torch.long).reshape(len(met), most),
            log_counts=torch.tensor(counts).reshape(len(met), most),
            branch_turns=torch.tensor([turn for turn, _ in met], dtype=torch.long),
            first_branches=tuple(
                accumulate((len(decision.branches) for decision in decisions[:-1]), initial=0) if decisions else ()
            ),
        )

    def turnings(self, chosen: Iterable[tuple[int, Iterable[int]]]) -> tuple[Tensor, Tensor, Tensor]:
        """What leads to choices: the number of the choice asked about, branch, and target of it; int64 (T,) each.

        Args:
            chosen: Decisions, and the numbers of choices of each.
        """
        ways = [
            [(self.first_branches[turn] + branch, target) for branch, target in way]
            for turn, numbers in chosen
            for way in turnings(self.decisions[turn].branches, self._choices(turn, numbers))
        ]
        flat = [(number, *turning) for number, way in enumerate(ways) for turning in way]
        found = torch.tensor(flat, dtype=torch.long, device=self.branch_nodes.device).reshape(-1, 3)
        of_choice, branch, target = found.unbind(1)
        return of_choice, branch, target

    def _choices(self, turn: int, numbers: Iterable[int]) -> list[tuple[int, ...]]:
        offered = self.decisions[turn].choices
        assert offered is not None, "choices are offered"
        return [offered[number] for number in numbers]
