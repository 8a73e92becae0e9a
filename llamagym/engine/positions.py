"""How many tokens a model can read so that each of them means the same, however many follow."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import ModelLoadError

logger = logging.getLogger(__name__)

# By these names configs bound how far back layers see, which such layers apply by the columns of their own cache.
_WINDOWS = ("attention_window", "attention_window_size", "local_attention", "sliding_window_size", "window_size")
_LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions")


def context_length(config: Any, name: str) -> int:
    """Tokens up to which a token's position is encoded the same however many follow.

    Longrope switches all positions to other frequencies once a sequence is longer than the original context. What was
    cached before, or computed for a shorter sequence, would then belong to another model, so the context ends there.
    So it does where attention in chunks does.

    Args:
        config: The model's.
        name: The model's class, for messages.

    Raises:
        ModelLoadError: The config names no length, or a window that is not masked here.
    """
    lengths = [length for key in _LENGTHS if isinstance(length := getattr(config, key, None), int) and length > 0]
    if not lengths:
        raise ModelLoadError(
            f"{name} has no length of context: its config has none of {', '.join(_LENGTHS)}. Set "
            "model.config.max_position_embeddings to the number of tokens that it was trained on."
        )
    length = lengths[0]
    for key in _WINDOWS:
        window = getattr(config, key, None)
        if isinstance(window, int) and 0 < window < length:
            raise ModelLoadError(
                f"{name} bounds how far back its layers see by {key}={window}, in a way that llamagym does not mask. "
                "Use a class that the page on models lists as supported."
            )
    chunk = getattr(config, "attention_chunk_size", None)
    if isinstance(chunk, int) and 0 < chunk < length:
        length = _limited(name, chunk, length, "attention in chunks sees no further back")
    for parameters in _rope_parameters(getattr(config, "rope_parameters", None)):
        original = parameters.get("original_max_position_embeddings")
        if parameters.get("rope_type") == "longrope" and original is not None and original < length:
            reason = "its position encodings (longrope) depend on the length of the whole sequence beyond"
            length = _limited(name, int(original), length, reason)
    return length


def _limited(name: str, length: int, usual: int, reason: str) -> int:
    logger.warning("%s: contexts are limited to %d tokens of %d: %s.", name, length, usual, reason)
    return length


def _rope_parameters(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of rotary positions, of each kind of layer where a config has several."""
    if not isinstance(parameters, Mapping):
        return
    yield parameters
    for of_kind in parameters.values():
        yield from _rope_parameters(of_kind)
