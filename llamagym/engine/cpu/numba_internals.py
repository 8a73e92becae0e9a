"""What this library needs of numba beyond its documented interface, all in one file.

`tests/test_internals.py` checks each of these against the installed version, and names the one that broke.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray as carray

VERSIONS = ">=0.61"
"""Versions of numba that this file is known to fit."""


def has_thread_pool() -> bool:
    """Whether numba's thread pool is OpenMP's or TBB's; its own must not be used by several threads at once."""
    for pool in ("tbbpool", "omppool"):
        with suppress(ImportError):
            import_module(f"numba.np.ufunc.{pool}")
            return True
    return False


def cache_on_disk(kernel: Any) -> None:
    """Keep the machine code of a kernel in a folder, if there is one that may be written to."""
    with suppress(RuntimeError):
        kernel.enable_caching()


def cache_folder(kernel: Any) -> Path | None:
    """Where a kernel's machine code is kept; None if it is not."""
    path = kernel.stats.cache_path
    return None if path is None else Path(path)


def _compile_pointer(typing_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    """An address as a pointer, which `carray` turns into an array."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


pointer: Any = intrinsic(_compile_pointer)
