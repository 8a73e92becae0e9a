"""Runs the transformer on batches of token trees: hidden states first, logits only where they are read.

The model's body is called with explicit positions and an explicit mask, so padding, shared prefixes and branches mean
the same to every architecture. It reads a history first, then the decisions that branch off it. Where an activated LoRA
is all that learns, histories do not depend on it: what decisions need of them (keys and values of the adapted layers,
hidden states where these begin) is computed once for as long as the model lives. Otherwise gradients flow through the
history, and the prefix that all rows share is computed once a pass.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import DynamicCache

from .adapter import acting_on_every_token, is_activated
from .batching import Batch, TokenTree
from .errors import ModelLoadError
from .value_head import AutoModelForCausalLMWithValueHead

logger = logging.getLogger(__name__)

# Of histories, kept at most: a 20-token one takes 250 kB where 8 layers of a 135M model are adapted.
_RECALL_BYTES = 512 * 2**20
# Tokens of history in one pass; their keys and values of all layers live until its end.
_HISTORY_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class _Recall:
    """What a tree's decisions need of its frozen layers.

    Attributes:
        entries: Keys and values of the history after the prefix, one layer after the other, (2L, heads, S, head size).
        hidden: Decision nodes' states where the adapted layers begin, (D, H).
    """

    entries: Tensor
    hidden: Tensor

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + self.hidden.nbytes


class Backbone:
    """The body and the output layer of a causal language model.

    Attributes:
        history_is_frozen: Whether histories do not depend on what is trained.
        tokens_forwarded: Tokens (padding included) that were read or decided so far.
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
        self._prefixes: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        self._recalls: OrderedDict[TokenTree, _Recall] = OrderedDict()
        self._recall_bytes = 0
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
        if not self.history_is_frozen:
            return self._decide(self._body, batch, batch.ids, self._read(batch), adapted)
        recalls = self._recall(trees)
        hidden = recalls[0].hidden.new_zeros(*batch.ids.shape, recalls[0].hidden.shape[1])
        entries = recalls[0].entries
        rows = entries.new_zeros(len(trees), *entries.shape[:2], batch.history.shape[1], entries.shape[3])
        for row, recall in enumerate(recalls):
            hidden[row, : len(recall.hidden)] = recall.hidden
            rows[row, :, :, : recall.entries.shape[2]] = recall.entries
        cache = self._start(batch, self._first_top_layer)
        for index in range(rows.shape[1] // 2):
            cache.update(rows[:, 2 * index], rows[:, 2 * index + 1], self._first_top_layer + index)
        return self._decide(self._top, batch, hidden, cache, adapted)

    def start_writing(self, batch: Batch) -> tuple[Tensor, DynamicCache]:
        """The last hidden states (B, D, H) of decisions that await text, and a cache for `extend`.

        The cache holds P + S + D entries a row, padding included.
        """
        cache = self._read(batch)
        return self._decide(self._body, batch, batch.ids, cache), cache

    def extend(
        self, ids: Tensor, positions: Tensor, visible: Tensor, key_positions: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Hidden states of one more decision token a row, float (B, H); its entries are appended to the cache.

        Args:
            ids: Token ids, int64 (B,).
            positions: Their positions, int64 (B,).
            visible: Which cache entries, the new one included, each row sees, bool (B, S).
            key_positions: Positions of the entries, int64 (B, S).
            cache: Grows by one entry a row.
        """
        self.tokens_forwarded += len(ids)
        with acting_on_every_token(self._lm):
            return self._run(self._body, ids[:, None], positions[:, None], visible[:, None], key_positions, cache)[:, 0]

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

    def _decide(
        self, part: nn.Module, batch: Batch, inputs: Tensor, cache: DynamicCache, adapted: bool = True
    ) -> Tensor:
        """Run `part` on decision nodes, given as ids (B, D) or hidden states (B, D, H)."""
        self.tokens_forwarded += batch.ids.numel()
        with acting_on_every_token(self._lm) if adapted else nullcontext():
            return self._run(part, inputs, batch.positions, batch.visible, batch.key_positions, cache)

    def _start(self, batch: Batch, first_layer: int = 0) -> DynamicCache:
        """A cache that holds the batch's prefix in every row, from `first_layer` on."""
        cache, count = DynamicCache(), len(batch.ids)
        for layer, (keys, values) in enumerate(self._read_prefix(batch)):
            if layer >= first_layer:
                cache.update(keys.expand(count, -1, -1, -1), values.expand(count, -1, -1, -1), layer)
        return cache

    def _read_prefix(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (1, heads, P, head size) of each layer; none without a prefix."""
        ids, length = tuple(batch.prefix[0].tolist()), batch.prefix_length
        if not length:
            return []
        if ids in self._prefixes:
            return self._prefixes[ids]
        self.tokens_forwarded += length
        positions = torch.arange(length)[None]
        cache = DynamicCache()
        with torch.no_grad() if self.history_is_frozen else nullcontext():
            causal = torch.ones(1, length, length, dtype=torch.bool).tril()
            self._run(self._body, batch.prefix, positions, causal, positions, cache)
        layers: list[Any] = cache.layers
        entries = [(layer.keys, layer.values) for layer in layers]
        if self.history_is_frozen:
            self._prefixes[ids] = entries
        return entries

    def _read(self, batch: Batch) -> DynamicCache:
        """Keys and values of every layer after prefix and history, P + S a row, padding included."""
        cache = self._start(batch)
        count, size = batch.history.shape
        if not size:
            return cache
        self.tokens_forwarded += batch.history.numel()
        positions = batch.prefix_length + torch.arange(size).expand(count, -1)
        keys = torch.arange(batch.prefix_length + size).expand(count, -1)
        with torch.no_grad() if self.history_is_frozen else nullcontext():
            self._run(self._body, batch.history, positions, batch.history_visible, keys, cache)
        return cache

    @torch.no_grad()
    def _recall(self, trees: Sequence[TokenTree]) -> list[_Recall]:
        """What each tree's decisions need of the frozen layers, computed where it is not at hand."""
        found = {tree: self._recalls[tree] for tree in trees if tree in self._recalls}
        fresh = [tree for tree in dict.fromkeys(trees) if tree not in found]
        size = max((tree.context_length for tree in fresh), default=0) or 1
        for start in range(0, len(fresh), max(1, _HISTORY_TOKENS // size)):
            chunk = fresh[start : start + max(1, _HISTORY_TOKENS // size)]
            found |= zip(chunk, self._read_recalls(chunk), strict=True)
        for tree in found:
            if tree not in self._recalls:
                self._recalls[tree] = found[tree]
                self._recall_bytes += found[tree].nbytes
            self._recalls.move_to_end(tree)
        while self._recall_bytes > _RECALL_BYTES:
            self._recall_bytes -= self._recalls.popitem(last=False)[1].nbytes
        return [found[tree] for tree in trees]

    def _read_recalls(self, trees: list[TokenTree]) -> list[_Recall]:
        batch = Batch.from_trees(trees)
        cache = self._read(batch)
        layers: list[Any] = cache.layers
        prefix = batch.prefix_length
        entries = torch.stack(
            [part for layer in layers[self._first_top_layer :] for part in (layer.keys, layer.values)], dim=1
        )[..., prefix:, :]
        hidden: Tensor = self._body.get_input_embeddings()(batch.ids.to(self.device))
        if self._trunk is not None:
            hidden = self._run(self._trunk, batch.ids, batch.positions, batch.visible, batch.key_positions, cache)
        return [
            _Recall(entries[row, :, :, : len(tree.history)].clone(), hidden[row, : tree.node_count].clone())
            for row, tree in enumerate(trees)
        ]

    def _run(
        self,
        part: nn.Module,
        inputs: Tensor,
        positions: Tensor,
        visible: Tensor,
        key_positions: Tensor,
        cache: DynamicCache,
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
        """Split the body at the first trainable layer, where that gives the same hidden states."""
        trained = [name for name, weight in self._body.named_parameters() if weight.requires_grad]
        layers = [re.match(r"layers\.(\d+)\.", name) for name in trained]
        first = min((int(match[1]) for match in layers if match), default=0)
        if first == 0 or None in layers:
            return
        trunk, top = _part(self._body, slice(0, first)), _part(self._body, slice(first, None))
        for norm in ("norm", "final_layernorm"):
            if hasattr(trunk, norm):
                setattr(trunk, norm, nn.Identity())
        ids, positions, causal = _probe()
        expected = self._run(self._body, ids, positions, causal, positions, DynamicCache())
        with suppress(TypeError, ValueError):
            hidden = self._run(trunk, ids, positions, causal, positions, DynamicCache())
            received = self._run(top, hidden, positions, causal, positions, DynamicCache())
            if torch.equal(received, expected):
                self._trunk, self._top, self._first_top_layer = trunk, top, first
        if self._trunk is None:
            logger.info("%s cannot be split at layer %d; every pass runs all layers", type(self._lm).__name__, first)


def _part(body: Any, layers: slice) -> Any:
    """The same body with some of its layers; weights and adapters are shared, not copied."""
    part = copy.copy(body)
    part._modules = dict(body._modules)
    part.layers = nn.ModuleList(list(body.layers)[layers])
    if types := getattr(body.config, "layer_types", None):
        # A model that mixes kinds of layers looks their masks up by index.
        part.config = copy.copy(body.config)
        part.config.layer_types = types[layers]
    return part


def _probe() -> tuple[Tensor, Tensor, Tensor]:
    """Five tokens to compare computations on: ids (1, 5), positions (1, 5), a causal mask (1, 5, 5)."""
    return torch.arange(1, 6)[None], torch.arange(5)[None], torch.ones(1, 5, 5, dtype=torch.bool).tril()
