"""Contexts' lengths: whether they fit the model, which go together in a batch, and which process reads which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..engine.token_tree import TokenTree
from ..errors import ContextLengthError
from ..text.episode import Segment


def chunks(trees: Sequence[TokenTree], sizes: Sequence[int], most: int, equal_once: bool) -> Iterator[list[int]]:
    """Rows in chunks of one prefix, padded to their largest size at most `most`, or of a single row.

    Args:
        trees: Contexts with their decisions.
        sizes: What each costs.
        most: What a chunk may cost.
        equal_once: Whether equal trees lie together and count once, as in a forward pass. Otherwise every row counts,
            as in decoding, and a chunk has generation prompts of one length.
    """

    def kind(row: int) -> tuple[object, ...]:
        return trees[row].prefix, 0 if equal_once else trees[row].node_count

    def order(row: int) -> tuple[object, ...]:
        return *kind(row), sizes[row], trees[row].history

    chunk: list[int] = []
    distinct = 0
    for row in sorted(range(len(trees)), key=order):
        is_new = not (chunk and equal_once and trees[row] == trees[chunk[-1]])
        # They come by size, so this is what all would cost as a rectangle.
        is_full = is_new and (distinct + 1) * sizes[row] > most
        if chunk and (is_full or kind(row) != kind(chunk[-1])):
            yield chunk
            chunk, distinct = [], 0
        chunk.append(row)
        distinct += is_new
    if chunk:
        yield chunk


def check_room(trees: Sequence[TokenTree], most: int, reply_tokens: int = 0) -> list[int]:
    """Tokens of each context, with what is read of its longest choice or so many of a reply.

    Args:
        trees: Contexts with a single decision.
        most: Tokens that the model can hold.
        reply_tokens: To keep free for a reply in free text.

    Raises:
        ContextLengthError: One does not fit.
    """
    lengths = [tree.context_length + tree.decisions[0].depth + reply_tokens for tree in trees]
    for length in lengths:
        if length > most:
            raise ContextLengthError(
                f"A conversation of {length} tokens, of which {reply_tokens} are kept for the reply, does not fit the "
                f"model's {most}. Pass context='turn', shorten observations, or end episodes sooner."
            )
    return lengths


def shares(segments: Sequence[Segment], count: int) -> list[list[Segment]]:
    """Divides recorded contexts among processes, equal ones together, so that each has about as many tokens.

    Args:
        segments: Contexts, in the same order on all processes; the process `segment.rank` has cached the history.
        count: Number of processes.
    """
    equal: dict[TokenTree, list[Segment]] = {}
    for segment in segments:
        equal.setdefault(TokenTree.from_segment(segment), []).append(segment)
    parts: list[list[Segment]] = [[] for _ in range(count)]
    loads = [0] * count
    for tree in sorted(equal, key=lambda tree: -tree.node_count):
        players = {segment.rank for segment in equal[tree]}
        costs = [tree.node_count + (0 if rank in players else len(tree.history)) for rank in range(count)]
        least = min(range(count), key=lambda rank: loads[rank] + costs[rank])
        parts[least] += equal[tree]
        loads[least] += costs[least]
    return parts
