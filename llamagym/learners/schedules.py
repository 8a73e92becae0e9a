"""Schedules and controllers of the KL coefficient, the learning rate and the entropy bonus."""

from __future__ import annotations

import math

from .state import Stateful

# Factor of one change of the learning rate (Schulman et al. 2017, section 4, adapt the KL coefficient this way), and
# the lowest share of its initial value. If every step goes too far and is undone, the rate must fall until one does
# not, or nothing is learned again. It never exceeds its initial value: a converged policy hardly moves.
_RATE_FACTOR = 1.5
_MIN_RATE_SCALE = 0.001
# The coefficient of the KL to the reference stays within this factor of its initial value.
_KL_COEF_RANGE = 1000.0


class AdaptiveKLController(Stateful):
    """Proportional controller of the KL coefficient (Ziegler et al. 2019, section 2.2).

    Departure: the coefficient stays within a thousandth and a thousand times its initial value. A run whose KL cannot
    reach the target would otherwise drive it to 0, from where no factor brings it back, or to infinity.
    """

    saved = ("value",)

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        """Starts at `init_kl_coef`."""
        self.value = init_kl_coef
        self._target = target
        self._horizon = horizon
        self._min = init_kl_coef / _KL_COEF_RANGE
        self._max = init_kl_coef * _KL_COEF_RANGE

    def update(self, kl: float, steps: int) -> None:
        """Adapts the coefficient after `steps` samples with this mean KL, in nats, unless it is not finite."""
        if not math.isfinite(kl):
            return
        error = min(max(kl / self._target - 1, -0.2), 0.2)
        # More samples than the horizon count as the horizon: the coefficient stays positive.
        value = self.value * (1 + error * min(steps / self._horizon, 1.0))
        self.value = min(max(value, self._min), self._max)


class RateController(Stateful):
    """Lowers the learning rate after updates beyond `target_kl`; None leaves its scale at 1."""

    saved = ("scale",)

    def __init__(self, target_kl: float | None) -> None:
        """Starts at scale 1."""
        self.scale = 1.0
        self._target = target_kl

    def update(self, kl: float, may_rise: bool) -> None:
        """Lowers the scale after an update beyond the target KL, and raises it after one below half of it.

        Args:
            kl: The update's KL, in nats.
            may_rise: Whether a small KL means that the rate is too small: the warmup is over, and the batch held
                information.
        """
        if self._target is None:
            return
        if kl > self._target:
            self.scale = max(self.scale / _RATE_FACTOR, _MIN_RATE_SCALE)
        elif may_rise and kl < self._target / 2:
            self.scale = min(self.scale * _RATE_FACTOR, 1.0)


class Cooldown:
    """Scales learning rates and the entropy bonus down to 0 over the end of a run (Hägele et al. 2024, section 3).

    Full steps would keep moving the policy away from its optimum, and the bonus would pay for exploration that no later
    batch learns from. https://arxiv.org/abs/2405.18392

    Attributes:
        progress: Share of the run that was over when the batch began, 0 to 1; 0 outside of `train`.
    """

    def __init__(self, share: float) -> None:
        """Creates a cooldown over this share of a run; 0 for none."""
        self.progress = 0.0
        self._share = share

    @property
    def scale(self) -> float:
        """Factor of learning rates and entropy bonus.

        >>> cooldown = Cooldown(0.2)
        >>> cooldown.progress = 0.9
        >>> round(cooldown.scale, 6)
        0.5
        """
        if not self._share:
            return 1.0
        return max(0.0, min(1.0, (1 - self.progress) / self._share))
