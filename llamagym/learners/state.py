"""Saving and restoring a learner's state beside weights: plain numbers, random number generators, an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..options import shortened

# State of each weight in Adam, the only optimizer whose state is saved.
_MOMENTS = {"step", "exp_avg", "exp_avg_sq"}


class Stateful:
    """An object whose state is plain numbers.

    Attributes:
        saved: Names of the attributes that are saved.
    """

    saved: ClassVar[tuple[str, ...]] = ()


def state_of(owner: Any, names: Iterable[str]) -> dict[str, Any]:
    """The state of an object's attributes by name, ready for JSON except for tensors."""
    return {name: _state(getattr(owner, name)) for name in names}


def restore(owner: Any, state: Mapping[str, Any]) -> None:
    """Restores the attributes that `state_of` saved."""
    for name, saved in state.items():
        attribute = getattr(owner, name)
        if isinstance(attribute, Stateful):
            _check_names(attribute, saved)
            restore(attribute, saved)
        elif isinstance(attribute, np.random.Generator):
            attribute.bit_generator.state = saved
        elif isinstance(attribute, Optimizer):
            moments = {int(number): of_weight for number, of_weight in saved["state"].items()}
            attribute.load_state_dict({**saved, "state": moments})
            _check_moments(attribute)
        else:
            setattr(owner, name, saved)


@contextmanager
def attributes_undone_on_error(owner: Any, attributes: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
    """While open, an exception restores attributes.

    Args:
        owner: The object with the attributes.
        attributes: Function that copies each attribute, by the attribute's name.
    """
    before = {name: copy(getattr(owner, name)) for name, copy in attributes.items()}
    try:
        yield
    except BaseException:
        for name, value in before.items():
            setattr(owner, name, value)
        raise


def _check_names(owner: Stateful, saved: Mapping[str, Any]) -> None:
    """Rejects a state that another version of the library saved.

    Raises:
        CheckpointError: It has unknown attributes.
    """
    unknown = sorted(saved.keys() - set(owner.saved))
    if unknown:
        raise CheckpointError(
            f"The state of {type(owner).__name__} has {shortened(unknown)}, which this version of llamagym does not "
            "have: another version saved it. Continue the run with that version, or start a new one."
        )


def _check_moments(optimizer: Optimizer) -> None:
    """Rejects moments that do not fit their weights; PyTorch would fail only at the next step.

    Raises:
        CheckpointError: A moment is missing, or has another shape or dtype than its weight.
    """
    for weight, moments in optimizer.state.items():
        if moments.keys() != _MOMENTS:
            raise CheckpointError(f"The optimizer has {shortened(sorted(moments))} for a weight; expected {_MOMENTS}.")
        for name, moment in moments.items():
            expected_shape = () if name == "step" else weight.shape
            is_float = isinstance(moment, Tensor) and moment.is_floating_point()
            if not (is_float and moment.shape == expected_shape):
                raise CheckpointError(
                    f"The optimizer's {name!r} does not fit its weight of the shape {tuple(weight.shape)}: "
                    f"{shortened(getattr(moment, 'shape', moment))}, {getattr(moment, 'dtype', 'not a tensor')}."
                )


def _state(attribute: Any) -> Any:
    if isinstance(attribute, Stateful):
        return state_of(attribute, attribute.saved)
    if isinstance(attribute, np.random.Generator):
        return attribute.bit_generator.state
    if isinstance(attribute, Optimizer):
        state = attribute.state_dict()
        # JSON's keys are strings.
        return {**state, "state": {str(number): moments for number, moments in state["state"].items()}}
    return attribute
