"""The radix tree finds what was put, whatever shares nodes with it and whatever was evicted."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamagym.engine.radix_tree import HISTORY, TRUNK, Activations, CacheKey, RadixTree

# Few tokens, so that sequences share beginnings.
SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)
REPLY = CacheKey("top", adapted_from=3)
KEYS = st.sampled_from([TRUNK, HISTORY, REPLY])


def activations_of(ids, key, start=0):
    """Two numbers for each token, which depend on all tokens before it and on the key."""
    sums = [hash((key, ids[: index + 1])) % 10_007 for index in range(start, len(ids))]
    hidden = torch.tensor(sums, dtype=torch.float32).reshape(-1, 1)
    return Activations(hidden.T.reshape(1, 1, -1, 1).clone(), hidden)


def found_of(tree, ids, key, start=0):
    """The activations found, as one list of numbers."""
    pieces = tree.find(ids, key, start)
    for piece in pieces:
        assert piece.entries.flatten().equal(piece.hidden.flatten())
    return [number for piece in pieces for number in piece.hidden.flatten().tolist()]


def sizes_of(tree):
    """Bytes of all reachable pieces, and the number of nodes without activations and children."""
    nodes, nbytes, useless = [tree.root], 0, 0
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        nbytes += sum(piece.nbytes for piece in node.activations.values())
        useless += node.parent is not None and not node.activations and not node.children
        assert all(child.parent is node and child.ids[0] == first for first, child in node.children.items())
        assert all(len(piece) == len(node.ids) for piece in node.activations.values())
    return nbytes, useless


@given(st.lists(st.tuples(SEQUENCES, KEYS, st.integers(0, 7)), max_size=20), st.sampled_from([0, 8, 64, 200, 10_000]))
@settings(max_examples=300, deadline=None)
def test_finds_what_was_put(calls, max_bytes):
    tree = RadixTree(max_bytes)
    for ids, key, start in calls:
        known = len(found_of(tree, ids, key))
        # From the first unknown token, or further back.
        first = min(start, known)
        tree.put(ids, key, first, activations_of(ids, key, first))
        expected = activations_of(ids, key).hidden.flatten().tolist()
        found = found_of(tree, ids, key)
        assert found == expected[: len(found)]
        assert len(found) == len(ids) or max_bytes < 10_000
        for other, of_key, at in calls:
            numbers = found_of(tree, other, of_key, at)
            assert numbers == activations_of(other, of_key, at).hidden.flatten().tolist()[: len(numbers)]
        nbytes, useless = sizes_of(tree)
        assert nbytes == tree.nbytes <= max_bytes
        assert useless == 0


def test_common_beginnings_share_memory():
    tree = RadixTree(10_000)
    for ids in ((1, 2, 3, 4), (1, 2, 3, 5), (1, 2), (1, 2, 3, 4, 6)):
        known = len(found_of(tree, ids, TRUNK))
        tree.put(ids, TRUNK, known, activations_of(ids, TRUNK, known))
    # Six tokens of two numbers in float32.
    assert tree.nbytes == 6 * 8


def test_evicts_least_recently_used_first_and_beginnings_last():
    tree = RadixTree(max_bytes=6 * 8)
    for ids in ((1, 2, 3, 4), (1, 2, 5, 6)):
        tree.put(ids, TRUNK, 0, activations_of(ids, TRUNK))
    assert len(found_of(tree, (1, 2, 3, 4), TRUNK)) == 4
    tree.put((7,), TRUNK, 0, activations_of((7,), TRUNK))
    assert len(found_of(tree, (1, 2, 5, 6), TRUNK)) == 2
    assert len(found_of(tree, (1, 2, 3, 4), TRUNK)) == 4


def test_removes_activations_by_key():
    tree, ids = RadixTree(10_000), (1, 2, 3)
    for key in (TRUNK, REPLY):
        tree.put(ids, key, 0, activations_of(ids, key))
    tree.remove(lambda key: key.adapted_from is not None)
    assert (len(found_of(tree, ids, TRUNK)), found_of(tree, ids, REPLY)) == (3, [])
    assert tree.nbytes == 3 * 8


def test_stores_copies():
    tree, activations = RadixTree(10_000), activations_of((1, 2), TRUNK)
    tree.put((1, 2), TRUNK, 0, activations)
    activations.hidden.zero_()
    assert tree.find((1, 2), TRUNK)[0].hidden.any()
