"""Finds and stores the activations of contexts and replies; it runs no layer.

The trunk, the frozen layers below the first trained one, computes the same for a token in a history as in a reply. In
the layers above, the top, an activated LoRA changes replies but not histories. So a reply that has become history runs
through the top once more, from the trunk's output. Without an activated LoRA there is no such difference, and all
activations are valid until the weights change.
"""

from __future__ import annotations

from dataclasses import dataclass

from .radix_tree import HISTORY, TRUNK, Activations, CacheKey, Ids, RadixTree, token_count
from .token_tree import Decision, TokenTree


@dataclass(slots=True)
class ContextActivations:
    """Activations of a context, as far as they are known.

    Attributes:
        trunk: The trunk's of the history after the shared prefix, in pieces.
        history: The top's of the same tokens, in pieces.
        decisions: The trunk's of the decision nodes; None if unknown.
    """

    trunk: list[Activations]
    history: list[Activations]
    decisions: Activations | None


class PrefixCache:
    """Activations of all tokens that were computed so far, within a budget of memory.

    Attributes:
        activations: Radix tree over token ids.
    """

    def __init__(self, history_is_frozen: bool, activations: RadixTree) -> None:
        """Wraps a radix tree.

        Args:
            history_is_frozen: Whether histories do not depend on the trained weights.
            activations: Radix tree to store in.
        """
        self.activations = activations
        self._history_is_frozen = history_is_frozen

    def copy(self) -> PrefixCache:
        """An independent cache with the same activations, which are not copied."""
        return PrefixCache(self._history_is_frozen, self.activations.copy())

    def clear(self) -> None:
        """Removes all activations."""
        self.activations.remove(lambda key: True)

    def remove_outdated(self) -> None:
        """Removes what depends on the trained weights, after these have changed."""
        self.activations.remove(lambda key: not self._history_is_frozen or key.adapted_from is not None)

    def find_context(self, tree: TokenTree, with_decisions: bool) -> ContextActivations:
        """Activations of a context's history and, if `with_decisions`, of its decision nodes."""
        ids = tree.prefix + tree.history
        start = len(tree.prefix)
        trunk = self.activations.find(ids, TRUNK, start)
        history = self.activations.find(ids, HISTORY, start)
        decisions = None
        if with_decisions:
            found: list[Activations] = []
            for decision in tree.decisions:
                path = ids[: decision.start] + decision.ids
                found += self.activations.find(path, _key_of_decision(decision), decision.start)
            if token_count(found) == tree.node_count:
                decisions = Activations.cat(found)
        return ContextActivations(trunk, history, decisions)

    def put_history(self, tree: TokenTree, key: CacheKey, activations: Activations) -> None:
        """Stores activations of the last tokens of a context's history."""
        ids = tree.prefix + tree.history
        self.activations.put(ids, key, len(ids) - len(activations), activations)

    def put_decisions(self, tree: TokenTree, activations: Activations) -> None:
        """Stores the trunk's activations of a context's decision nodes."""
        ids = tree.prefix + tree.history
        first = 0
        for decision in tree.decisions:
            end = first + len(decision.ids)
            path = ids[: decision.start] + decision.ids
            self.activations.put(path, _key_of_decision(decision), decision.start, activations[first:end])
            first = end

    def find_reply(self, tree: TokenTree, reply: Ids) -> tuple[list[Activations], list[Activations]]:
        """The trunk's and the top's activations of the generation prompt and the reply after it."""
        path = _path_of_reply(tree, reply)
        start = tree.context_length
        trunk = self.activations.find(path, TRUNK, start)
        top = self.activations.find(path, self._key_of_reply(tree), start)
        return trunk, top

    def put_reply(self, tree: TokenTree, reply: Ids, trunk: Activations, top: Activations) -> None:
        """Stores the trunk's and the top's activations of the generation prompt and the reply after it."""
        path = _path_of_reply(tree, reply)
        self.activations.put(path, TRUNK, tree.context_length, trunk)
        self.activations.put(path, self._key_of_reply(tree), tree.context_length, top)

    def _key_of_reply(self, tree: TokenTree) -> CacheKey:
        return CacheKey("top", adapted_from=tree.context_length) if self._history_is_frozen else HISTORY


def _key_of_decision(decision: Decision) -> CacheKey:
    """Key of the trunk's activations of decision nodes, which a sequence shares with histories and replies."""
    is_sequence = decision.parents == tuple(range(-1, len(decision.ids) - 1))
    return TRUNK if is_sequence else CacheKey("trunk", parents=decision.parents)


def _path_of_reply(tree: TokenTree, reply: Ids) -> Ids:
    """All tokens up to the reply's last one."""
    return tree.prefix + tree.history + tree.decisions[0].ids + reply
