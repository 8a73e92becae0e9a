"""Compiles functions on tensors for the processor, with numba: at first use, in some seconds, and kept on disk.

Compiled functions take addresses, since wrapping tensors as arrays would take as long as some of the work; what lies
there is checked before. They compute in float32. numba has no bfloat16: these are passed as unsigned integers, the
upper halves of float32.

numba's cache is invalidated by changes to a function's own file alone. After a change to a function that other files
call, as they call all of these, delete `*.nbi` in `__pycache__`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from torch import Tensor

# Arrays without elements: they tell compiled functions what they find at an address.
_KINDS = {torch.float32: np.empty(0, np.float32), torch.bfloat16: np.empty(0, np.uint16)}
# Sums may be added up in any order and products be fused with sums; infinities and what is no number are respected.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
# Products that are worth a second thread, which takes some microseconds to start.
_WORTH_A_THREAD = 2**18
_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)


def has_kernels(states: Tensor) -> bool:
    """Whether compiled functions can compute with such states: float32 or bfloat16 on the CPU."""
    return states.device.type == "cpu" and states.dtype in _KINDS


def kind_of(*tensors: Tensor) -> Any:
    """What all of these hold, as compiled functions are told it."""
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) > 1:
        raise TypeError(f"compiled functions were given {sorted(map(str, kinds))} together; expected one of them")
    return _KINDS[kinds.pop()]


def parts_of(products: int) -> int:
    """In how many parts, each in a thread of its own, so many products are best computed."""
    return min(torch.get_num_threads(), products // _WORTH_A_THREAD + 1) if _HAS_THREADS else 1


def _has_threads() -> bool:
    """Whether numba has threads that several of Python's may start at once: OpenMP's or TBB's, not its own."""
    for pool in ("tbbpool", "omppool"):
        with suppress(ImportError):
            import_module(f"numba.np.ufunc.{pool}")
            return True
    return False


_HAS_THREADS = _has_threads()


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a function at its first call for what it is given, with threads and without.

    Args:
        function: Its last argument is the number of parts, over which it runs a `prange`.

    Returns:
        The same, with the number of products that it computes first and without the number of parts, which depends on
        that.
    """
    in_threads = FunctionType(function.__code__, function.__globals__, function.__name__)
    # numba's cache tells functions apart by their names.
    in_threads.__qualname__ = f"{function.__qualname__}_in_threads"
    options: dict[str, Any] = {"nogil": True, "fastmath": _FAST, "error_model": "numpy"}
    variants: list[Any] = [njit(**options)(function), njit(parallel=True, **options)(in_threads)]
    for variant in variants:
        with suppress(RuntimeError):  # There may be no folder to keep it in.
            variant.enable_caching()

    @wraps(function)
    def run(products: int, *given: Any) -> None:
        parts = parts_of(products)
        variants[parts > 1](*given, parts)

    return run


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled into those that call it."""
    result: Any = njit(fastmath=_FAST, error_model="numpy")(function)
    return result


def _compile_pointer(typing_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    """An address as a pointer, which `carray` makes an array of."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


pointer: Any = intrinsic(_compile_pointer)


def wide(number: Any) -> Any:
    """An element as float32; compiled functions call it."""


@overload(wide, strict=False)
def _compile_wide(number: Any) -> Callable[..., Any]:
    if number == types.float32:
        return lambda number: number
    return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)


def as_element(kind: Any, number: Any) -> Any:
    """A float32 as an element, rounded to the nearest, to even at a tie; compiled functions call it."""


@overload(as_element, strict=False)
def _compile_as(kind: Any, number: Any) -> Callable[..., Any]:
    def rounded(kind, number):  # type: ignore[no-untyped-def]
        bits = np.float32(number).view(np.uint32)
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return (lambda kind, number: number) if kind.dtype == types.float32 else rounded


@inlined
def exponential(number):  # type: ignore[no-untyped-def]
    """The exponential of a float32 that is not positive, to two units in the last place (Cephes' `expf`).

    Below e^-87 it is 0: processors take long for the numbers that would come next.
    """
    # What is no number is not less.
    is_nothing = number < np.float32(-87)
    number = np.float32(-87) if is_nothing else number
    doublings = np.floor(number * _LOG2_E + np.float32(0.5))
    rest = number - doublings * _LN_2
    series = np.float32(1.9875691e-4)
    series = series * rest + np.float32(1.3981999e-3)
    series = series * rest + np.float32(8.3334519e-3)
    series = series * rest + np.float32(4.1665796e-2)
    series = series * rest + np.float32(1.6666666e-1)
    series = series * rest + np.float32(5.0000001e-1)
    power = np.uint32((np.int32(doublings) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0) if is_nothing else (series * rest * rest + rest + np.float32(1)) * power
