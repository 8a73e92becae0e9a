"""LoRA's two small products as one function.

PEFT scales, adds and rounds in separate operations, for each of which autograd saves tensors; together they take longer
than the products. Here all of it is one autograd function for training, and one compiled kernel for the few rows of
decoding. Both sum in the adapter's dtype as PEFT does, and in float64 if the model is in bfloat16 (see
`models.hardware.sum_dtype`).

Shapes: M rows, I inputs and O outputs of a layer, r rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from ...models.hardware import sum_dtype
from ...models.peft_internals import LowRank
from .compiling import as_element, compiled, empty_array_like, has_kernels, new_sums, summand
from .numba_internals import carray, pointer

# From this many rows on, BLAS is faster than the kernel.
_MANY_ROWS = 32


def add_low_rank(product: Tensor, inputs: Tensor, low_rank: LowRank) -> Tensor:
    """Adds LoRA's update to a layer's output.

    Args:
        product: Output (..., O) of the layer without LoRA, with one stride between rows.
        inputs: Inputs of the layer (..., I).
        low_rank: A, B and scale of each adapter.
    """
    for down, up, scale in low_rank:
        if _is_for_kernel(product, down, up):
            product = _add_few_rows(product, inputs, down, up, scale)
        else:
            product = _LowRank.apply(product, inputs, down, up, scale)
    return product


class _LowRank(torch.autograd.Function):
    """product + scale inputs A^T B^T, rounded once, with A (r, I) and B (O, r)."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, inputs: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        rows = inputs.flatten(0, -2)
        dtype = torch.promote_types(up.dtype, sum_dtype(product))
        low = rows.to(dtype) @ down.T.to(dtype)
        output = torch.addmm(product.flatten(0, -2).to(dtype), low, up.T.to(dtype), alpha=scale)
        ctx.save_for_backward(rows, low.to(down.dtype), down, up)
        ctx.scale = scale
        return output.to(product.dtype).view_as(product)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor, None]:
        rows, low, down, up = ctx.saved_tensors
        grad_rows = grad_output.flatten(0, -2).to(up.dtype)
        grad_low = (grad_rows @ up).mul_(ctx.scale)
        grad_up = (grad_rows.T @ low).mul_(ctx.scale)
        grad_down = grad_low.T @ rows.to(down.dtype)
        grad_inputs = None
        if ctx.needs_input_grad[1]:
            grad_inputs = (grad_low @ down).to(rows.dtype).view(*grad_output.shape[:-1], down.shape[1])
        return grad_output, grad_inputs, grad_down, grad_up, None


def _is_for_kernel(product: Tensor, down: Tensor, up: Tensor) -> bool:
    # Users may assign weights of any dtype and strides; the kernel reads plain float32 arrays.
    is_float32 = down.dtype == up.dtype == torch.float32
    is_contiguous = down.is_contiguous() and up.is_contiguous()
    few_rows = product.numel() < _MANY_ROWS * product.shape[-1]
    return few_rows and is_float32 and is_contiguous and not torch.is_grad_enabled() and has_kernels(product)


def _add_few_rows(product: Tensor, inputs: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    inputs = inputs.contiguous()
    output = torch.empty_like(product, memory_format=torch.contiguous_format)
    rank, width = down.shape
    outputs = up.shape[0]
    rows = product.numel() // outputs
    _add_low_rank(
        rows * rank * (width + outputs),
        empty_array_like(product, inputs),
        (inputs.data_ptr(), down.data_ptr(), up.data_ptr()),
        (product.data_ptr(), output.data_ptr()),
        (rows, width, rank, outputs, product.stride(-2)),
        scale,
    )
    return output


@compiled
def _add_low_rank(like, factors, products, sizes, scale, chunks):  # type: ignore[no-untyped-def]
    for chunk in prange(chunks):
        rows, width, rank, outputs, stride = sizes
        inputs = carray(pointer(factors[0]), (rows, width), like.dtype)
        down = carray(pointer(factors[1]), (rank, width), np.float32)
        up = carray(pointer(factors[2]), (outputs, rank), np.float32)
        output = carray(pointer(products[1]), (rows, outputs), like.dtype)
        wide_inputs = new_sums(like, width)
        low = new_sums(like, rank)
        for row in range(chunk * rows // chunks, (chunk + 1) * rows // chunks):
            product = carray(pointer(products[0] + like.itemsize * row * stride), (outputs,), like.dtype)
            for i in range(width):
                wide_inputs[i] = summand(inputs[row, i])
            for k in range(rank):
                total = wide_inputs[0] * down[k, 0]
                for i in range(1, width):
                    total += wide_inputs[i] * down[k, i]
                low[k] = total
            for j in range(outputs):
                total = low[0] * up[j, 0]
                for k in range(1, rank):
                    total += low[k] * up[j, k]
                output[row, j] = as_element(like, summand(product[j]) + scale * total)
