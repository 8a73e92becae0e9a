"""Runs the transformer on batches of token trees: hidden states first, logits only where they are read.

It reads a history first, then the decisions that branch off it. Where an activated LoRA is all that learns, histories
do not depend on it: what decisions need of them (keys and values of the adapted layers, hidden states where these
begin) is computed once for as long as the model lives, both in one pass. Otherwise it is kept until the weights change,
and in training gradients flow through the history, whose shared prefix is computed once a pass.

Shapes: B rows, D decision nodes a row, N nodes of all rows, H width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from ..models.lora import acting_on_every_token
from .kv_cache import Places, Recall, Room, RoomyCache, cache_of, entries_of
from .masks import causal
from .prefix_cache import Memory
from .token_tree import Batch, Ids, TokenTree


class Backbone(Memory):
    """A causal language model that decides: it gives the hidden states that replies are read from."""

    def size(self, tree: TokenTree) -> int:
        """What a tree costs in a pass with gradients, in nodes: entries that are only looked at cost an eighth."""
        if self.history_is_frozen:
            return tree.node_count + tree.context_length // 8
        return tree.node_count + len(tree.history)

    def hidden_states(self, trees: Sequence[TokenTree], batch: Batch, adapted: bool = True) -> Tensor:
        """The last hidden state of every decision node, one tree after the other, float (N, H).

        Args:
            trees: What the batch was made from.
            batch: The same as rectangles.
            adapted: Whether an activated LoRA acts on the decisions; a plain one always does.
        """
        size, width = batch.history.shape[1], batch.ids.shape[1]
        if self.history_is_frozen:
            recalls = self._recall(trees)
            hidden = pad_sequence([recall.hidden for recall in recalls], batch_first=True)
            prefix = self.read_prefix(trees[0].prefix)[self._bottom :]
            rows = [recall.entries for recall in recalls]
            cache = cache_of(prefix, rows, size, width, self.shares(prefix, batch.ids.numel()), self._first_top_layer)
            return self._decide(self._top, batch, hidden, cache, adapted)
        if adapted and not torch.is_grad_enabled():
            prefix = self.read_prefix(trees[0].prefix)
            cache = cache_of(prefix, self.read(trees), size, width, self.shares(prefix, batch.ids.numel()))
        else:
            cache = self._read_anew(batch)
        return self._decide(self._body, batch, batch.ids, cache, adapted)

    def _decide(self, part: nn.Module, batch: Batch, inputs: Tensor, cache: RoomyCache, adapted: bool = True) -> Tensor:
        """Run `part` on decision nodes, given as ids (B, D) or hidden states (B, D, H); returns states (N, H)."""
        places = Places(batch.places, *batch.ids.shape)
        if torch.is_grad_enabled() and self._can_pack and len(batch.places) < batch.ids.numel():
            cache.places = places
        self.tokens_forwarded += batch.ids.numel() if cache.places is None else len(batch.places)
        with acting_on_every_token(part) if adapted else nullcontext():
            hidden = self._run(part, inputs, batch.positions, batch.visible, batch.key_positions, cache)
        return (places.gather(hidden) if cache.places is None else hidden)[0]

    def _read_anew(self, batch: Batch) -> RoomyCache:
        """Keys and values of prefix and history, P + S a row, padding included, with gradients."""
        prefix, length = self._nothing, batch.prefix_length
        count, size = batch.history.shape
        self.tokens_forwarded += length + batch.history.numel()
        if length:
            read, positions = DynamicCache(), torch.arange(length)[None]
            self._run(self._body, batch.prefix, positions, causal(0, length)[None], positions, read)
            prefix = entries_of(read, slice(None))[0]
        room = Room(prefix, count, length + size + batch.ids.shape[1], self.shares(prefix, batch.ids.numel()))
        cache = room.cache(slice(None), length)
        cache.keeps_gradients = True
        if size:
            keys = torch.arange(length + size).expand(count, -1)
            visible = causal(length, size).expand(count, -1, -1)
            self._run(self._body, batch.history, keys[:, length:], visible, keys, cache)
        return cache

    @torch.no_grad()
    def _recall(self, trees: Sequence[TokenTree]) -> list[Recall]:
        """What each tree's decisions need of the frozen layers, computed where it is not at hand."""
        recalls: dict[TokenTree, Recall] = {}
        for tree in dict.fromkeys(trees):
            top, states = self._tops.get(tree.context), [self._states.get(key) for key in _decision_keys(tree)]
            known_states = [of_decision for of_decision in states if of_decision is not None]
            if top is not None and len(known_states) == len(states):
                recalls[tree] = Recall(top, torch.cat(known_states))
        for entries, hidden, _ in self._read_below([tree for tree in trees if tree not in recalls]):
            for row, (tree, of_tree) in enumerate(entries.items()):
                recalls[tree] = Recall(self._top_of(tree, of_tree), hidden[row, : tree.node_count].clone())
                lengths = [len(decision.ids) for decision in tree.decisions]
                for key, states in zip(_decision_keys(tree), recalls[tree].hidden.split(lengths), strict=True):
                    self._states.put(key, states)
        return [recalls[tree] for tree in trees]


def _decision_keys(tree: TokenTree) -> list[tuple[Ids, Ids, Ids, Ids]]:
    """For each decision, what its states depend on: prefix, history before it, its tokens and how they branch."""
    shared = len(tree.prefix)
    return [
        (tree.prefix, tree.history[: decision.start - shared], decision.ids, decision.parents)
        for decision in tree.decisions
    ]
