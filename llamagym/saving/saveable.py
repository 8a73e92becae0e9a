"""Checks that what users add to a checkpoint can be saved and loaded; tuples and arrays become lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, excerpt
from ..options import as_json
from .state_files import require_saveable

# Deeper states cannot be written as JSON.
_MOST_LEVELS = 100
# Types of numbers that a checkpoint's format has.
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
# A dictionary with one of these as its only key stands for something else in a checkpoint.
_RESERVED_KEYS = ("__tensor__", "__number__")
# Values without parts, of which any can be saved.
_PLAIN_TYPES = frozenset((float, bool, str, type(None)))


class CheckedState(dict[str, Any]):
    """A state that `saveable_state` has checked, which is not checked again as a part of another one."""


def saveable_state(state: Any, name: str) -> CheckedState:
    """Returns the state of a callback or of a user's loop as a checkpoint holds it.

    Args:
        state: The state.
        name: Its name in errors.

    Raises:
        ConfigError: It is not a dictionary, or a value in it cannot be written and read again.
    """
    _check_part(state, name, 0, set())
    plain = as_json(state)
    if not isinstance(plain, dict):
        raise ConfigError(f"{name} must be a dictionary, got {type(plain).__name__}.")
    require_saveable(plain, name)
    return CheckedState(plain)


def _check_part(part: Any, path: str, level: int, tensor_paths: set[str]) -> None:
    """Rejects a part that would not be read again as it was; other types are for `require_saveable`."""
    if isinstance(part, CheckedState):
        return
    if level > _MOST_LEVELS:
        raise ConfigError(
            f"{path[:200]}... has more than {_MOST_LEVELS} levels, or contains itself. Save a flatter state."
        )
    if isinstance(part, np.ndarray) and part.dtype == object:
        part = part.tolist()
    if isinstance(part, Mapping):
        if len(part) == 1 and next(iter(part)) in _RESERVED_KEYS:
            raise ConfigError(f"{path} has {next(iter(part))!r} as its only key, which is reserved. Use another name.")
        for key, value in part.items():
            if not isinstance(key, str):
                raise ConfigError(f"{path} has the key {excerpt(key)} ({type(key).__name__}). Use strings.")
            _check_part(value, f"{path}/{key}", level + 1, tensor_paths)
    elif isinstance(part, (list, tuple)):
        for index, value in enumerate(part):
            # Skip plain values: a run has one return and one success per episode.
            if type(value) not in _PLAIN_TYPES:
                _check_part(value, f"{path}/{index}", level + 1, tensor_paths)
    elif isinstance(part, Tensor):
        _check_tensor(part, path)
        # A tensor is saved under its path, as UTF-8.
        if path != path.encode("utf-8", "replace").decode():
            raise ConfigError(
                f"{path[:200]!a} contains a lone surrogate, under which no tensor can be saved. Use a key "
                "that UTF-8 can encode, such as os.fsencode(name).hex()."
            )
        if path in tensor_paths:
            raise ConfigError(f"Two tensors would be saved as {path}. Use keys without '/'.")
        tensor_paths.add(path)
    elif isinstance(part, int):
        try:
            str(part)
        except ValueError as error:
            raise ConfigError(
                f"{path} is an int of {part.bit_length()} bits, which cannot be saved: {error}. Save it as hex(...)."
            ) from error


def _check_tensor(tensor: Tensor, path: str) -> None:
    is_plain = tensor.layout == torch.strided and tensor.device.type != "meta"
    if tensor.dtype not in _DTYPES or not is_plain:
        raise ConfigError(
            f"{path} is a tensor that cannot be saved ({tensor.dtype}, {tensor.layout}, on {tensor.device}). Convert "
            "it to a dense tensor of one of the types float64, float32, float16, bfloat16, int64 to int8, uint8, bool."
        )
