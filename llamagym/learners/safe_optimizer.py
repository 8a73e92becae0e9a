"""Adam that skips steps with losses that are not finite, and undoes steps beyond the trust region."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from .. import distributed
from ..errors import DivergedError
from .state import Stateful

# This many consecutive skipped steps, or updates with output that is not finite, raise DivergedError.
_MAX_FAILURES = 3
# A step is too large once the KL exceeds the target by this factor.
_KL_TOLERANCE = 1.5


class SafeOptimizer(Stateful):
    """Adam with a finite guard and a trust region.

    Steps with losses or gradients that are not finite are skipped. The KL of a step is known only at the next
    minibatch, so the weights before the step are kept until then. A step to a KL beyond 1.5 times the target, or to
    output that is not finite, is undone.

    Attributes:
        adam: The optimizer, as accelerate prepared it.
        total_steps: Number of steps so far, including undone ones.
        steps: Number of steps of the current update, without undone ones.
        skipped: Number of minibatches of the current update whose losses, gradients or results were not finite.
        kl: KL of the current update's steps, without undone ones, in nats per decision.
        kept_weights: Copies of the weights for `undo`; empty without any.
        largest_kl: Largest KL of the current update, including undone steps; infinite if one was not finite.
    """

    saved = ("adam", "total_steps", "_skipped_in_a_row", "_undone_in_a_row")

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        rates: Sequence[float],
        accelerator: Accelerator,
        max_grad_norm: float,
        target_kl: float | None = None,
        clips_jointly: bool = False,
        **options: Any,
    ) -> None:
        """Creates an optimizer.

        Args:
            groups: The weights of each parameter group.
            rates: Initial learning rate of each group.
            accelerator: Prepares the optimizer and clips gradients.
            max_grad_norm: Largest norm of a gradient.
            target_kl: Target KL of an update, in nats per decision. None: only output that is not finite is undone.
            clips_jointly: Whether gradients are clipped by the norm of all groups instead of each group's own.
            options: Further arguments of Adam.
        """
        self._rates = list(rates)
        self._accelerator = accelerator
        self._max_grad_norm = max_grad_norm
        self._target_kl = target_kl
        self._clips_jointly = clips_jointly
        self._options = options
        self.total_steps = 0
        self._skipped_in_a_row = 0
        self._undone_in_a_row = 0
        self.restart(groups)

    def restart(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Creates a new Adam for these weights; `total_steps` and the counters of consecutive failures are kept."""
        pairs = zip(groups, self._rates, strict=True)
        param_groups = [{"params": list(weights), "lr": rate} for weights, rate in pairs]
        self.adam = self._accelerator.prepare(torch.optim.Adam(param_groups, **self._options))
        self.kept_weights: list[Tensor] = []
        self.begin()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Adam's parameter groups."""
        groups: list[dict[str, Any]] = self.adam.param_groups
        return groups

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights of all groups, in order."""
        return [weight for group in self.param_groups for weight in group["params"]]

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of the weights that have one."""
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def holds(self, weights: Iterable[nn.Parameter]) -> bool:
        """Whether these are exactly the optimizer's weights; activating another adapter replaces the trainable ones."""
        own = self.weights
        others = list(weights)
        return len(own) == len(others) and all(one is other for one, other in zip(own, others, strict=True))

    def begin(self) -> None:
        """Begins an update: resets its counters, and moves Adam's moments to the weights' device."""
        for weight, state in self.adam.state.items():
            for name, moment in state.items():
                # Adam's step counts stay on the CPU.
                if isinstance(moment, Tensor) and moment.dim():
                    state[name] = moment.to(weight.device)
        self.steps = 0
        self.skipped = 0
        self.kl = 0.0
        self.largest_kl = 0.0
        self._steps_when_kept = 0

    def sum_gradients_(self) -> None:
        """Gives all processes the sum of their gradients, including those that read no tokens."""
        if distributed.world_size() > 1:
            for weight in self.weights:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
            distributed.sum_(self.gradients)

    def accepts(self, losses: Mapping[str, float]) -> bool:
        """Whether losses and gradients are finite in all processes; if not, counts the minibatch as skipped.

        Args:
            losses: A minibatch's losses and statistics by name. The norm of its gradients must be finite as well,
                since clipping divides by it.

        Raises:
            DivergedError: Several steps in a row were not finite.
        """
        values = {**losses, "norm of the gradients": float(get_total_norm(self.gradients))}
        not_finite = {name: value for name, value in values.items() if not math.isfinite(value)}
        if not any(distributed.gather_objects(bool(not_finite))):
            self._skipped_in_a_row = 0
            return True
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= _MAX_FAILURES:
            where = not_finite or "in another process"
            raise diverged(f"{_MAX_FAILURES} optimizer steps in a row were not finite: {where}")
        return False

    def step(self, rates: Sequence[float] | None = None) -> list[float]:
        """Takes a step with the current gradients, and clears them.

        Args:
            rates: Learning rate of each group; None keeps the current ones.

        Returns:
            Norm of each group's gradient before clipping, or only the joint norm.
        """
        clipped_together = [group["params"] for group in self.param_groups]
        if self._clips_jointly:
            clipped_together = [self.weights]
        norms = [float(self._accelerator.clip_grad_norm_(weights, self._max_grad_norm)) for weights in clipped_together]
        if rates is not None:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate
        self.adam.step()
        self.adam.zero_grad()
        self.steps += 1
        self.total_steps += 1
        return norms

    @torch.no_grad()
    def keep_weights(self) -> None:
        """Copies the weights for `undo`, into the memory of an earlier copy."""
        if not self.kept_weights:
            self.kept_weights = [torch.empty_like(weight) for weight in self.weights]
        for weight, kept in zip(self.weights, self.kept_weights, strict=True):
            kept.copy_(weight)
        self._steps_when_kept = self.steps

    def record_kl(self, kl: float, share: float = 1.0) -> bool:
        """Records the KL of the steps so far; returns whether it is outside the trust region.

        Args:
            kl: KL from the policy before the update, in nats per decision.
            share: Share of the target KL that the batch supports.
        """
        self.largest_kl = max(self.largest_kl, kl if math.isfinite(kl) else math.inf)
        if self.is_too_far(share):
            return True
        self.kl = kl
        return False

    def is_too_far(self, share: float = 1.0) -> bool:
        """Whether a step of this update left the trust region and has to be undone."""
        if not math.isfinite(self.largest_kl):
            return True
        return self._target_kl is not None and self.largest_kl / share > _KL_TOLERANCE * self._target_kl

    def release_weights(self) -> None:
        """Frees the memory of the copied weights."""
        self.kept_weights = []

    @torch.no_grad()
    def undo(self) -> None:
        """Undoes all steps since `keep_weights`, and clears the current gradients."""
        for weight, kept in zip(self.weights, self.kept_weights, strict=True):
            weight.copy_(kept)
        self.adam.zero_grad()
        self.steps = self._steps_when_kept
        if not math.isfinite(self.largest_kl):
            self.skipped += 1

    def end(self) -> None:
        """Ends an update with steps, after `record_kl` for the last one.

        Raises:
            DivergedError: The output was not finite after several updates in a row.
        """
        self._undone_in_a_row = 0 if math.isfinite(self.largest_kl) else self._undone_in_a_row + 1
        if self._undone_in_a_row >= _MAX_FAILURES:
            raise diverged(f"After each of {_MAX_FAILURES} updates in a row the model's output was not finite")

    @contextmanager
    def undone_on_error(self, tensors: Iterable[Tensor] = ()) -> Iterator[None]:
        """While open, an exception restores the optimizer, and these tensors.

        Args:
            tensors: Tensors that are changed in place meanwhile; their copies take as much memory again.
        """
        tensors = list(tensors)
        copies = [tensor.detach().clone() for tensor in tensors]
        attributes = dict(vars(self))
        state = deepcopy(self.adam.state_dict())
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)
                    tensor.grad = None
            vars(self).update(attributes)
            self.adam.load_state_dict(state)
            self.adam.zero_grad()
            raise


def diverged(failure: str) -> DivergedError:
    """The error of an update that is undone."""
    return DivergedError(
        f"{failure}. The weights are those of before this update. Check rewards and observations for extreme values, "
        "lower learning_rate, or load the model with dtype='float32'."
    )
