"""Queries and their responses as one rectangle, for `ppo_trainer`, and what a model says of them.

Shapes: B samples, T tokens, M tokens of all responses, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..models.value_head import AutoModelForCausalLMWithValueHead


class Samples(NamedTuple):
    """Queries and responses as a rectangle, padded on the right, and what the response tokens are trained towards.

    ids and attention are int64 (B, T). mask is True at t where token t + 1 belongs to the response, bool (B, T - 1).
    The rest, float (B, T - 1), belongs to the mask's positions; log-probabilities and values are those at the start.
    """

    ids: Tensor
    attention: Tensor
    mask: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def rows(self, index: Tensor) -> Samples:
        """Some of the samples."""
        return Samples(*(part[index] for part in self))


def pack(queries: Sequence[Tensor], responses: Sequence[Tensor], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """The batch's ids, attention and mask."""
    ids = pad_sequence([torch.cat(pair) for pair in zip(queries, responses, strict=True)], True, pad_id)
    query_lengths = torch.tensor([len(query) for query in queries])[:, None]
    lengths = query_lengths + torch.tensor([len(response) for response in responses])[:, None]
    position = torch.arange(ids.shape[1])
    attention = (position < lengths).long()
    return ids, attention, ((position >= query_lengths) & (position < lengths))[:, 1:]


def read(
    model: AutoModelForCausalLMWithValueHead, ids: Tensor, attention: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and values at the mask, 0 elsewhere, float32 (B, T - 1), and the mask's logits (M, V)."""
    logits, _, values = model(input_ids=ids, attention_mask=attention)
    logits = logits[:, :-1][mask]
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:][mask][:, None])[:, 0]
    logprobs = torch.zeros(mask.shape, device=logits.device).masked_scatter(mask, chosen)
    return logprobs, values[:, :-1].float().masked_fill(~mask, 0.0), logits
