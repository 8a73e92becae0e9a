"""Runs the transformer on batches of token trees: hidden states first, logits only where they are read.

The model's body is called with explicit positions and an explicit mask, so padding, shared prefixes and branches mean
the same to every architecture. It reads a history first, then the decisions that branch off it. Where an activated LoRA
is all that learns, histories do not depend on it: what decisions need of them (keys and values of the adapted layers,
hidden states where these begin) is computed once for as long as the model lives. Otherwise it is kept until the weights
change, and in training gradients flow through the history, whose shared prefix is computed once a pass.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache

from .adapter import acting_on_every_token, is_activated
from .batching import Batch, TokenTree
from .errors import ModelLoadError
from .history import Recall, Recent, Unread, Written, cache_of, entries_of
from .parts import first_trained_layer, split
from .value_head import AutoModelForCausalLMWithValueHead

logger = logging.getLogger(__name__)

# Kept at most, of what was read: 20 tokens take 900 kB in a 135M model.
_HISTORY_BYTES = 512 * 2**20
# Of what decisions need of it, 250 kB where 8 layers are adapted: as much, or this share of the device's memory. Where
# the observations that come again and again do not fit, each is read anew every time.
_RECALL_BYTES, _RECALL_SHARE = 512 * 2**20, 1 / 16
# Kept at most, of what was written: a token takes 250 kB in a 135M model, most of it what may follow.
_WRITTEN_BYTES = 512 * 2**20
# Tokens of history in one pass.
_HISTORY_TOKENS = 2048


class Backbone:
    """The body and the output layer of a causal language model.

    Attributes:
        history_is_frozen: Whether histories do not depend on what is trained.
        tokens_forwarded: Tokens (padding included) that were read or decided so far.
        written: By context and beginning of a reply, what was written since the weights changed.
    """

    def __init__(self, model: AutoModelForCausalLMWithValueHead) -> None:
        """Find the parts of `model` and check that together they give the model's own logits."""
        pretrained = model.pretrained_model
        lm: Any = pretrained.get_base_model() if isinstance(pretrained, PeftModel) else pretrained
        self._lm = lm
        self._body: Any = getattr(lm, lm.base_model_prefix)
        self._head: nn.Module = lm.get_output_embeddings()
        config = lm.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._window: int | None = getattr(config, "sliding_window", None)
        self._layer_types: set[str] = set(getattr(config, "layer_types", None) or ())
        self.max_length: int = config.max_position_embeddings
        self.history_is_frozen = is_activated(pretrained)
        self.tokens_forwarded = 0
        self._trunk: Any = None
        self._top = self._body
        self._first_top_layer = 0
        self._histories: Recent[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = Recent(
            lambda entries: entries.nbytes, _HISTORY_BYTES
        )
        self._recalls: Recent[TokenTree, Recall] = Recent(
            lambda recall: recall.nbytes, max(_RECALL_BYTES, int(_RECALL_SHARE * _memory_bytes(self.device)))
        )
        self.written: Recent[tuple[TokenTree, tuple[int, ...]], Written] = Recent(
            lambda written: written.nbytes, _WRITTEN_BYTES
        )
        self._check_parts()
        if self.history_is_frozen:
            self._split()

    @property
    def device(self) -> torch.device:
        """Where inputs must lie."""
        device: torch.device = self._lm.device
        return device

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

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits in float32, (M, V), of hidden states (M, H)."""
        return self._cap(self._head(hidden))

    def logits_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Logits in float32, (M, K), of the target tokens (M, K) alone."""
        if type(self._head) is not nn.Linear:
            return self.logits(hidden).gather(1, targets)
        logits = (self._head.weight[targets] @ hidden[:, :, None])[:, :, 0]
        return self._cap(logits if self._head.bias is None else logits + self._head.bias[targets])

    def _cap(self, logits: Tensor) -> Tensor:
        logits = logits.float()
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

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
            self._run(self._body, batch.prefix, positions, _causal(0, length)[None], positions, cache)
            layers: list[Any] = cache.layers
            for layer in layers:
                layer.keys, layer.values = layer.keys.expand(count, -1, -1, -1), layer.values.expand(count, -1, -1, -1)
        if size:
            keys = torch.arange(length + size).expand(count, -1)
            visible = _causal(length, size).expand(count, -1, -1)
            self._run(self._body, batch.history, keys[:, length:], visible, keys, cache)
        return cache

    def read_prefix(self, ids: tuple[int, ...]) -> Tensor | None:
        """Entries (2L, heads, P, head size) of a shared prefix; None if it is empty."""
        return self.read([TokenTree((), ids, ())])[0] if ids else None

    @torch.no_grad()
    def read(self, trees: Sequence[TokenTree]) -> list[Tensor]:
        """Entries (2L, heads, S, head size) of each tree's history, of which only what is new is read."""
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
        fresh.sort(key=lambda unread: len(unread.ids))
        start = 0
        while start < len(fresh):
            stop = start + 1
            while stop < len(fresh) and (stop + 1 - start) * len(fresh[stop].ids) <= _HISTORY_TOKENS:
                stop += 1
            found |= self._read_on(fresh[start:stop])
            start = stop
        return [found[tree] for tree in trees]

    def _read_on(self, fresh: list[Unread]) -> dict[TokenTree, Tensor]:
        """Read histories from where earlier turns stopped."""
        prefix = self.read_prefix(fresh[0].tree.prefix)
        like = next((entries for entries in (prefix, *(unread.known for unread in fresh)) if entries is not None), None)
        shared, seen = len(fresh[0].tree.prefix), max(unread.mark for unread in fresh)
        count, size = len(fresh), max(len(unread.ids) for unread in fresh)
        if like is None:
            cache: Cache = DynamicCache()
        else:
            nothing = like[:, :, :0]
            cache = cache_of(
                prefix, [nothing if unread.known is None else unread.known for unread in fresh], seen, size
            )
        marks = torch.tensor([unread.mark for unread in fresh])[:, None]
        ids = pad_sequence([torch.tensor(unread.ids, dtype=torch.long) for unread in fresh], batch_first=True)
        positions = shared + marks + torch.arange(size)
        keys = torch.cat([torch.arange(shared + seen).expand(count, -1), positions], dim=1)
        before = (torch.arange(shared + seen) < shared + marks)[:, None].expand(-1, size, -1)
        visible = torch.cat([before, _causal(0, size).expand(count, -1, -1)], dim=2)
        if size:
            self.tokens_forwarded += ids.numel()
            self._run(self._body, ids, positions, visible, keys, cache)
        entries = entries_of(cache, shared + seen)
        found = {}
        for row, unread in enumerate(fresh):
            tree, parts = unread.tree, [entries[row, :, :, : len(unread.ids)]]
            if unread.known is not None:
                parts.insert(0, unread.known)
                # Its conversation has gone on; what follows it has a copy.
                self._histories.pop((tree.prefix, tree.history[: unread.mark]))
            found[tree] = torch.cat(parts, dim=2)
            self._histories.put((tree.prefix, tree.history), found[tree])
        return found

    @torch.no_grad()
    def _recall(self, trees: Sequence[TokenTree]) -> list[Recall]:
        """What each tree's decisions need of the frozen layers, computed where it is not at hand."""
        found = {tree: recall for tree in trees if (recall := self._recalls.get(tree)) is not None}
        fresh = [tree for tree in dict.fromkeys(trees) if tree not in found]
        if fresh:
            batch = Batch.from_trees(fresh)
            entries = self.read(fresh)
            hidden: Tensor = self._body.get_input_embeddings()(batch.ids.to(self.device))
            if self._trunk is not None:
                cache = cache_of(self.read_prefix(fresh[0].prefix), entries, batch.history.shape[1], batch.ids.shape[1])
                hidden = self._run(self._trunk, batch.ids, batch.positions, batch.visible, batch.key_positions, cache)
            for row, tree in enumerate(fresh):
                top = entries[row][2 * self._first_top_layer :].clone()
                found[tree] = Recall(top, hidden[row, : tree.node_count].clone())
                self._recalls.put(tree, found[tree])
        return [found[tree] for tree in trees]

    def _run(
        self,
        part: nn.Module,
        inputs: Tensor,
        positions: Tensor,
        visible: Tensor,
        key_positions: Tensor,
        cache: Cache,
    ) -> Tensor:
        """Last hidden states of `part`, given token ids (B, T) or hidden states (B, T, H)."""
        device = self.device
        output = part(
            **{"input_ids" if inputs.ndim == 2 else "inputs_embeds": inputs.to(device)},
            position_ids=positions.to(device),
            attention_mask=self._attention_mask(visible, positions, key_positions),
            past_key_values=cache,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _attention_mask(self, visible: Tensor, positions: Tensor, key_positions: Tensor) -> Tensor | dict[str, Tensor]:
        """Additive mask (B, 1, T, S), one for each kind of layer where a model has several kinds."""
        full = self._additive(visible)
        if self._window is None or self._layer_types == {"full_attention"}:
            return {"full_attention": full} if self._layer_types else full
        distance = positions[:, :, None] - key_positions[:, None, :]
        sliding = self._additive(visible & (distance < self._window))
        return {"full_attention": full, "sliding_attention": sliding} if self._layer_types else sliding

    def _additive(self, visible: Tensor) -> Tensor:
        dtype = self._lm.dtype
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
        return mask[:, None].to(self.device)

    @torch.no_grad()
    def _check_parts(self) -> None:
        """Compare with the model's own forward pass, and raise if they disagree."""
        ids, positions, causal = _probe()
        expected = self._lm(input_ids=ids.to(self.device)).logits[0].float()
        received = self.logits(self._run(self._body, ids, positions, causal, positions, DynamicCache())[0])
        # Kernels differ in rounding; an architecture that scales or caps its logits elsewhere is off by far more.
        if not torch.allclose(received, expected, atol=0.05 * expected.std().item(), rtol=0):
            raise ModelLoadError(
                f"{type(self._lm).__name__} computes logits in a way that llamagym does not reproduce: the largest "
                f"difference is {(received - expected).abs().max().item():.3g}. Use one of the registry's families, or "
                "report the architecture as an issue."
            )

    @torch.no_grad()
    def _split(self) -> None:
        """Split the body at the first trained layer, where that gives the same hidden states."""
        first = first_trained_layer(self._body)
        if first == 0:
            return
        trunk, top = split(self._body, first)
        ids, positions, causal = _probe()
        expected = self._run(self._body, ids, positions, causal, positions, DynamicCache())
        with suppress(TypeError, ValueError):
            hidden = self._run(trunk, ids, positions, causal, positions, DynamicCache())
            received = self._run(top, hidden, positions, causal, positions, DynamicCache())
            if torch.equal(received, expected):
                self._trunk, self._top, self._first_top_layer = trunk, top, first
        if self._trunk is None:
            logger.info("%s cannot be split at layer %d; every pass runs all layers", type(self._lm).__name__, first)


def _memory_bytes(device: torch.device) -> int:
    """Memory of a device; 0 where that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def _causal(before: int, size: int) -> Tensor:
    """A causal mask for `size` tokens that follow `before` others, bool (size, before + size)."""
    return torch.ones(size, before + size, dtype=torch.bool).tril(before)


def _probe() -> tuple[Tensor, Tensor, Tensor]:
    """Five tokens to compare computations on: ids (1, 5), positions (1, 5), a causal mask (1, 5, 5)."""
    return torch.arange(1, 6)[None], torch.arange(5)[None], _causal(0, 5)[None]
