"""What the optimizers here share: which weights they hold, and their gradients, summed over processes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import ranks


def weights_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The weights that an optimizer moves, in its own order."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def holds_exactly(optimizer: Optimizer, weights: Iterable[nn.Parameter]) -> bool:
    """Whether an optimizer moves these weights and no others: an adapter that is switched on has others."""
    return list(map(id, weights_of(optimizer))) == list(map(id, weights))


def move_state_(optimizer: Optimizer) -> None:
    """Bring what an optimizer keeps of its weights to where they lie now: the model may have been moved."""
    for weight, state in optimizer.state.items():
        for name, kept in state.items():
            # Steps are counted on the CPU.
            if isinstance(kept, Tensor) and kept.dim():
                state[name] = kept.to(weight.device)


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients at hand."""
    return [weight.grad for weight in weights_of(optimizer) if weight.grad is not None]


def sum_gradients_(optimizer: Optimizer) -> None:
    """Let all processes have the sum of their gradients, those that read nothing included."""
    if ranks.count() > 1:
        for weight in weights_of(optimizer):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        ranks.sum_(gradients_of(optimizer))
