"""Controllers that adapt from one update to the next: the KL coefficient and the learning rates."""

from __future__ import annotations

import math

from .state import Stateful

# The learning rate moves in these steps, and falls to this share of its start (Schulman et al. 2017, section 4, steer
# the KL's coefficient so): where every step leads too far and is undone, it must fall until one does not, or nothing is
# learned again. It never rises above its start: a policy that has learned what there is to learn hardly moves.
_RATE_STEP, _LEAST_RATE = 1.5, 0.001
# The coefficient of the KL to the reference stays within this factor of its start.
_KL_COEF_RANGE = 1000.0


class AdaptiveKLController(Stateful):
    """Proportional controller of the KL coefficient (Ziegler et al. 2019, section 2.2).

    Departure: the coefficient stays within a thousandth and a thousand times its start. A run whose KL cannot reach the
    target would otherwise drive it to 0, from where no factor brings it back, or to infinity.
    """

    saved = ("value",)

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        """Start at `init_kl_coef`."""
        self.value, self._target, self._horizon = init_kl_coef, target, horizon
        self._least, self._most = init_kl_coef / _KL_COEF_RANGE, init_kl_coef * _KL_COEF_RANGE

    def update(self, kl: float, steps: int) -> None:
        """Move the coefficient after `steps` samples with this mean KL, in nats, unless it is not finite."""
        if not math.isfinite(kl):
            return
        error = min(max(kl / self._target - 1, -0.2), 0.2)
        # More samples than the horizon count as the horizon: the coefficient stays positive.
        value = self.value * (1 + error * min(steps / self._horizon, 1.0))
        self.value = min(max(value, self._least), self._most)


class RateController(Stateful):
    """Scales the learning rate down where an update would move the policy beyond `target_kl`; None leaves it at 1."""

    saved = ("scale",)

    def __init__(self, target_kl: float | None) -> None:
        """Start at scale 1."""
        self.scale, self._target = 1.0, target_kl

    def update(self, kl: float, may_rise: bool) -> None:
        """Lower the scale after an update beyond the target KL, raise it again after one below half of it; in nats.

        Args:
            kl: By which the update moved the policy.
            may_rise: Whether a small KL means too small a rate: steps have their full size by now, and the batch told
                good actions from bad ones.
        """
        if self._target is None:
            return
        if kl > self._target:
            self.scale = max(self.scale / _RATE_STEP, _LEAST_RATE)
        elif may_rise and kl < self._target / 2:
            self.scale = min(self.scale * _RATE_STEP, 1.0)


class Cooldown:
    """Scales learning rates and the entropy bonus down to 0 over the end of a run (Hägele et al. 2024, section 3).

    At full size, steps keep throwing the policy off what it has found, and the bonus pays for exploration that no later
    batch will learn from. https://arxiv.org/abs/2405.18392

    Attributes:
        progress: Share of the run that was over when the batch began, 0 to 1; 0 where nobody says.
    """

    def __init__(self, share: float) -> None:
        """Scale over this share of a run; 0 never does."""
        self.progress, self._share = 0.0, share

    @property
    def scale(self) -> float:
        """What to multiply by.

        >>> cooldown = Cooldown(0.2)
        >>> cooldown.progress = 0.9
        >>> round(cooldown.scale, 6)
        0.5
        """
        return max(0.0, min(1.0, (1 - self.progress) / self._share)) if self._share else 1.0
