"""From segments to log-probabilities, entropies and values: token trees, their chunks, and a forward pass over them.

Shapes: N turns, L decisions per turn (tokens of free text; 1 for a choice), M branch points on the way to a choice, K
targets per branch point; both are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..engine.token_tree import TokenTree
from ..errors import ContextLengthError
from ..models.lora import latest_inputs
from ..text.episode import Segment
from .choices import choice_logprobs
from .score import Reading


def numbered(contexts: Sequence[Segment]) -> list[Segment]:
    """Contexts with pending prompts as the rows of one batch, for `TreeCache`."""
    return [Segment(context.turns, context.pending, row, context.rank) for row, context in enumerate(contexts)]


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


def check_context_lengths(trees: Sequence[TokenTree], max_length: int, reply_tokens: int = 0) -> list[int]:
    """Rejects contexts that exceed the model's maximum length.

    Args:
        trees: Contexts with a single decision.
        max_length: Maximum tokens of a context.
        reply_tokens: Tokens to reserve for a reply in free text.

    Returns:
        Tokens of each context, including the reserved ones or the longest choice.

    Raises:
        ContextLengthError: A context is too long.
    """
    lengths = [tree.context_length + tree.decisions[0].depth + reply_tokens for tree in trees]
    for length in lengths:
        if length > max_length:
            raise ContextLengthError(
                f"A conversation of {length} tokens, of which {reply_tokens} are kept for the reply, does not fit the "
                f"model's {max_length}. Pass context='turn', shorten observations, or end episodes sooner."
            )
    return lengths


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
    plan = reading.plan
    device = reading.values.device
    turns = [turn for segment in segments for turn in segment.turns]
    width = max(len(turn.reply.logprobs) for turn in turns)
    logprobs = torch.zeros(count, width, device=device)
    entropy = torch.zeros_like(logprobs)
    decision, offset = plan.text_slots.unbind(1)
    logprobs = logprobs.index_put((decision, offset), reading.text_logprobs)
    entropy = entropy.index_put((decision, offset), reading.text_entropy)
    first_column = torch.tensor(0, device=device)
    # A choice is one decision. The sum of entropies on its way is an unbiased estimate of the entropy over choices.
    entropy = entropy.index_put((plan.branch_turns, first_column), reading.branch_entropy, accumulate=True)
    decisions = [first_decision[tree] + index for tree in trees for index in range(len(tree.decisions))]
    decision_of_turn = torch.tensor(decisions, device=device)
    logprobs = logprobs[decision_of_turn]
    entropy = entropy[decision_of_turn]
    # Equal choices in equal contexts are computed once: the number of each distinct (decision, choice).
    distinct: dict[tuple[int, int], int] = {}
    chosen: list[tuple[int, int]] = []
    for row, turn in enumerate(turns):
        if turn.reply.choice_index is not None:
            number = distinct.setdefault((decisions[row], turn.reply.choice_index), len(distinct))
            chosen.append((row, number))
    distinct_logprobs = choice_logprobs(plan, reading.branch_logprobs, [(turn, [index]) for turn, index in distinct])
    rows, numbers = torch.tensor(chosen, dtype=torch.long, device=device).reshape(-1, 2).unbind(1)
    logprobs = logprobs.index_put((rows, first_column), distinct_logprobs[numbers])
    lengths = torch.tensor([turn.decision_count for turn in turns])
    mask = (torch.arange(width) < lengths[:, None]).to(device)
    branches = _branches_by_decision(reading, count)[decision_of_turn]
    values = reading.values[decision_of_turn]
    return Evaluation(logprobs, entropy, mask, values, reading.features[decision_of_turn], branches)


def _branches_by_decision(reading: Reading, count: int) -> Tensor:
    """Log-probabilities at branch points (B, K), grouped by the `count` decisions: (count, M, K)."""
    plan = reading.plan
    logprobs = reading.branch_logprobs.detach()
    positions = [number - plan.first_branches[turn] for number, turn in enumerate(plan.branch_turns.tolist())]
    empty = logprobs.new_full((count, max(positions, default=-1) + 1, logprobs.shape[1]), -torch.inf)
    position = torch.tensor(positions, dtype=torch.long, device=logprobs.device)
    return empty.index_put((plan.branch_turns, position), logprobs)


def read_inputs(
    tree_chunks: Iterable[Sequence[TokenTree]],
    layers: Sequence[nn.Linear],
    features_of: Callable[[Sequence[TokenTree]], Tensor],
) -> tuple[Tensor, dict[nn.Linear, Tensor], Tensor]:
    """Records the critic's features and the inputs of some layers.

    Args:
        tree_chunks: Token trees of each forward pass.
        layers: Layers whose inputs are recorded.
        features_of: Runs the model on token trees; returns the critic's features.

    Returns:
        Features (N, H); the inputs of each layer at all nodes, (M, H); and a number for each node, int64 (M,), equal
        for nodes with the same tokens of a reply. Layers that do not run once per row of a batch are left out: experts,
        the output layer, and layers whose weights another module uses.
    """
    features: list[Tensor] = []
    inputs: dict[nn.Linear, list[Tensor]] = {layer: [] for layer in layers}
    numbers: dict[tuple[int, ...], int] = {}
    groups: list[int] = []
    with latest_inputs(list(layers)) as latest:
        for trees in tree_chunks:
            features.append(features_of(trees))
            groups += [numbers.setdefault(path, len(numbers)) for tree in trees for path in tree.paths()]
            for layer in list(inputs):
                received = latest.get(layer)
                if received is None or received.ndim != 3 or len(received) != len(trees):
                    del inputs[layer]
                    continue
                inputs[layer] += [row[: tree.node_count] for row, tree in zip(received, trees, strict=True)]
    return torch.cat(features), {layer: torch.cat(rows) for layer, rows in inputs.items()}, torch.tensor(groups)
