"""The policy over choices: token by token among the tokens that the offered choices allow, relative to the calibration.

At a branch point the next token is drawn among its targets, the tokens that some choice continues with. A token that
must follow has probability 1, so only branch points are computed, and long choices are not unlikely for their length.

Shapes: N decisions, F tokens of free text, B branch points, K targets per branch point (padded), T choices that were
taken, C choices of a decision, M branch points on the way to a choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from ..engine.choice_trie import END, Branch, ChoiceTrie, Ids
from ..engine.choice_trie import branch_points as branch_points_to
from ..engine.token_tree import Decision, TokenTree
from .calibration import Calibration


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
        branch_decisions: Decision of each branch point, int64 (B,).
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
    branch_decisions: Tensor
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
            (index, offset) for index, decision in enumerate(decisions) for offset in range(len(decision.text_ids))
        ]
        branches = [(index, branch) for index, decision in enumerate(decisions) for branch in decision.branches]
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
            text_nodes=torch.tensor([ends[index] + offset for index, offset in text_slots], dtype=torch.long),
            text_targets=torch.tensor(
                [decisions[index].text_ids[offset] for index, offset in text_slots], dtype=torch.long
            ),
            text_slots=torch.tensor(text_slots, dtype=torch.long).reshape(-1, 2),
            branches=tuple(branch for _, branch in branches),
            repeat_counts=tuple(counts for decision in decisions for counts in decision.repeat_counts),
            branch_nodes=torch.tensor([ends[index] + branch.node for index, branch in branches], dtype=torch.long),
            branch_targets=torch.tensor(targets, dtype=torch.long).reshape(len(branches), width),
            log_counts=torch.tensor(log_counts).reshape(len(branches), width),
            branch_decisions=torch.tensor([index for index, _ in branches], dtype=torch.long),
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
        for number, indices in chosen:
            decision = self.decisions[number]
            assert decision.choices is not None, "choices are offered"
            taken = [decision.choices[index] for index in indices]
            for way in branch_points_to(decision.branches, taken):
                rows += [(position, self.first_branches[number] + branch, target) for branch, target in way]
                position += 1
        flat = torch.tensor(rows, dtype=torch.long, device=self.branch_nodes.device).reshape(-1, 3)
        of_choice, branch, target = flat.unbind(1)
        return of_choice, branch, target


def branch_logprobs(plan: ReadPlan, logits: Tensor, calibration: Calibration | None, temperature: float) -> Tensor:
    """Log-probability of each target of each branch point, float (B, K); -inf for padding.

    softmax((logit - expected) / (temperature * deviation) + log(number of choices that continue with the target)), so
    that expected logits make all choices equally likely. Without calibration softmax(logit / temperature).

    Args:
        plan: Branch points and their targets.
        logits: Logits of the targets, up to a constant per branch point, (B, K).
        calibration: Expected logits and the deviation from them; None without calibration.
        temperature: Temperature; above 1 flattens the distribution.
    """
    if calibration is None:
        return (logits / temperature).masked_fill(plan.log_counts == -torch.inf, -torch.inf).log_softmax(-1)
    width = logits.shape[1]
    rows = []
    for branch, counts in zip(plan.branches, plan.repeat_counts, strict=True):
        padding = [0.0] * (width - len(branch.targets))
        rows.append(calibration.expected(branch, counts) + padding)
    expected = torch.tensor(rows, device=logits.device).reshape(logits.shape)
    return ((logits - expected) / (temperature * calibration.deviation) + plan.log_counts).log_softmax(-1)


def relative(plan: ReadPlan, logits: Tensor) -> Tensor:
    """Log of each target's probability relative to the mean of all targets at its branch point, (B, K).

    The number of targets and the total probability of the choices cancel, so that choices that are first offered later
    have comparable values. Padding has arbitrary values.

    Args:
        plan: Branch points and their targets.
        logits: Logits of the targets, up to a constant per branch point, (B, K).
    """
    is_target = plan.log_counts > -torch.inf
    return logits.masked_fill(~is_target, -torch.inf).log_softmax(-1) + is_target.sum(-1, keepdim=True).log()


def choice_logprobs(plan: ReadPlan, of_branches: Tensor, chosen: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
    """Log-probability of choices, float (T,): the sum over the branch points on their way.

    Args:
        plan: Branch points and their targets.
        of_branches: Log-probabilities from `branch_logprobs`, (B, K).
        chosen: Pairs of a decision and indices of some of its choices.
    """
    of_choice, branch, target = plan.branch_points(chosen)
    count = sum(len(numbers) for _, numbers in chosen)
    return of_branches.new_zeros(count).index_add(0, of_choice, of_branches[branch, target])


def offer_logprobs(plan: ReadPlan, of_branches: Tensor) -> list[Tensor]:
    """Log-probabilities of all choices of each decision, float (C,) each, on the CPU."""
    counts = [len(decision.choices or ()) for decision in plan.decisions]
    every = choice_logprobs(plan, of_branches, [(turn, range(count)) for turn, count in enumerate(counts)])
    # Copies, since a view would keep the memory of all other decisions.
    return [offer.clone() for offer in every.cpu().split(counts)]


# Lists of choices recur.
@lru_cache(maxsize=256)
def _ways(choices: tuple[Ids, ...]) -> tuple[list[list[int]], Tensor]:
    """The branch points on the way to each choice, and all (choice, branch point, target), int64 (T, 3)."""
    ways = branch_points_to(ChoiceTrie.of(choices).branches, choices)
    flat = [(number, *step) for number, way in enumerate(ways) for step in way]
    return [[branch for branch, _ in way] for way in ways], torch.tensor(flat, dtype=torch.long).reshape(-1, 3)


def logprobs_on_the_way(choices: tuple[Ids, ...], logprobs: Sequence[float], taken: int) -> Tensor:
    """Log-probabilities at the branch points on the way to a choice, from those of all choices.

    A target's probability is that of all choices that continue with it, divided by that of all choices that pass the
    branch point.

    Args:
        choices: The offered choices, C.
        logprobs: Log-probability of each choice, (C,).
        taken: Index of the choice that was taken.

    Returns:
        Float32 (M, K), M branch points in order; -inf for padding.
    """
    ways, flat = _ways(choices)
    if not len(flat):
        return torch.zeros(0, 0)
    choice, branch, target = flat.unbind(1)
    mass = torch.zeros(int(branch.max()) + 1, int(target.max()) + 1, dtype=torch.float64)
    mass = mass.index_put((branch, target), torch.tensor(logprobs, dtype=torch.float64).exp()[choice], accumulate=True)
    mass = mass[ways[taken]]
    return (mass / mass.sum(-1, keepdim=True)).log().float()


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) along the last dimension; a logit of -inf is an impossible outcome.

    >>> round(entropy_from_logits(torch.tensor([0.0, 0.0, -torch.inf])).item(), 4)
    0.6931
    """
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)
