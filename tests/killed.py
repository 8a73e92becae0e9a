"""Kills a process in the middle of what it does to files."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def killed_at(point: int, do: Callable[[], Any]) -> bool:
    """Do something in a child that is killed where it opens, writes, flushes, renames or deletes for the nth time.

    A write is half made by then.

    Returns:
        Whether it came to its end.
    """
    child = os.fork()
    if not child:
        try:
            _killing_at(point)
            do()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status == 0


def _killing_at(point: int) -> None:
    """From now on count, and kill this process when the count is there."""
    count, write, flush = itertools.count(), os.write, os.fsync

    def tick(before_death: Callable[[], Any] = int) -> None:
        if next(count) == point:
            before_death()
            os.kill(os.getpid(), signal.SIGKILL)

    def counted_write(descriptor: int, data: Any) -> int:
        tick(lambda: write(descriptor, data[: len(data) // 2]))
        return write(descriptor, data)

    def counted_flush(descriptor: int) -> None:
        tick()
        flush(descriptor)

    os.write, os.fsync = counted_write, counted_flush
    sys.addaudithook(lambda event, _: tick() if event in _EVENTS else None)
