"""Ctrl-C and SIGTERM: the first lets a run finish its step and save, a second one stops it at once."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

EXIT_CODE = 130
"""What a shell reports of a program that was stopped by Ctrl-C."""


class Interrupts:
    """While open, remembers that it was asked to stop. Only a process's main thread can listen to signals."""

    def __init__(self, listens: bool) -> None:
        """Listen to signals, or leave them as they are."""
        self._listens = listens and threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, Any] = {}
        self.stops = False

    def __enter__(self) -> Interrupts:
        """Begin to listen."""
        if self._listens:
            self._before = {number: signal.signal(number, self._remember) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave signals as they were."""
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.stops = True
        # Handlers that were there before act on the next one.
        self._restore()
        logger.warning(
            "%s: stopping after the current step and saving. Press Ctrl-C again to stop immediately.",
            signal.Signals(number).name,
        )

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
