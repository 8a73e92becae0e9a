"""Runs the layers and the output layer of a causal language model.

The layers take explicit positions and an explicit mask, so padding, shared prefixes and branches mean the same in every
architecture; `verification` compares this with the model's own forward pass.

Shapes: B rows, T tokens, S columns of keys, L layers, H width, M states that logits are read from, K targets, V
vocabulary.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ..errors import LlamaGymError, ModelLoadError
from ..models.adapters import check_adapter
from ..models.hardware import check_one_device, is_out_of_memory, min_rows, pass_tokens, weights_cost
from ..models.peft_internals import require_activation
from ..models.torch_internals import CONTAINERS, shallow_copy
from ..models.transformers_internals import CACHE_LAYER, cache_argument
from ..models.value_head import AutoModelForCausalLMWithValueHead
from .acceleration import Acceleration
from .attention import register, sharing, without_shape_plans
from .masks import Tokens, attention_mask

logger = logging.getLogger(__name__)

# Below this many query-key pairs, attention in two parts is slower than copying the shared prefix into each row.
MIN_SHARED_SCORES = 1024
# Config options, other than `sliding_window`, that limit attention by the columns of the model's own cache.
_UNSUPPORTED_WINDOWS = (
    "attention_window",
    "attention_window_size",
    "local_attention",
    "sliding_window_size",
    "window_size",
)
_LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions")


class Transformer:
    """The layers and the output layer of a causal language model.

    Attributes:
        pretrained: The language model, with adapters if it has any.
        lm: The language model without the wrapper of its adapters.
        body: All layers between embeddings and output layer.
        head: The output layer.
        acceleration: The context in which the model runs on this machine's kernels.
        trunk: The frozen layers below the first trained one; None if the body is not split.
        top: The other layers, or the whole body.
        first_top_layer: Number of the top's first layer.
        max_length: Maximum tokens of a context.
        vocabulary: Number of tokens in the vocabulary.
        window: How far back layers with sliding attention see; None if none has a window.
        layer_types: The config's types of layers; empty if it names none.
        no_entries: Keys and values of no tokens, (2L, heads, 0, head size); set by `verification`.
        can_share: Whether rows may attend to one shared prefix; set by `verification`.
    """

    no_entries: Tensor
    can_share = False

    def __init__(self, model: AutoModelForCausalLMWithValueHead) -> None:
        """Finds the parts of `model`.

        Raises:
            ModelLoadError: The model has other parts, or a context of unknown length.
        """
        check_one_device(model)
        pretrained: Any = model.pretrained_model
        lm: Any = pretrained.get_base_model() if model.is_peft_model else pretrained
        CACHE_LAYER.require()
        check_adapter(pretrained)
        require_activation(pretrained)
        register()
        self.pretrained = pretrained
        self.lm = lm
        self._num_weights: int = sum(weight.numel() for weight in lm.parameters())
        with rejecting_errors(lm):
            self.body: Any = getattr(lm, lm.base_model_prefix, None) or lm.model
            self._cache_argument = cache_argument(self.body)
            self.head: nn.Module = lm.get_output_embeddings()
            config = lm.config.get_text_config()
            self._scale = logit_scale(config)
            self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
            self.window: int | None = getattr(config, "sliding_window", None)
            self.layer_types: set[str] = set(getattr(config, "layer_types", None) or ())
            self.max_length = context_length(config, type(lm).__name__)
            self.vocabulary: int = config.vocab_size
        self.acceleration = Acceleration(lm, self.body)
        self._is_ready = False
        self.trunk: Any = None
        self.top = self.body
        self.first_top_layer = 0

    @property
    def device(self) -> torch.device:
        """The model's device."""
        device: torch.device = self.lm.device
        return device

    @property
    def pass_tokens(self) -> int:
        """Number of tokens for one pass with gradients."""
        return pass_tokens(self.device, self._num_weights)

    @property
    def weights_cost(self) -> int:
        """Number of tokens that are computed in the time that a pass takes to read all weights."""
        return weights_cost(self.device)

    @property
    def token_bytes(self) -> int:
        """Size of a token's keys and values in all layers."""
        layers, heads, _, head_size = self.no_entries.shape
        return self.no_entries.new_empty(layers, heads, 1, head_size).nbytes

    @property
    def trunk_entries(self) -> int:
        """Number of a token's keys and values that are the trunk's; those of the top follow."""
        return 2 * self.first_top_layer

    @contextmanager
    def ready(self, is_accelerated: bool = True) -> Iterator[None]:
        """While open, the model runs accelerated, and its frozen weights must not change.

        Every pass opens it. For several passes it is opened once around all of them, since checking the weights for
        changes takes as long as a layer.

        Args:
            is_accelerated: False runs the model's own operations; for a few tokens, packing weights costs more than it
                saves.
        """
        if self._is_ready:
            yield
            return
        self._is_ready = True
        try:
            with self.acceleration if is_accelerated else nullcontext(), without_shape_plans(self.device):
                yield
        finally:
            self._is_ready = False

    def unfuse(self, fault: str | None = None) -> None:
        """Runs all layers unfused from now on; see `Acceleration.unfuse`."""
        self.acceleration.unfuse(fault)

    def drop_packed_weights(self) -> None:
        """Drops the packed copies of weights; later passes pack them again."""
        self.acceleration.drop_packed_weights()

    def temporary_packing(self) -> AbstractContextManager[None]:
        """On exit, drops the weights that were packed while open."""
        return self.acceleration.temporary_packing()

    def run(self, layers: nn.Module | None, tokens: Tokens, cache: Cache) -> Tensor:
        """Last hidden states (B, T, H) of some layers; None returns the embeddings.

        Args:
            layers: The body, the trunk or the top.
            tokens: Inputs with positions and mask.
            cache: The S - T entries before; the new ones are added.
        """
        tokens = Tokens(*(tensor.to(self.device) for tensor in tokens))
        hidden: Tensor
        if layers is None:
            hidden = self.body.get_input_embeddings()(tokens.inputs)
            return hidden
        mask = attention_mask(tokens, self.window, self.layer_types, self.lm.dtype)
        # Padding may lie beyond the model's positions, where some models change the encoding of all positions.
        positions = tokens.positions.clamp(max=self.max_length - 1)
        inputs_argument = "inputs_embeds" if tokens.inputs.is_floating_point() else "input_ids"
        arguments = {inputs_argument: tokens.inputs, self._cache_argument: cache}
        with self.ready(), sharing(self.body, cache) as shared:
            output = layers(**arguments, position_ids=positions, attention_mask=mask, use_cache=True, **shared)
        hidden = output.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits (M, V) of hidden states (M, H), in the model's dtype or in float32."""
        count = len(hidden)
        if 0 < count < min_rows(hidden):
            hidden = hidden.expand(min_rows(hidden), -1)
        with self.ready():
            return self._scaled(self.head(hidden))[:count]

    def logits_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Logits, float32 (M, K), of the target tokens (M, K) only."""
        if type(self.head) is not nn.Linear:
            return self.logits(hidden).gather(1, targets).float()
        # bfloat16 would round logits near 20 to multiples of 1/8, and probabilities accordingly.
        logits = (self.head.weight[targets].float() @ hidden.float()[:, :, None])[:, :, 0]
        if self.head.bias is not None:
            logits = logits + self.head.bias[targets]
        return self._scaled(logits)

    def _scaled(self, logits: Tensor) -> Tensor:
        """Applies the architecture's scale and soft cap of logits."""
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap is None:
            return logits
        return self._softcap * torch.tanh(logits.float() / self._softcap)

    def new_states(self, *sizes: int) -> Tensor:
        """Uninitialized hidden states (*sizes, H)."""
        width = self.body.get_input_embeddings().weight.shape[1]
        return self.no_entries.new_empty(*sizes, width)

    def shares(self, prefix: Tensor, queries: int) -> bool:
        """Whether `queries` tokens in one pass attend to one shared prefix rather than to a copy in each row."""
        return self.can_share and queries * prefix.shape[2] >= MIN_SHARED_SCORES

    def split(self, first: int) -> None:
        """Splits the body into trunk and top, whose first layer is number `first`; weights and adapters are shared.

        The top takes the trunk's output as `inputs_embeds`. An architecture that scales its embeddings computes
        something else then, which `verification` checks.
        """
        self.trunk = first_layers(self.body, first)
        self.top = _with_layers(self.body, slice(first, None))
        self.first_top_layer = first

    def unsplit(self) -> None:
        """Runs the whole body as top."""
        self.trunk = None
        self.top = self.body
        self.first_top_layer = 0


def first_layers(body: Any, count: int) -> Any:
    """The body's first `count` layers, without the final norm; the whole body if its layers are not in a list."""
    if not (hasattr(body, "layers") and CONTAINERS.works):
        return body
    part = _with_layers(body, slice(0, count))
    for norm in ("norm", "final_layernorm"):
        if hasattr(part, norm):
            setattr(part, norm, nn.Identity())
    return part


def _with_layers(body: Any, layers: slice) -> Any:
    """A copy of the body with some of its layers."""
    part = shallow_copy(body)
    part.layers = nn.ModuleList(list(body.layers)[layers])
    if types := getattr(body.config, "layer_types", None):
        # A model with several types of layers looks up their masks by index.
        part.config = copy.copy(body.config)
        part.config.layer_types = types[layers]
    return part


def first_trained_layer(body: nn.Module) -> int:
    """Number of the lowest trained layer; 0 if anything outside the layers is trained, or nothing."""
    layers: list[int] = []
    for name, weight in body.named_parameters():
        if weight.requires_grad:
            match = re.match(r"layers\.(\d+)\.", name)
            if match is None:
                return 0
            layers.append(int(match[1]))
    return min(layers, default=0)


def logit_scale(config: Any) -> float:
    """Factor of the logits, which some architectures have in their config."""
    factor = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    return float(1.0 if factor is None else factor) / float(divisor or 1.0)


def context_length(config: Any, name: str) -> int:
    """Longest context in which a token's position means the same, however many tokens follow.

    Longrope switches all positions to other frequencies once a sequence exceeds the original context. Whatever was
    cached for a shorter sequence would then be wrong, so the context ends there. So it does where chunked attention
    starts a new chunk.

    Args:
        config: The model's config.
        name: The model's class, for messages.

    Raises:
        ModelLoadError: The config has no length, or a window that is not masked here.
    """
    lengths = [length for key in _LENGTHS if isinstance(length := getattr(config, key, None), int) and length > 0]
    if not lengths:
        raise ModelLoadError(
            f"{name} has no length of context: its config has none of {', '.join(_LENGTHS)}. Set "
            "model.config.max_position_embeddings to the number of tokens that it was trained on."
        )
    length = lengths[0]
    for key in _UNSUPPORTED_WINDOWS:
        window = getattr(config, key, None)
        if isinstance(window, int) and 0 < window < length:
            raise ModelLoadError(
                f"{name} bounds how far back its layers see by {key}={window}, in a way that llamagym does not mask. "
                "Use a class that the page on models lists as supported."
            )
    chunk = getattr(config, "attention_chunk_size", None)
    if isinstance(chunk, int) and 0 < chunk < length:
        length = _limited(name, chunk, length, "chunked attention sees no further back")
    for parameters in _rope_parameters(getattr(config, "rope_parameters", None)):
        original = parameters.get("original_max_position_embeddings")
        if parameters.get("rope_type") == "longrope" and original is not None and original < length:
            reason = "beyond, its position encodings (longrope) depend on the length of the whole sequence"
            length = _limited(name, int(original), length, reason)
    return length


def _limited(name: str, length: int, full: int, reason: str) -> int:
    logger.warning("%s: contexts are limited to %d tokens of %d: %s.", name, length, full, reason)
    return length


def _rope_parameters(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """Parameters of rotary positions, for each type of layer if a config has several."""
    if not isinstance(parameters, Mapping):
        return
    yield parameters
    for nested in parameters.values():
        yield from _rope_parameters(nested)


@contextmanager
def rejecting_errors(lm: nn.Module) -> Iterator[None]:
    """While open, any error of an architecture's own code becomes a `ModelLoadError`."""
    try:
        yield
    except LlamaGymError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise rejected(lm, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def rejected(lm: nn.Module, reason: str) -> ModelLoadError:
    """The error for a model that computes in an unsupported way."""
    return ModelLoadError(
        f"{type(lm).__name__} computes in a way that llamagym does not reproduce ({reason}). It needs a decoder whose "
        "layers attend to cached keys and values under a given mask. Use a class that the page on models lists as "
        "supported."
    )
