"""What this library needs of transformers beyond its documented interface, all in one file.

`tests/test_internals.py` checks each of these against the installed version, and names the one that broke.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer as DynamicLayer

VERSIONS = ">=5.20"
"""Versions of transformers that this file is known to fit."""


def cache_argument(module: Any) -> str:
    """The name of the argument by which a model or decoder layer takes its KV cache.

    It is `cache` since transformers 5.24, where `past_key_values` is deprecated. Models whose code lies outside of
    transformers keep the name that they were written with.
    """
    return "cache" if "cache" in inspect.signature(type(module).forward).parameters else "past_key_values"


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Make an attention function known under a name."""
    _attention_functions().register(name, function)


def attention_function(name: str) -> Callable[..., Any]:
    """The attention function of a name."""
    function: Callable[..., Any] = _attention_functions()[name]
    return function


def has_attention(name: str) -> bool:
    """Whether there is an attention function of a name; there is none where a model's layers attend by themselves."""
    return name in _attention_functions()


def attention_of(config: Any) -> str:
    """The name of the attention function that a model uses."""
    name: str = config._attn_implementation
    return name


@contextmanager
def attending_by(config: Any, name: str) -> Iterator[None]:
    """While open, a model uses another attention function."""
    usual = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = usual


def rotate(query: Tensor, key: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Rotary positions as Llama has them: queries and keys (B, heads, T, D), cosines and sines (B, T, D)."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    rotated: tuple[Tensor, Tensor] = apply_rotary_pos_emb(query, key, *angles)
    return rotated


class InitializedLayer(DynamicLayer):
    """A cache layer whose dtype and device are given, not inferred from the first keys and values."""

    def __init__(self, like: Tensor) -> None:
        """Hold keys and values like this tensor."""
        super().__init__()
        # What `lazy_initialization` sets, without the empty tensors that it makes.
        self.dtype, self.device, self.is_initialized = like.dtype, like.device, True


def _attention_functions() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # takes more than a second to import

    return ALL_ATTENTION_FUNCTIONS
