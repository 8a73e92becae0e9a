"""What the optimisers here share: which weights they hold, their gradients, the mean over processes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer


def weights_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The weights that an optimiser moves, in its own order."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def holds_exactly(optimizer: Optimizer, weights: Iterable[nn.Parameter]) -> bool:
    """Whether an optimiser moves these weights and no others: an adapter that is switched on has others."""
    return list(map(id, weights_of(optimizer))) == list(map(id, weights))


def move_state_(optimizer: Optimizer) -> None:
    """Bring what an optimiser keeps of its weights to where they lie now: the model may have been moved."""
    for weight, state in optimizer.state.items():
        for name, kept in state.items():
            # Steps are counted on the CPU.
            if isinstance(kept, Tensor) and kept.dim():
                state[name] = kept.to(weight.device)


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients at hand."""
    return [weight.grad for weight in weights_of(optimizer) if weight.grad is not None]


def average_gradients_(accelerator: Accelerator, optimizer: Optimizer) -> None:
    """Let all processes have the mean of their gradients."""
    if accelerator.num_processes > 1:
        for weight in weights_of(optimizer):
            if weight.grad is not None:
                weight.grad = accelerator.reduce(weight.grad, "mean")


def mean_over_processes(accelerator: Accelerator, value: float) -> float:
    """A number's mean, so that all processes decide alike."""
    return float(accelerator.reduce(torch.tensor(value, device=accelerator.device), "mean").item())
