"""Runs the transformer on batches of token trees: hidden states first, logits only where they are read.

It reads a history first, then the decisions that branch off it. Where an activated LoRA is all that learns, histories
do not depend on it: what decisions need of them (keys and values of the adapted layers, hidden states where these
begin) is computed once for as long as the model lives, both in one pass. Otherwise it is kept until the weights change,
and in training gradients flow through the history, whose shared prefix is computed once a pass.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache

from .adapter import acting_on_every_token, is_activated
from .batching import Batch, TokenTree
from .history import Recall, Recent, Unread, Written, cache_of, entries_of
from .masks import causal
from .transformer import Transformer
from .value_head import AutoModelForCausalLMWithValueHead

# Kept at most, of what was read: 20 tokens take 900 kB in a 135M model.
_HISTORY_BYTES = 512 * 2**20
# Of what decisions need of it, 250 kB where 8 layers are adapted: as much, or this share of the device's memory. Where
# the observations that come again and again do not fit, each is read anew every time.
_RECALL_BYTES, _RECALL_SHARE = 512 * 2**20, 1 / 16
# Kept at most, of what was written: a token takes 250 kB in a 135M model, most of it what may follow.
_WRITTEN_BYTES = 512 * 2**20
# Tokens of history in one pass.
_HISTORY_TOKENS = 2048


class Backbone(Transformer):
    """A causal language model that remembers what it has read and written.

    Attributes:
        history_is_frozen: Whether histories do not depend on what is trained.
        tokens_forwarded: Tokens (padding included) that were read or decided so far.
        written: By context and beginning of a reply, what was written since the weights changed.
    """

    def __init__(self, model: AutoModelForCausalLMWithValueHead) -> None:
        """Remember nothing yet."""
        super().__init__(model)
        self.history_is_frozen = is_activated(model.pretrained_model)
        self.tokens_forwarded = 0
        self._histories: Recent[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = Recent(
            lambda entries: entries.nbytes, _HISTORY_BYTES
        )
        self._recalls: Recent[TokenTree, Recall] = Recent(
            lambda recall: recall.nbytes, max(_RECALL_BYTES, int(_RECALL_SHARE * _memory_bytes(self.device)))
        )
        self.written: Recent[tuple[TokenTree, tuple[int, ...]], Written] = Recent(
            lambda written: written.nbytes, _WRITTEN_BYTES
        )
        if self.history_is_frozen:
            self._split()

    def size(self, tree: TokenTree) -> int:
        """What a tree costs in a pass with gradients, in nodes: entries that are only looked at cost an eighth."""
        if self.history_is_frozen:
            return tree.node_count + tree.context_length // 8
        return tree.node_count + len(tree.history)

    def hidden_states(self, trees: Sequence[TokenTree], batch: Batch, adapted: bool = True) -> Tensor:
        """The last hidden state of every decision node, float (B, D, H).

        Args:
            trees: What the batch was made from.
            batch: The same as rectangles.
            adapted: Whether an activated LoRA acts on the decisions; a plain one always does.
        """
        size = batch.history.shape[1]
        if self.history_is_frozen:
            recalls = self._recall(trees)
            hidden = pad_sequence([recall.hidden for recall in recalls], batch_first=True)
            prefix = self.read_prefix(trees[0].prefix)
            shared = None if prefix is None else prefix[2 * self._first_top_layer :]
            rows = [recall.entries for recall in recalls]
            cache = cache_of(shared, rows, size, batch.ids.shape[1], self._first_top_layer)
            return self._decide(self._top, batch, hidden, cache, adapted)
        if adapted and not torch.is_grad_enabled():
            cache = cache_of(self.read_prefix(trees[0].prefix), self.read(trees), size, batch.ids.shape[1])
        else:
            cache = self._read_anew(batch)
        return self._decide(self._body, batch, batch.ids, cache, adapted)

    def forget(self) -> None:
        """Drop what depends on weights that have changed."""
        self.written.clear()
        if not self.history_is_frozen:
            self.forget_histories()

    def forget_histories(self) -> None:
        """Drop what was read."""
        self._histories.clear()
        self._recalls.clear()

    def write(self, ids: Tensor, positions: Tensor, visible: Tensor, key_positions: Tensor, cache: Cache) -> Tensor:
        """Hidden states (B, T, H) of a reply's tokens, whose entries are added to the cache.

        Args:
            ids: Token ids, int64 (B, T).
            positions: Their positions, int64 (B, T).
            visible: Which entries, the new ones included, each token sees, bool (B, T, S).
            key_positions: Positions of the entries, int64 (B, S).
            cache: Holds the S - T entries before.
        """
        self.tokens_forwarded += ids.numel()
        with acting_on_every_token(self._lm):
            return self._run(self._body, ids, positions, visible, key_positions, cache)

    def _decide(self, part: nn.Module, batch: Batch, inputs: Tensor, cache: Cache, adapted: bool = True) -> Tensor:
        """Run `part` on decision nodes, given as ids (B, D) or hidden states (B, D, H)."""
        self.tokens_forwarded += batch.ids.numel()
        with acting_on_every_token(self._lm) if adapted else nullcontext():
            return self._run(part, inputs, batch.positions, batch.visible, batch.key_positions, cache)

    def _read_anew(self, batch: Batch) -> DynamicCache:
        """Keys and values of prefix and history, P + S a row, padding included, with gradients."""
        cache, length = DynamicCache(), batch.prefix_length
        count, size = batch.history.shape
        self.tokens_forwarded += length + batch.history.numel()
        if length:
            positions = torch.arange(length)[None]
            self._run(self._body, batch.prefix, positions, causal(0, length)[None], positions, cache)
            layers: list[Any] = cache.layers
            for layer in layers:
                layer.keys, layer.values = layer.keys.expand(count, -1, -1, -1), layer.values.expand(count, -1, -1, -1)
        if size:
            keys = torch.arange(length + size).expand(count, -1)
            visible = causal(length, size).expand(count, -1, -1)
            self._run(self._body, batch.history, keys[:, length:], visible, keys, cache)
        return cache

    def read_prefix(self, ids: tuple[int, ...]) -> Tensor | None:
        """Entries (2L, heads, P, head size) of a shared prefix; None if it is empty."""
        return self.read([TokenTree((), ids, ())])[0] if ids else None

    @torch.no_grad()
    def read(self, trees: Sequence[TokenTree]) -> list[Tensor]:
        """Entries (2L, heads, S, head size) of each tree's history, of which only what is new is read."""
        found, chunks = self._look_up(trees)
        for chunk in chunks:
            found |= self._read_on(chunk)[0]
        return [found[tree] for tree in trees]

    def _look_up(self, trees: Sequence[TokenTree]) -> tuple[dict[TokenTree, Tensor], list[list[Unread]]]:
        """Entries of the histories that are known, and what is left to read of others, alike in length in a chunk."""
        found: dict[TokenTree, Tensor] = {}
        fresh: list[Unread] = []
        for tree in dict.fromkeys(trees):
            for mark in (len(tree.history), *reversed(tree.marks), 0):
                known = self._histories.get((tree.prefix, tree.history[:mark])) if mark else None
                if known is not None or not mark:
                    break
            if known is not None and mark == len(tree.history):
                found[tree] = known
            else:
                fresh.append(Unread(tree, mark, known))
        chunks: list[list[Unread]] = []
        for unread in sorted(fresh, key=lambda unread: len(unread.ids)):
            if not chunks or (len(chunks[-1]) + 1) * len(unread.ids) > _HISTORY_TOKENS:
                chunks.append([])
            chunks[-1].append(unread)
        return found, chunks

    def _read_on(
        self, fresh: list[Unread], decisions: Batch | None = None
    ) -> tuple[dict[TokenTree, Tensor], Tensor | None]:
        """Read histories from where earlier turns stopped; returns the entries of all.

        Args:
            fresh: What is left to read.
            decisions: Those of the same trees; run through the trunk beside their histories, which saves a pass. Their
                states where the top begins, (B, D, H), are the second result.
        """
        prefix = self.read_prefix(fresh[0].tree.prefix)
        like = next((entries for entries in (prefix, *(unread.known for unread in fresh)) if entries is not None), None)
        shared, seen = len(fresh[0].tree.prefix), max(unread.mark for unread in fresh)
        count, size = len(fresh), max(len(unread.ids) for unread in fresh)
        width = 0 if decisions is None else decisions.ids.shape[1]
        if like is None:
            cache: Cache = DynamicCache()
        else:
            known = [like[:, :, :0] if unread.known is None else unread.known for unread in fresh]
            cache = cache_of(prefix, known, seen, size + width)
        marks = torch.tensor([unread.mark for unread in fresh])[:, None]
        ids = pad_sequence([torch.tensor(unread.ids, dtype=torch.long) for unread in fresh], batch_first=True)
        positions = shared + marks + torch.arange(size)
        keys = torch.cat([torch.arange(shared + seen).expand(count, -1), positions], dim=1)
        before = torch.arange(shared + seen) < shared + marks
        visible = torch.cat([before[:, None].expand(-1, size, -1), causal(0, size).expand(count, -1, -1)], dim=2)
        self.tokens_forwarded += ids.numel()
        hidden = None
        if decisions is not None:
            lengths = torch.tensor([len(unread.ids) for unread in fresh])[:, None]
            filled = torch.cat([before, torch.arange(size) < lengths], dim=1)
            starts, own = decisions.visible[:, :, :-width].sum(2), decisions.visible[:, :, -width:]
            context = filled[:, None] & (keys[:, None] < starts[:, :, None])
            of_history = torch.cat([visible, torch.zeros(count, size, width, dtype=torch.bool)], dim=2)
            below = self._run(
                self._trunk,
                torch.cat([ids, decisions.ids], dim=1),
                torch.cat([positions, decisions.positions], dim=1),
                torch.cat([of_history, torch.cat([context, own], dim=2)], dim=1),
                torch.cat([keys, decisions.positions], dim=1),
                cache,
            )
            hidden = below[:, size:]
            if size:
                self._run(self._top, below[:, :size], positions, visible, keys, cache)
        elif size:
            self._run(self._body, ids, positions, visible, keys, cache)
        entries = entries_of(cache, slice(shared + seen, shared + seen + size))
        found = {}
        for row, unread in enumerate(fresh):
            tree, parts = unread.tree, [entries[row, :, :, : len(unread.ids)]]
            if unread.known is not None:
                parts.insert(0, unread.known)
                # Its conversation has gone on; what follows it has a copy.
                self._histories.pop((tree.prefix, tree.history[: unread.mark]))
            found[tree] = torch.cat(parts, dim=2)
            self._histories.put((tree.prefix, tree.history), found[tree])
        return found, hidden

    @torch.no_grad()
    def _recall(self, trees: Sequence[TokenTree]) -> list[Recall]:
        """What each tree's decisions need of the frozen layers, computed where it is not at hand."""
        recalls = {tree: recall for tree in trees if (recall := self._recalls.get(tree)) is not None}
        known, chunks = self._look_up([tree for tree in trees if tree not in recalls])
        if self._trunk is None:
            for chunk in chunks:
                known |= self._read_on(chunk)[0]
            chunks = []
        groups: list[tuple[dict[TokenTree, Tensor], Tensor]] = []
        if known:
            groups.append((known, self._below_top(Batch.from_trees(list(known)), list(known.values()))))
        for chunk in chunks:
            entries, hidden = self._read_on(chunk, Batch.from_trees([unread.tree for unread in chunk]))
            assert hidden is not None
            groups.append((entries, hidden))
        for entries, hidden in groups:
            for row, (tree, of_tree) in enumerate(entries.items()):
                top = of_tree[2 * self._first_top_layer :].clone()
                recalls[tree] = Recall(top, hidden[row, : tree.node_count].clone())
                self._recalls.put(tree, recalls[tree])
        return [recalls[tree] for tree in trees]

    def _below_top(self, batch: Batch, entries: Sequence[Tensor]) -> Tensor:
        """States (B, D, H) of decisions where the top begins, given the entries of their histories."""
        if self._trunk is None:
            embedded: Tensor = self._body.get_input_embeddings()(batch.ids.to(self.device))
            return embedded
        prefix = self.read_prefix(tuple(batch.prefix[0].tolist()))
        cache = cache_of(prefix, entries, batch.history.shape[1], batch.ids.shape[1])
        return self._run(self._trunk, batch.ids, batch.positions, batch.visible, batch.key_positions, cache)


def _memory_bytes(device: torch.device) -> int:
    """Memory of a device; 0 where that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0
