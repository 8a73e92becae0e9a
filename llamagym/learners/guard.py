"""Keeps what is not finite out of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from ..errors import DivergedError
from .state import Stateful

# So many steps in a row that cannot be made end a run: weights or inputs are beyond repair.
_MOST_SKIPPED = 3


class FiniteGuard(Stateful):
    """Looks at losses and gradients before each optimiser step."""

    saved = ("_in_a_row",)

    def __init__(self) -> None:
        """Begin with nothing skipped."""
        self._in_a_row = 0

    def passes(
        self, losses: Mapping[str, float], gradients: Iterable[Tensor], mean_over_processes: Callable[[float], float]
    ) -> bool:
        """Whether a step can be made; if not, the gradients are to be dropped.

        Args:
            losses: Of a minibatch, and what else was computed of it, by name.
            gradients: The minibatch's.
            mean_over_processes: Averages a number: all processes step, or none.

        Raises:
            DivergedError: Several steps in a row could not be made.
        """
        wrong = {name: value for name, value in losses.items() if not math.isfinite(value)}
        is_finite = not wrong and all(bool(gradient.isfinite().all()) for gradient in gradients)
        if mean_over_processes(float(is_finite)) == 1.0:
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        if self._in_a_row >= _MOST_SKIPPED:
            raise DivergedError(
                f"{_MOST_SKIPPED} optimiser steps in a row were not finite: {wrong or 'gradients'}. The weights are "
                "those of before this update. Look at rewards and observations for extreme values, lower "
                "learning_rate, or load the model with dtype='float32'."
            )
        return False
