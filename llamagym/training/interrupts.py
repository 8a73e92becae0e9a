"""Ctrl-C and SIGTERM: the first lets a run finish its step and save, a second one stops it at once."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

EXIT_CODE = 130
"""Exit status of a program that Ctrl-C stopped, as shells report it."""


class Interrupts:
    """While open, the first Ctrl-C or SIGTERM only sets `stops`. Python delivers signals to the main thread only.

    Attributes:
        stops: Whether a signal asked to stop.
    """

    def __init__(self, listens: bool) -> None:
        """Prepares to handle signals; with `listens=False`, or outside the main thread, leaves them as they are."""
        self._listens = listens and threading.current_thread() is threading.main_thread()
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self.stops = False

    def __enter__(self) -> Interrupts:
        """Installs the handlers."""
        if self._listens:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._request_stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restores the previous handlers."""
        self._restore()

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self.stops = True
        # The previous handlers act on the next signal.
        self._restore()
        logger.warning(
            "%s: stopping after the current step and saving. Press Ctrl-C again to stop immediately.",
            signal.Signals(number).name,
        )

    def _restore(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}
