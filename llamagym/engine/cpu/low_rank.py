"""LoRA's update of a layer's output, as PEFT computes it, in fewer operations.

PEFT scales, adds and rounds in separate operations, for each of which autograd saves tensors; together they take longer
than the two small products. Here all of it is one autograd function, in the adapter's dtype as with PEFT, and
in float64 where the model is in bfloat16 (see `models.hardware.sum_dtype`).

Shapes: I inputs, O outputs, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...models.hardware import sum_dtype
from ...models.peft_internals import LowRank


def add_low_rank(product: Tensor, inputs: Tensor, low_rank: LowRank) -> Tensor:
    """A layer's output (..., O) for inputs (..., I), with LoRA's update added."""
    for down, up, scale in low_rank:
        product = _LowRank.apply(product, inputs, down, up, scale)
    return product


class _LowRank(torch.autograd.Function):
    """product + scale inputs A^T B^T, rounded once."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, inputs: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        rows, dtype = inputs.flatten(0, -2), torch.promote_types(up.dtype, sum_dtype(product))
        low = rows.to(dtype) @ down.T.to(dtype)
        total = torch.addmm(product.flatten(0, -2).to(dtype), low, up.T.to(dtype), alpha=scale)
        ctx.save_for_backward(rows, low.to(down.dtype), down, up)
        ctx.scale = scale
        return total.to(product.dtype).view_as(product)

    @staticmethod
    def backward(ctx: Any, of_total: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor, None]:
        rows, low, down, up = ctx.saved_tensors
        slopes = of_total.flatten(0, -2).to(up.dtype)
        of_low = (slopes @ up).mul_(ctx.scale)
        of_up = (slopes.T @ low).mul_(ctx.scale)
        of_down = of_low.T @ rows.to(down.dtype)
        of_inputs = None
        if ctx.needs_input_grad[1]:
            of_inputs = (of_low @ down).to(rows.dtype).view(*of_total.shape[:-1], down.shape[1])
        return of_total, of_inputs, of_down, of_up, None
