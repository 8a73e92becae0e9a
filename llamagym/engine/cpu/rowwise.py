"""The row-wise steps between a layer's matrix products, RMS norm and SwiGLU gate, each as one compiled kernel.

On few rows a PyTorch operation takes about 10 us whatever it computes; on many rows each one reads and writes all of
them, and autograd saves what it read. Here a norm or a gate is one call forward and one backward. They compute in
float32 and round where transformers rounds.

Shapes: B rows, T tokens, H width, I inner width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from .compiling import as_element, compiled, exponential, inlined, kind_of, wide
from .numba_internals import carray, pointer


def normalize(states: Tensor, weight: Tensor, epsilon: float, addend: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The sum of states (..., H) and a residual, and its RMS norm with a frozen weight."""
    total, result = _Normalized.apply(states, addend, weight, epsilon)
    return states if addend is None else total, result


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up, both (B, T, I) with one stride between tokens."""
    result: Tensor = _Gated.apply(gate, up)
    return result


class _Normalized(torch.autograd.Function):
    """With x = states + addend and y = w x / r, where r is the root of x's mean square."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, addend: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor | None, Tensor]:
        states = states.contiguous()
        addend = None if addend is None else addend.contiguous()
        total = states if addend is None else torch.empty_like(states)
        result = torch.empty_like(states)
        kind = kind_of(states, weight, *([] if addend is None else [addend]))
        given = states.data_ptr(), 0 if addend is None else addend.data_ptr(), weight.data_ptr()
        at = *given, total.data_ptr(), result.data_ptr()
        _run(_normalize, kind, at, states, epsilon=epsilon)
        ctx.save_for_backward(total, weight)
        ctx.epsilon = epsilon
        return (None if addend is None else total), result

    @staticmethod
    def backward(ctx: Any, of_total: Tensor | None, of_result: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """With g = w dy: dx = (g - x (g . x) / (H r^2)) / r + what flows into the sum."""
        total, weight = ctx.saved_tensors
        of_result, of_states = of_result.contiguous(), torch.empty_like(total)
        of_total = None if of_total is None else of_total.contiguous()
        given = total.data_ptr(), weight.data_ptr(), 0 if of_total is None else of_total.data_ptr()
        at = *given, of_result.data_ptr(), of_states.data_ptr()
        _run(_normalize_back, kind_of(total, of_result), at, total, epsilon=ctx.epsilon)
        return of_states, of_states if ctx.needs_input_grad[1] else None, None, None


class _Gated(torch.autograd.Function):
    """With s the sigmoid of the gate z: z s times the input."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        result = torch.empty_like(gate, memory_format=torch.contiguous_format)
        at = gate.data_ptr(), up.data_ptr(), result.data_ptr()
        _run(_gated, kind_of(gate, up), at, gate, (gate.stride(1), up.stride(1)))
        ctx.save_for_backward(gate, up)
        return result

    @staticmethod
    def backward(ctx: Any, of_result: Tensor) -> tuple[Tensor, Tensor]:
        """The derivative of z s is s (1 + z (1 - s))."""
        gate, up = ctx.saved_tensors
        of_result = of_result.contiguous()
        of_gate, of_up = torch.empty_like(of_result), torch.empty_like(of_result)
        at = gate.data_ptr(), up.data_ptr(), of_result.data_ptr(), of_gate.data_ptr(), of_up.data_ptr()
        _run(_gated_back, kind_of(gate, up, of_result), at, gate, (gate.stride(1), up.stride(1)))
        return of_gate, of_up


def _run(
    function: Any, kind: Any, at: tuple[int, ...], states: Tensor, strides: tuple[int, ...] = (), epsilon: float = 0.0
) -> None:
    """Run a kernel on all rows of states (..., H)."""
    rows, width = states.numel() // max(1, states.shape[-1]), states.shape[-1]
    function(states.numel(), kind, at, (rows, width, *strides), epsilon)


@compiled
def _normalize(kind, at, sizes, epsilon, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        rows, width = sizes
        states = carray(pointer(at[0]), (rows, width), kind.dtype)
        addend = carray(pointer(at[1]), (rows, width), kind.dtype)
        weight = carray(pointer(at[2]), (width,), kind.dtype)
        sums = carray(pointer(at[3]), (rows, width), kind.dtype)
        result = carray(pointer(at[4]), (rows, width), kind.dtype)
        for row in range(part * rows // parts, (part + 1) * rows // parts):
            if at[1]:
                for i in range(width):
                    sums[row, i] = as_element(kind, wide(states[row, i]) + wide(addend[row, i]))
            scale = _inverse_root(sums[row], epsilon)
            for i in range(width):
                result[row, i] = as_element(kind, wide(weight[i]) * wide(as_element(kind, wide(sums[row, i]) * scale)))


@inlined
def _inverse_root(states, epsilon):  # type: ignore[no-untyped-def]
    """One over the root mean square of states (H,)."""
    squares = np.float32(0)
    for i in range(len(states)):
        squares += wide(states[i]) * wide(states[i])
    return np.float32(1) / np.sqrt(squares / np.float32(len(states)) + np.float32(epsilon))


@compiled
def _normalize_back(kind, at, sizes, epsilon, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        rows, width = sizes
        states = carray(pointer(at[0]), (rows, width), kind.dtype)
        weight = carray(pointer(at[1]), (width,), kind.dtype)
        of_sum = carray(pointer(at[2]), (rows, width), kind.dtype)
        of_result = carray(pointer(at[3]), (rows, width), kind.dtype)
        of_states = carray(pointer(at[4]), (rows, width), kind.dtype)
        for row in range(part * rows // parts, (part + 1) * rows // parts):
            scale = _inverse_root(states[row], epsilon)
            along = np.float32(0)
            for i in range(width):
                along += wide(weight[i]) * wide(of_result[row, i]) * wide(states[row, i])
            along *= scale * scale / np.float32(width)
            for i in range(width):
                slope = scale * (wide(weight[i]) * wide(of_result[row, i]) - wide(states[row, i]) * along)
                if at[2]:
                    slope += wide(of_sum[row, i])
                of_states[row, i] = as_element(kind, slope)


@inlined
def _sigmoid(number):  # type: ignore[no-untyped-def]
    power = exponential(-abs(number))
    return (np.float32(1) if number >= 0 else power) / (np.float32(1) + power)


@compiled
def _gated(kind, at, sizes, epsilon, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        rows, width, gate_stride, up_stride = sizes
        result = carray(pointer(at[2]), (rows, width), kind.dtype)
        for row in range(part * rows // parts, (part + 1) * rows // parts):
            gate = carray(pointer(at[0] + kind.itemsize * row * gate_stride), (width,), kind.dtype)
            up = carray(pointer(at[1] + kind.itemsize * row * up_stride), (width,), kind.dtype)
            for i in range(width):
                number = wide(gate[i])
                result[row, i] = as_element(kind, wide(as_element(kind, number * _sigmoid(number))) * wide(up[i]))


@compiled
def _gated_back(kind, at, sizes, epsilon, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        rows, width, gate_stride, up_stride = sizes
        of_result = carray(pointer(at[2]), (rows, width), kind.dtype)
        of_gate = carray(pointer(at[3]), (rows, width), kind.dtype)
        of_up = carray(pointer(at[4]), (rows, width), kind.dtype)
        for row in range(part * rows // parts, (part + 1) * rows // parts):
            gate = carray(pointer(at[0] + kind.itemsize * row * gate_stride), (width,), kind.dtype)
            up = carray(pointer(at[1] + kind.itemsize * row * up_stride), (width,), kind.dtype)
            for i in range(width):
                number, slope = wide(gate[i]), wide(of_result[row, i])
                sigmoid = _sigmoid(number)
                of_up[row, i] = as_element(kind, slope * number * sigmoid)
                rise = sigmoid * (np.float32(1) + number * (np.float32(1) - sigmoid))
                of_gate[row, i] = as_element(kind, slope * wide(up[i]) * rise)
