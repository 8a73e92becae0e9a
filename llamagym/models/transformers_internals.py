"""All uses of undocumented APIs of transformers.

`tests/models/test_internals.py` checks each of them against the installed version, and the fallback without it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicLayer, PretrainedConfig

from .private_apis import PrivateApi

_LAYERS = {f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")}


def cache_argument(module: Any) -> str:
    """The name of the argument by which a model or decoder layer takes its KV cache.

    It is `cache` since transformers 5.24, which deprecates `past_key_values`. Models outside of transformers may still
    use the old name.
    """
    return "cache" if "cache" in inspect.signature(type(module).forward).parameters else "past_key_values"


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Registers an attention function under a name."""
    from transformers import AttentionInterface  # takes more than a second to import

    AttentionInterface.register(name, function)


def attention_function(name: str) -> Callable[..., Any]:
    """The attention function registered under a name."""
    from transformers import AttentionInterface

    function: Callable[..., Any] = AttentionInterface()[name]
    return function


def has_attention(name: str) -> bool:
    """Whether an attention function has this name; False for models whose layers implement attention themselves."""
    from transformers import AttentionInterface

    return name in AttentionInterface()


def attention_name(config: Any) -> str:
    """The name of the attention function that a model uses; empty if unknown."""
    if not ATTENTION_NAME.works:
        return ""
    name: str = config._attn_implementation
    return name


@contextmanager
def gguf_progress_hidden() -> Iterator[None]:
    """While open, hides the progress bar of GGUF files, which ignores transformers' switch for progress bars."""
    from transformers import modeling_gguf_pytorch_utils

    reader: Any = modeling_gguf_pytorch_utils
    original = getattr(reader, "tqdm", None)
    if original is None:  # another version of transformers, which has no such bar or obeys the switch
        yield
        return
    reader.tqdm = functools.partial(original, disable=True)
    try:
        yield
    finally:
        reader.tqdm = original


@contextmanager
def using_attention(config: Any, name: str) -> Iterator[None]:
    """While open, a model uses another attention function."""
    original = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = original


def captures_outputs(hook: Any) -> bool:
    """Whether a forward hook is one of transformers' own, which collect hidden states and attentions.

    The first pass that returns either installs them on all layers for good. They do nothing in any other pass.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


class InitializedLayer(DynamicLayer):
    """A cache layer that takes its dtype and device from a tensor, not from the first keys and values."""

    def __init__(self, like: Tensor) -> None:
        """Initializes the layer for keys and values of the dtype and device of `like`."""
        super().__init__()
        # As `lazy_initialization` does, without its empty tensors.
        self.dtype = like.dtype
        self.device = like.device
        self.is_initialized = True


class LlamaLayer(NamedTuple):
    """The parts of a Llama-style decoder layer.

    Attributes:
        attention: The attention module, with `config`, `head_dim`, `layer_idx` and `scaling`.
        projections: Linear layers in the order in which they run; those of a group have the same input.
        norms: RMS norms, each with `weight` and `variance_epsilon`: before attention, before the feed-forward block,
            and those of queries and keys where the family has them.
    """

    attention: Any
    projections: tuple[tuple[Any, ...], ...]
    norms: tuple[Any, ...]


def is_llama_layer(layer: Any) -> bool:
    """Whether a module is a Llama-style decoder layer."""
    return type(layer).__name__ in _LAYERS and DECODER_LAYER.works


def parts_of(layer: Any) -> LlamaLayer:
    """The parts of a Llama-style decoder layer."""
    attention = layer.self_attn
    feed_forward = layer.mlp
    projections = (
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (feed_forward.gate_proj, feed_forward.up_proj),
        (feed_forward.down_proj,),
    )
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            norms.append(getattr(attention, name))
    return LlamaLayer(attention, projections, tuple(norms))


def _attention_can_be_set() -> bool:
    config = PretrainedConfig()
    config._attn_implementation = "eager"
    before = config._attn_implementation
    with using_attention(config, "sdpa"):
        within = config._attn_implementation
    return (before, within, config._attn_implementation) == ("eager", "sdpa", "eager")


def _cache_layer_is_initialized() -> bool:
    layer = InitializedLayer(torch.zeros(1, device="cpu"))
    layer.keys = layer.values = torch.ones(1, 1, 2, 2, device="cpu")
    keys, values = layer.update(*torch.zeros(2, 1, 1, 3, 2, device="cpu").unbind())
    return keys.shape == values.shape == (1, 1, 5, 2) and layer.get_seq_length() == 5


@torch.no_grad()
def _layer_is_as_expected() -> bool:
    """Whether a small Llama layer computes what is expected for one token, which attends only to itself."""
    from transformers import LlamaConfig  # type: ignore[attr-defined]
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        hidden_size=4, intermediate_size=4, num_attention_heads=1, num_key_value_heads=1, attn_implementation="sdpa"
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        layer: Any = LlamaDecoderLayer(config, 0).float().eval()
    attention, ((_, _, value), (out,), (gate, up), (down,)), norms = parts_of(layer)
    hidden = torch.arange(4.0, device="cpu").view(1, 1, 4)
    rotary = torch.ones(2, 1, 1, 4, device="cpu").unbind()
    output = layer(hidden, attention_mask=None, position_embeddings=rotary)

    def normalize(norm: Any, states: Tensor) -> Tensor:
        mean_square = states.square().mean(-1, keepdim=True)
        return norm.weight * states * (mean_square + norm.variance_epsilon).rsqrt()

    expected = hidden + out(value(normalize(norms[0], hidden)))
    inputs = normalize(norms[1], expected)
    expected = expected + down(nn.functional.silu(gate(inputs)) * up(inputs))
    attributes = (attention.head_dim, attention.layer_idx, attention.scaling)
    has_attributes = attention.config is config and attributes == (4, 0, 0.5)
    return has_attributes and torch.allclose(output, expected, atol=1e-5)


ATTENTION_NAME = PrivateApi(
    "transformers",
    "PretrainedConfig._attn_implementation",
    "Shared prefixes are copied for each row, and decoder layers run unfused: everything takes longer.",
    _attention_can_be_set,
)
CACHE_LAYER = PrivateApi(
    "transformers",
    "DynamicLayer: dtype, device, is_initialized, keys, values",
    "Install a version of transformers that this version of llamagym was tested with (see requirements/base.txt).",
    _cache_layer_is_initialized,
)
DECODER_LAYER = PrivateApi(
    "transformers",
    "LlamaDecoderLayer: self_attn, mlp, input_layernorm, post_attention_layernorm and their parts",
    "Decoder layers run unfused, which takes longer.",
    _layer_is_as_expected,
)
