"""Choices without those that `info["action_mask"]` rules out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from numbers import Integral
from typing import Any

import numpy as np

from ..errors import ConfigError

# More lists of choices than that are none that stay the same.
_REMEMBERED = 256


class Masking:
    """Reads masks as Gymnasium's spaces take them: 1 where an action is possible.

    A mask has one entry for each action of a Discrete space, or is a tuple with a mask for each part of a MultiDiscrete
    space. It counts where as many choices are offered as it has actions; choices that name whole numbers without a gap
    may stand in any order, all others stand in the order of their actions. A mask of another size is left alone: then
    the user's own `get_action_choices` has made its selection.
    """

    def __init__(self, extract: Callable[[str], Any]) -> None:
        """Read masks of choices; `extract` says which action one names."""
        self._extract = extract
        self._orders: dict[tuple[str, ...], list[int]] = {}

    def possible(self, offered: Sequence[str], mask: Any) -> list[str]:
        """The choices that a mask allows.

        Raises:
            ConfigError: There are none.
        """
        flags = _flat(mask)
        if len(flags) != len(offered):
            return list(offered)
        left = [choice for choice, place in zip(offered, self._order(tuple(offered)), strict=True) if flags[place]]
        if not left:
            raise ConfigError(
                f'info["action_mask"] rules out all choices, {list(offered)}. A state in which nothing can be done '
                "should end the episode; otherwise correct the mask."
            )
        return left

    def _order(self, offered: tuple[str, ...]) -> list[int]:
        """Which entry of a mask each choice belongs to."""
        if offered not in self._orders:
            if len(self._orders) == _REMEMBERED:
                self._orders.clear()
            actions = [self._extract(choice) for choice in offered]
            places = list(range(len(offered)))
            if all(isinstance(action, Integral) for action in actions):
                first = min(actions)
                shifted = [int(action - first) for action in actions]
                places = shifted if sorted(shifted) == places else places
            self._orders[offered] = places
        return self._orders[offered]


def _flat(mask: Any) -> np.ndarray:
    """A mask as a row of flags; of several parts, one for each combination, the last part changing fastest."""
    if isinstance(mask, (tuple, list)) and mask and all(np.ndim(part) == 1 for part in mask):
        mask = reduce(np.multiply.outer, [np.asarray(part) for part in mask])
    return np.asarray(mask).astype(bool).ravel()
