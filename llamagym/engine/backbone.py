"""Runs a causal language model on token trees, each token once: hidden states first, logits only where they are read.

A context's history runs first, then the decisions that branch off it. With an activated LoRA, histories do not depend
on the trained weights. Then what decisions need of a history (keys and values of the top, and the trunk's output for
the decision nodes) is computed once and cached for good. Otherwise it is cached until the weights change. In training,
gradients flow through the history; the shared prefix runs once per pass.

Shapes: B rows, T tokens, S tokens of history after the prefix, D decision nodes a row, N nodes of all rows, H width,
L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache

from ..models.hardware import memory_bytes
from ..models.lora import is_activated
from ..models.peft_internals import acting_on_every_token, layers_with_variants
from ..models.value_head import AutoModelForCausalLMWithValueHead
from .kv_cache import BufferCache, GatheringCache, KVBuffer, entries_of
from .masks import Tokens, causal
from .prefix_cache import ContextActivations, PrefixCache
from .radix_tree import HISTORY, TRUNK, Activations, Ids, RadixTree, token_count
from .token_tree import Batch, TokenTree
from .verification import verified_transformer

# Budget of the prefix cache: this share of the device's memory, or so many bytes where that is unknown. A token takes
# 25 kB in a 135M model.
_CACHE_SHARE = 1 / 8
_CACHE_BYTES = 2**30
# Without gradients and logits, a pass has room for this many times the tokens.
_PREFILL_PASSES = 2
# Tokens of padding per pass on a CPU, where reading all weights once more takes as long as about ten tokens. A GPU
# needs large passes more than short ones.
_PADDING = 32


class Backbone:
    """A causal language model with a prefix cache.

    Attributes:
        transformer: Runs the layers.
        prefix_cache: Finds and stores activations.
        history_is_frozen: Whether histories do not depend on the trained weights.
        tokens_forwarded: Tokens that went through the model so far, including padding.
    """

    def __init__(self, model: AutoModelForCausalLMWithValueHead) -> None:
        """Wraps a model.

        Raises:
            ModelLoadError: The model computes in a way that `Transformer` does not reproduce.
        """
        self.transformer = verified_transformer(model)
        self.history_is_frozen = is_activated(model.pretrained_model)
        self.tokens_forwarded = 0
        self._variants = layers_with_variants(self.transformer.top)
        max_bytes = int(_CACHE_SHARE * memory_bytes(self.transformer.device)) or _CACHE_BYTES
        self.prefix_cache = PrefixCache(self.history_is_frozen, RadixTree(max_bytes))

    def cost(self, tree: TokenTree) -> int:
        """Cost of a tree in a pass with gradients, in nodes; a cached token counts as an eighth of a node."""
        if self.history_is_frozen:
            return tree.node_count + tree.context_length // 8
        return tree.node_count + len(tree.history)

    def hidden_states(self, trees: Sequence[TokenTree], adapted: bool = True, cached: bool = True) -> Tensor:
        """Last hidden state of every decision node, one tree after the other, float (N, H).

        Args:
            trees: Trees with one prefix.
            adapted: Whether an activated LoRA acts on the decisions; a plain one always does.
            cached: Whether activations that depend on the trained weights may be cached. False while these weights are
                replaced by others.
        """
        batch = Batch.from_trees(trees)
        nodes = batch.nodes
        self.tokens_forwarded += nodes.inputs.numel()
        if not self.history_is_frozen and (torch.is_grad_enabled() or not cached):
            cache: BufferCache = self._prefill_with_gradients(batch)
        else:
            contexts = self.prefill(trees, with_decisions=self.history_is_frozen)
            prefix = self.prefix(trees[0].prefix)[1]
            histories = [context.history for context in contexts]
            size = batch.history.shape[1]
            width = nodes.inputs.shape[1]
            is_shared = self.transformer.shares(prefix, nodes.inputs.numel())
            first_layer = self.transformer.first_top_layer
            cache = GatheringCache(prefix, histories, size, width, is_shared, first_layer)
            trunk_outputs = [context.decisions.hidden for context in contexts if context.decisions is not None]
            if trunk_outputs:
                nodes = nodes._replace(inputs=pad_sequence(trunk_outputs, batch_first=True))
        with acting_on_every_token(self._variants) if adapted else nullcontext():
            hidden = self.transformer.run(self.transformer.top, nodes, cache)
        return hidden.flatten(0, 1).index_select(0, batch.places.to(hidden.device))

    def _prefill_with_gradients(self, batch: Batch) -> BufferCache:
        """KV cache of prefix and history, P + S columns a row including padding, with gradients."""
        prefix = self.transformer.no_entries
        prefix_length = batch.prefix_length
        count, size = batch.history.shape
        nodes = batch.nodes.inputs
        self.tokens_forwarded += prefix_length + batch.history.numel()
        if prefix_length:
            cache_of_prefix = DynamicCache()
            positions = torch.arange(prefix_length)[None]
            tokens = Tokens(batch.prefix, positions, causal(0, prefix_length)[None], positions)
            self.transformer.run(self.transformer.body, tokens, cache_of_prefix)
            prefix = entries_of(cache_of_prefix, slice(None))[0]
        columns = prefix_length + size + nodes.shape[1]
        buffer = KVBuffer(prefix, count, columns, self.transformer.shares(prefix, nodes.numel()))
        cache = buffer.cache(slice(None), prefix_length)
        cache.keeps_gradients = True
        if size:
            key_positions = torch.arange(prefix_length + size).expand(count, -1)
            visible = causal(prefix_length, size).expand(count, -1, -1)
            tokens = Tokens(batch.history, key_positions[:, prefix_length:], visible, key_positions)
            self.transformer.run(self.transformer.body, tokens, cache)
        return cache

    def prefix(self, ids: Ids) -> tuple[Tensor, Tensor]:
        """Entries (2L, heads, P, head size) of a shared prefix: the trunk's and the top's."""
        context = ContextActivations([], [], None)
        if ids:
            context = self.prefill([TokenTree((), ids, ())])[0]
        trunk_entries = self.transformer.trunk_entries
        trunk = [self.transformer.no_entries[:trunk_entries]]
        trunk += [piece.entries for piece in context.trunk]
        top = [self.transformer.no_entries[trunk_entries:]]
        top += [piece.entries for piece in context.history]
        return torch.cat(trunk, dim=2), torch.cat(top, dim=2)

    @torch.no_grad()
    def prefill(self, trees: Sequence[TokenTree], with_decisions: bool = False) -> list[ContextActivations]:
        """Activations of contexts; the layers run over the tokens that are not cached.

        Args:
            trees: Contexts with one prefix.
            with_decisions: Whether the trunk runs over the decision nodes, too.
        """
        contexts = {tree: self.prefix_cache.find_context(tree, with_decisions) for tree in dict.fromkeys(trees)}
        missing: dict[TokenTree, int] = {}
        for tree, context in contexts.items():
            tokens = len(tree.history) - token_count(context.trunk)
            if context.decisions is None:
                tokens += tree.node_count
            if tokens or token_count(context.history) < len(tree.history):
                missing[tree] = tokens
        max_tokens = _PREFILL_PASSES * self.transformer.pass_tokens
        max_padding = _PADDING if self.transformer.device.type == "cpu" else max_tokens
        for group in _grouped(missing, max_tokens, max_padding):
            self._run_trunk({tree: contexts[tree] for tree in group}, with_decisions)
            self._run_top({tree: contexts[tree] for tree in group})
        return [contexts[tree] for tree in trees]

    def decode(self, tokens: Tokens, cache: Cache) -> tuple[Tensor, Tensor]:
        """Last hidden states (B, T, H) of a reply's tokens, and the trunk's output for them.

        Args:
            tokens: The reply's tokens, as ids or as the trunk's output.
            cache: The S - T entries before, including the trunk's entries of tokens that it has run over. The new
                entries are added.
        """
        self.tokens_forwarded += tokens.positions.numel()
        transformer = self.transformer
        if not tokens.inputs.is_floating_point():
            tokens = tokens._replace(inputs=transformer.run(transformer.trunk, tokens, cache))
        with acting_on_every_token(self._variants):
            return transformer.run(transformer.top, tokens, cache), tokens.inputs

    def _run_trunk(self, contexts: dict[TokenTree, ContextActivations], with_decisions: bool) -> None:
        """Adds the trunk's activations of tokens that it has not run over."""
        trees = list(contexts)
        inputs: list[Tensor] = []
        for tree, context in contexts.items():
            new_ids = tree.history[token_count(context.trunk) :]
            inputs.append(torch.tensor(new_ids, dtype=torch.long))
        decisions = None
        if with_decisions and any(context.decisions is None for context in contexts.values()):
            decisions = Batch.from_trees(trees).nodes
        elif not any(map(len, inputs)):
            return
        prefix = self.prefix(trees[0].prefix)[0]
        histories = [context.trunk for context in contexts.values()]
        extended = self._extend(self.transformer.trunk, prefix, histories, inputs, decisions)
        for (tree, context), (new, nodes) in zip(contexts.items(), extended, strict=True):
            if len(new):
                self.prefix_cache.put_history(tree, TRUNK, new)
                context.trunk.append(new)
            if decisions is not None and context.decisions is None:
                context.decisions = nodes[: tree.node_count]
                self.prefix_cache.put_decisions(tree, context.decisions)

    def _run_top(self, contexts: dict[TokenTree, ContextActivations]) -> None:
        """Adds the top's activations of histories."""
        trees: list[TokenTree] = []
        histories: list[list[Activations]] = []
        inputs: list[Tensor] = []
        for tree, context in contexts.items():
            known = token_count(context.history)
            if known < len(tree.history):
                trees.append(tree)
                histories.append(context.history)
                inputs.append(Activations.cat(context.trunk).hidden[known:])
        if not trees:
            return
        prefix = self.prefix(trees[0].prefix)[1]
        extended = self._extend(self.transformer.top, prefix, histories, inputs)
        for tree, history, (new, _) in zip(trees, histories, extended, strict=True):
            self.prefix_cache.put_history(tree, HISTORY, new)
            history.append(new)

    def _extend(
        self,
        layers: nn.Module | None,
        prefix: Tensor,
        histories: Sequence[Sequence[Activations]],
        inputs: Sequence[Tensor],
        decisions: Tokens | None = None,
    ) -> Iterator[tuple[Activations, Activations]]:
        """Runs layers over tokens that follow cached ones.

        Args:
            layers: The trunk, None if it has no layers, or the top.
            prefix: These layers' entries of the shared prefix, (2L, heads, P, head size).
            histories: Their activations of each row's history so far.
            inputs: Ids (T,) or hidden states (T, H) that follow, one tensor for each row.
            decisions: Decision nodes as ids, one row for each history, off which they branch.

        Yields:
            For each row, the activations of its inputs and, padded, of its decision nodes.
        """
        transformer = self.transformer
        size = max(map(len, inputs))
        width = 0 if decisions is None else decisions.inputs.shape[1]
        # Tokens are counted once, in the lowest layers that they go through.
        lowest_layers = transformer.top if transformer.trunk is None else transformer.trunk
        if layers is lowest_layers:
            self.tokens_forwarded += len(inputs) * size
        lengths = torch.tensor([token_count(history) for history in histories])[:, None]
        tokens = _continuation(inputs, lengths, prefix.shape[2], decisions)
        first_layer = transformer.first_top_layer if layers is transformer.top else 0
        is_shared = transformer.shares(prefix, len(inputs) * (size + width))
        cache = GatheringCache(prefix, histories, int(lengths.max()), size + width, is_shared, first_layer)
        hidden = transformer.run(layers, tokens, cache)
        for row, own in enumerate(inputs):
            new = Activations(cache.new_entries(row), hidden[row])
            yield new[: len(own)], new[size:]


def _continuation(inputs: Sequence[Tensor], lengths: Tensor, prefix_length: int, decisions: Tokens | None) -> Tokens:
    """Lays out tokens that follow each row's prefix and history, and the decision nodes that branch off them.

    Args:
        inputs: Ids (T,) or hidden states (T, H), one tensor for each row.
        lengths: Length of each row's cached history, int64 (B, 1).
        prefix_length: Length of the shared prefix.
        decisions: Decision nodes as ids, one row for each history.
    """
    padded = pad_sequence(list(inputs), batch_first=True)
    count, size = padded.shape[:2]
    columns = torch.arange(prefix_length + int(lengths.max()))
    is_cached = columns < prefix_length + lengths
    positions = prefix_length + lengths + torch.arange(size)
    key_positions = torch.cat([columns.expand(count, -1), positions], dim=1)
    visible = torch.cat([is_cached[:, None].expand(-1, size, -1), causal(0, size).expand(count, -1, -1)], dim=2)
    if decisions is None:
        return Tokens(padded, positions, visible, key_positions)
    width = decisions.inputs.shape[1]
    starts = decisions.visible[:, :, :-width].sum(2)
    new_lengths = torch.tensor([len(own) for own in inputs])[:, None]
    is_filled = torch.cat([is_cached, torch.arange(size) < new_lengths], dim=1)
    context = is_filled[:, None] & (key_positions[:, None] < starts[:, :, None])
    visible_to_inputs = torch.cat([visible, torch.zeros(count, size, width, dtype=torch.bool)], dim=2)
    visible_to_nodes = torch.cat([context, decisions.visible[:, :, -width:]], dim=2)
    return Tokens(
        torch.cat([padded, decisions.inputs], dim=1),
        torch.cat([positions, decisions.positions], dim=1),
        torch.cat([visible_to_inputs, visible_to_nodes], dim=1),
        torch.cat([key_positions, decisions.positions], dim=1),
    )


def _grouped(tokens: dict[TokenTree, int], max_tokens: int, max_padding: int) -> Iterator[list[TokenTree]]:
    """Groups contexts of similar length for one pass each.

    Args:
        tokens: Number of tokens to run of each context.
        max_tokens: Most tokens in a pass.
        max_padding: Most tokens of padding in a pass.
    """
    group: list[TokenTree] = []
    total = 0
    for tree in sorted(tokens, key=tokens.__getitem__):
        size = (len(group) + 1) * tokens[tree]
        padding = size - total - tokens[tree]
        if group and (size > max_tokens or padding > max_padding):
            yield group
            group = []
            total = 0
        group.append(tree)
        total += tokens[tree]
    if group:
        yield group
