"""Kills a process in the middle of what it does to files."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def killed_at(point: int, do: Callable[[], Any], most: int | None = None) -> bool:
    """Do something in a child that is killed where it opens, writes, flushes, renames or deletes for the nth time.

    A write is half made by then. What Rust writes (safetensors, tokenizers) is not seen that way: with `most`, the
    child goes on at that point, and the kernel kills it in the next write, whoever makes it, that lets a file grow
    beyond so many bytes.

    Returns:
        Whether it came to its end.
    """
    child = os.fork()
    if not child:
        try:
            _killing_at(point, most)
            do()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL if most is None else signal.SIGXFSZ)
    return status == 0


def _killing_at(point: int, most: int | None) -> None:
    """From now on count, and kill this process when the count is there, or let files grow to `most` bytes only."""
    import resource  # of Unix

    count, write, flush = itertools.count(), os.write, os.fsync

    def tick(before_death: Callable[[], Any] = int) -> None:
        if next(count) == point:
            if most is None:
                before_death()
                os.kill(os.getpid(), signal.SIGKILL)
            # Python ignores the signal otherwise, and what it kills leaves a core.
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def counted_write(descriptor: int, data: Any) -> int:
        tick(lambda: write(descriptor, data[: len(data) // 2]))
        return write(descriptor, data)

    def counted_flush(descriptor: int) -> None:
        tick()
        flush(descriptor)

    os.write, os.fsync = counted_write, counted_flush
    sys.addaudithook(lambda event, _: tick() if event in _EVENTS else None)


def as_nobody(do: Callable[[], Any]) -> None:
    """Do something in a child that has no rights of root, so that permissions count; its errors fail the test."""
    child = os.fork()
    if not child:
        try:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            do()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
