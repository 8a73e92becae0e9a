"""Compiles CPU kernels with numba at their first call, which takes seconds, and caches them on disk.

Kernels take addresses, since wrapping tensors as arrays would take as long as some of the work; callers check shapes
and dtypes. numba has no bfloat16: bfloat16 numbers are passed as unsigned integers, the upper halves of float32.
Kernels compute in float32, in attention in the dtype given by `models.hardware.sum_dtype`.

numba invalidates its cache only when a function's own file changes, not when a called function does. So cache entries
are named after the content of all files in this package.
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

# Empty arrays that tell kernels the dtype at an address.
_EMPTY_ARRAYS = {torch.float32: np.empty(0, np.float32), torch.bfloat16: np.empty(0, np.uint16)}
# Sums may be reordered and fused with products; infinities and NaN are respected.
_FAST_MATH = {"reassoc", "contract", "nsz", "arcp"}
# Multiplications per thread, which takes some microseconds to start.
MULTIPLICATIONS_PER_THREAD = 2**18
# Compiling a kernel takes 1 to 5 seconds.
_COMPILE_TIMEOUT_S = 120.0
_COMPILE_LOCK = threading.Lock()
# Whether kernels may use several threads.
HAS_THREADS = has_thread_pool()
_LN_2_FLOAT64 = 0.6931471805599453
_LN_2 = np.float32(_LN_2_FLOAT64)
_LOG2_E = np.float32(1.4426950408889634)
# Factors of the exponential's Taylor series up to the 13th power, which is below 1e-15 in the range of its use.
_INVERSES = tuple(1 / factor for factor in range(13, 0, -1))


def source_hash(folder: Path) -> str:
    """Hash of all source files in a folder."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()[:12]


_SOURCE_HASH = source_hash(Path(__file__).parent)


def has_kernels(states: Tensor) -> bool:
    """Whether kernels can compute with such states: float32 or bfloat16 on the CPU."""
    return states.device.type == "cpu" and states.dtype in _EMPTY_ARRAYS


def empty_array_like(*tensors: Tensor) -> Any:
    """An empty array that tells kernels the dtype of all these tensors.

    Raises:
        TypeError: The tensors have several dtypes.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise TypeError(f"compiled functions were given {sorted(map(str, dtypes))} together; expected one of them")
    return _EMPTY_ARRAYS[dtypes.pop()]


def thread_count(multiplications: int) -> int:
    """Number of threads for so many multiplications."""
    if not HAS_THREADS:
        return 1
    return min(torch.get_num_threads(), multiplications // MULTIPLICATIONS_PER_THREAD + 1)


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compiles a kernel for its arguments' types at the first call, with threads or without.

    Args:
        function: Kernel whose last argument is the number of chunks, over which it runs a `prange`.

    Returns:
        A function that takes the number of multiplications, from which the number of chunks follows, and then the
        kernel's other arguments.
    """
    in_threads = FunctionType(function.__code__, function.__globals__, function.__name__)
    # numba's cache distinguishes functions by name.
    in_threads.__qualname__ = f"{function.__qualname__}_in_threads_{_SOURCE_HASH}"
    function.__qualname__ += f"_{_SOURCE_HASH}"
    options: dict[str, Any] = {"nogil": True, "fastmath": _FAST_MATH, "error_model": "numpy"}
    variants: list[Any] = [njit(**options)(function), njit(parallel=True, **options)(in_threads)]
    for variant in variants:
        cache_on_disk(variant)
    compiled_types: set[tuple[Any, ...]] = set()

    @wraps(function)
    def run(multiplications: int, *args: Any) -> None:
        chunks = thread_count(multiplications)
        kernel = variants[chunks > 1]
        arg_types = (chunks > 1, id(args[0]), *map(type, args))
        if arg_types not in compiled_types:
            _compile_in_child(kernel, tuple(map(typeof, (*args, chunks))))
            compiled_types.add(arg_types)
        kernel(*args, chunks)

    return run


def _compile_in_child(kernel: Any, signature: tuple[Any, ...]) -> None:
    """Compiles a kernel in a child process into the cache, where this process finds it.

    A process that compiles a kernel for threads runs other machine code, with other rounding, than those that load it
    from the cache. Then a resumed run would differ from an uninterrupted one. Without a cache or a safe way to fork,
    the kernel is compiled in this process.
    """
    folder = cache_folder(kernel)
    if sys.platform != "linux" or folder is None:
        return
    identity = (_SOURCE_HASH, kernel.__qualname__, str(signature), numba.__version__, get_host_cpu_name())
    mark = folder / f"{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.compiled"
    with _COMPILE_LOCK, suppress(OSError), warnings.catch_warnings():
        # Python warns that another thread may hold a lock that the child needs. The timeout below handles that.
        warnings.simplefilter("ignore", DeprecationWarning)
        if mark.exists():
            return
        child = os.fork()
        if not child:
            with suppress(BaseException):
                kernel.compile(signature)
            os._exit(0)
        deadline = time.monotonic() + _COMPILE_TIMEOUT_S
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return
            time.sleep(0.01)
        mark.touch()


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function that kernels call."""
    result: Any = njit(fastmath=_FAST_MATH, error_model="numpy")(function)
    return result


def wide(number: Any) -> Any:
    """Converts an element to float32; for use in kernels."""


@overload(wide, strict=False)
def _compile_wide(number: Any) -> Callable[..., Any]:
    if number == types.float32:
        return lambda number: number
    return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)


def summand(number: Any) -> Any:
    """Converts an element to the dtype of attention's sums; for use in kernels."""


@overload(summand, strict=False)
def _compile_summand(number: Any) -> Callable[..., Any]:
    if number == types.float32:
        return lambda number: number
    return lambda number: np.float64(wide(number))


def new_sums(like: Any, shape: Any) -> Any:
    """Creates zeros in the dtype of attention's sums; for use in kernels."""


@overload(new_sums, strict=False)
def _compile_new_sums(like: Any, shape: Any) -> Callable[..., Any]:
    if like.dtype == types.float32:
        return lambda like, shape: np.zeros(shape, np.float32)
    return lambda like, shape: np.zeros(shape, np.float64)


def sums_at(like: Any, address: Any, shape: Any) -> Any:
    """Wraps an array at an address, in the dtype of attention's sums; for use in kernels."""


@overload(sums_at, strict=False)
def _compile_sums_at(like: Any, address: Any, shape: Any) -> Callable[..., Any]:
    if like.dtype == types.float32:
        return lambda like, address, shape: carray(pointer(address), shape, np.float32)
    return lambda like, address, shape: carray(pointer(address), shape, np.float64)


def as_element(like: Any, number: Any) -> Any:
    """Converts a float32 to an element, rounded to nearest, ties to even; for use in kernels."""


@overload(as_element, strict=False)
def _compile_as(like: Any, number: Any) -> Callable[..., Any]:
    if like.dtype == types.float32:
        return lambda like, number: number

    def rounded(like, number):  # type: ignore[no-untyped-def]
        bits = np.float32(number).view(np.uint32)
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return rounded


def exponential(number: Any) -> Any:
    """Computes the exponential of a float32 or float64 that is not positive; for use in kernels.

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
    underflows = number < np.float32(-87)
    number = np.float32(-87) if underflows else number
    exponent = np.floor(number * _LOG2_E + np.float32(0.5))
    remainder = number - exponent * _LN_2
    series = np.float32(1.9875691e-4)
    series = series * remainder + np.float32(1.3981999e-3)
    series = series * remainder + np.float32(8.3334519e-3)
    series = series * remainder + np.float32(4.1665796e-2)
    series = series * remainder + np.float32(1.6666666e-1)
    series = series * remainder + np.float32(5.0000001e-1)
    power = np.uint32((np.int32(exponent) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0) if underflows else (series * remainder * remainder + remainder + np.float32(1)) * power


@inlined
def _exponential_float64(number):  # type: ignore[no-untyped-def]
    """Within 1e-14, by Taylor's series."""
    underflows = number < -87
    number = -87.0 if underflows else number
    exponent = np.floor(number / _LN_2_FLOAT64 + 0.5)
    remainder = number - exponent * _LN_2_FLOAT64
    series = 1.0
    for factor in _INVERSES:
        series = 1 + series * remainder * factor
    power = np.uint64((np.int64(exponent) + np.int64(1023)) << np.int64(52)).view(np.float64)
    return 0.0 if underflows else series * power
