"""Radix tree over token ids that caches activations within a budget of bytes.

Sequences with a common beginning share nodes; where they diverge, a node is split in two (RadixAttention, Zheng et al.
2024, https://arxiv.org/abs/2312.07104). The least recently used activations are evicted first.

Shapes: L layers, T tokens, H width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Ids = tuple[int, ...]


@dataclass(frozen=True)
class CacheKey:
    """Which layers computed an activation, and what it depends on besides the tokens before it.

    Attributes:
        layers: "trunk", the frozen layers below the first trained one, or "top", the layers above.
        adapted_from: Context length after which an activated LoRA is active; None if it is not.
        parents: Parent of each token where tokens branch (see `Decision`); None for a sequence.
    """

    layers: Literal["trunk", "top"]
    adapted_from: int | None = None
    parents: tuple[int, ...] | None = None
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Computes the hash once: a key is looked up for every node, and `parents` can be long."""
        object.__setattr__(self, "_hash", hash((self.layers, self.adapted_from, self.parents)))

    def __hash__(self) -> int:
        """Hash of all fields."""
        return self._hash


TRUNK = CacheKey("trunk")
"""Key of the trunk's activations of any sequence: its layers do not distinguish histories from replies."""
HISTORY = CacheKey("top")
"""Key of the top's activations of histories."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Output of consecutive layers for consecutive tokens.

    Attributes:
        entries: Keys and values, layer after layer, (2L, heads, T, head size).
        hidden: Hidden states after the last of these layers, (T, H).
    """

    entries: Tensor
    hidden: Tensor

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.entries.nbytes + self.hidden.nbytes

    def __len__(self) -> int:
        """Number of tokens, T."""
        return len(self.hidden)

    def __getitem__(self, tokens: slice) -> Activations:
        """A view of some of the tokens."""
        return Activations(self.entries[:, :, tokens], self.hidden[tokens])

    def clone(self) -> Activations:
        """A copy with its own memory."""
        return Activations(self.entries.clone(), self.hidden.clone())

    @classmethod
    def cat(cls, pieces: Sequence[Activations]) -> Activations:
        """Concatenates one or more pieces along the tokens."""
        if len(pieces) == 1:
            return pieces[0]
        entries = torch.cat([piece.entries for piece in pieces], dim=2)
        hidden = torch.cat([piece.hidden for piece in pieces])
        return cls(entries, hidden)


def token_count(pieces: Sequence[Activations]) -> int:
    """Total number of tokens."""
    return sum(map(len, pieces))


class RadixTree:
    """Activations by cache key and token ids.

    Attributes:
        nbytes: Total size of the cached activations.
        max_bytes: Maximum of `nbytes`.
        root: The node of the empty sequence.
    """

    def __init__(self, max_bytes: int) -> None:
        """Creates an empty tree that holds up to `max_bytes`."""
        self.nbytes = 0
        self.max_bytes = max_bytes
        self.root = _Node((), None)
        # Least recently used first.
        self._uses: OrderedDict[tuple[_Node, CacheKey], None] = OrderedDict()

    def copy(self) -> RadixTree:
        """An independent tree with the same activations, which are not copied."""
        copied = RadixTree(self.max_bytes)
        copied.nbytes = self.nbytes
        copy_of = {self.root: copied.root}
        pending = [self.root]
        while pending:
            node = pending.pop()
            for first, child in node.children.items():
                child_copy = _Node(child.ids, copy_of[node])
                child_copy.activations = dict(child.activations)
                copy_of[node].children[first] = child_copy
                copy_of[child] = child_copy
                pending.append(child)
        for node, key in self._uses:
            copied._uses[copy_of[node], key] = None
        return copied

    def find(self, ids: Ids, key: CacheKey, start: int = 0) -> list[Activations]:
        """Cached activations of `ids[start:]` in pieces, up to the first token without any."""
        found: list[Activations] = []
        used: list[tuple[_Node, CacheKey]] = []
        end = 0
        for node, length in self._walk(ids):
            first = max(0, start - end)
            end += length
            if first >= length:
                continue
            cached = node.activations.get(key)
            if cached is None:
                break
            is_whole = length - first == len(node.ids)
            found.append(cached if is_whole else cached[first:length])
            used.append((node, key))
        # A beginning counts as used after its continuation, so that it is evicted later.
        for use in reversed(used):
            self._uses.move_to_end(use)
        return found

    def put(self, ids: Ids, key: CacheKey, start: int, activations: Activations) -> None:
        """Caches a copy of the activations of `ids[start:]`; tokens that are cached already keep their activations."""
        added: list[tuple[_Node, CacheKey]] = []
        end = 0
        for node in self._insert(ids, start):
            first = end
            end += len(node.ids)
            if first >= start and key not in node.activations:
                own = activations[first - start : end - start].clone()
                node.activations[key] = own
                self.nbytes += own.nbytes
                added.append((node, key))
        for use in reversed(added):
            self._uses[use] = None
        while self.nbytes > self.max_bytes:
            self._evict(*next(iter(self._uses)))

    def remove(self, is_outdated: Callable[[CacheKey], bool]) -> None:
        """Removes the activations of outdated keys."""
        for node, key in list(self._uses):
            if is_outdated(key):
                self._evict(node, key)

    def _walk(self, ids: Ids) -> Iterator[tuple[_Node, int]]:
        """Yields the nodes along `ids` with the number of matching tokens, which is all of them but for the last."""
        node = self.root
        depth = 0
        while depth < len(ids) and (child := node.children.get(ids[depth])) is not None:
            length = _common_length(child.ids, ids[depth : depth + len(child.ids)])
            yield child, length
            if length < len(child.ids):
                return
            node = child
            depth += length

    def _insert(self, ids: Ids, start: int) -> list[_Node]:
        """The nodes along `ids`, created where missing, with node boundaries at `start` and at the end."""
        path: list[_Node] = []
        node = self.root
        depth = 0
        while depth < len(ids):
            remaining = ids[depth : start if depth < start else None]
            child = node.children.get(ids[depth])
            if child is None:
                child = _Node(remaining, node)
                node.children[ids[depth]] = child
            elif (length := _common_length(child.ids, remaining)) < len(child.ids):
                child = self._split(child, length)
            path.append(child)
            node = child
            depth += len(child.ids)
        return path

    def _split(self, node: _Node, length: int) -> _Node:
        """Moves a node's first `length` tokens to a new parent, and returns that."""
        assert node.parent is not None
        upper = _Node(node.ids[:length], node.parent)
        node.parent.children[node.ids[0]] = upper
        upper.children[node.ids[length]] = node
        node.ids = node.ids[length:]
        node.parent = upper
        for key, cached in node.activations.items():
            # Copies: a view of one half would hold the memory of both.
            upper.activations[key] = cached[:length].clone()
            node.activations[key] = cached[length:].clone()
            self._uses[upper, key] = None
        return upper

    def _evict(self, node: _Node, key: CacheKey) -> None:
        """Removes a node's activations, and nodes that are then of no use."""
        del self._uses[node, key]
        self.nbytes -= node.activations.pop(key).nbytes
        while node.parent is not None and not node.activations and not node.children:
            del node.parent.children[node.ids[0]]
            node = node.parent


class _Node:
    """Consecutive tokens that follow those of the parent.

    Attributes:
        ids: Token ids.
        parent: Node before; None for the root, which has no tokens.
        children: Continuations by their first token.
        activations: Activations of these tokens by key.
    """

    __slots__ = ("activations", "children", "ids", "parent")

    def __init__(self, ids: Ids, parent: _Node | None) -> None:
        self.ids = ids
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.activations: dict[CacheKey, Activations] = {}


def _common_length(one: Ids, other: Ids) -> int:
    """Length of the common beginning of two sequences."""
    if one == other:
        return len(one)
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
