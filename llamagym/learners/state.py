"""What of a learner is saved, beside weights: plain numbers, random number generators, an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..options import shortened

# What Adam, the only optimizer whose state is saved, keeps of each weight.
_MOMENTS = {"step", "exp_avg", "exp_avg_sq"}


class Stateful:
    """Has a state of plain numbers.

    Attributes:
        saved: The attributes that change, and are saved.
    """

    saved: ClassVar[tuple[str, ...]] = ()


def state_of(owner: Any, names: Iterable[str]) -> dict[str, Any]:
    """The state of an object's attributes, by their names."""
    return {name: _saved(getattr(owner, name)) for name in names}


def restore(owner: Any, state: Mapping[str, Any]) -> None:
    """Put attributes in the state that `state_of` gave."""
    for name, saved in state.items():
        part = getattr(owner, name)
        if isinstance(part, Stateful):
            _check_names(part, saved)
            restore(part, saved)
        elif isinstance(part, np.random.Generator):
            part.bit_generator.state = saved
        elif isinstance(part, Optimizer):
            of_weights = {int(number): of_weight for number, of_weight in saved["state"].items()}
            part.load_state_dict({**saved, "state": of_weights})
            _check_moments(part)
        else:
            setattr(owner, name, saved)


@contextmanager
def attributes_undone_on_error(owner: Any, attributes: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
    """While open, an exception gives attributes the values that they had.

    Args:
        owner: The object that has them.
        attributes: By name, the function that copies each of them.
    """
    before = {name: copied(getattr(owner, name)) for name, copied in attributes.items()}
    try:
        yield
    except BaseException:
        for name, value in before.items():
            setattr(owner, name, value)
        raise


def _check_names(part: Stateful, saved: Mapping[str, Any]) -> None:
    """Rejects a state that another version of the library saved.

    Raises:
        CheckpointError: It holds what this version does not have.
    """
    unknown = sorted(saved.keys() - set(part.saved))
    if unknown:
        raise CheckpointError(
            f"The state of {type(part).__name__} has {shortened(unknown)}, which this version of llamagym does not "
            "have: another version saved it. Continue the run with that version, or start a new one."
        )


def _check_moments(optimizer: Optimizer) -> None:
    """Rejects moments that do not fit their weights, which PyTorch notices only at the next step.

    Raises:
        CheckpointError: Some do not fit.
    """
    for weight, moments in optimizer.state.items():
        if moments.keys() != _MOMENTS:
            raise CheckpointError(f"The optimizer has {shortened(sorted(moments))} of a weight; expected {_MOMENTS}.")
        for name, moment in moments.items():
            fits = isinstance(moment, Tensor) and moment.is_floating_point()
            fits = fits and moment.shape == (() if name == "step" else weight.shape)
            if not fits:
                raise CheckpointError(
                    f"The optimizer's {name!r} does not fit its weight of the shape {tuple(weight.shape)}: "
                    f"{shortened(getattr(moment, 'shape', moment))}, {getattr(moment, 'dtype', 'not a tensor')}."
                )


def _saved(part: Any) -> Any:
    if isinstance(part, Stateful):
        return state_of(part, part.saved)
    if isinstance(part, np.random.Generator):
        return part.bit_generator.state
    if isinstance(part, Optimizer):
        state = part.state_dict()
        # JSON's keys are strings.
        return {**state, "state": {str(number): of_weight for number, of_weight in state["state"].items()}}
    return part
