"""Prefill: the layers run over the tokens of a context that the radix tree does not know yet.

The frozen layers below the adapted ones, the trunk, make the same of a token whether it is history or reply. Above
them, an activated LoRA acts on replies and not on histories, so that a reply which has become history runs through
the upper layers once more, from the states that the trunk left. Without an activated LoRA there is no such difference,
and all that is known holds until the weights change.

Shapes: B rows, T tokens, S tokens of history after the prefix, D decision nodes, H width, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache

from ..models.hardware import memory_bytes
from ..models.lora import is_activated
from ..models.peft_internals import acting_on_every_token
from ..models.value_head import AutoModelForCausalLMWithValueHead
from .gathering import GatheringCache
from .masks import Tokens, causal
from .radix_tree import Activations, Ids, Part, RadixTree
from .token_tree import Batch, Decision, TokenTree
from .transformer import Transformer

# Kept at most: this share of the device's memory, or so many bytes where it is unknown. A token takes 25 kB in a 135M
# model.
_KEPT_SHARE, _KEPT_BYTES = 1 / 8, 2**30
# Without gradients and logits a pass has room for so many times the tokens.
_PREFILL_PASSES = 2
# Padding in one pass on a processor, where to read all weights once more takes as long as some ten tokens. An
# accelerator needs large passes more than short ones.
_PADDING = 32
# What the trunk makes of tokens, and what the layers above make of histories; what these make of a reply is filed under
# where their adapter begins to act.
_TRUNK, _HISTORY = "trunk", "history"


@dataclass(slots=True)
class Prefilled:
    """What is known of a context.

    Attributes:
        trunk: What the trunk made of its history, in pieces.
        history: What the layers above made of it, in pieces.
        decisions: What the trunk made of its decision nodes; None if that is unknown.
    """

    trunk: list[Activations]
    history: list[Activations]
    decisions: Activations | None


class PrefixCache(Transformer):
    """A causal language model that runs each token of a conversation once.

    Attributes:
        history_is_frozen: Whether histories do not depend on what is trained.
        activations: What has been computed of tokens so far.
        tokens_forwarded: Tokens, with what padding there was, that went through the model so far.
    """

    def __init__(self, model: AutoModelForCausalLMWithValueHead) -> None:
        """Begin with nothing known."""
        super().__init__(model)
        self.history_is_frozen = is_activated(model.pretrained_model)
        self.tokens_forwarded = 0
        self.activations = RadixTree(int(_KEPT_SHARE * memory_bytes(self.device)) or _KEPT_BYTES)
        if self.history_is_frozen:
            self._split()

    def forget(self) -> None:
        """Drop what depends on weights that have changed."""
        self.activations.forget(lambda part: not self.history_is_frozen or isinstance(part, int))

    def forget_all(self, packed: bool = False) -> None:
        """Drop everything that was computed; `packed` weights as well, if so said."""
        self.activations.forget(lambda part: True)
        if packed:
            self.forget_copies()

    def prefix(self, ids: Ids) -> tuple[Tensor, Tensor]:
        """Entries (2l, heads, P, head size) of a shared prefix: the trunk's, and those of the layers above."""
        known = self.prefill([TokenTree((), ids, ())])[0] if ids else Prefilled([], [], None)
        below = [self._nothing[: self.first_entry], *(piece.entries for piece in known.trunk)]
        above = [self._nothing[self.first_entry :], *(piece.entries for piece in known.history)]
        return torch.cat(below, dim=2), torch.cat(above, dim=2)

    @property
    def first_entry(self) -> int:
        """How many keys and values of a token, those of the trunk's layers, come before those of the layers above."""
        return 2 * self._first_top_layer

    @torch.no_grad()
    def prefill(self, trees: Sequence[TokenTree], with_decisions: bool = False) -> list[Prefilled]:
        """Histories of contexts with one prefix, and what the trunk makes of their decisions, if that is wanted."""
        found = {tree: self._look_up(tree, with_decisions) for tree in dict.fromkeys(trees)}
        unknown: dict[TokenTree, int] = {}
        for tree, known in found.items():
            tokens = len(tree.history) - _length(known.trunk) + (tree.node_count if known.decisions is None else 0)
            if tokens or _length(known.history) < len(tree.history):
                unknown[tree] = tokens
        most = _PREFILL_PASSES * self.pass_tokens
        for chunk in _chunks(unknown, most, _PADDING if self.device.type == "cpu" else most):
            self._run_trunk({tree: found[tree] for tree in chunk}, with_decisions)
            self._run_top({tree: found[tree] for tree in chunk})
        return [found[tree] for tree in trees]

    def reply(self, tree: TokenTree, said: Ids) -> tuple[list[Activations], list[Activations]]:
        """What is known of a reply, the tokens that open it first: below the adapted layers, and from these on."""
        ids, start = _path(tree, said), tree.context_length
        return self.activations.find(ids, _TRUNK, start), self.activations.find(ids, self._part_of_reply(tree), start)

    def keep_reply(self, tree: TokenTree, said: Ids, below: Activations, above: Activations) -> None:
        """Keep what the layers made of a reply, the tokens that open it first."""
        ids, start = _path(tree, said), tree.context_length
        self.activations.put(ids, _TRUNK, start, below)
        self.activations.put(ids, self._part_of_reply(tree), start, above)

    def decode(self, tokens: Tokens, cache: Cache) -> tuple[Tensor, Tensor]:
        """Last hidden states (B, T, H) of a reply's tokens, and those that the trunk returned.

        Args:
            tokens: As ids, or as what the trunk returned.
            cache: Holds the S - T entries before, and the trunk's of tokens that it has run over. It is added to.
        """
        self.tokens_forwarded += tokens.positions.numel()
        if not tokens.inputs.is_floating_point():
            tokens = tokens._replace(inputs=self._run(self._trunk, tokens, cache))
        with acting_on_every_token(self._top):
            return self._run(self._top, tokens, cache), tokens.inputs

    def _part_of_reply(self, tree: TokenTree) -> Part:
        return tree.context_length if self.history_is_frozen else _HISTORY

    def _look_up(self, tree: TokenTree, with_decisions: bool) -> Prefilled:
        """What the radix tree knows of a context."""
        ids, start = tree.prefix + tree.history, len(tree.prefix)
        known = Prefilled(self.activations.find(ids, _TRUNK, start), self.activations.find(ids, _HISTORY, start), None)
        if with_decisions:
            found: list[Activations] = []
            for decision in tree.decisions:
                before = ids[: decision.start]
                found += self.activations.find(before + decision.ids, _part_of(decision), decision.start)
            known.decisions = Activations.cat(found) if _length(found) == tree.node_count else None
        return known

    def _run_trunk(self, known_of: dict[TokenTree, Prefilled], with_decisions: bool) -> None:
        """Add what the trunk makes of tokens that it has not run over."""
        trees = list(known_of)
        read = [_length(known.trunk) for known in known_of.values()]
        ids = [torch.tensor(tree.history[size:], dtype=torch.long) for tree, size in zip(trees, read, strict=True)]
        decisions = None
        if with_decisions and any(known.decisions is None for known in known_of.values()):
            decisions = Batch.from_trees(trees).nodes
        elif not any(map(len, ids)):
            return
        prefix = self.prefix(trees[0].prefix)[0]
        new_of = self._extend(self._trunk, prefix, [known.trunk for known in known_of.values()], ids, decisions)
        for (tree, known), (new, nodes) in zip(known_of.items(), new_of, strict=True):
            self._keep(tree, _TRUNK, known.trunk, new)
            if decisions is not None and known.decisions is None:
                known.decisions, first = nodes[: tree.node_count], 0
                for decision in tree.decisions:
                    own, first = nodes[first : first + len(decision.ids)], first + len(decision.ids)
                    before = (tree.prefix + tree.history)[: decision.start]
                    self.activations.put(before + decision.ids, _part_of(decision), decision.start, own)

    def _run_top(self, known_of: dict[TokenTree, Prefilled]) -> None:
        """Add what the layers above the trunk make of histories."""
        behind = {tree: known for tree, known in known_of.items() if _length(known.history) < len(tree.history)}
        if not behind:
            return
        rows = [known.history for known in behind.values()]
        inputs = [Activations.cat(known.trunk).hidden[_length(known.history) :] for known in behind.values()]
        prefix = self.prefix(next(iter(behind)).prefix)[1]
        for (tree, known), (new, _) in zip(behind.items(), self._extend(self._top, prefix, rows, inputs), strict=True):
            self._keep(tree, _HISTORY, known.history, new)

    def _keep(self, tree: TokenTree, part: Part, known: list[Activations], new: Activations) -> None:
        """Add what some layers made of a history's last tokens to what is known of it."""
        if len(new):
            path = tree.prefix + tree.history
            self.activations.put(path, part, len(path) - len(new), new)
            known.append(new)

    def _extend(
        self,
        part: nn.Module | None,
        prefix: Tensor,
        rows: Sequence[Sequence[Activations]],
        inputs: Sequence[Tensor],
        decisions: Tokens | None = None,
    ) -> Iterator[tuple[Activations, Activations]]:
        """Run over tokens that follow known ones.

        Args:
            part: Trunk, None if it has no layers, or top.
            prefix: Entries of its layers of the shared prefix.
            rows: What it made of each history so far.
            inputs: Ids (T,) or hidden states (T, H) that follow, of each row.
            decisions: That branch off these histories, as ids; one row each.

        Yields:
            For each row, what was made of its inputs and, padded, of its decisions.
        """
        first_layer = self._first_top_layer if part is self._top else 0
        fed, lengths = pad_sequence(list(inputs), batch_first=True), torch.tensor([len(own) for own in inputs])[:, None]
        marks = torch.tensor([_length(row) for row in rows])[:, None]
        (count, size), shared, seen = fed.shape[:2], prefix.shape[2], int(marks.max())
        width = 0 if decisions is None else decisions.inputs.shape[1]
        # Those that pass the upper layers alone were counted when they passed the trunk.
        self.tokens_forwarded += count * size if part is (self._trunk or self._top) else 0
        is_shared = self.shares(prefix, count * (size + width))
        positions = shared + marks + torch.arange(size)
        keys = torch.cat([torch.arange(shared + seen).expand(count, -1), positions], dim=1)
        before = torch.arange(shared + seen) < shared + marks
        visible = torch.cat([before[:, None].expand(-1, size, -1), causal(0, size).expand(count, -1, -1)], dim=2)
        if decisions is not None:
            starts, own = decisions.visible[:, :, :-width].sum(2), decisions.visible[:, :, -width:]
            filled = torch.cat([before, torch.arange(size) < lengths], dim=1)
            context = filled[:, None] & (keys[:, None] < starts[:, :, None])
            of_history = torch.cat([visible, torch.zeros(count, size, width, dtype=torch.bool)], dim=2)
            visible = torch.cat([of_history, torch.cat([context, own], dim=2)], dim=1)
            fed = torch.cat([fed, decisions.inputs], dim=1)
            positions, keys = (torch.cat([part, decisions.positions], dim=1) for part in (positions, keys))
        cache = GatheringCache(prefix, rows, seen, size + width, is_shared, first_layer)
        hidden = self._run(part, Tokens(fed, positions, visible, keys), cache)
        for row, own in enumerate(inputs):
            new = Activations(cache.new_entries(row), hidden[row])
            yield new[: len(own)], new[size:]


def _part_of(decision: Decision) -> Part:
    """Where the trunk's activations of a decision are filed: a sequence's, or those of nodes that branch in one way."""
    is_sequence = decision.parents == tuple(range(-1, len(decision.ids) - 1))
    return _TRUNK if is_sequence else decision.parents


def _path(tree: TokenTree, said: Ids) -> Ids:
    """All tokens up to the last one said."""
    return tree.prefix + tree.history + tree.decisions[0].ids + said


def _length(pieces: Sequence[Activations]) -> int:
    return sum(map(len, pieces))


def _chunks(tokens: dict[TokenTree, int], most: int, most_padding: int) -> Iterator[list[TokenTree]]:
    """Contexts, alike in how many tokens are to be run over, in groups for one pass each.

    Args:
        tokens: How many, of each context.
        most: Tokens in a pass.
        most_padding: Tokens of padding in a pass.
    """
    chunk: list[TokenTree] = []
    needed = 0
    for tree in sorted(tokens, key=tokens.__getitem__):
        size = (len(chunk) + 1) * tokens[tree]
        padding = size - needed - tokens[tree]
        if chunk and (size > most or padding > most_padding):
            yield chunk
            chunk, needed = [], 0
        chunk.append(tree)
        needed += tokens[tree]
    if chunk:
        yield chunk
