"""One thread at a time: while a model reads, its layers run other code than usual, which a second thread would meet."""

from __future__ import annotations

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
