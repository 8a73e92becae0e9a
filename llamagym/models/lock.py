"""One thread at a time: while a model reads, its layers run other code than usual, which a second thread would meet.

A process forks between two uses: otherwise the child would hold a model in the middle of one, and a lock that no thread
of its own releases.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from .value_head import AutoModelForCausalLMWithValueHead

P = ParamSpec("P")
R = TypeVar("R")
_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_MAKING = threading.Lock()
# The locks that a thread holds while it forks.
_HELD = threading.local()
_RETRY_S = 0.05


class Locked(Protocol):
    """Uses a model."""

    @property
    def lock(self) -> threading.RLock:
        """The model's."""


LockedT = TypeVar("LockedT", bound=Locked)


def lock_of(model: AutoModelForCausalLMWithValueHead) -> threading.RLock:
    """The lock of a language model: the same for all that use it, whatever adapters and heads they put around it."""
    with _MAKING:
        return _LOCKS.setdefault(language_model_of(model), threading.RLock())


def language_model_of(model: AutoModelForCausalLMWithValueHead) -> nn.Module:
    """The language model without adapters and heads."""
    pretrained: Any = model.pretrained_model
    base: nn.Module = pretrained.get_base_model() if model.is_peft_model else pretrained
    return base


def alone(method: Callable[Concatenate[LockedT, P], R]) -> Callable[Concatenate[LockedT, P], R]:
    """Let a method wait until no other thread uses its model."""

    @wraps(method)
    def locked(self: LockedT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked


def _hold_all() -> None:
    """Wait until no other thread uses a model, and keep it that way."""
    _HELD.locks = []
    while not all(map(_hold, [*_LOCKS.values(), _MAKING])):
        # A thread that has one lock may wait for another one that is held here.
        _release_all()


def _hold(lock: Any) -> bool:
    is_held: bool = lock.acquire(timeout=_RETRY_S)
    if is_held:
        _HELD.locks.append(lock)
    return is_held


def _release_all() -> None:
    while _HELD.locks:
        _HELD.locks.pop().release()


if hasattr(os, "register_at_fork"):  # not on Windows, where no process forks
    os.register_at_fork(before=_hold_all, after_in_parent=_release_all, after_in_child=_release_all)
