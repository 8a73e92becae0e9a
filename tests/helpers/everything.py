"""All state of an agent, found by walking through its objects, and of the process's random numbers."""

from __future__ import annotations

import hashlib
import random
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

# Objects without state of their own, or with one that only says which object it is.
_OPAQUE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, GeneratorType, partial)
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.device, torch.dtype, torch.Size, range, slice)
# A meter of work that was done, on which nothing depends; and a cache of pure functions of its keys.
METERS = {"tokens_forwarded", "_orders"}


def everything(agent: Any) -> dict[str, Any]:
    """The value of every attribute that is reachable from an agent, by its path, and the global random states."""
    found = dict(_walk(agent, "agent", set()))
    found["torch's random numbers"] = _digest(torch.get_rng_state())
    found["numpy's random numbers"] = str(np.random.get_state())
    found["Python's random numbers"] = hash(random.getstate())
    return found


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The ways to what is another than before."""
    return sorted(way for way in before.keys() | after.keys() if before.get(way) != after.get(way))


def _walk(part: Any, way: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(part, _PLAIN):
        yield way, part
        return
    if isinstance(part, _OPAQUE):
        yield way, id(part)
        return
    # Python may make one object of equal tuples.
    if not isinstance(part, tuple):
        if id(part) in seen:
            return
        seen.add(id(part))
    if isinstance(part, torch.Tensor):
        yield way, (id(part) if isinstance(part, nn.Parameter) else None, part.requires_grad, _digest(part))
    elif isinstance(part, torch.Generator):
        yield way, _digest(part.get_state())
    elif isinstance(part, np.random.Generator):
        yield way, str(part.bit_generator.state)
    elif isinstance(part, np.ndarray):
        yield way, (part.shape, part.tobytes())
    elif isinstance(part, (set, frozenset)):
        yield way, (len(part), sorted(map(str, part)))
    elif isinstance(part, (list, tuple, deque)):
        yield way, len(part)
        for index, each in enumerate(part):
            yield from _walk(each, f"{way}[{index}]", seen)
    elif isinstance(part, Mapping):
        yield way, len(part)
        for index, (key, each) in enumerate(part.items()):
            name = key if isinstance(key, str) else f"{index}. {type(key).__name__}"
            yield from _walk(key, f"{way}<{name}>", seen)
            yield from _walk(each, f"{way}[{name}]", seen)
    elif not isinstance(part, (type(threading.Lock()), type(threading.RLock()))):
        own = dict(getattr(part, "__dict__", {}))
        for kind in type(part).__mro__:
            own |= {name: getattr(part, name) for name in getattr(kind, "__slots__", ()) if hasattr(part, name)}
        yield way, type(part).__name__
        for name, each in own.items():
            if name not in METERS:
                yield from _walk(each, f"{way}.{name}", seen)


def _digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()
