"""Nested state as two files: tensors in `NAME.safetensors`, all else in `NAME.json`. Nothing goes through pickle.

State that users add is checked before it is saved: what is written must be read again as it was, except that tuples and
arrays become lists.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import CheckpointError, ConfigError, excerpt, reason_of
from ..options import as_json, shortened
from .file_operations import write_file
from .paths import file_inside

# Keys that stand for a tensor or a non-finite number in the JSON file, each the only key of its dictionary.
_TENSOR_KEY = "__tensor__"
_NUMBER_KEY = "__number__"
# Deeper states cannot be written as JSON.
_MAX_LEVELS = 100
# Dtypes of tensors that a state may hold.
SAVEABLE_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
# Types whose values can always be saved.
_PLAIN_TYPES = frozenset((float, bool, str, type(None)))


# Writing and reading


def write_state(folder: Path, name: str, state: Mapping[str, Any]) -> None:
    """Writes `name`.json and `name`.safetensors.

    Args:
        folder: Folder of the files.
        name: Name of the files, without suffix.
        state: Dictionaries with strings as keys, lists, tuples (read again as lists), numbers, strings, None, tensors.

    Raises:
        ConfigError: The state holds something else.
        OSError: The disk is full, or cannot be written.
        SafetensorError: The same, for the tensors.
    """
    tensors: dict[str, Tensor] = {}
    plain = _split(state, "", tensors)
    _copy_overlapping_(tensors)
    plain_file = folder / f"{name}.json"
    tensor_file = folder / f"{name}.safetensors"
    write_file(plain_file, json.dumps(plain, allow_nan=False).encode())
    save_file(tensors, tensor_file)


def read_state(folder: Path, name: str) -> dict[str, Any]:
    """Reads the files that `write_state` wrote; tensors lie on the CPU.

    Raises:
        CheckpointError: A file is missing or cannot be read.
    """
    plain_file = f"{name}.json"
    tensor_file = f"{name}.safetensors"
    with as_checkpoint_error(folder, plain_file):
        plain = json.loads(file_inside(folder, plain_file).read_text(encoding="utf-8"))
    with as_checkpoint_error(folder, tensor_file):
        tensors = load_file(file_inside(folder, tensor_file))
    with as_checkpoint_error(folder, plain_file):
        state = _join(plain, tensors)
        if not isinstance(state, dict):
            raise TypeError(f"it holds a {type(state).__name__} instead of a dictionary")
    return state


@contextmanager
def as_checkpoint_error(folder: Path, file: str = "", unchanged: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """While open, turns every error into a `CheckpointError` that names the file and the reason.

    Damaged files raise whatever the library that reads them raises, Rust's panics included.

    Args:
        folder: The folder that is read.
        file: The file in it.
        unchanged: Errors that have another cause, and are raised as they are.
    """
    source = str(folder / file)
    stops: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit, GeneratorExit)
    try:
        yield
    except stops + unchanged:
        raise
    except CheckpointError as error:
        if str(folder) in str(error):
            raise
        raise CheckpointError(f"{source!r}: {error}") from error
    except BaseException as error:
        raise CheckpointError(
            f"{source!r} cannot be read: it is damaged, or was not written by this library ({reason_of(error)})."
        ) from error


def _split(part: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Returns a part of the state as JSON holds it, and adds its tensors to `tensors` under their paths."""
    if isinstance(part, Tensor):
        tensors[path] = part.detach().cpu().contiguous()
        return {_TENSOR_KEY: path}
    if isinstance(part, Mapping):
        for key in part:
            if not isinstance(key, str):
                raise ConfigError(f"{path or 'The state'} has the key {key!r} ({type(key).__name__}). Use strings.")
        return {key: _split(value, f"{path}/{key}" if path else key, tensors) for key, value in part.items()}
    if isinstance(part, (list, tuple)):
        return [_split(value, f"{path}/{index}", tensors) for index, value in enumerate(part)]
    if isinstance(part, float) and not math.isfinite(part):
        return {_NUMBER_KEY: str(part)}
    if part is None or isinstance(part, (str, int, float)):
        return part
    raise ConfigError(
        f"{path} is a {type(part).__name__}, which cannot be saved. Use numbers, strings, None, tensors, lists and "
        "dictionaries of them."
    )


def _copy_overlapping_(tensors: dict[str, Tensor]) -> None:
    """Copies tensors that share memory with another one, which safetensors rejects."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            tensors[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)


def _join(part: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns a part of the state with its tensors and non-finite numbers, the inverse of `_split`."""
    if isinstance(part, list):
        return [_join(value, tensors) for value in part]
    if not isinstance(part, dict):
        return part
    if part.keys() == {_TENSOR_KEY}:
        return tensors[part[_TENSOR_KEY]]
    if part.keys() == {_NUMBER_KEY}:
        return float(part[_NUMBER_KEY])
    return {key: _join(value, tensors) for key, value in part.items()}


# Checking what is saved


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
    check_part(state, name, 0, set())
    plain = as_json(state)
    if not isinstance(plain, dict):
        raise ConfigError(f"{name} must be a dictionary, got {type(plain).__name__}.")
    # Rejects values of any other type.
    _split(plain, name, {})
    return CheckedState(plain)


def check_part(part: Any, path: str, level: int, tensor_paths: set[str]) -> None:
    """Rejects a part that would not be read again as it was; types that `_split` rejects pass.

    Args:
        part: The part of the state.
        path: Its path in the state, for errors.
        level: Number of levels above it.
        tensor_paths: Paths of the tensors that were met so far; those in this part are added.
    """
    if isinstance(part, CheckedState):
        return
    if level > _MAX_LEVELS:
        raise ConfigError(
            f"{path[:200]}... has more than {_MAX_LEVELS} levels, or contains itself. Save a flatter state."
        )
    if isinstance(part, np.ndarray) and part.dtype == object:
        part = part.tolist()
    if isinstance(part, Mapping):
        if len(part) == 1 and next(iter(part)) in (_TENSOR_KEY, _NUMBER_KEY):
            raise ConfigError(f"{path} has {next(iter(part))!r} as its only key, which is reserved. Use another name.")
        for key, value in part.items():
            if not isinstance(key, str):
                raise ConfigError(f"{path} has the key {excerpt(key)} ({type(key).__name__}). Use strings.")
            check_part(value, f"{path}/{key}", level + 1, tensor_paths)
    elif isinstance(part, (list, tuple)):
        for index, value in enumerate(part):
            # Skip plain values: a run has one return and one success per episode.
            if type(value) not in _PLAIN_TYPES:
                check_part(value, f"{path}/{index}", level + 1, tensor_paths)
    elif isinstance(part, Tensor):
        _check_tensor(part, path)
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
    """Rejects a tensor, or a path of one, that a safetensors file cannot hold."""
    is_dense = tensor.layout == torch.strided and tensor.device.type != "meta"
    if tensor.dtype not in SAVEABLE_DTYPES or not is_dense:
        raise ConfigError(
            f"{path} is a tensor that cannot be saved ({tensor.dtype}, {tensor.layout}, on {tensor.device}). Convert "
            "it to a dense tensor of one of the types float64, float32, float16, bfloat16, int64 to int8, uint8, bool."
        )
    # Tensors are named by their path, in UTF-8.
    if path != path.encode("utf-8", "replace").decode():
        raise ConfigError(
            f"{path[:200]!a} contains a lone surrogate, under which no tensor can be saved. Use a key "
            "that UTF-8 can encode, such as os.fsencode(name).hex()."
        )


# Checking what is loaded


def check_same_types(saved: Any, expected: Any, path: str = "") -> None:
    """Rejects a state whose types differ from those of the object that loads it.

    Args:
        saved: The state that was read.
        expected: The object's own state. Keys that only one of them has are not compared, nor are lists of different
            lengths.
        path: Path of the part, for errors.

    Raises:
        CheckpointError: A part is of another type.
    """
    if expected is None or saved is None:
        return
    if isinstance(expected, Mapping):
        _require_type(saved, dict, path)
        for name in expected.keys() & saved.keys():
            check_same_types(saved[name], expected[name], f"{path}/{name}")
    elif isinstance(expected, (list, tuple)):
        _require_type(saved, list, path)
        if len(saved) == len(expected):
            for index, (part, expected_part) in enumerate(zip(saved, expected, strict=True)):
                check_same_types(part, expected_part, f"{path}/{index}")
    elif isinstance(expected, Tensor):
        _require_type(saved, Tensor, path)
        if saved.dtype != expected.dtype:
            raise CheckpointError(f"The saved state has {saved.dtype} at {path!r}; expected {expected.dtype}.")
    elif not (_is_number(expected) and _is_number(saved)):
        _require_type(saved, type(expected), path)
        if isinstance(saved, bool) and not isinstance(expected, bool):  # a bool is an int to Python
            raise CheckpointError(f"The saved state has {saved} at {path!r}; expected a number.")


def _is_number(part: Any) -> bool:
    return isinstance(part, (int, float)) and not isinstance(part, bool)


def _require_type(saved: Any, expected: type, path: str) -> None:
    if not isinstance(saved, expected):
        raise CheckpointError(
            f"The saved state has {shortened(saved)} at {path!r}; expected a value of the type {expected.__name__}."
        )
