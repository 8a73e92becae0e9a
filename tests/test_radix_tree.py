"""The radix tree: what is found is what was put, whatever shares nodes with it and whatever had to be forgotten."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamagym.engine.radix_tree import Activations, RadixTree

# Few tokens, so that sequences share beginnings.
SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)
PARTS = st.sampled_from(["trunk", "history", 3])


def activations_of(ids, part, start=0):
    """Two numbers for each token, which depend on all tokens before it and on the part."""
    sums = [hash((part, ids[: index + 1])) % 10_007 for index in range(start, len(ids))]
    hidden = torch.tensor(sums, dtype=torch.float32).reshape(-1, 1)
    return Activations(hidden.T.reshape(1, 1, -1, 1).clone(), hidden)


def found_of(tree, ids, part, start=0):
    """What is found, as one list of numbers."""
    pieces = tree.find(ids, part, start)
    for piece in pieces:
        assert piece.entries.flatten().equal(piece.hidden.flatten())
    return [number for piece in pieces for number in piece.hidden.flatten().tolist()]


def sizes_of(tree):
    """Bytes of all pieces that can be reached, and how many nodes hold nothing and lead to nothing."""
    nodes, nbytes, useless = [tree._root], 0, 0
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        nbytes += sum(known.nbytes for known in node.known.values())
        useless += node.parent is not None and not node.known and not node.children
        assert all(child.parent is node and child.ids[0] == first for first, child in node.children.items())
        assert all(len(known) == len(node.ids) for known in node.known.values())
    return nbytes, useless


@given(st.lists(st.tuples(SEQUENCES, PARTS, st.integers(0, 7)), max_size=20), st.sampled_from([0, 8, 64, 200, 10_000]))
@settings(max_examples=300, deadline=None)
def test_what_is_found_is_what_was_put(calls, max_bytes):
    tree = RadixTree(max_bytes)
    for ids, part, start in calls:
        known = len(found_of(tree, ids, part))
        # From where it is known on, or further back.
        first = min(start, known)
        tree.put(ids, part, first, activations_of(ids, part, first))
        expected = activations_of(ids, part).hidden.flatten().tolist()
        found = found_of(tree, ids, part)
        assert found == expected[: len(found)]
        assert len(found) == len(ids) or max_bytes < 10_000
        for other, of_part, at in calls:
            numbers = found_of(tree, other, of_part, at)
            assert numbers == activations_of(other, of_part, at).hidden.flatten().tolist()[: len(numbers)]
        nbytes, useless = sizes_of(tree)
        assert nbytes == tree.nbytes <= max_bytes
        assert useless == 0


def test_sequences_that_begin_alike_share_memory():
    tree = RadixTree(10_000)
    for ids in ((1, 2, 3, 4), (1, 2, 3, 5), (1, 2), (1, 2, 3, 4, 6)):
        known = len(found_of(tree, ids, "trunk"))
        tree.put(ids, "trunk", known, activations_of(ids, "trunk", known))
    # Six tokens of two numbers in float32.
    assert tree.nbytes == 6 * 8


def test_what_was_used_least_recently_is_forgotten_first_and_beginnings_last():
    tree = RadixTree(max_bytes=6 * 8)
    for ids in ((1, 2, 3, 4), (1, 2, 5, 6)):
        tree.put(ids, "trunk", 0, activations_of(ids, "trunk"))
    assert len(found_of(tree, (1, 2, 3, 4), "trunk")) == 4
    tree.put((7,), "trunk", 0, activations_of((7,), "trunk"))
    assert len(found_of(tree, (1, 2, 5, 6), "trunk")) == 2
    assert len(found_of(tree, (1, 2, 3, 4), "trunk")) == 4


def test_parts_are_forgotten_by_name():
    tree, ids = RadixTree(10_000), (1, 2, 3)
    for part in ("trunk", 7):
        tree.put(ids, part, 0, activations_of(ids, part))
    tree.forget(lambda part: part == 7)
    assert (len(found_of(tree, ids, "trunk")), found_of(tree, ids, 7)) == (3, [])
    assert tree.nbytes == 3 * 8


def test_what_is_kept_is_a_copy():
    tree, given_tensor = RadixTree(10_000), activations_of((1, 2), "trunk")
    tree.put((1, 2), "trunk", 0, given_tensor)
    given_tensor.hidden.zero_()
    assert tree.find((1, 2), "trunk")[0].hidden.any()
