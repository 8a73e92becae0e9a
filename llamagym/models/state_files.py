"""Nested state as two files: what JSON holds in one, tensors in another (safetensors). Nothing goes through pickle."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import CheckpointError, ConfigError
from .atomic import write_file

# The format's names of what a state may hold.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# How JSON says what it has no word for; no state has a dictionary with one of these as its only key.
_TENSOR, _NUMBER = "__tensor__", "__number__"


def write_state(folder: Path, name: str, state: Mapping[str, Any]) -> None:
    """Write `name`.json and `name`.safetensors.

    Args:
        folder: Where to.
        name: Of the files.
        state: Dictionaries with strings as keys, lists, tuples (read again as lists), numbers, strings, None, tensors.

    Raises:
        ConfigError: The state holds something else.
        OSError: The disk is full, or cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    plain = _split(state, "", tensors)
    write_file(folder / f"{name}.safetensors", _safetensors(tensors))
    write_file(folder / f"{name}.json", [json.dumps(plain, allow_nan=False).encode()])


def require_saveable(state: Any, name: str) -> None:
    """Reject a state that `write_state` cannot write.

    Args:
        state: The state.
        name: What the error calls it.

    Raises:
        ConfigError: A value, which is named, is of a type that cannot be saved.
    """
    _split(state, name, {})


def read_state(folder: Path, name: str) -> dict[str, Any]:
    """Read what `write_state` wrote; tensors lie on the CPU.

    Raises:
        CheckpointError: A file is missing or cannot be read.
    """
    try:
        plain = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / f"{name}.safetensors")
        state: dict[str, Any] = _join(plain, tensors)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"the state {name!r} in {str(folder)!r} cannot be read: {error!r}.") from error
    return state


def _safetensors(tensors: Mapping[str, Tensor]) -> Iterator[Any]:
    """A safetensors file in pieces, one tensor at a time, so that no second copy of all is made.

    See https://github.com/huggingface/safetensors#format: the header's length, the header in JSON, the tensors' bytes.
    """
    # Wide numbers first: each then begins at a multiple of its width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    header, end = {}, 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    yield len(said).to_bytes(8, "little") + said
    for _, tensor in ordered:
        yield tensor.flatten().view(torch.uint8).numpy()


def _split(part: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """What JSON holds; tensors are added to `tensors` by their path."""
    if isinstance(part, Tensor):
        tensors[path] = part.detach().cpu().contiguous()
        return {_TENSOR: path}
    if isinstance(part, Mapping):
        for key in part:
            if not isinstance(key, str):
                raise ConfigError(f"{path or 'The state'} has the key {key!r} ({type(key).__name__}). Use strings.")
        return {key: _split(value, f"{path}/{key}" if path else key, tensors) for key, value in part.items()}
    if isinstance(part, (list, tuple)):
        return [_split(value, f"{path}/{index}", tensors) for index, value in enumerate(part)]
    if isinstance(part, float) and not math.isfinite(part):
        return {_NUMBER: str(part)}
    if part is None or isinstance(part, (str, int, float)):
        return part
    raise ConfigError(
        f"{path} is a {type(part).__name__}, which cannot be saved. Use numbers, strings, None, tensors, lists and "
        "dictionaries of them."
    )


def _join(part: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(part, list):
        return [_join(value, tensors) for value in part]
    if not isinstance(part, dict):
        return part
    if part.keys() == {_TENSOR}:
        return tensors[part[_TENSOR]]
    if part.keys() == {_NUMBER}:
        return float(part[_NUMBER])
    return {key: _join(value, tensors) for key, value in part.items()}
