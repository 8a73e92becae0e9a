"""Updates that happen whole or not at all: an error in the middle of one takes back all that it did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor


@contextmanager
def attributes_undone_on_error(owner: Any, attributes: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
    """While open, an exception gives attributes the values that they had.

    Args:
        owner: Whose.
        attributes: How to copy each, by name.
    """
    before = {name: copied(getattr(owner, name)) for name, copied in attributes.items()}
    try:
        yield
    except BaseException:
        for name, value in before.items():
            setattr(owner, name, value)
        raise


@contextmanager
def undone_on_error(
    owner: Any, attributes: Mapping[str, Callable[[Any], Any]], weights: Iterable[Tensor]
) -> Iterator[None]:
    """While open, an exception puts a learner back to where it was.

    Args:
        owner: Has an `optimizer`.
        attributes: How to copy each of its attributes that an update changes, by name.
        weights: Tensors that an update changes in place; copies take as much memory again while it runs.
    """
    tensors = list(weights)
    kept = [tensor.detach().clone() for tensor in tensors]
    optimizer, steps = owner.optimizer, deepcopy(owner.optimizer.state_dict())
    try:
        with attributes_undone_on_error(owner, attributes):
            yield
    except BaseException:
        with torch.no_grad():
            for tensor, old in zip(tensors, kept, strict=True):
                tensor.copy_(old)
                tensor.grad = None
        optimizer.load_state_dict(steps)
        optimizer.zero_grad()
        owner.optimizer = optimizer
        raise
