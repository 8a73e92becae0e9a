"""From segments to log-probabilities, entropies and values: token trees, their chunks, and a forward pass over them.

Shapes: N turns, L decisions per turn (tokens of free text; 1 for a choice), M branch points on the way to a choice, K
targets per branch point; M and K are padded. H hidden size, F tokens of free text, B branch points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.backbone import Backbone
from ..engine.likelihood import logprobs_and_entropy
from ..engine.token_tree import TokenTree
from ..errors import ContextLengthError
from ..models.lora import latest_inputs
from ..text.episode import Segment, Turn
from .calibration import Calibration, Row
from .choices import ReadPlan, branch_logprobs, choice_logprobs, entropy_from_logits, relative


def numbered(contexts: Sequence[Segment]) -> list[Segment]:
    """Contexts with pending prompts as the rows of one batch, for `TreeCache`."""
    return [Segment(context.turns, context.pending, row, context.rank) for row, context in enumerate(contexts)]


# Largest number of inputs that are recorded per layer. With long replies, all would take gigabytes, and their
# principal components minutes.
_MAX_INPUTS = 4096

Weights = Literal["policy", "reference", "base"]
"""Weights of a forward pass: the policy's; the reference's, which `init_kl_coef` penalizes the distance to; or the base
model's without adapter, which choices are calibrated on."""


class TreeCache:
    """Token trees of a batch's segments, found by the segments' rows.

    An update needs each segment's tree twice an epoch. With few distinct observations, building the trees each time
    would take longer than the matrix products.
    """

    def __init__(self) -> None:
        """Starts inactive: every tree is built when it is needed."""
        # Segments and their trees by the segment's first row in the batch; None outside of `cached`.
        self._by_row: dict[int, tuple[Segment, TokenTree]] | None = None
        self._distinct: dict[TokenTree, TokenTree] = {}

    @contextmanager
    def cached(self) -> Iterator[None]:
        """While open, trees of a batch's segments are kept and reused; equal trees are one object."""
        self._by_row = {}
        try:
            yield
        finally:
            self._by_row = None
            self._distinct.clear()

    def of(self, segments: Sequence[Segment]) -> list[TokenTree]:
        """The segments' token trees."""
        if self._by_row is None:
            return [TokenTree.from_segment(segment) for segment in segments]
        trees = []
        for segment in segments:
            # Segments outside of the batch have rows, too.
            entry = self._by_row.get(segment.first_row)
            if entry is None or entry[0] is not segment:
                tree = TokenTree.from_segment(segment)
                entry = (segment, self._distinct.setdefault(tree, tree))
                self._by_row[segment.first_row] = entry
            trees.append(entry[1])
        return trees


class CriticReading(NamedTuple):
    """The critic's output for N contexts.

    Attributes:
        values: Estimates in reward units, float32 (N,).
        features: Inputs of the value head's last layer, float32 (N, H).
    """

    values: Tensor
    features: Tensor


def chunks(trees: Sequence[TokenTree], sizes: Sequence[int], max_size: int, equal_once: bool) -> Iterator[list[int]]:
    """Splits rows into chunks of one prefix whose padded size is at most `max_size`, or of a single row.

    Args:
        trees: Contexts with their decisions.
        sizes: Size of each row, in tokens.
        max_size: Maximum of a chunk's largest size times its number of rows.
        equal_once: Whether equal trees go together and count once, as in a forward pass. Otherwise every row counts, as
            in decoding, and all generation prompts of a chunk have one length.
    """

    def compatibility(row: int) -> tuple[object, ...]:
        return trees[row].prefix, 0 if equal_once else trees[row].node_count

    def order(row: int) -> tuple[object, ...]:
        return *compatibility(row), sizes[row], trees[row].history

    chunk: list[int] = []
    distinct = 0
    for row in sorted(range(len(trees)), key=order):
        is_distinct = not (chunk and equal_once and trees[row] == trees[chunk[-1]])
        # Rows come by size, so this one's is the largest.
        is_full = is_distinct and (distinct + 1) * sizes[row] > max_size
        if chunk and (is_full or compatibility(row) != compatibility(chunk[-1])):
            yield chunk
            chunk = []
            distinct = 0
        chunk.append(row)
        distinct += is_distinct
    if chunk:
        yield chunk


def check_context_lengths(trees: Sequence[TokenTree], max_length: int, reply_tokens: int = 0) -> None:
    """Rejects contexts that exceed the model's maximum length.

    Args:
        trees: Contexts with a single decision.
        max_length: Maximum tokens of a context.
        reply_tokens: Tokens to reserve for a reply in free text.

    Raises:
        ContextLengthError: A context is too long.
    """
    for tree in trees:
        length = tree.context_length + tree.decisions[0].depth + reply_tokens
        if length > max_length:
            raise ContextLengthError(
                f"A conversation of {length} tokens, of which {reply_tokens} are kept for the reply, does not fit the "
                f"model's {max_length}. Pass context='turn', shorten observations, or end episodes sooner."
            )


def divided(segments: Sequence[Segment], count: int) -> list[list[Segment]]:
    """Divides segments among processes, equal ones together, so that each has about as many tokens.

    Args:
        segments: Segments with turns, in the same order on all processes; process `segment.rank` has cached the
            history.
        count: Number of processes.
    """
    equal: dict[TokenTree, list[Segment]] = {}
    for segment in segments:
        equal.setdefault(TokenTree.from_segment(segment), []).append(segment)
    shares: list[list[Segment]] = [[] for _ in range(count)]
    loads = [0] * count
    for tree in sorted(equal, key=lambda tree: -tree.node_count):
        costs = [len(tree.history) + tree.node_count] * count
        for segment in equal[tree]:
            if segment.rank < count:
                costs[segment.rank] = tree.node_count
        least_loaded = min(range(count), key=lambda rank: loads[rank] + costs[rank])
        shares[least_loaded] += equal[tree]
        loads[least_loaded] += costs[least_loaded]
    return shares


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
        cached: Whether activations may be cached; True with the policy's weights only.
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


@dataclass(frozen=True)
class Evaluation:
    """Recorded turns under the current weights.

    Attributes:
        logprobs: Log-probability of each decision, float32 (N, L).
        entropy: Entropy of each decision's distribution, in nats, float32 (N, L).
        mask: True at decisions, bool (N, L): tokens of free text, and choices among several.
        values: The critic's estimates, float32 (N,).
        features: The critic's features, float (N, H), detached.
        branches: Log-probabilities at the branch points on the way to the reply, float32 (N, M, K), detached; -inf for
            padding and free text.
    """

    logprobs: Tensor
    entropy: Tensor
    mask: Tensor
    values: Tensor
    features: Tensor
    branches: Tensor


def evaluate_turns(
    segments: Sequence[Segment], trees: Sequence[TokenTree], run_model: Callable[[Sequence[TokenTree]], Reading]
) -> Evaluation:
    """Log-probabilities, entropies and values of recorded turns, in the order of the segments' turns.

    Equal segments (the same observation and reply) are computed once; gradients add up.

    Args:
        segments: Segments without a pending prompt.
        trees: One token tree per segment.
        run_model: Runs the model on token trees.
    """
    # Number the decisions of the distinct trees; `decisions` maps each turn to its decision.
    first_decision: dict[TokenTree, int] = {}
    count = 0
    for tree in trees:
        if tree not in first_decision:
            first_decision[tree] = count
            count += len(tree.decisions)
    decisions = [first_decision[tree] + index for tree in trees for index in range(len(tree.decisions))]
    turns = [turn for segment in segments for turn in segment.turns]
    width = max(len(turn.reply.logprobs) for turn in turns)

    reading = run_model(list(first_decision))
    device = reading.values.device
    decision_of_turn = torch.tensor(decisions, device=device)
    logprobs, entropy = _by_decision(reading, count, width)
    logprobs = _fill_choice_logprobs(logprobs[decision_of_turn], reading, turns, decisions)
    lengths = torch.tensor([turn.decision_count for turn in turns])
    return Evaluation(
        logprobs,
        entropy[decision_of_turn],
        mask=(torch.arange(width) < lengths[:, None]).to(device),
        values=reading.values[decision_of_turn],
        features=reading.features[decision_of_turn],
        branches=_branches_by_decision(reading, count)[decision_of_turn],
    )


def _by_decision(reading: Reading, count: int, width: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of free text, and entropies, of `count` decisions with up to `width` tokens: (count, width).

    A choice is one token: its entropy is the sum of those at the branch points on its way, an unbiased estimate of the
    entropy over choices.
    """
    plan = reading.plan
    decision, offset = plan.text_slots.unbind(1)
    zeros = torch.zeros(count, width, device=reading.values.device)
    logprobs = zeros.index_put((decision, offset), reading.text_logprobs)
    entropy = zeros.index_put((decision, offset), reading.text_entropy)
    first_column = torch.tensor(0, device=zeros.device)
    entropy = entropy.index_put((plan.branch_decisions, first_column), reading.branch_entropy, accumulate=True)
    return logprobs, entropy


def _fill_choice_logprobs(
    logprobs: Tensor, reading: Reading, turns: Sequence[Turn], decisions: Sequence[int]
) -> Tensor:
    """Writes log-probabilities of choices into the first column of (N, L); `decisions` maps each turn to its decision.

    Equal choices of equal decisions are computed once.
    """
    distinct: dict[tuple[int, int], int] = {}
    chosen: list[tuple[int, int]] = []
    for row, turn in enumerate(turns):
        if turn.reply.choice_index is not None:
            number = distinct.setdefault((decisions[row], turn.reply.choice_index), len(distinct))
            chosen.append((row, number))
    taken = [(decision, [index]) for decision, index in distinct]
    distinct_logprobs = choice_logprobs(reading.plan, reading.branch_logprobs, taken)
    rows, numbers = torch.tensor(chosen, dtype=torch.long, device=logprobs.device).reshape(-1, 2).unbind(1)
    first_column = torch.tensor(0, device=logprobs.device)
    return logprobs.index_put((rows, first_column), distinct_logprobs[numbers])


def _branches_by_decision(reading: Reading, count: int) -> Tensor:
    """Log-probabilities at branch points (B, K), grouped by the `count` decisions: (count, M, K)."""
    plan = reading.plan
    logprobs = reading.branch_logprobs.detach()
    positions = [
        branch - plan.first_branches[decision] for branch, decision in enumerate(plan.branch_decisions.tolist())
    ]
    empty = logprobs.new_full((count, max(positions, default=-1) + 1, logprobs.shape[1]), -torch.inf)
    position = torch.tensor(positions, dtype=torch.long, device=logprobs.device)
    return empty.index_put((plan.branch_decisions, position), logprobs)


def read_inputs(
    tree_chunks: Iterable[Sequence[TokenTree]],
    node_count: int,
    layers: Iterable[nn.Linear],
    features_of: Callable[[Sequence[TokenTree]], Tensor],
) -> tuple[Tensor, dict[nn.Linear, Tensor], Tensor]:
    """Records the critic's features and the inputs of some layers.

    Args:
        tree_chunks: Token trees of each forward pass.
        node_count: Number of their nodes.
        layers: Layers whose inputs are recorded.
        features_of: Runs the model on token trees; returns the critic's features.

    Returns:
        Features (N, H); the inputs of each layer at all nodes, or at evenly spaced ones if there are many, (M, H); and
        a number for each of these nodes, int64 (M,), equal for nodes with the same tokens of a reply. Layers that do
        not run once per row of a batch are left out: experts, the output layer, and layers whose weights another module
        uses.
    """
    stride = math.ceil(node_count / _MAX_INPUTS)
    features: list[Tensor] = []
    inputs: dict[nn.Linear, list[Tensor]] = {layer: [] for layer in layers}
    numbers: dict[tuple[int, ...], int] = {}
    groups: list[int] = []
    nodes_before = 0
    with latest_inputs(list(inputs)) as latest:
        for trees in tree_chunks:
            features.append(features_of(trees))
            first_nodes: list[int] = []
            for tree in trees:
                first = -nodes_before % stride
                first_nodes.append(first)
                groups += [numbers.setdefault(path, len(numbers)) for path in tree.paths()[first::stride]]
                nodes_before += tree.node_count
            for layer in list(inputs):
                received = latest.get(layer)
                if received is None or received.ndim != 3 or len(received) != len(trees):
                    del inputs[layer]
                    continue
                for row, tree, first in zip(received, trees, first_nodes, strict=True):
                    # A copy, since a view would keep the whole batch in memory.
                    inputs[layer].append(row[first : tree.node_count : stride].clone())
    return torch.cat(features), {layer: torch.cat(rows) for layer, rows in inputs.items()}, torch.tensor(groups)
