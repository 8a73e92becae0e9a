"""Reads a batch of trees: how likely each recorded or offered token is, and what the critic says.

Shapes: H width, N turns, F tokens of free text, B branches (places where choices part), K targets a branch (padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from ..engine.backbone import Backbone
from ..engine.likelihood import logprobs_and_entropy
from ..engine.token_tree import TokenTree
from .calibration import Calibration
from .choices import branch_logprobs, entropy_from_logits, relative
from .read_plan import ReadPlan
from .repetition import Row

# Bytes of logits that are computed at once: in bfloat16, those of 256 nodes over 50,000 words.
_LOGITS_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Reading:
    """One batch, read.

    Attributes:
        plan: Where what follows was read.
        features: Hidden states at prompt ends, (N, H); no gradient flows back from them.
        values: The critic's estimates there, (N,).
        text_logprobs: Log-probability of each token of free text, (F,).
        text_entropy: Entropy of the distribution it was drawn from, in nats, (F,).
        branch_logprobs: Log-probability of what may go on where choices part, (B, K); -inf for padding.
        branch_entropy: Entropy there, in nats, (B,).
    """

    plan: ReadPlan
    features: Tensor
    values: Tensor
    text_logprobs: Tensor
    text_entropy: Tensor
    branch_logprobs: Tensor
    branch_entropy: Tensor


def read(
    backbone: Backbone,
    v_head: nn.Module,
    trees: Sequence[TokenTree],
    calibration: Calibration | None,
    temperature: float,
    closing_id: int,
    adapted: bool = True,
    cached: bool = True,
) -> Reading:
    """Read trees with one prefix.

    Args:
        backbone: The model.
        v_head: Values of hidden states.
        trees: What to read.
        calibration: What choices are measured against, see `branch_logprobs`.
        temperature: Of free text's tokens and of choices.
        closing_id: The token that ends a choice where longer ones go on.
        adapted: Whether an activated LoRA acts.
        cached: Whether the policy's weights are read, of which results may be cached.
    """
    plan = ReadPlan.from_trees(trees, closing_id).to(backbone.device)
    flat = backbone.hidden_states(trees, adapted, cached)
    # The critic learns on the policy's features but does not shape them: its gradient stops here.
    features = flat[plan.value_nodes].detach()
    values = v_head(features).squeeze(-1)
    text, entropy = _over_vocabulary(backbone, flat[plan.text_nodes], plan.text_targets[:, None], temperature)
    of_branches = branch_logprobs(plan, _of_targets(backbone, flat, plan), calibration, temperature)
    return Reading(plan, features, values, text[:, 0], entropy, of_branches, entropy_from_logits(of_branches))


def read_reference(backbone: Backbone, trees: Sequence[TokenTree], closing_id: int) -> dict[TokenTree, list[Row]]:
    """How likely the reference finds each token where choices part, of each tree, for `Calibration`.

    Args:
        backbone: The model.
        trees: With one prefix.
        closing_id: The token that ends a choice where longer ones go on.
    """
    plan = ReadPlan.from_trees(trees, closing_id).to(backbone.device)
    logits = _of_targets(backbone, backbone.hidden_states(trees, adapted=False, cached=False), plan)
    rows = (
        [
            ((*branch.path, token), relative_logprob, count)
            for token, relative_logprob, count in zip(branch.targets, row, counts, strict=False)
        ]
        for branch, row, counts in zip(plan.branches, relative(plan, logits).tolist(), plan.repeat_counts, strict=True)
    )
    return {tree: list(islice(rows, len(tree.decisions[0].branches))) for tree in trees}


def _of_targets(backbone: Backbone, hidden: Tensor, plan: ReadPlan) -> Tensor:
    """Logits (B, K) of what may go on where choices part, by nodes' hidden states; the vocabulary's rest cancels."""
    states, targets = hidden[plan.branch_nodes], plan.branch_targets
    rows = max(1, _LOGITS_BYTES // max(1, targets.shape[1] * states.shape[1] * 4))
    parts = zip(states.split(rows), targets.split(rows), strict=True)
    return torch.cat([backbone.logits_of(*part) for part in parts])


def _over_vocabulary(backbone: Backbone, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets (M, K) and entropies (M,) of the next token, by hidden states (M, H)."""
    rows = max(1, _LOGITS_BYTES // (backbone.vocabulary * hidden.element_size()))
    temperatures = torch.full((len(hidden),), temperature, device=hidden.device)
    parts = (tensor.split(rows) for tensor in (hidden, targets, temperatures))
    chunks = [
        logprobs_and_entropy(backbone.logits(hidden), targets, temperatures)
        for hidden, targets, temperatures in zip(*parts, strict=True)
    ]
    return torch.cat([picked for picked, _ in chunks]), torch.cat([entropy for _, entropy in chunks])
