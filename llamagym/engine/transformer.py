"""A causal language model taken apart: its body, or trunk and top, and the output layer.

The body is called with explicit positions and an explicit mask, so padding, shared prefixes and branches mean the same
to every architecture.

Shapes: B rows, T tokens, S columns of keys and values, H width, M states that logits are read from, K targets, V
vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from ..errors import ModelLoadError
from ..models.value_head import AutoModelForCausalLMWithValueHead
from .acceleration import Acceleration
from .attention import register, sharing
from .kv_cache import BufferCache
from .layers import first_trained_layer, split
from .masks import attention_mask, causal

logger = logging.getLogger(__name__)


class Transformer:
    """The body and the output layer of a causal language model.

    Attributes:
        max_length: Tokens that it can hold.
        vocabulary: Tokens that it knows.
    """

    def __init__(self, model: AutoModelForCausalLMWithValueHead) -> None:
        """Find the parts of `model` and check that together they give the model's own logits."""
        pretrained: Any = model.pretrained_model
        lm: Any = pretrained.get_base_model() if model.is_peft_model else pretrained
        register()
        self._lm = lm
        self._body: Any = getattr(lm, lm.base_model_prefix)
        self._head: nn.Module = lm.get_output_embeddings()
        config = lm.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._window: int | None = getattr(config, "sliding_window", None)
        self._layer_types: set[str] = set(getattr(config, "layer_types", None) or ())
        self.max_length: int = config.max_position_embeddings
        self.vocabulary: int = config.vocab_size
        self._acceleration = Acceleration(lm, self._body)
        self._is_ready = False
        self._trunk: Any = None
        self._top = self._body
        self._first_top_layer = 0
        self._check_parts()

    @property
    def device(self) -> torch.device:
        """Where inputs must lie."""
        device: torch.device = self._lm.device
        return device

    @contextmanager
    def ready(self) -> Iterator[None]:
        """While open, the model runs as fast as it can, and its frozen weights must not change.

        Every pass opens it for itself. Where many passes follow each other, it is opened once for all of them, since
        looking whether weights have changed takes as long as a layer.
        """
        if self._is_ready:
            yield
            return
        self._is_ready = True
        try:
            with self._acceleration:
                yield
        finally:
            self._is_ready = False

    def forget_copies(self) -> None:
        """Drop the packed copies of weights; passes to come make those that they multiply by."""
        self._acceleration.forget_copies()

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits (M, V) of hidden states (M, H), in the model's number format or in float32."""
        with self.ready():
            logits: Tensor = self._head(hidden)
        return logits if self._softcap is None else self._cap(logits)

    def logits_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Logits in float32, (M, K), of the target tokens (M, K) alone."""
        if type(self._head) is not nn.Linear:
            return self.logits(hidden).gather(1, targets).float()
        # In bfloat16 logits near 20 would lie an eighth apart, and probabilities with them.
        logits = (self._head.weight[targets].float() @ hidden.float()[:, :, None])[:, :, 0]
        return self._cap(logits if self._head.bias is None else logits + self._head.bias[targets])

    def _cap(self, logits: Tensor) -> Tensor:
        logits = logits.float()
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    def _run(
        self,
        part: nn.Module,
        inputs: Tensor,
        positions: Tensor,
        visible: Tensor,
        key_positions: Tensor,
        cache: Cache,
    ) -> Tensor:
        """Last hidden states (B, T, H) of `part`, given token ids (B, T) or hidden states (B, T, H).

        If the cache tells the tokens' places, these run side by side in one row: (1, N, H).
        """
        device = self.device
        mask = attention_mask(
            visible.to(device),
            positions.to(device),
            key_positions.to(device),
            self._window,
            self._layer_types,
            self._lm.dtype,
        )
        if isinstance(cache, BufferCache) and cache.places is not None:
            inputs, positions = cache.places.gather(inputs), cache.places.gather(positions)
        with self.ready(), sharing(self._body, cache) as shared:
            output = part(
                **{"inputs_embeds" if inputs.is_floating_point() else "input_ids": inputs.to(device)},
                position_ids=positions.to(device),
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                **shared,
            )
        hidden: Tensor = output.last_hidden_state
        return hidden

    @torch.no_grad()
    def _check_parts(self) -> None:
        """Compare with the model's own forward pass, and raise if they disagree."""
        ids, positions, visible = probe()
        expected = self._lm(input_ids=ids.to(self.device)).logits[0].float()
        received = self.logits(self._run(self._body, ids, positions, visible, positions, DynamicCache())[0]).float()
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
        ids, positions, visible = probe()
        expected = self._run(self._body, ids, positions, visible, positions, DynamicCache())
        with suppress(TypeError, ValueError):
            hidden = self._run(trunk, ids, positions, visible, positions, DynamicCache())
            received = self._run(top, hidden, positions, visible, positions, DynamicCache())
            if torch.equal(received, expected):
                self._trunk, self._top, self._first_top_layer = trunk, top, first
        if self._trunk is None:
            logger.info("%s cannot be split at layer %d; every pass runs all layers", type(self._lm).__name__, first)


def probe() -> tuple[Tensor, Tensor, Tensor]:
    """Five tokens to compare computations on: ids (1, 5), positions (1, 5), a causal mask (1, 5, 5)."""
    return torch.arange(1, 6)[None], torch.arange(5)[None], causal(0, 5)[None]
