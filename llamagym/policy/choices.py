"""The policy over choices: token by token among those that the offered choices allow, relative to the calibration.

Where choices part, the next token is drawn among those that go on; where one token alone can follow, nothing is
decided. So a choice costs no more to learn from than the places where it parts from others, however many are offered,
and a long one is not unlikely for its length: tokens that must follow count for nothing.

Shapes: B branches (places where choices part), K targets a branch (padded), T choices that are asked about.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..engine.choice_trie import ChoiceTrie, Ids, turnings
from .calibration import Calibration
from .read_plan import ReadPlan


def branch_logprobs(plan: ReadPlan, logits: Tensor, calibration: Calibration | None, temperature: float) -> Tensor:
    """Log-probability of each target of each branch, float (B, K); -inf for padding.

    softmax((logit - expected) / (temperature * deviation) + log(choices that go on so)), so that what says no more
    than is expected leaves all choices equally likely; without calibration softmax(logit / temperature).

    Args:
        plan: What goes on at each branch.
        logits: Of its targets, up to what all of a branch share, (B, K).
        calibration: What is expected of each target, and the deviation from it; None for neither.
        temperature: Above 1 flattens the distribution.
    """
    if calibration is None:
        return (logits / temperature).masked_fill(plan.log_counts == -torch.inf, -torch.inf).log_softmax(-1)
    most = logits.shape[1]
    known = [
        [*calibration.expected(branch, counts), *[0.0] * (most - len(branch.targets))]
        for branch, counts in zip(plan.branches, plan.repeat_counts, strict=True)
    ]
    shift = torch.tensor(known, device=logits.device).reshape(logits.shape)
    return ((logits - shift) / (temperature * calibration.deviation) + plan.log_counts).log_softmax(-1)


def relative(plan: ReadPlan, logits: Tensor) -> Tensor:
    """Logarithm of each target's probability over the mean of all targets' at its branch, (B, K); of no use in padding.

    What offers more targets makes each less likely, and some observations make a reply of this kind likelier than
    others do; both cancel here, so that choices met late are measured like those met first.

    Args:
        plan: What goes on at each branch.
        logits: Of its targets, up to what all of a branch share, (B, K).
    """
    is_target = plan.log_counts > -torch.inf
    return logits.masked_fill(~is_target, -torch.inf).log_softmax(-1) + is_target.sum(-1, keepdim=True).log()


def choice_logprobs(plan: ReadPlan, of_branches: Tensor, chosen: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
    """Log-probability of choices, float (T,): the sum over the branches that lead there.

    Args:
        plan: Where they part.
        of_branches: From `branch_logprobs`, (B, K).
        chosen: Decisions, and the numbers of choices of each.
    """
    of_choice, branch, target = plan.turnings(chosen)
    count = sum(len(numbers) for _, numbers in chosen)
    return of_branches.new_zeros(count).index_add(0, of_choice, of_branches[branch, target])


def offer_logprobs(plan: ReadPlan, of_branches: Tensor) -> list[Tensor]:
    """Log-probabilities of all choices that each decision offers, float (C,) each, on the CPU."""
    counts = [len(decision.choices or ()) for decision in plan.decisions]
    every = choice_logprobs(plan, of_branches, [(turn, range(count)) for turn, count in enumerate(counts)])
    # Copies: a view would keep the rows of all other decisions.
    return [offer.clone() for offer in every.cpu().split(counts)]


# Lists of choices recur.
@lru_cache(maxsize=256)
def _ways(choices: tuple[Ids, ...]) -> tuple[list[list[int]], Tensor]:
    """For each choice the branches on the way to it; and every (choice, branch, target) on any way, int64 (T, 3)."""
    ways = turnings(ChoiceTrie.of(choices).branches, choices)
    flat = [(number, *turning) for number, way in enumerate(ways) for turning in way]
    return [[branch for branch, _ in way] for way in ways], torch.tensor(flat, dtype=torch.long).reshape(-1, 3)


def logprobs_on_the_way(choices: tuple[Ids, ...], logprobs: Sequence[float], taken: int) -> Tensor:
    """Log-probability of each target of the branches on the way to a choice, by those of all choices.

    A target's probability is that of all choices that go on with it, over that of all choices that come by its branch.

    Args:
        choices: What was offered, C.
        logprobs: Log-probability of each, (C,).
        taken: The number of the choice.

    Returns:
        Float32 (M, K), M branches in order, -inf for padding, as `branch_logprobs` has them.
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
