"""Removes the choices that `info["action_mask"]` excludes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from numbers import Integral
from typing import Any

import numpy as np

from ..errors import ConfigError

# Beyond this many distinct lists, choices are not static; the cached orders are dropped.
_MOST_ORDERS = 256


class ActionMasks:
    """Reads masks as Gymnasium's spaces define them: 1 where an action is possible.

    A mask has one entry for each action of a Discrete space, or is a tuple with a mask for each part of a MultiDiscrete
    space. It applies if as many choices are offered as it has entries. Choices that name consecutive integers may stand
    in any order; all others must stand in the order of their actions. A mask of another size is ignored, because then
    the user's `get_action_choices` has already selected.
    """

    def __init__(self, action_of: Callable[[str], Any]) -> None:
        """Creates a reader of masks.

        Args:
            action_of: Function from a choice to its action.
        """
        self._action_of = action_of
        self._orders: dict[tuple[str, ...], list[int]] = {}

    def possible(self, choices: Sequence[str], mask: Any) -> list[str]:
        """Returns the choices that a mask allows.

        Raises:
            ConfigError: The mask excludes all of them.
        """
        flags = _flatten(mask)
        if len(flags) != len(choices):
            return list(choices)
        order = self._order(tuple(choices))
        allowed = [choice for choice, index in zip(choices, order, strict=True) if flags[index]]
        if not allowed:
            raise ConfigError(
                f'info["action_mask"] rules out all choices, {list(choices)}. A state in which nothing can be done '
                "should end the episode; otherwise correct the mask."
            )
        return allowed

    def _order(self, choices: tuple[str, ...]) -> list[int]:
        """Returns the index of each choice's entry in a mask."""
        if choices not in self._orders:
            if len(self._orders) == _MOST_ORDERS:
                self._orders.clear()
            self._orders[choices] = self._computed_order(choices)
        return self._orders[choices]

    def _computed_order(self, choices: tuple[str, ...]) -> list[int]:
        in_order = list(range(len(choices)))
        actions = [self._action_of(choice) for choice in choices]
        if not all(isinstance(action, Integral) for action in actions):
            return in_order
        first = min(actions)
        shifted = [int(action - first) for action in actions]
        return shifted if sorted(shifted) == in_order else in_order


def _flatten(mask: Any) -> np.ndarray:
    """Returns a mask as flags, bool (actions,).

    A mask of several parts becomes one flag for each combination; the last part changes fastest.
    """
    if isinstance(mask, (tuple, list)) and mask and all(np.ndim(part) == 1 for part in mask):
        mask = reduce(np.multiply.outer, [np.asarray(part) for part in mask])
    return np.asarray(mask).astype(bool).ravel()
