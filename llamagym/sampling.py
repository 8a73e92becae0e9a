"""Draws from distributions: one choice, or a text token by token."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from .backbone import Backbone
from .batching import Batch, TokenTree
from .conversation import FinishReason
from .generation import GenerationConfig


@dataclass(frozen=True, slots=True)
class Text:
    """A sampled text: token ids, the log-probability of each, and why it ended."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


def draw(logits: Tensor, greedy: bool, rng: torch.Generator) -> Tensor:
    """An index into the last dimension of logits (V,) or (B, V), on the generator's device."""
    if greedy:
        return logits.argmax(-1).to(rng.device)
    return torch.multinomial(logits.softmax(-1).to(rng.device), 1, generator=rng).squeeze(-1)


@torch.no_grad()
def write_text(
    backbone: Backbone,
    trees: Sequence[TokenTree],
    config: GenerationConfig,
    eos_ids: AbstractSet[int],
    rng: torch.Generator,
) -> tuple[Tensor, list[Text]]:
    """Sample a reply to each context, keeping the key-value entries from token to token.

    Log-probabilities are those under softmax(logits / temperature), before top-k and top-p.

    Args:
        backbone: The model.
        trees: Contexts that await free text.
        config: How to sample.
        eos_ids: Every id that ends a reply.
        rng: Random numbers.

    Returns:
        The hidden state of each context's last token, float (B, H), and the texts.
    """
    batch = Batch.from_trees(trees)
    states, cache = backbone.start_writing(trees, batch)
    rows = active = torch.arange(len(trees))
    ends = torch.tensor([tree.decisions[0].prompt_end for tree in trees])
    positions = batch.positions[rows, ends]
    first = hidden = states[rows.to(states.device), ends.to(states.device)]
    visible, key_positions = batch.visible[rows, ends], batch.key_positions
    ids: list[list[int]] = [[] for _ in trees]
    logprobs: list[list[float]] = [[] for _ in trees]
    reasons: list[FinishReason] = ["length"] * len(trees)
    for length in range(1, config.max_new_tokens + 1):
        logits = backbone.logits(hidden) / config.temperature
        tokens = draw(_cut(logits, config), not config.do_sample, rng)
        taken = logits.log_softmax(-1).gather(1, tokens[:, None].to(logits.device))[:, 0]
        for row, token, logprob in zip(active.tolist(), tokens.tolist(), taken.tolist(), strict=True):
            ids[row].append(token)
            logprobs[row].append(logprob)
            if token in eos_ids:
                reasons[row] = "eos"
        keep = torch.tensor([reasons[row] != "eos" for row in active.tolist()]).nonzero()[:, 0]
        if length == config.max_new_tokens or not len(keep):
            break
        if len(keep) < len(active):
            active, positions = active[keep], positions[keep]
            visible, key_positions = visible[keep], key_positions[keep]
            cache.batch_select_indices(keep.to(states.device))
        positions = positions + 1
        visible = torch.cat([visible, torch.ones(len(active), 1, dtype=torch.bool)], dim=1)
        key_positions = torch.cat([key_positions, positions[:, None]], dim=1)
        hidden = backbone.extend(tokens[keep], positions, visible, key_positions, cache)
    return first, [Text(tuple(i), tuple(p), reason) for i, p, reason in zip(ids, logprobs, reasons, strict=True)]


def _cut(logits: Tensor, config: GenerationConfig) -> Tensor:
    """Logits after top-k and top-p."""
    if config.top_k:
        logits = TopKLogitsWarper(config.top_k)(None, logits)
    if config.top_p < 1.0:
        logits = TopPLogitsWarper(config.top_p)(None, logits)
    return logits
