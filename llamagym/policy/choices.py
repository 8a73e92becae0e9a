"""The policy over choices: token by token among the tokens that the offered choices allow, relative to the calibration.

At a branch point the next token is drawn among its targets, the tokens that some choice continues with. A token that
must follow has probability 1, so only branch points are computed, and long choices are not unlikely for their length.

Shapes: B branch points, K targets per branch point (padded), T choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..engine.choice_trie import ChoiceTrie, Ids, branch_points
from .calibration import Calibration
from .read_plan import ReadPlan


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
    ways = branch_points(ChoiceTrie.of(choices).branches, choices)
    flat = [(number, *turning) for number, way in enumerate(ways) for turning in way]
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
