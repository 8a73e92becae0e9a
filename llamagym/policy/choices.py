"""The policy over choices: exact scores of the offered strings, measured against their prior.

A long string is less likely than a short one, whatever they mean. Dividing its log-likelihood by its number of tokens
or of words makes up for that (TWOSOME: Tan et al. 2024, https://arxiv.org/abs/2401.14151).

Shapes: D turns that offer choices, C choices (padded), S steps of the batch's read plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import ConfigError, did_you_mean
from .read_plan import ReadPlan

ChoiceNormalization = Literal["none", "token", "word"]
# What a choice, given as token ids, has its log-likelihood divided by.
ChoiceLength = Callable[[tuple[int, ...]], int]


def choice_length(normalization: ChoiceNormalization, decode: Callable[[list[int]], str]) -> ChoiceLength | None:
    """The length that log-likelihoods are divided by, or None if they are not.

    Args:
        normalization: "none", "token" for the number of tokens, "word" for that of words between white space.
        decode: Text of token ids.

    Raises:
        ConfigError: The normalisation is unknown.

    >>> choice_length("word", lambda ids: "go " * len(ids))((7, 8, 9))
    3
    """
    if normalization not in get_args(ChoiceNormalization):
        hint = did_you_mean(normalization, get_args(ChoiceNormalization))
        raise ConfigError(f"choice_normalization={normalization!r}. {hint}")
    if normalization == "word":
        # A choice may be white space alone.
        return lru_cache(maxsize=2**14)(lambda ids: max(1, len(decode(list(ids)).split())))
    return len if normalization == "token" else None


def choice_scores(plan: ReadPlan, step_logprobs: Tensor, length: ChoiceLength | None = None) -> Tensor:
    """Exact log-probability of each choice's tokens, (D, C); 0 where a turn offers fewer.

    Args:
        plan: Which steps make up which choice.
        step_logprobs: Log-probability of each step's token, (S,).
        length: What to divide it by, from `choice_length`.
    """
    rows, columns = len(plan.choices), plan.choice_width
    step, slot = plan.choice_slots.unbind(1)
    flat = torch.zeros(rows * columns, device=step_logprobs.device)
    scores = flat.index_add(0, slot, step_logprobs[step]).reshape(rows, columns)
    if length is None:
        return scores
    lengths = torch.ones(rows, columns)
    for row, choices in enumerate(plan.choices):
        lengths[row, : len(choices)] = torch.tensor([length(choice) for choice in choices], dtype=torch.float)
    return scores / lengths.to(scores.device)


def choice_logprobs(
    plan: ReadPlan, scores: Tensor, prior: Mapping[tuple[int, ...], float], temperature: float
) -> Tensor:
    """Log of softmax((score - prior) / temperature) over each turn's choices, (D, C); -inf where a turn offers fewer.

    Args:
        plan: Which choices each turn offers.
        scores: From `choice_scores`, (D, C).
        prior: Mean score of a choice; 0 if missing.
        temperature: Above 1 flattens the distribution.
    """
    shift, absent = torch.zeros(scores.shape), torch.ones(scores.shape, dtype=torch.bool)
    for row, choices in enumerate(plan.choices):
        absent[row, : len(choices)] = False
        shift[row, : len(choices)] = torch.tensor([prior.get(choice, 0.0) for choice in choices])
    logits = (scores - shift.to(scores.device)) / temperature
    return logits.masked_fill(absent.to(scores.device), -torch.inf).log_softmax(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) along the last dimension; a logit of -inf is an impossible outcome.

    >>> round(entropy_from_logits(torch.tensor([0.0, 0.0, -torch.inf])).item(), 4)
    0.6931
    """
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)
