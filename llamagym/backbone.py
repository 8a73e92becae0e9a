"""Runs the transformer on batches of token trees: hidden states first, logits only where they are read.

The model's body is called with explicit positions and an explicit mask, so padding, shared prefixes and branches mean
the same to every architecture. Layers below the first trainable one, the trunk, give the same output for the same tree
for as long as the model lives, so each tree passes through them once.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import DynamicCache

from .batching import Batch, TokenTree, shared_prefix_length
from .errors import ModelLoadError
from .value_head import AutoModelForCausalLMWithValueHead

logger = logging.getLogger(__name__)

# Trunk outputs kept at most: a 60-token context of a 576-wide model in float32 takes 140 kB.
_TRUNK_CACHE_BYTES = 256 * 2**20


class Backbone:
    """The body and the output layer of a causal language model.

    Attributes:
        tokens_forwarded: Tokens (padding included) that went through the trainable layers so far.
        trunk_tokens_forwarded: The same for the frozen layers below them.
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
        self.tokens_forwarded = self.trunk_tokens_forwarded = 0
        self._trunk: Any = None
        self._top = self._body
        self._trunk_outputs: OrderedDict[TokenTree, Tensor] = OrderedDict()
        self._trunk_bytes = 0
        self._check_parts()
        self._split()

    @property
    def device(self) -> torch.device:
        """Where inputs must lie."""
        device: torch.device = self._lm.device
        return device

    def hidden_states(self, trees: Sequence[TokenTree], batch: Batch) -> Tensor:
        """The last hidden state of every node, float (B, T, H).

        Gradients flow through the shared prefix, which is computed once and seen by every row.

        Args:
            trees: What the batch was made from.
            batch: The same as rectangles.
        """
        if self._trunk is None:
            return self._forward(self._top, batch, batch.prefix_ids, batch.ids, DynamicCache())
        outputs = self._through_trunk(trees)
        prefix = batch.prefix_length
        rows = torch.zeros(*batch.ids.shape, outputs[0].shape[1], dtype=outputs[0].dtype, device=self.device)
        for row, output in enumerate(outputs):
            rows[row, : len(output) - prefix] = output[prefix:]
        return self._forward(self._top, batch, outputs[0][None, :prefix], rows, DynamicCache())

    def start_writing(self, batch: Batch) -> tuple[Tensor, DynamicCache]:
        """The last hidden states (B, T, H) and a cache of P + T entries a row, padding included, for `extend`."""
        cache = DynamicCache()
        return self._forward(self._body, batch, batch.prefix_ids, batch.ids, cache), cache

    def extend(
        self, ids: Tensor, positions: Tensor, visible: Tensor, key_positions: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Hidden states of one more token a row, float (B, H); its entries are appended to the cache.

        Args:
            ids: Token ids, int64 (B,).
            positions: Their positions, int64 (B,).
            visible: Which cache entries, the new one included, each row sees, bool (B, S).
            key_positions: Positions of the entries, int64 (B, S).
            cache: Grows by one entry a row.
        """
        return self._run(self._body, ids[:, None], positions[:, None], visible[:, None], key_positions, cache)[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits in float32, (M, V), of hidden states (M, H)."""
        logits: Tensor = self._head(hidden).float()
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    def _forward(self, part: nn.Module, batch: Batch, prefix: Tensor, rows: Tensor, cache: DynamicCache) -> Tensor:
        """Run `part` on a batch whose prefix (1, P) and rows (B, T) are given as ids or as hidden states."""
        length, count = batch.prefix_length, batch.ids.shape[0]
        positions = torch.arange(length)[None]
        if length:
            self._run(part, prefix, positions, torch.ones(1, length, length, dtype=torch.bool).tril(), positions, cache)
            layers: list[Any] = cache.layers
            for layer in layers:
                # Layers that `part` leaves out are there, but hold nothing.
                if layer.get_seq_length():
                    layer.keys = layer.keys.expand(count, -1, -1, -1)
                    layer.values = layer.values.expand(count, -1, -1, -1)
        key_positions = torch.cat([positions.expand(count, -1), batch.positions], dim=1)
        return self._run(part, rows, batch.positions, batch.visible, key_positions, cache)

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
        if part is self._trunk:
            self.trunk_tokens_forwarded += positions.numel()
        else:
            self.tokens_forwarded += positions.numel()
        output = part(
            **{"input_ids" if inputs.ndim == 2 else "inputs_embeds": inputs.to(device)},
            position_ids=positions.to(device),
            attention_mask=self._attention_mask(visible, positions, key_positions),
            past_key_values=cache,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    @torch.no_grad()
    def _through_trunk(self, trees: Sequence[TokenTree]) -> list[Tensor]:
        """Each tree's hidden states (nodes, H) where the trainable layers begin."""
        assert self._trunk is not None
        fresh = [tree for tree in dict.fromkeys(trees) if tree not in self._trunk_outputs]
        found = {tree: self._trunk_outputs[tree] for tree in trees if tree in self._trunk_outputs}
        if fresh:
            prefix = shared_prefix_length(fresh)
            batch = Batch.from_trees(fresh, prefix)
            cache = DynamicCache()
            head = torch.empty(0)
            if prefix:
                positions = torch.arange(prefix)[None]
                causal = torch.ones(1, prefix, prefix, dtype=torch.bool).tril()
                head = self._run(self._trunk, batch.prefix_ids, positions, causal, positions, DynamicCache())[0]
            rows = self._forward(self._trunk, batch, batch.prefix_ids, batch.ids, cache)
            for tree, row in zip(fresh, rows, strict=True):
                output = torch.cat([head.to(row), row[: len(tree) - prefix]])
                found[tree] = self._trunk_outputs[tree] = output
                self._trunk_bytes += output.nbytes
        for tree in found:
            self._trunk_outputs.move_to_end(tree)
        while self._trunk_bytes > _TRUNK_CACHE_BYTES:
            self._trunk_bytes -= self._trunk_outputs.popitem(last=False)[1].nbytes
        return [found[tree] for tree in trees]

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
                self._trunk, self._top = trunk, top
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
