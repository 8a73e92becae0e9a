"""RMS norm and SwiGLU gate, the row-wise steps between a layer's matrix products, each as one compiled kernel.

On few rows a PyTorch operation takes about 10 us whatever it computes; on many rows each one reads and writes all of
them, and autograd saves its inputs. Here a norm or a gate is one call forward and one backward. They compute in float32
and round where transformers rounds.

Shapes: B rows, T tokens, H width, I inner width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from .compiling import as_element, compiled, empty_array_like, exponential, inlined, wide
from .numba_internals import carray, pointer


def normalize(states: Tensor, weight: Tensor, epsilon: float, addend: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum of states (..., H) and `addend`, the residual, and the sum's RMS norm with a frozen weight."""
    weight = weight.contiguous()
    if torch.is_grad_enabled():
        total, normalized = _RmsNorm.apply(states, addend, weight, epsilon)
    else:
        # `Function.apply` costs as much as the kernel.
        total, normalized = _sum_and_norm(states, addend, weight, epsilon)
    return states if addend is None else total, normalized


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up, both (B, T, I) with one stride between tokens."""
    if not torch.is_grad_enabled():
        return _gated(gate, up)
    result: Tensor = _Gated.apply(gate, up)
    return result


class _RmsNorm(torch.autograd.Function):
    """With x = states + addend and y = w x / r, where r is the root of x's mean square."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, addend: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor | None, Tensor]:
        total, normalized = _sum_and_norm(states, addend, weight, epsilon)
        ctx.save_for_backward(total, weight)
        ctx.epsilon = epsilon
        return (None if addend is None else total), normalized

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad_output: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """With g = w dy: dx = (g - x (g . x) / (H r^2)) / r + the gradient of the sum."""
        total, weight = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad_states = torch.empty_like(total)
        if grad_total is not None:
            grad_total = grad_total.contiguous()
        tensors = total, weight, grad_total, grad_output, grad_states
        _run(_normalize_backward, empty_array_like(total, grad_output), tensors, total, epsilon=ctx.epsilon)
        return grad_states, grad_states if ctx.needs_input_grad[1] else None, None, None


class _Gated(torch.autograd.Function):
    """The gate z is multiplied by its sigmoid s and by the input."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """The derivative of z s is s (1 + z (1 - s))."""
        gate, up = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad_gate = torch.empty_like(grad_output)
        grad_up = torch.empty_like(grad_output)
        tensors = gate, up, grad_output, grad_gate, grad_up
        strides = gate.stride(1), up.stride(1)
        _run(_gate_backward, empty_array_like(gate, up, grad_output), tensors, gate, strides)
        return grad_gate, grad_up


def _sum_and_norm(states: Tensor, addend: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Sum of states and addend, if there is one, and the sum's norm; both contiguous."""
    states = states.contiguous()
    total = states
    if addend is not None:
        addend = addend.contiguous()
        total = torch.empty_like(states)
    normalized = torch.empty_like(states)
    like = empty_array_like(states, weight) if addend is None else empty_array_like(states, weight, addend)
    _run(_normalize, like, (states, addend, weight, total, normalized), states, epsilon=epsilon)
    return total, normalized


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    output = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _run(_gate, empty_array_like(gate, up), (gate, up, output), gate, (gate.stride(1), up.stride(1)))
    return output


def _run(
    kernel: Any,
    like: Any,
    tensors: Sequence[Tensor | None],
    states: Tensor,
    strides: tuple[int, ...] = (),
    epsilon: float = 0.0,
) -> None:
    """Runs a kernel on all rows of states (..., H); it gets address 0 for a missing tensor."""
    width = states.shape[-1]
    rows = states.numel() // max(1, width)
    addresses = []
    for tensor in tensors:
        addresses.append(0 if tensor is None else tensor.data_ptr())
    kernel(states.numel(), like, tuple(addresses), (rows, width, *strides), epsilon)


@compiled
def _normalize(like, addresses, sizes, epsilon, chunks):  # type: ignore[no-untyped-def]
    for chunk in prange(chunks):
        rows, width = sizes
        states = carray(pointer(addresses[0]), (rows, width), like.dtype)
        addend = carray(pointer(addresses[1]), (rows, width), like.dtype)
        weight = carray(pointer(addresses[2]), (width,), like.dtype)
        total = carray(pointer(addresses[3]), (rows, width), like.dtype)
        output = carray(pointer(addresses[4]), (rows, width), like.dtype)
        for row in range(chunk * rows // chunks, (chunk + 1) * rows // chunks):
            if addresses[1]:
                for i in range(width):
                    total[row, i] = as_element(like, wide(states[row, i]) + wide(addend[row, i]))
            scale = _inverse_root(total[row], epsilon)
            for i in range(width):
                output[row, i] = as_element(like, wide(weight[i]) * wide(as_element(like, wide(total[row, i]) * scale)))


@inlined
def _inverse_root(states, epsilon):  # type: ignore[no-untyped-def]
    """Inverse root mean square of states (H,)."""
    squares = np.float32(0)
    for i in range(len(states)):
        squares += wide(states[i]) * wide(states[i])
    return np.float32(1) / np.sqrt(squares / np.float32(len(states)) + np.float32(epsilon))


@compiled
def _normalize_backward(like, addresses, sizes, epsilon, chunks):  # type: ignore[no-untyped-def]
    for chunk in prange(chunks):
        rows, width = sizes
        states = carray(pointer(addresses[0]), (rows, width), like.dtype)
        weight = carray(pointer(addresses[1]), (width,), like.dtype)
        grad_total = carray(pointer(addresses[2]), (rows, width), like.dtype)
        grad_output = carray(pointer(addresses[3]), (rows, width), like.dtype)
        grad_states = carray(pointer(addresses[4]), (rows, width), like.dtype)
        for row in range(chunk * rows // chunks, (chunk + 1) * rows // chunks):
            scale = _inverse_root(states[row], epsilon)
            projection = np.float32(0)
            for i in range(width):
                projection += wide(weight[i]) * wide(grad_output[row, i]) * wide(states[row, i])
            projection *= scale * scale / np.float32(width)
            for i in range(width):
                gradient = scale * (wide(weight[i]) * wide(grad_output[row, i]) - wide(states[row, i]) * projection)
                if addresses[2]:
                    gradient += wide(grad_total[row, i])
                grad_states[row, i] = as_element(like, gradient)


@inlined
def _sigmoid(number):  # type: ignore[no-untyped-def]
    power = exponential(-abs(number))
    return (np.float32(1) if number >= 0 else power) / (np.float32(1) + power)


@compiled
def _gate(like, addresses, sizes, epsilon, chunks):  # type: ignore[no-untyped-def]
    for chunk in prange(chunks):
        rows, width, gate_stride, up_stride = sizes
        output = carray(pointer(addresses[2]), (rows, width), like.dtype)
        for row in range(chunk * rows // chunks, (chunk + 1) * rows // chunks):
            gate = carray(pointer(addresses[0] + like.itemsize * row * gate_stride), (width,), like.dtype)
            up = carray(pointer(addresses[1] + like.itemsize * row * up_stride), (width,), like.dtype)
            for i in range(width):
                number = wide(gate[i])
                output[row, i] = as_element(like, wide(as_element(like, number * _sigmoid(number))) * wide(up[i]))


@compiled
def _gate_backward(like, addresses, sizes, epsilon, chunks):  # type: ignore[no-untyped-def]
    for chunk in prange(chunks):
        rows, width, gate_stride, up_stride = sizes
        grad_output = carray(pointer(addresses[2]), (rows, width), like.dtype)
        grad_gate = carray(pointer(addresses[3]), (rows, width), like.dtype)
        grad_up = carray(pointer(addresses[4]), (rows, width), like.dtype)
        for row in range(chunk * rows // chunks, (chunk + 1) * rows // chunks):
            gate = carray(pointer(addresses[0] + like.itemsize * row * gate_stride), (width,), like.dtype)
            up = carray(pointer(addresses[1] + like.itemsize * row * up_stride), (width,), like.dtype)
            for i in range(width):
                number, gradient = wide(gate[i]), wide(grad_output[row, i])
                sigmoid = _sigmoid(number)
                grad_up[row, i] = as_element(like, gradient * number * sigmoid)
                rise = sigmoid * (np.float32(1) + number * (np.float32(1) - sigmoid))
                grad_gate[row, i] = as_element(like, gradient * wide(up[i]) * rise)
