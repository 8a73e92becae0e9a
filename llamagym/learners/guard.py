"""Keeps what is not finite out of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn.utils import get_total_norm

from ..errors import DivergedError
from . import ranks
from .state import Stateful

# So many in a row end a run: weights or inputs are beyond repair.
_MOST_SKIPPED = 3


class FiniteGuard(Stateful):
    """Looks at losses and gradients before each optimizer step, and at the model's output after an update's last."""

    saved = ("_in_a_row", "_last_in_a_row")

    def __init__(self) -> None:
        """Begin with nothing skipped."""
        self._in_a_row = self._last_in_a_row = 0

    def passes(self, losses: Mapping[str, float], gradients: Sequence[Tensor]) -> bool:
        """Whether a step can be made, in all processes or in none; if not, the gradients are to be dropped.

        Args:
            losses: Of a minibatch, and what else was computed of it, by name.
            gradients: The minibatch's. Their norm must be finite too, since they are divided by it.

        Raises:
            DivergedError: Several steps in a row could not be made.
        """
        numbers = {**losses, "norm of the gradients": float(get_total_norm(gradients))}
        wrong = {name: value for name, value in numbers.items() if not math.isfinite(value)}
        if not any(ranks.gather_objects(bool(wrong))):
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        if self._in_a_row >= _MOST_SKIPPED:
            raise diverged(f"{_MOST_SKIPPED} optimizer steps in a row were not finite: {wrong or 'in another process'}")
        return False

    def settle(self, is_finite: bool) -> None:
        """Count an update whose last step left the model's output finite, or had to be undone since it did not.

        Raises:
            DivergedError: Several updates in a row ended so.
        """
        self._last_in_a_row = 0 if is_finite else self._last_in_a_row + 1
        if self._last_in_a_row >= _MOST_SKIPPED:
            raise diverged(f"After each of {_MOST_SKIPPED} updates in a row the model's output was not finite")


def diverged(what: str) -> DivergedError:
    """The error of an update that is taken back."""
    return DivergedError(
        f"{what}. The weights are those of before this update. Look at rewards and observations for extreme values, "
        "lower learning_rate, or load the model with dtype='float32'."
    )
