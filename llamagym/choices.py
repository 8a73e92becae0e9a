"""The policy over choices: exact scores of the offered strings, measured against their prior.

Shapes: D turns that offer choices, C choices (padded), S steps of the batch's read plan.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .batching import ReadPlan


def choice_scores(plan: ReadPlan, step_logprobs: Tensor) -> Tensor:
    """Exact log-probability of each choice's tokens, (D, C); 0 where a turn offers fewer.

    Args:
        plan: Which steps make up which choice.
        step_logprobs: Log-probability of each step's token, (S,).
    """
    rows, columns = len(plan.choices), plan.choice_width
    step, slot = plan.choice_slots.unbind(1)
    flat = torch.zeros(rows * columns, device=step_logprobs.device)
    return flat.index_add(0, slot, step_logprobs[step]).reshape(rows, columns)


def choice_logprobs(
    plan: ReadPlan, scores: Tensor, prior: Mapping[tuple[int, ...], float], temperature: float
) -> Tensor:
    """Log of softmax((score - prior) / temperature) over each turn's choices, (D, C); -inf where a turn offers fewer.

    Args:
        plan: Which choices each turn offers.
        scores: From `choice_scores`, (D, C).
        prior: Mean score of a choice's tokens; 0 if missing.
        temperature: Above 1 flattens the distribution.
    """
    shift, absent = torch.zeros(scores.shape), torch.ones(scores.shape, dtype=torch.bool)
    for row, choices in enumerate(plan.choices):
        absent[row, : len(choices)] = False
        shift[row, : len(choices)] = torch.tensor([prior.get(choice, 0.0) for choice in choices])
    logits = (scores - shift.to(scores.device)) / temperature
    return logits.masked_fill(absent.to(scores.device), -torch.inf).log_softmax(-1)
