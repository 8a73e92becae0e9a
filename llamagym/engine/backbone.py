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
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from ..models.peft_internals import acting_on_every_token
from .gathering import GatheringCache
from .kv_cache import BufferCache, KVBuffer, entries_of
from .masks import Tokens, causal
from .prefix_cache import PrefixCache
from .token_tree import Batch, TokenTree


class Backbone(PrefixCache):
    """A causal language model that gives the hidden states at decision positions, where replies are scored."""

    def size(self, tree: TokenTree) -> int:
        """Cost of a tree in a pass with gradients, in nodes; a cached token counts as an eighth of one."""
        if self.history_is_frozen:
            return tree.node_count + tree.context_length // 8
        return tree.node_count + len(tree.history)

    def hidden_states(self, trees: Sequence[TokenTree], adapted: bool = True, cached: bool = True) -> Tensor:
        """The last hidden state of every decision node, one tree after the other, float (N, H).

        Args:
            trees: With one prefix.
            adapted: Whether an activated LoRA acts on the decisions; a plain one always does.
            cached: Whether results may be cached. Not where other weights stand in the place of those that learn; what
                none of these has a part in is cached all the same.
        """
        batch = Batch.from_trees(trees)
        nodes, size = batch.nodes, batch.history.shape[1]
        self.tokens_forwarded += nodes.inputs.numel()
        if not self.history_is_frozen and (torch.is_grad_enabled() or not cached):
            cache: BufferCache = self._prefill_with_gradients(batch)
        else:
            known = self.prefill(trees, with_decisions=self.history_is_frozen)
            prefix, histories = self.prefix(trees[0].prefix)[1], [of_tree.history for of_tree in known]
            is_shared = self.shares(prefix, nodes.inputs.numel())
            cache = GatheringCache(prefix, histories, size, nodes.inputs.shape[1], is_shared, self._first_top_layer)
            below = [of_tree.decisions.hidden for of_tree in known if of_tree.decisions is not None]
            if below:
                nodes = nodes._replace(inputs=pad_sequence(below, batch_first=True))
        with acting_on_every_token(self._top) if adapted else nullcontext():
            hidden = self._run(self._top, nodes, cache)
        return hidden.flatten(0, 1).index_select(0, batch.places.to(hidden.device))

    def _prefill_with_gradients(self, batch: Batch) -> BufferCache:
        """Keys and values of prefix and history, P + S a row, padding included, with gradients."""
        prefix, length, nodes = self._nothing, batch.prefix_length, batch.nodes.inputs
        count, size = batch.history.shape
        self.tokens_forwarded += length + batch.history.numel()
        if length:
            read, positions = DynamicCache(), torch.arange(length)[None]
            self._run(self._body, Tokens(batch.prefix, positions, causal(0, length)[None], positions), read)
            prefix = entries_of(read, slice(None))[0]
        buffer = KVBuffer(prefix, count, length + size + nodes.shape[1], self.shares(prefix, nodes.numel()))
        cache = buffer.cache(slice(None), length)
        cache.keeps_gradients = True
        if size:
            keys = torch.arange(length + size).expand(count, -1)
            visible = causal(length, size).expand(count, -1, -1)
            self._run(self._body, Tokens(batch.history, keys[:, length:], visible, keys), cache)
        return cache
