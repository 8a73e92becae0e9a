"""Log-probabilities, entropies and values of recorded turns, from a forward pass over their token trees.

Shapes: N turns, L decisions a turn (tokens of free text; 1 for a choice), M branch points on the way to a choice, K
targets per branch point; both are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..engine.token_tree import TokenTree
from ..models.lora import latest_inputs
from ..text.episode import Segment
from .choices import choice_logprobs
from .score import Reading


@dataclass(frozen=True)
class Evaluation:
    """Recorded turns under the current weights.

    Attributes:
        logprobs: Log-probability of each decision, float32 (N, L).
        entropy: Entropy of each decision's distribution, in nats, float32 (N, L).
        mask: True at decisions, bool (N, L): tokens of free text, and choices among several.
        values: The critic's estimates, float32 (N,).
        features: The critic's features, float (N, H), detached.
        branches: Log-probabilities at the branch points on the way to the choice that was taken, float32 (N, M, K),
            detached; -inf for padding.
    """

    logprobs: Tensor
    entropy: Tensor
    mask: Tensor
    values: Tensor
    features: Tensor
    branches: Tensor


def evaluate_turns(
    segments: Sequence[Segment], trees: Sequence[TokenTree], read: Callable[[Sequence[TokenTree]], Reading]
) -> Evaluation:
    """Log-probabilities, entropies and values of recorded turns, in the order of the segments' turns.

    Equal segments (the same observation and reply) are computed once; gradients add up.

    Args:
        segments: Segments without a pending prompt.
        trees: One token tree per segment.
        read: Runs the model on token trees.
    """
    first_decision: dict[TokenTree, int] = {}
    count = 0
    for tree in trees:
        if tree not in first_decision:
            first_decision[tree] = count
            count += len(tree.decisions)
    reading = read(list(first_decision))
    device = reading.values.device
    plan, turns = reading.plan, [turn for segment in segments for turn in segment.turns]
    width = max(len(turn.reply.logprobs) for turn in turns)
    logprobs = torch.zeros(count, width, device=device)
    entropy = torch.zeros_like(logprobs)
    decision, offset = plan.text_slots.unbind(1)
    logprobs = logprobs.index_put((decision, offset), reading.text_logprobs)
    entropy = entropy.index_put((decision, offset), reading.text_entropy)
    first = torch.tensor(0, device=device)
    # A choice is one decision. The sum of entropies on its way is an unbiased estimate of the entropy over choices.
    entropy = entropy.index_put((plan.branch_turns, first), reading.branch_entropy, accumulate=True)
    decisions = [first_decision[tree] + index for tree in trees for index in range(len(tree.decisions))]
    of_turn = torch.tensor(decisions, device=device)
    logprobs, entropy = logprobs[of_turn], entropy[of_turn]
    chosen = [
        (row, (decisions[row], index))
        for row, turn in enumerate(turns)
        if (index := turn.reply.choice_index) is not None
    ]
    # The same choice in the same context is the same decision.
    place = {each: number for number, each in enumerate(dict.fromkeys(each for _, each in chosen))}
    of_choice = choice_logprobs(plan, reading.branch_logprobs, [(turn, [index]) for turn, index in place])
    found = torch.tensor([(row, place[each]) for row, each in chosen], dtype=torch.long, device=device).reshape(-1, 2)
    logprobs = logprobs.index_put((found[:, 0], first), of_choice[found[:, 1]])
    lengths = torch.tensor([turn.decision_count for turn in turns])
    mask = (torch.arange(width) < lengths[:, None]).to(device)
    branches = _branches_by_decision(reading, count)[of_turn]
    return Evaluation(logprobs, entropy, mask, reading.values[of_turn], reading.features[of_turn], branches)


def _branches_by_decision(reading: Reading, count: int) -> Tensor:
    """Log-probabilities at branch points (B, K), grouped by the `count` decisions: (count, M, K)."""
    plan, logprobs = reading.plan, reading.branch_logprobs.detach()
    position = [number - plan.first_branches[turn] for number, turn in enumerate(plan.branch_turns.tolist())]
    most = max(position, default=-1) + 1
    empty = logprobs.new_full((count, most, logprobs.shape[1]), -torch.inf)
    return empty.index_put(
        (plan.branch_turns, torch.tensor(position, dtype=torch.long, device=logprobs.device)), logprobs
    )


def read_inputs(
    chunks: Iterable[Sequence[TokenTree]],
    layers: Sequence[nn.Linear],
    features_of: Callable[[Sequence[TokenTree]], Tensor],
) -> tuple[Tensor, dict[nn.Linear, Tensor], Tensor]:
    """Records the critic's features and the inputs of some layers.

    Args:
        chunks: Token trees of one forward pass each.
        layers: Layers whose inputs are recorded.
        features_of: Runs the model on token trees; returns the critic's features.

    Returns:
        Features (N, H); the inputs of each layer at all nodes, (M, H); and a number for each node, int64 (M,), equal
        where the same words of a reply were read. Layers that do not run once per row of a batch are left out:
        experts, the output layer, and layers whose weights another module uses.
    """
    features: list[Tensor] = []
    inputs: dict[nn.Linear, list[Tensor]] = {layer: [] for layer in layers}
    words: dict[tuple[int, ...], int] = {}
    groups: list[int] = []
    with latest_inputs(list(layers)) as latest:
        for trees in chunks:
            features.append(features_of(trees))
            groups += [words.setdefault(path, len(words)) for tree in trees for path in tree.paths()]
            for layer in list(inputs):
                received = latest.get(layer)
                if received is None or received.ndim != 3 or len(received) != len(trees):
                    del inputs[layer]
                    continue
                inputs[layer] += [row[: tree.node_count] for row, tree in zip(received, trees, strict=True)]
    return torch.cat(features), {layer: torch.cat(of_layer) for layer, of_layer in inputs.items()}, torch.tensor(groups)
