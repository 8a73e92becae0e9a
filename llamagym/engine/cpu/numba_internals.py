"""Uses of numba beyond its documented interface, all in one file.

`tests/models/test_internals.py` checks each of these against the installed version, and what happens without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Documented, but numba's type hints do not export it.
from numba import carray as carray  # type: ignore[attr-defined]
from numba import njit, types
from numba.extending import intrinsic

from ...models.private_apis import PrivateApi

_POOLS = "numba.np.ufunc"


def has_thread_pool() -> bool:
    """Whether numba's thread pool is OpenMP's or TBB's; its own must not be used by several threads at once."""
    if not THREAD_POOLS.works:
        return False
    for pool in ("tbbpool", "omppool"):
        with suppress(ImportError):
            import_module(f"{_POOLS}.{pool}")
            return True
    return False


def cache_on_disk(kernel: Any) -> None:
    """Caches the machine code of a kernel on disk, if a folder is writable."""
    if CACHE.works:
        with suppress(RuntimeError):
            kernel.enable_caching()


def cache_folder(kernel: Any) -> Path | None:
    """Folder of a kernel's machine code; None if it is not cached."""
    path = kernel.stats.cache_path if CACHE.works else None
    return None if path is None else Path(path)


def _compile_pointer(typing_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    """Converts an address to a pointer, which `carray` wraps as an array."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.voidptr(address), generate


pointer: Any = intrinsic(_compile_pointer)


def _pools_exist() -> bool:
    # numba's own pool exists on every platform, the others where their libraries are installed.
    return find_spec(f"{_POOLS}.workqueue") is not None


def _caches_kernels() -> bool:
    kernel: Any = njit(_empty_kernel)
    before = kernel.stats.cache_path
    with suppress(RuntimeError):
        kernel.enable_caching()
        return before is None and isinstance(kernel.stats.cache_path, str)
    # No folder is writable.
    return True


def _empty_kernel() -> None:
    """A kernel to test the cache with."""


THREAD_POOLS = PrivateApi(
    "numba",
    f"{_POOLS}.tbbpool, omppool",
    "Kernels run in one thread, which takes longer.",
    _pools_exist,
)
CACHE = PrivateApi(
    "numba",
    "Dispatcher.enable_caching, Dispatcher.stats.cache_path",
    "Kernels are compiled by every process, which takes seconds.",
    _caches_kernels,
)
