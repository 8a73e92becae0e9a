"""Environments in processes of their own: none outlives its run, however it hangs, and one that is lost is named.

Each process leads a process group, so that what an environment has started itself, such as a game's server, is ended
with it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from ..errors import EnvironmentLostError
from .env_errors import failed_env_number

logger = logging.getLogger(__name__)

# For processes that are to end at once, or do not end by themselves, before a firmer signal follows.
_GRACE_S = 2.0


@contextmanager
def report_lost_processes(envs: VectorEnv, first: int) -> Iterator[None]:
    """While open, the loss of a process of a vector environment is an error that names its environment.

    Args:
        envs: The vector environment; in one without processes none can be lost.
        first: The number of its first environment.

    Raises:
        EnvironmentLostError: A process has ended; those of a `ProcessEnvs` have been stopped.
    """
    try:
        yield
    except (EOFError, ConnectionError) as error:
        base = envs.unwrapped
        processes = getattr(base, "processes", [])
        is_ours = isinstance(base, ProcessEnvs)
        # An environment's own error, in its process or, while it is made, here.
        if failed_env_number(error) is not None or not processes:
            raise
        ready = wait([process.sentinel for process in processes], _GRACE_S)
        for process in processes:
            if process.sentinel in ready:
                process.join()
        codes = {first + i: process.exitcode for i, process in enumerate(processes) if process.exitcode is not None}
        # In a caller's vector environment, a process whose environment raises an error ends with 0.
        if not is_ours and not any(codes.values()):
            raise
        if is_ours:
            base.close(terminate=True)
        lost = ", ".join(f"{number} ({_reason(code)})" for number, code in codes.items())
        rest = " All others have been stopped." if is_ours else ""
        raise EnvironmentLostError(
            f"Processes of environments have ended: {lost}.{rest} A process killed by SIGKILL often means that memory "
            "ran out: use fewer environments (num_envs). Otherwise look at what it wrote to stderr."
        ) from error


def lead_group() -> None:
    """Make this process the leader of a process group of its own, where the system has such groups."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)


def _signal_group(process: Any, number: signal.Signals) -> None:
    """Send a signal to an environment's process and all that it has started."""
    if hasattr(os, "killpg"):
        # No group has this number if it was not made yet, or is empty.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
    if process.is_alive():
        process.terminate() if number == signal.SIGTERM else process.kill()


def exit_with_parent() -> None:
    """End this process, and what it has started, some time after its parent has ended, even if it hangs."""

    def watch(parent: Any) -> None:
        parent.join()
        # An environment that does not hang is closed meanwhile: its process notices by itself.
        time.sleep(_GRACE_S)
        if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=watch, args=(parent,), daemon=True).start()


class ProcessEnvs(AsyncVectorEnv):
    """Environments in processes of their own, reset one by one."""

    def __init__(self, makers: Sequence[Callable[[], gymnasium.Env]], first: int) -> None:
        """Start a process for each environment; `first` is the number of the first one in messages.

        Raises:
            EnvironmentLostError: A process ended before its environment was made.
        """
        self._first, self._owner = first, os.getpid()
        try:
            with report_lost_processes(self, first):
                # Observations of any space can be sent through pipes, but not all can be shared.
                super().__init__(makers, shared_memory=False, autoreset_mode=AutoresetMode.DISABLED)
        except BaseException:
            if hasattr(self, "processes"):
                self.close(terminate=True)
            raise

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close all environments and end their processes; those that do not end in time are killed.

        Args:
            timeout: Seconds to wait for them; None sets no limit.
            terminate: Whether to wait for a moment only, since a process may hang.
        """
        if os.getpid() != self._owner:
            return  # a forked process inherits this object, but not the processes
        try:
            for pipe in self._pipes():
                with suppress(OSError):  # its process has ended
                    pipe.send(("close", None))
            self._wait_for_ends(_GRACE_S if terminate else timeout)
        finally:
            late = self._numbers(lambda process: process.is_alive())
            self._kill_late()
            # What the others started, and did not end, lives on: they had the time to.
            for process in self.processes:
                if process.exitcode != 0:
                    _signal_group(process, signal.SIGKILL)
            for pipe in self._pipes():
                pipe.close()
        if terminate:
            return
        if late:
            logger.error(
                "Environments %s did not close within %s seconds (env_timeout), and their processes were killed.",
                late,
                timeout,
            )
        if failed := self._numbers(lambda process: process.exitcode == 1):
            logger.warning("Environments %s raised an error in close(), which their processes wrote to stderr.", failed)

    def _kill_late(self) -> None:
        """End the processes that are still running, those that ignore SIGTERM too."""
        for process in self.processes:
            if process.is_alive():
                _signal_group(process, signal.SIGTERM)
        self._wait_for_ends(_GRACE_S)
        for process in self.processes:
            if process.is_alive():
                _signal_group(process, signal.SIGKILL)
            process.join()

    def _pipes(self) -> list[Any]:
        """The pipes to the environments; the pipe of one that raised an error is closed."""
        return [pipe for pipe in self.parent_pipes if pipe is not None]

    def _numbers(self, condition: Callable[[Any], bool]) -> list[int]:
        """The numbers of the environments whose process meets a condition."""
        return [self._first + i for i, process in enumerate(self.processes) if condition(process)]

    def _wait_for_ends(self, seconds: float | None) -> None:
        """Wait until all processes have ended, or for so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        pipes = self._pipes()
        while running := [process.sentinel for process in self.processes if process.is_alive()]:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([*running, *pipes], left)
            if not ready:
                return
            for pipe in [pipe for pipe in pipes if pipe in ready]:
                # A process cannot end before its last answer, which nobody needs any more, has been read.
                try:
                    pipe.recv_bytes()
                except (EOFError, OSError):
                    pipes.remove(pipe)


def _reason(code: int) -> str:
    """How a process ended, by its exit code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
