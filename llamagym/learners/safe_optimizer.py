"""Adam whose steps are skipped where losses are not finite, and undone where they lead the policy too far."""

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

from ..errors import DivergedError
from . import ranks
from .state import Stateful

# After so many skipped steps, or updates whose last step was undone, in a row, weights or inputs are beyond repair.
_MOST_IN_A_ROW = 3
# A step is too large once the KL exceeds the target by this factor.
_KL_TOLERANCE = 1.5


class SafeOptimizer(Stateful):
    """Adam with a finite guard and a trust region.

    A step whose losses or gradients are not finite is skipped. Where a step led the policy shows only afterwards, at
    the next minibatch, and where most replies are nearly certain a single step can change them all. So the weights from
    before a step are kept until then: a step that led beyond 1.5 times the target KL, or to output that is not finite,
    is undone.

    Attributes:
        adam: The optimizer, as accelerate prepared it.
        total_steps: Steps since the beginning, including those that were undone.
        steps: Steps of the current update that were not undone.
        skipped: Minibatches of the current update without a step, including an undone step whose KL is not finite.
        kl: How far the remaining steps of the update have moved the policy, in nats per decision.
        largest_kl: The farthest that any step of the update has moved it; infinite if a KL was not finite.
    """

    saved = ("adam", "total_steps", "_skipped_in_a_row", "_undone_in_a_row")

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        accelerator: Accelerator,
        max_grad_norm: float,
        target_kl: float | None = None,
        clips_jointly: bool = False,
        **options: Any,
    ) -> None:
        """Creates an optimizer.

        Args:
            groups: The weights of each parameter group.
            accelerator: Prepares the optimizer and clips gradients.
            max_grad_norm: Largest norm of a gradient.
            target_kl: In nats per decision. None: only output that is not finite is too far.
            clips_jointly: Whether gradients are clipped by the norm of all groups, and not by each group's own.
            options: Further arguments of Adam.
        """
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
        """Starts Adam again on the weights of these groups; what is counted in a row stays."""
        self.adam = self._accelerator.prepare(
            torch.optim.Adam([{"params": list(weights)} for weights in groups], **self._options)
        )
        self._kept: list[Tensor] = []
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
        """The gradients of those weights that have one."""
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def holds(self, weights: Iterable[nn.Parameter]) -> bool:
        """Whether these are exactly the weights that it moves: an adapter that was switched on has others."""
        return list(map(id, self.weights)) == list(map(id, weights))

    def begin(self) -> None:
        """Begins an update: moments move to the weights' device, gradients and counters start at zero."""
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
        if ranks.count() > 1:
            for weight in self.weights:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
            ranks.sum_(self.gradients)

    def accepts(self, losses: Mapping[str, float]) -> bool:
        """Whether losses and gradients are finite in all processes; if not, the step is counted as skipped.

        Args:
            losses: A minibatch's losses and statistics by name. The norm of its gradients must be finite as well,
                since they are divided by it.

        Raises:
            DivergedError: Several steps in a row were not finite.
        """
        numbers = {**losses, "norm of the gradients": float(get_total_norm(self.gradients))}
        wrong = {name: value for name, value in numbers.items() if not math.isfinite(value)}
        if not any(ranks.gather_objects(bool(wrong))):
            self._skipped_in_a_row = 0
            return True
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= _MOST_IN_A_ROW:
            where = wrong or "in another process"
            raise diverged(f"{_MOST_IN_A_ROW} optimizer steps in a row were not finite: {where}")
        return False

    def step(self, rates: Sequence[float]) -> list[float]:
        """Makes a step on the gradients at hand, and clears them.

        Args:
            rates: Learning rate of each group.

        Returns:
            Norm of each group's gradient before clipping, or the joint one alone.
        """
        clipped = [self.weights] if self._clips_jointly else [group["params"] for group in self.param_groups]
        norms = [float(self._accelerator.clip_grad_norm_(weights, self._max_grad_norm)) for weights in clipped]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        self.adam.step()
        self.adam.zero_grad()
        self.steps += 1
        self.total_steps += 1
        return norms

    @torch.no_grad()
    def keep_weights(self) -> None:
        """Keeps the weights as they are now for `undo`, in the memory of those kept before."""
        self._kept = self._kept or [torch.empty_like(weight) for weight in self.weights]
        for weight, kept in zip(self.weights, self._kept, strict=True):
            kept.copy_(weight)
        self._steps_when_kept = self.steps

    def observe_kl(self, kl: float, share: float = 1.0) -> bool:
        """Takes in how far the steps so far have moved the policy; returns whether that is too far.

        Args:
            kl: In nats per decision.
            share: Share of the target KL that the batch supports.
        """
        self.largest_kl = max(self.largest_kl, kl if math.isfinite(kl) else math.inf)
        if self.is_too_far(share):
            return True
        self.kl = kl
        return False

    def is_too_far(self, share: float = 1.0) -> bool:
        """Whether a step of this update led beyond the trust region, so that it has to be undone."""
        if not math.isfinite(self.largest_kl):
            return True
        return self._target_kl is not None and self.largest_kl / share > _KL_TOLERANCE * self._target_kl

    @torch.no_grad()
    def undo(self) -> None:
        """Takes back all steps since `keep_weights`, and drops the gradients at hand."""
        for weight, kept in zip(self.weights, self._kept, strict=True):
            weight.copy_(kept)
        self.adam.zero_grad()
        self.steps = self._steps_when_kept
        if not math.isfinite(self.largest_kl):
            self.skipped += 1

    def end(self) -> None:
        """Ends an update with steps, once `observe_kl` knows where the last one led.

        Raises:
            DivergedError: After several updates in a row the output was not finite.
        """
        self._undone_in_a_row = 0 if math.isfinite(self.largest_kl) else self._undone_in_a_row + 1
        if self._undone_in_a_row >= _MOST_IN_A_ROW:
            raise diverged(f"After each of {_MOST_IN_A_ROW} updates in a row the model's output was not finite")

    @contextmanager
    def undone_on_error(self, tensors: Iterable[Tensor] = ()) -> Iterator[None]:
        """While open, an exception restores the optimizer, and these tensors.

        Args:
            tensors: Changed in place meanwhile; their copies take as much memory again.
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


def diverged(what: str) -> DivergedError:
    """The error of an update that is taken back."""
    return DivergedError(
        f"{what}. The weights are those of before this update. Look at rewards and observations for extreme values, "
        "lower learning_rate, or load the model with dtype='float32'."
    )
