"""One forward pass over token trees: log-probabilities of recorded or offered tokens, and the critic's values.

Shapes: H hidden size, N turns, F tokens of free text, B branch points, K targets per branch point (padded).
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

# Bytes of logits that are computed at once: 256 tokens over a vocabulary of 50,000 in bfloat16.
_LOGITS_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Reading:
    """Output of one forward pass.

    Attributes:
        plan: Positions of all outputs in the batch.
        features: Hidden states at the ends of prompts, (N, H), detached.
        values: The critic's estimates there, (N,).
        text_logprobs: Log-probability of each token of free text, (F,).
        text_entropy: Entropy of each of these tokens' distribution, in nats, (F,).
        branch_logprobs: Log-probability of each target of each branch point, (B, K); -inf for padding.
        branch_entropy: Entropy at each branch point, in nats, (B,).
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
    """Runs the model on token trees that share a prefix.

    Args:
        backbone: The model.
        v_head: Value head, from hidden states to values.
        trees: Token trees.
        calibration: Calibration of choices (see `branch_logprobs`); None without it.
        temperature: Temperature of free text and of choices.
        closing_id: Token that ends a choice which is a prefix of another.
        adapted: Whether an activated LoRA is active.
        cached: Whether activations may be cached: the weights are the policy's.
    """
    plan = ReadPlan.from_trees(trees, closing_id).to(backbone.transformer.device)
    flat = backbone.hidden_states(trees, adapted, cached)
    # The critic's gradient does not reach the policy.
    features = flat[plan.value_nodes].detach()
    values = v_head(features).squeeze(-1)
    text, entropy = _over_vocabulary(backbone, flat[plan.text_nodes], plan.text_targets[:, None], temperature)
    of_branches = branch_logprobs(plan, _target_logits(backbone, flat, plan), calibration, temperature)
    return Reading(plan, features, values, text[:, 0], entropy, of_branches, entropy_from_logits(of_branches))


def read_reference(backbone: Backbone, trees: Sequence[TokenTree], closing_id: int) -> dict[TokenTree, list[Row]]:
    """Relative log-probabilities at the branch points of each tree, for `Calibration`.

    Args:
        backbone: The model, with the weights to calibrate on.
        trees: Token trees that share a prefix.
        closing_id: Token that ends a choice which is a prefix of another.
    """
    plan = ReadPlan.from_trees(trees, closing_id).to(backbone.transformer.device)
    logits = _target_logits(backbone, backbone.hidden_states(trees, adapted=False, cached=False), plan)
    relative_logprobs = relative(plan, logits).tolist()
    rows: list[Row] = []
    for branch, of_branch, counts in zip(plan.branches, relative_logprobs, plan.repeat_counts, strict=True):
        paths = [(*branch.path, token) for token in branch.targets]
        # Rows of logits are padded.
        rows.append(list(zip(paths, of_branch, counts, strict=False)))
    remaining = iter(rows)
    return {tree: list(islice(remaining, len(tree.decisions[0].branches))) for tree in trees}


def _target_logits(backbone: Backbone, hidden: Tensor, plan: ReadPlan) -> Tensor:
    """Logits of the targets of branch points, (B, K); the rest of the vocabulary would cancel in the softmax."""
    states = hidden[plan.branch_nodes]
    targets = plan.branch_targets
    rows = max(1, _LOGITS_BYTES // max(1, targets.shape[1] * states.shape[1] * 4))
    parts = zip(states.split(rows), targets.split(rows), strict=True)
    return torch.cat([backbone.transformer.logits_of(*part) for part in parts])


def _over_vocabulary(backbone: Backbone, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities of targets (M, K) and entropies (M,) of the next token, from hidden states (M, H)."""
    rows = max(1, _LOGITS_BYTES // (backbone.transformer.vocabulary * hidden.element_size()))
    temperatures = torch.full((len(hidden),), temperature, device=hidden.device)
    parts = (tensor.split(rows) for tensor in (hidden, targets, temperatures))
    chunks = [
        logprobs_and_entropy(backbone.transformer.logits(hidden), targets, temperatures)
        for hidden, targets, temperatures in zip(*parts, strict=True)
    ]
    return torch.cat([picked for picked, _ in chunks]), torch.cat([entropy for _, entropy in chunks])
