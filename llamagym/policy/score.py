"""Reads a batch of trees: how likely each recorded or offered token is, and what the critic says.

Shapes: B rows, D nodes a row, H width, N turns, M nodes that predict tokens, K targets a node, S steps, V vocabulary,
C choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..engine.backbone import Backbone
from ..engine.likelihood import logprobs_and_entropy
from ..engine.token_tree import TokenTree
from .choices import ChoiceLength, choice_logprobs, choice_scores
from .read_plan import ReadPlan

# Bytes of logits that are computed at once: in bfloat16, those of 256 nodes over 50,000 words.
_LOGITS_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Reading:
    """One batch, read.

    Attributes:
        plan: Where what follows was read.
        features: Hidden states at prompt ends, (N, H); no gradient flows back from them.
        values: The critic's estimates there, (N,).
        step_logprobs: Log-probability of each step's token, (S,); see `read` for choices.
        node_entropy: Entropy of the next token at nodes of free text, in nats, (M,); 0 elsewhere.
        choice_scores: Log-likelihood of each choice, (turns with choices, C): by its length if `read` was given one,
            else up to what all choices of a turn share.
        choice_logprobs: The policy's log-probability of each choice, of the same shape.
    """

    plan: ReadPlan
    features: Tensor
    values: Tensor
    step_logprobs: Tensor
    node_entropy: Tensor
    choice_scores: Tensor
    choice_logprobs: Tensor


def read(
    backbone: Backbone,
    v_head: nn.Module,
    trees: Sequence[TokenTree],
    prior: Mapping[tuple[int, ...], float],
    temperature: float,
    length: ChoiceLength | None = None,
    adapted: bool = True,
    normalized: bool = False,
) -> Reading:
    """Read trees with one prefix.

    Args:
        backbone: The model.
        v_head: Values of hidden states.
        trees: What to read.
        prior: Mean score of each choice, see `choice_logprobs`.
        temperature: Of free text's tokens and of choices.
        length: What choices' log-likelihoods are divided by, see `choice_length`.
        adapted: Whether an activated LoRA acts.
        normalized: Whether the choices' first tokens are normalised over the vocabulary. What they lack otherwise is
            the same for all choices of a turn and costs most of a pass: only their own logits are computed. Divided
            by different lengths it is no longer the same, so a `length` implies it.
    """
    plan = ReadPlan.from_trees(trees).to(backbone.device)
    flat = backbone.hidden_states(trees, adapted)
    # The critic learns on the policy's features but does not shape them: its gradient stops here.
    features = flat[plan.value_nodes].detach()
    values = v_head(features).squeeze(-1)
    hidden = flat[plan.nodes]
    picked = hidden.new_zeros(plan.targets.shape, dtype=torch.float32)
    entropy = picked.new_zeros(len(plan.nodes))
    full = plan.is_text | ~plan.is_fork | normalized | (length is not None)
    if not full.all():
        picked = picked.index_put((~full,), backbone.logits_of(hidden[~full], plan.targets[~full]))
    if full.any():
        temperatures = torch.where(plan.is_text, temperature, 1.0)[full]
        read_full, entropy_full = _read_nodes(backbone, hidden[full], plan.targets[full], temperatures)
        picked = picked.index_put((full,), read_full)
        entropy = entropy.index_put((full,), entropy_full)
    step_logprobs = picked[plan.steps[:, 0], plan.steps[:, 1]]
    scores = choice_scores(plan, step_logprobs, length)
    offers = choice_logprobs(plan, scores, prior, temperature)
    return Reading(plan, features, values, step_logprobs, entropy, scores, offers)


def _read_nodes(backbone: Backbone, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets (M, K) and entropies (M,) of the next token."""
    rows = max(1, _LOGITS_BYTES // (backbone.vocabulary * hidden.element_size()))
    parts = (tensor.split(rows) for tensor in (hidden, targets, temperatures))
    chunks = [
        logprobs_and_entropy(backbone.logits(hidden), targets, temperatures)
        for hidden, targets, temperatures in zip(*parts, strict=True)
    ]
    return torch.cat([picked for picked, _ in chunks]), torch.cat([entropy for _, entropy in chunks])
