"""Keeps an update near the policy that sampled its batch: a step that leads too far is taken back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# A step is too large once the KL exceeds the target by this factor.
_KL_TOLERANCE = 1.5


class TrustRegion:
    """Policies within 1.5 times a KL of the one that sampled, or without a target all whose output is finite.

    A step's KL shows only after it, at the next minibatch; where most replies are certain, one step can change them
    all. So the weights before it are kept until then.
    """

    def __init__(self, weights: Sequence[Tensor], target_kl: float | None) -> None:
        """Watch over `weights`; `target_kl` is in nats per decision."""
        self._weights, self._target, self._kept = list(weights), target_kl, list[Tensor]()

    def is_left(self, kl: float) -> bool:
        """Whether a policy at this KL, in nats per decision, is too far away.

        >>> TrustRegion([], 0.02).is_left(0.04), TrustRegion([], 0.02).is_left(0.03), TrustRegion([], None).is_left(9.0)
        (True, False, False)
        >>> TrustRegion([], 0.02).is_left(math.nan), TrustRegion([], None).is_left(math.inf)
        (True, True)
        """
        return not math.isfinite(kl) or (self._target is not None and kl > _KL_TOLERANCE * self._target)

    @torch.no_grad()
    def enter(self) -> None:
        """Keep the weights as they are now, in place of those kept before: new memory would take twice as long."""
        self._kept = self._kept or [torch.empty_like(weight) for weight in self._weights]
        for weight, kept in zip(self._weights, self._kept, strict=True):
            kept.copy_(weight)

    @torch.no_grad()
    def return_to(self) -> None:
        """Take the weights that were kept last."""
        for weight, kept in zip(self._weights, self._kept, strict=True):
            weight.copy_(kept)


def farthest(*kls: float) -> float:
    """The largest KL; one that is not finite is infinite.

    >>> farthest(0.1, 0.2), farthest(0.1, math.nan), farthest(math.nan, 0.1)
    (0.2, inf, inf)
    """
    return max(kl if math.isfinite(kl) else math.inf for kl in kls)
