"""Locks that let one thread at a time use a model.

A pass replaces parts of a model's layers while it runs, which a second thread would use. A process also forks only
while no thread uses a model: otherwise the child would hold a half-changed model, and a lock that none of its threads
releases.
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
_LOCKS_GUARD = threading.Lock()
# The locks that a thread holds while it forks.
_HELD = threading.local()
_RETRY_S = 0.05


class HasModelLock(Protocol):
    """An object that uses a model."""

    @property
    def lock(self) -> threading.RLock:
        """The lock of the model."""


HasModelLockT = TypeVar("HasModelLockT", bound=HasModelLock)


def lock_of(model: AutoModelForCausalLMWithValueHead) -> threading.RLock:
    """The lock of a language model, shared by all adapters and value heads around it."""
    with _LOCKS_GUARD:
        return _LOCKS.setdefault(language_model_of(model), threading.RLock())


def language_model_of(model: AutoModelForCausalLMWithValueHead) -> nn.Module:
    """The language model without adapters and value head."""
    pretrained: Any = model.pretrained_model
    base: nn.Module = pretrained.get_base_model() if model.is_peft_model else pretrained
    return base


def with_model_lock(
    method: Callable[Concatenate[HasModelLockT, P], R],
) -> Callable[Concatenate[HasModelLockT, P], R]:
    """Makes a method wait until no other thread uses its object's model."""

    @wraps(method)
    def locked(self: HasModelLockT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked


def _acquire_all() -> None:
    """Acquires the locks of all models, so that no other thread uses one."""
    _HELD.locks = []
    while not all(map(_acquire, [*_LOCKS.values(), _LOCKS_GUARD])):
        # A thread that has one lock may wait for another one that is held here.
        _release_all()


def _acquire(lock: Any) -> bool:
    is_held: bool = lock.acquire(timeout=_RETRY_S)
    if is_held:
        _HELD.locks.append(lock)
    return is_held


def _release_all() -> None:
    while _HELD.locks:
        _HELD.locks.pop().release()


if hasattr(os, "register_at_fork"):  # not on Windows, where no process forks
    os.register_at_fork(before=_acquire_all, after_in_parent=_release_all, after_in_child=_release_all)
