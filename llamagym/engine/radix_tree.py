"""A radix tree over tokens: what has been computed of each token, given all tokens before it, within one budget.

Sequences that begin alike share nodes, and one that parts ways splits a node in two (RadixAttention, Zheng et al. 2024,
https://arxiv.org/abs/2312.07104). What was used least recently is forgotten first.

Shapes: L layers, T tokens, H width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Ids = tuple[int, ...]
Part: TypeAlias = Hashable
"""Names the layers that computed something, and how: the same tokens may be known in several parts."""


@dataclass(frozen=True, slots=True)
class Activations:
    """What some layers made of consecutive tokens.

    Attributes:
        entries: Keys and values, layer after layer, (2L, heads, T, head size).
        hidden: What the last of these layers returned, (T, H).
    """

    entries: Tensor
    hidden: Tensor

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return self.entries.nbytes + self.hidden.nbytes

    def __len__(self) -> int:
        """T."""
        return len(self.hidden)

    def __getitem__(self, tokens: slice) -> Activations:
        """A view of some of the tokens."""
        return Activations(self.entries[:, :, tokens], self.hidden[tokens])

    def clone(self) -> Activations:
        """A copy of its own size."""
        return Activations(self.entries.clone(), self.hidden.clone())

    @classmethod
    def cat(cls, parts: Sequence[Activations]) -> Activations:
        """One after the other; there must be at least one."""
        if len(parts) == 1:
            return parts[0]
        return cls(torch.cat([part.entries for part in parts], dim=2), torch.cat([part.hidden for part in parts]))


class RadixTree:
    """Activations by the tokens that they depend on.

    Attributes:
        nbytes: Size of all that is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        """Keep `max_bytes` at most."""
        self.nbytes = 0
        self._max_bytes = max_bytes
        self._root = _Node((), None)
        # Least recently used first.
        self._uses: OrderedDict[tuple[_Node, Part], None] = OrderedDict()

    def copy(self) -> RadixTree:
        """A tree that holds the same activations, not copied, and from then on keeps and forgets by itself."""
        copied = RadixTree(self._max_bytes)
        copied.nbytes = self.nbytes
        copies = {self._root: copied._root}
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            for child in node.children.values():
                copies[child] = copies[node].children[child.ids[0]] = _Node(child.ids, copies[node])
                copies[child].known = dict(child.known)
                waiting.append(child)
        for node, part in self._uses:
            copied._uses[copies[node], part] = None
        return copied

    def find(self, ids: Ids, part: Part, start: int = 0) -> list[Activations]:
        """Activations of `ids[start:]` in pieces, up to the first token that is unknown in this part."""
        found, used, at = [], [], 0
        for node, length in self._walk(ids):
            first, at = max(0, start - at), at + length
            if first >= length:
                continue
            if (known := node.known.get(part)) is None:
                break
            found.append(known if length - first == len(node.ids) else known[first:length])
            used.append((node, part))
        # A beginning counts as used after what follows it, so that it stays for longer.
        for use in reversed(used):
            self._uses.move_to_end(use)
        return found

    def put(self, ids: Ids, part: Part, start: int, activations: Activations) -> None:
        """Keep a copy of what is known of `ids[start:]`; what was known before stays as it is."""
        at, added = 0, []
        for node in self._grow(ids, start):
            first, at = at, at + len(node.ids)
            if first >= start and part not in node.known:
                node.known[part] = activations[first - start : at - start].clone()
                self.nbytes += node.known[part].nbytes
                added.append((node, part))
        for use in reversed(added):
            self._uses[use] = None
        while self.nbytes > self._max_bytes:
            self._forget(*next(iter(self._uses)))

    def forget(self, is_outdated: Callable[[Part], bool]) -> None:
        """Drop all that is known in some parts."""
        for node, part in list(self._uses):
            if is_outdated(part):
                self._forget(node, part)

    def _walk(self, ids: Ids) -> Iterator[tuple[_Node, int]]:
        """The nodes along `ids`, and how many of each one's tokens are the same; all, but of the last."""
        node, at = self._root, 0
        while at < len(ids) and (child := node.children.get(ids[at])) is not None:
            length = _common_length(child.ids, ids[at : at + len(child.ids)])
            yield child, length
            if length < len(child.ids):
                return
            node, at = child, at + length

    def _grow(self, ids: Ids, start: int) -> list[_Node]:
        """The nodes along `ids`, with new ones where there were none; one begins at `start`, one ends with `ids`."""
        node, at, path = self._root, 0, []
        while at < len(ids):
            ahead = ids[at : start if at < start else None]
            child = node.children.get(ids[at])
            if child is None:
                child = node.children[ids[at]] = _Node(ahead, node)
            elif (length := _common_length(child.ids, ahead)) < len(child.ids):
                child = self._split(child, length)
            path.append(child)
            node, at = child, at + len(child.ids)
        return path

    def _split(self, node: _Node, length: int) -> _Node:
        """Give a node's first tokens a node of their own, and return it."""
        assert node.parent is not None
        upper = node.parent.children[node.ids[0]] = _Node(node.ids[:length], node.parent)
        upper.children[node.ids[length]] = node
        node.ids, node.parent = node.ids[length:], upper
        for part, known in node.known.items():
            # Copies: a view of one half would hold the memory of both.
            upper.known[part], node.known[part] = known[:length].clone(), known[length:].clone()
            self._uses[upper, part] = None
        return upper

    def _forget(self, node: _Node, part: Part) -> None:
        """Drop one piece, and the nodes that held nothing else."""
        del self._uses[node, part]
        self.nbytes -= node.known.pop(part).nbytes
        while node.parent is not None and not node.known and not node.children:
            del node.parent.children[node.ids[0]]
            node = node.parent


class _Node:
    """A run of tokens that follows its parent's.

    Attributes:
        ids: The tokens.
        parent: What comes before; None for the root, which has no tokens.
        children: What may follow, by its first token.
        known: Activations of its tokens, by part.
    """

    __slots__ = ("children", "ids", "known", "parent")

    def __init__(self, ids: Ids, parent: _Node | None) -> None:
        self.ids, self.parent = ids, parent
        self.children: dict[int, _Node] = {}
        self.known: dict[Part, Activations] = {}


def _common_length(one: Ids, other: Ids) -> int:
    """How many tokens two sequences begin with alike."""
    if one == other:
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
