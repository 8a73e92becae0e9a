"""Compiles kernels for the CPU with numba: on first use, which takes some seconds, and cached on disk.

Kernels take addresses, since wrapping tensors as arrays would take as long as some of the work; callers check shapes
and dtypes. numba has no bfloat16: bfloat16 numbers are passed as unsigned integers, the upper halves of float32.

They compute in float32, and in attention in the dtype that `models.hardware.sum_dtype` says.

numba invalidates its cache only when a function's own file changes, not when a function does that it calls. So the
cache's entries are named after the content of all files here.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
from llvmlite.binding import get_host_cpu_name
from numba import njit, typeof, types
from numba.extending import overload
from torch import Tensor

from .numba_internals import cache_folder, cache_on_disk, carray, has_thread_pool, pointer

# Empty arrays: they tell kernels which dtype lies at an address.
_KINDS = {torch.float32: np.empty(0, np.float32), torch.bfloat16: np.empty(0, np.uint16)}
# Sums may be reordered and fused with products; infinities and NaN are respected.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
# Multiplications that pay for another thread, which takes some microseconds to start.
_WORTH_A_THREAD = 2**18
# A kernel compiles in 1 to 5 seconds.
_COMPILES_S = 120.0
_COMPILING = threading.Lock()
_HAS_THREADS = has_thread_pool()
_LN_2_FLOAT64 = 0.6931471805599453
_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(_LN_2_FLOAT64)
# Of the exponential's series up to the 13th power, which is below 1e-15 where it is used.
_INVERSES = tuple(1 / factor for factor in range(13, 0, -1))


def stamp_of(folder: Path) -> str:
    """What tells these kernels' sources from others: numba looks at a kernel's own file only, not at what it calls."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()[:12]


_SOURCES = stamp_of(Path(__file__).parent)


def has_kernels(states: Tensor) -> bool:
    """Whether kernels can compute with such states: float32 or bfloat16 on the CPU."""
    return states.device.type == "cpu" and states.dtype in _KINDS


def kind_of(*tensors: Tensor) -> Any:
    """The dtype that all of these tensors share, in the form that kernels take."""
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) > 1:
        raise TypeError(f"compiled functions were given {sorted(map(str, kinds))} together; expected one of them")
    return _KINDS[kinds.pop()]


def parts_of(products: int) -> int:
    """The number of threads that so many multiplications are best divided among."""
    return min(torch.get_num_threads(), products // _WORTH_A_THREAD + 1) if _HAS_THREADS else 1


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a kernel for its arguments' types at its first call, once with threads and once without.

    Args:
        function: Its last argument is the number of parts, over which it runs a `prange`.

    Returns:
        A function that takes the number of multiplications first, which decides how many parts there are, and then all
        other arguments of the kernel.
    """
    in_threads = FunctionType(function.__code__, function.__globals__, function.__name__)
    # numba's cache tells functions apart by their names.
    in_threads.__qualname__ = f"{function.__qualname__}_in_threads_{_SOURCES}"
    function.__qualname__ += f"_{_SOURCES}"
    options: dict[str, Any] = {"nogil": True, "fastmath": _FAST, "error_model": "numpy"}
    variants: list[Any] = [njit(**options)(function), njit(parallel=True, **options)(in_threads)]
    for variant in variants:
        cache_on_disk(variant)
    known: set[tuple[Any, ...]] = set()

    @wraps(function)
    def run(products: int, *given: Any) -> None:
        parts = parts_of(products)
        kernel, kinds = variants[parts > 1], (parts > 1, id(given[0]), *map(type, given))
        if kinds not in known:
            _compile_in_a_child(kernel, tuple(map(typeof, (*given, parts))))
            known.add(kinds)
        kernel(*given, parts)

    return run


def _compile_in_a_child(kernel: Any, signature: tuple[Any, ...]) -> None:
    """Compile into the cache, where this process finds it.

    A process that compiles a kernel for threads runs other machine code of it than those that find it in the cache,
    with another rounding: a run that goes on in a second process would not compute what it would have in one. Where
    that cannot be avoided (no cache, no safe way to fork), the kernel is compiled here.
    """
    folder = cache_folder(kernel)
    if sys.platform != "linux" or folder is None:
        return
    known_by = (_SOURCES, kernel.__qualname__, str(signature), numba.__version__, get_host_cpu_name())
    mark = folder / f"{hashlib.sha256(repr(known_by).encode()).hexdigest()[:16]}.compiled"
    with _COMPILING, suppress(OSError), warnings.catch_warnings():
        # A thread of this process may hold a lock that the child needs. Then it is given up after a while.
        warnings.simplefilter("ignore", DeprecationWarning)
        if mark.exists():
            return
        child = os.fork()
        if not child:
            with suppress(BaseException):
                kernel.compile(signature)
            os._exit(0)
        given_up = time.monotonic() + _COMPILES_S
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > given_up:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return
            time.sleep(0.01)
        mark.touch()


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled into those that call it."""
    result: Any = njit(fastmath=_FAST, error_model="numpy")(function)
    return result


def wide(number: Any) -> Any:
    """An element as float32; for use in kernels."""


@overload(wide, strict=False)
def _compile_wide(number: Any) -> Callable[..., Any]:
    if number == types.float32:
        return lambda number: number
    return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)


def summand(number: Any) -> Any:
    """An element in the dtype that attention's sums run in; for use in kernels."""


@overload(summand, strict=False)
def _compile_summand(number: Any) -> Callable[..., Any]:
    return (lambda number: number) if number == types.float32 else (lambda number: np.float64(wide(number)))


def new_sums(kind: Any, shape: Any) -> Any:
    """Zeros in the dtype that attention's sums run in; for use in kernels."""


@overload(new_sums, strict=False)
def _compile_new_sums(kind: Any, shape: Any) -> Callable[..., Any]:
    if kind.dtype == types.float32:
        return lambda kind, shape: np.zeros(shape, np.float32)
    return lambda kind, shape: np.zeros(shape, np.float64)


def sums_at(kind: Any, address: Any, shape: Any) -> Any:
    """An array at an address, in the dtype that attention's sums run in; for use in kernels."""


@overload(sums_at, strict=False)
def _compile_sums_at(kind: Any, address: Any, shape: Any) -> Callable[..., Any]:
    if kind.dtype == types.float32:
        return lambda kind, address, shape: carray(pointer(address), shape, np.float32)
    return lambda kind, address, shape: carray(pointer(address), shape, np.float64)


def as_element(kind: Any, number: Any) -> Any:
    """A float32 as an element, rounded to nearest, ties to even; for use in kernels."""


@overload(as_element, strict=False)
def _compile_as(kind: Any, number: Any) -> Callable[..., Any]:
    def rounded(kind, number):  # type: ignore[no-untyped-def]
        bits = np.float32(number).view(np.uint32)
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return (lambda kind, number: number) if kind.dtype == types.float32 else rounded


def exponential(number: Any) -> Any:
    """The exponential of a float32 or float64 that is not positive; for use in kernels.

    Results below e^-87 are 0: subnormal numbers are slow on most processors.
    """


@overload(exponential, strict=False)
def _compile_exponential(number: Any) -> Callable[..., Any]:
    if number == types.float32:
        return lambda number: _exponential_float32(number)
    return lambda number: _exponential_float64(number)


@inlined
def _exponential_float32(number):  # type: ignore[no-untyped-def]
    """Within two units in the last place (Cephes' `expf`)."""
    # A comparison with NaN is false, so NaN stays NaN.
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


@inlined
def _exponential_float64(number):  # type: ignore[no-untyped-def]
    """Within 1e-14, by Taylor's series."""
    is_nothing = number < -87
    number = -87.0 if is_nothing else number
    doublings = np.floor(number / _LN_2_FLOAT64 + 0.5)
    rest = number - doublings * _LN_2_FLOAT64
    series = 1.0
    for factor in _INVERSES:
        series = 1 + series * rest * factor
    power = np.uint64((np.int64(doublings) + np.int64(1023)) << np.int64(52)).view(np.float64)
    return 0.0 if is_nothing else series * power
