"""Reads a batch of trees: how likely each recorded or offered token is, and what the critic says.

Shapes: B rows, D nodes a row, H width, N turns, M nodes that predict tokens, K targets a node, S steps, V vocabulary,
C choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .backbone import Backbone
from .batching import Batch, ReadPlan, TokenTree
from .choices import ChoiceLength, choice_logprobs, choice_scores

# Nodes whose logits are computed at once: 128 of a 50,000-word vocabulary are 25 MB.
_LOGITS_CHUNK = 128
# Nodes whose probabilities a CPU computes at once: of a 50,000-word vocabulary some MB.
_CACHED_ROWS = 16


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
    flat = backbone.hidden_states(trees, Batch.from_trees(trees), adapted).flatten(0, 1)
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
        temperatures = torch.where(plan.is_text, temperature, 1.0)[full, None]
        read_full, entropy_full = _read_nodes(backbone, hidden[full], plan.targets[full], temperatures)
        picked = picked.index_put((full,), read_full)
        entropy = entropy.index_put((full,), entropy_full)
    step_logprobs = picked[plan.steps[:, 0], plan.steps[:, 1]]
    scores = choice_scores(plan, step_logprobs, length)
    offers = choice_logprobs(plan, scores, prior, temperature)
    return Reading(plan, features, values, step_logprobs, entropy, scores, offers)


def _read_nodes(backbone: Backbone, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets (M, K) and entropies (M,) of the next token."""
    parts = (tensor.split(_LOGITS_CHUNK) for tensor in (hidden, targets, temperatures))
    chunks = [
        _PickedAndEntropy.apply(_cooled(backbone.logits(hidden), temperatures), targets)
        for hidden, targets, temperatures in zip(*parts, strict=True)
    ]
    return torch.cat([picked for picked, _ in chunks]), torch.cat([entropy for _, entropy in chunks])


def _cooled(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Logits (M, V) divided by temperatures (M, 1), where that changes anything."""
    return logits if (temperatures == 1).all() else logits / temperatures


class _PickedAndEntropy(torch.autograd.Function):
    """Log-probs of the targets (M, K) and entropy (M,) of softmax(logits), logits (M, V).

    With p = softmax(z) and H its entropy, d log p_k / dz = 1_k - p and dH / dz = -p (log p + H). Autograd would keep
    three tensors of the logits' size. This keeps the logits alone; what else has their width is made of a few rows at a
    time, which stay in the processor's cache, since on the way through memory it takes nearly twice as long.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        picked, entropy = logits.new_empty(targets.shape), logits.new_empty(len(logits))
        for rows in _blocks(logits):
            logprobs = _logprobs(logits[rows])
            picked[rows] = logprobs.gather(1, targets[rows])
            entropy[rows] = -torch.linalg.vecdot(logprobs.exp(), logprobs)
        ctx.save_for_backward(logits, targets, entropy)
        return picked, entropy

    @staticmethod
    def backward(ctx: Any, of_picked: Tensor, of_entropy: Tensor) -> tuple[Tensor, None]:
        logits, targets, entropy = ctx.saved_tensors
        shift = of_picked.sum(1) + of_entropy * entropy
        slope = torch.empty_like(logits)
        for rows in _blocks(logits):
            logprobs = _logprobs(logits[rows])
            of_rows = torch.addcmul(-shift[rows, None], logprobs, of_entropy[rows, None], value=-1, out=slope[rows])
            of_rows.mul_(logprobs.exp_()).scatter_add_(1, targets[rows], of_picked[rows])
        return slope, None


def _blocks(logits: Tensor) -> Iterator[slice]:
    """All rows of logits (M, V): on a CPU, a few at a time."""
    size = _CACHED_ROWS if logits.device.type == "cpu" else len(logits)
    return (slice(start, start + size) for start in range(0, len(logits), size))


def _logprobs(logits: Tensor) -> Tensor:
    """Log-probabilities (M, V) under softmax(logits), where no probability is quite 0.

    An impossible token's log-probability of -inf times its probability of 0 would not be a number; here and times any
    gradient it stays finite.
    """
    return logits.log_softmax(-1).clamp_min_(-(torch.finfo(logits.dtype).max ** 0.5))
