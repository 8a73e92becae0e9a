"""A causal language model taken apart: its body, or trunk and top, and the output layer.

The body is called with explicit positions and an explicit mask, so padding, shared prefixes and branches mean the same
to every architecture.

Shapes: B rows, T tokens, S columns of keys, L layers, H width, M states that logits are read from, K targets, V
vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from ..errors import ModelLoadError
from ..models.hardware import check_one_device, pass_tokens
from ..models.peft_internals import acting_on_every_token, require_activation
from ..models.torch_internals import CONTAINERS
from ..models.transformers_internals import CACHE_LAYER, attention_of, cache_argument
from ..models.value_head import AutoModelForCausalLMWithValueHead
from .acceleration import Acceleration
from .attention import for_any_shape, register, sharing
from .kv_cache import KVBuffer, entries_of
from .layers import first_layers, first_trained_layer, split
from .masks import Tokens, attention_mask, causal
from .structure import structure_of

logger = logging.getLogger(__name__)

# Attention in two parts, to what is shared and to a row's own, takes longer than in one where there is less to share:
# fewer pairs of tokens than these.
_SHARED_SCORES = 1024


@dataclass
class _Checked:
    """Results of comparing a model's own computations with faster ones.

    Attributes:
        nothing: Keys and values of no tokens, (2L, heads, 0, head size).
        is_fused: Whether layers may run as one function each.
        can_share: Whether rows may attend to one shared prefix.
        can_split: Whether the body may be split at the first trained layer; None until a model is split.
    """

    nothing: Tensor
    is_fused: bool
    can_share: bool
    can_split: bool | None = None


# By the structure of a model. The checks run on the weights of the first model that has it.
_CHECKED: dict[Hashable, _Checked] = {}
# A key of a large model takes a megabyte. When so many are kept, the oldest is dropped.
_MOST_CHECKED = 32


class Transformer:
    """The body and the output layer of a causal language model.

    Attributes:
        max_length: Tokens that it can hold.
        vocabulary: Tokens that it knows.
    """

    def __init__(self, model: AutoModelForCausalLMWithValueHead) -> None:
        """Find the parts of `model` and check that together they give the model's own logits."""
        check_one_device(model)
        pretrained: Any = model.pretrained_model
        lm: Any = pretrained.get_base_model() if model.is_peft_model else pretrained
        CACHE_LAYER.require()
        require_activation(pretrained)
        register()
        self._lm = lm
        self._weights: int = sum(weight.numel() for weight in lm.parameters())
        self._body: Any = getattr(lm, lm.base_model_prefix)
        self._cache_argument = cache_argument(self._body)
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
        structure = structure_of(lm)
        self._checked = _CHECKED.get(structure) or self._check()
        if structure is not None and structure not in _CHECKED:
            if len(_CHECKED) >= _MOST_CHECKED:
                del _CHECKED[next(iter(_CHECKED))]
            _CHECKED[structure] = self._checked
        self._nothing = self._checked.nothing
        self._can_share = self._checked.can_share
        if not self._checked.is_fused:
            self._acceleration.unfuse()

    @property
    def device(self) -> torch.device:
        """Where inputs must lie."""
        device: torch.device = self._lm.device
        return device

    @property
    def pass_tokens(self) -> int:
        """How many tokens to forward and backward in one pass."""
        return pass_tokens(self.device, self._weights)

    @contextmanager
    def ready(self, is_accelerated: bool = True) -> Iterator[None]:
        """While open, the model runs as fast as it can, and its frozen weights must not change.

        Every pass opens it for itself. Where many passes follow each other, it is opened once for all of them, since
        looking whether weights have changed takes as long as a layer.

        Args:
            is_accelerated: Without, the model runs on its own operations: packing weights costs more than a few tokens.
        """
        if self._is_ready:
            yield
            return
        self._is_ready = True
        try:
            with self._acceleration if is_accelerated else nullcontext(), for_any_shape(self.device):
                yield
        finally:
            self._is_ready = False

    def forget_copies(self) -> None:
        """Drop the packed copies of weights; passes to come make those that they multiply by."""
        self._acceleration.forget_copies()

    def temporary_copies(self) -> AbstractContextManager[None]:
        """Drop the packed copies that are made while this is open, and no others, when it closes."""
        return self._acceleration.temporary_copies()

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits (M, V) of hidden states (M, H), in the model's dtype or in float32."""
        with self.ready():
            return self._cap(self._head(hidden))

    def logits_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Logits in float32, (M, K), of the target tokens (M, K) alone."""
        if type(self._head) is not nn.Linear:
            return self.logits(hidden).gather(1, targets).float()
        # In bfloat16 logits near 20 would lie an eighth apart, and probabilities with them.
        logits = (self._head.weight[targets].float() @ hidden.float()[:, :, None])[:, :, 0]
        return self._cap(logits if self._head.bias is None else logits + self._head.bias[targets])

    @property
    def token_bytes(self) -> int:
        """Size of a token's keys and values in all layers."""
        return self._nothing.new_empty(*self._nothing.shape[:2], 1, self._nothing.shape[3]).nbytes

    def new_states(self, *sizes: int) -> Tensor:
        """Memory for hidden states (*sizes, H), filled with anything."""
        width = self._body.get_input_embeddings().weight.shape[1]
        return self._nothing.new_empty(*sizes, width)

    def shares(self, prefix: Tensor, queries: int) -> bool:
        """Whether `queries` tokens in one pass should attend to one shared prefix rather than to a copy in each row."""
        return self._can_share and queries * prefix.shape[2] >= _SHARED_SCORES

    def _cap(self, logits: Tensor) -> Tensor:
        return logits if self._softcap is None else self._softcap * torch.tanh(logits.float() / self._softcap)

    def _run(self, part: nn.Module | None, tokens: Tokens, cache: Cache) -> Tensor:
        """Last hidden states (B, T, H) of `part`; without a part, they are the embeddings.

        `cache` holds the S - T entries before, and is added to.
        """
        tokens = Tokens(*(tensor.to(self.device) for tensor in tokens))
        hidden: Tensor
        if part is None:
            hidden = self._body.get_input_embeddings()(tokens.inputs)
            return hidden
        mask = attention_mask(tokens, self._window, self._layer_types, self._lm.dtype)
        inputs_argument = "inputs_embeds" if tokens.inputs.is_floating_point() else "input_ids"
        arguments = {inputs_argument: tokens.inputs, self._cache_argument: cache}
        with self.ready(), sharing(self._body, cache) as shared:
            output = part(**arguments, position_ids=tokens.positions, attention_mask=mask, use_cache=True, **shared)
        hidden = output.last_hidden_state
        return hidden

    def _check(self) -> _Checked:
        """Compare what this class computes with the model's own forward pass."""
        nothing = self._check_parts()
        # The second layer's keys and values are made of what the first one saw. Over many layers bfloat16 drifts as far
        # as an error would.
        part = first_layers(self._body, 2)
        alone = self._read_alone(part)
        is_fused = self._sees_as(part, alone, is_shared=False)
        if not is_fused:
            self._acceleration.unfuse(f"layers of {type(self._lm).__name__} compute something else")
        is_sdpa = attention_of(self._body.config) == "sdpa"
        # On a processor, where it was measured; in learning and acting.
        can_share = is_sdpa and self.device.type == "cpu" and self._sees_as(part, alone, is_shared=True)
        can_share = can_share and self._sees_as(part, alone, is_shared=True, is_learning=True)
        return _Checked(nothing, is_fused, can_share)

    @torch.no_grad()
    def _check_parts(self) -> Tensor:
        """Compare with the model's own forward pass, and raise if they disagree.

        Returns:
            Keys and values of no tokens, (2L, heads, 0, head size).
        """
        tokens, cache = probe(), DynamicCache()
        expected = self._lm(input_ids=tokens.inputs.to(self.device)).logits[0].float()
        with self.ready(is_accelerated=False):
            received = self.logits(self._run(self._body, tokens, cache)[0]).float()
        if not _agree(received, expected):
            raise ModelLoadError(
                f"{type(self._lm).__name__} computes logits in a way that llamagym does not reproduce: the largest "
                f"difference is {(received - expected).abs().max().item():.3g}. Use one of the registry's families, or "
                "report the architecture as an issue."
            )
        return entries_of(cache, slice(0, 0))[0]

    @torch.no_grad()
    def _read_alone(self, part: nn.Module) -> DynamicCache:
        """Keys and values of a few tokens in a plain sequence, from the model's own operations."""
        alone = DynamicCache()
        with acting_on_every_token(self._body), self.ready(is_accelerated=False):
            self._run(part, probe(), alone)
        return alone

    def _sees_as(self, part: nn.Module, alone: DynamicCache, is_shared: bool, is_learning: bool = False) -> bool:
        """Whether tokens attend to a cache, shared or not, as they did alone, in a plain sequence."""
        tokens, errors = probe(), (TypeError, ValueError, AttributeError, RuntimeError)
        with torch.set_grad_enabled(is_learning), acting_on_every_token(self._body), suppress(*errors):
            prefix = entries_of(alone, slice(0, 2))[0]
            cache = KVBuffer(prefix, 2, 5, is_shared).cache(slice(None), 2)
            tokens = Tokens(*(of_rows.expand(2, *of_rows.shape[1:]) for of_rows in tokens))
            last = Tokens(*(of_rows[:, 2:] for of_rows in tokens))._replace(key_positions=tokens.key_positions)
            self._run(part, last, cache)
            expected, received = (entries_of(of, slice(-3, -1), 1)[:, :2] for of in (alone, cache))
            return _agree(received, expected)
        return False

    @torch.no_grad()
    def _split(self) -> None:
        """Split the body at the first trained layer, where that gives the same hidden states."""
        first = first_trained_layer(self._body)
        if first == 0 or not CONTAINERS.works:
            return
        trunk, top = split(self._body, first)
        if self._checked.can_split is None:
            self._checked.can_split = self._is_split(trunk, top)
        if self._checked.can_split:
            self._trunk = trunk
            self._top = top
            self._first_top_layer = first
        else:
            logger.info("%s cannot be split at layer %d; every pass runs all layers", type(self._lm).__name__, first)

    def _is_split(self, trunk: nn.Module, top: nn.Module) -> bool:
        """Whether trunk and top, one after the other, give the body's hidden states."""
        tokens = probe()
        with self.ready(is_accelerated=False), suppress(TypeError, ValueError):
            expected = self._run(self._body, tokens, DynamicCache())
            hidden = self._run(trunk, tokens, DynamicCache())
            received = self._run(top, tokens._replace(inputs=hidden), DynamicCache())
            return torch.equal(received, expected)
        return False


def _agree(received: Tensor, expected: Tensor) -> bool:
    """Whether only rounding tells two computations apart; logits that are scaled elsewhere, say, are off by far more.

    The largest difference would not say: 8 and 4 bits round single ones of a hundred thousand logits as far.
    """
    return bool((received - expected).square().mean().sqrt() <= 0.05 * expected.std())


def probe() -> Tokens:
    """Five tokens in a row to compare computations on."""
    positions = torch.arange(5)[None]
    return Tokens(positions + 1, positions, causal(0, 5)[None], positions)
