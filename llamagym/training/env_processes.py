"""Environments in worker processes. None outlives its run, even if it hangs; an error names one that was lost.

Each worker leads a process group, so that ending it also ends what its environment has started, such as a game server.
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

# Seconds that processes get to end by themselves before a signal, or before a stronger one, follows.
_GRACE_S = 2.0


@contextmanager
def report_lost_processes(envs: VectorEnv, first: int) -> Iterator[None]:
    """While open, replaces the error that a lost worker process causes by one that names the environment.

    Args:
        envs: The vector environment; one without worker processes never causes such an error.
        first: The number of its first environment.

    Raises:
        EnvironmentLostError: A worker has ended. The other workers of a `ProcessEnvs` have been stopped.
    """
    try:
        yield
    except (EOFError, ConnectionError) as error:
        base = envs.unwrapped
        processes = getattr(base, "processes", [])
        is_ours = isinstance(base, ProcessEnvs)
        # The environment itself raised the error, in its process or, while it is made, in this one.
        if failed_env_number(error) is not None or not processes:
            raise
        ready = wait([process.sentinel for process in processes], _GRACE_S)
        for process in processes:
            if process.sentinel in ready:
                process.join()
        exit_codes = {}
        for number, process in enumerate(processes, first):
            if process.exitcode is not None:
                exit_codes[number] = process.exitcode
        # In a caller's vector environment, a process whose environment raises an error ends with 0.
        if not is_ours and not any(exit_codes.values()):
            raise
        stopped = ""
        if is_ours:
            base.close(terminate=True)
            stopped = " All others have been stopped."
        lost = ", ".join(f"{number} ({_end_reason(code)})" for number, code in exit_codes.items())
        raise EnvironmentLostError(
            f"Processes of environments have ended: {lost}.{stopped} A process killed by SIGKILL often means that "
            "memory ran out: use fewer environments (num_envs). Otherwise look at what it wrote to stderr."
        ) from error


def lead_group() -> None:
    """Makes this process the leader of a new process group, where the system has such groups."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)


def _signal_group(process: Any, number: signal.Signals) -> None:
    """Sends a signal to an environment's process and to all processes that it has started."""
    if hasattr(os, "killpg"):
        # The group may not exist yet, or be empty already.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
    if process.is_alive():
        if number == signal.SIGTERM:
            process.terminate()
        else:
            process.kill()


def exit_with_parent() -> None:
    """Starts a thread that ends this process, even a hanging one, and its process group soon after its parent ends."""

    def watch(parent: Any) -> None:
        parent.join()
        # A worker that does not hang notices the parent's end, closes its environment, and ends meanwhile.
        time.sleep(_GRACE_S)
        if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=watch, args=(parent,), daemon=True).start()


class ProcessEnvs(AsyncVectorEnv):
    """A vector environment with a worker process for each environment, which can be reset one by one."""

    def __init__(self, makers: Sequence[Callable[[], gymnasium.Env]], first: int) -> None:
        """Starts a process for each environment.

        Args:
            makers: A function for each environment that makes it.
            first: Number of the first environment in messages.

        Raises:
            EnvironmentLostError: A process ended before its environment was made.
        """
        self._first = first
        self._owner = os.getpid()
        try:
            with report_lost_processes(self, first):
                # Pipes can send observations of any space; shared memory cannot hold all of them.
                super().__init__(makers, shared_memory=False, autoreset_mode=AutoresetMode.DISABLED)
        except BaseException:
            if hasattr(self, "processes"):
                self.close(terminate=True)
            raise

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes all environments and ends their processes; kills those that do not end in time.

        Args:
            timeout: Seconds to wait for them; None sets no limit.
            terminate: Whether to wait for `_GRACE_S` seconds instead, since a process may hang.
        """
        if os.getpid() != self._owner:
            return  # a forked process inherits this object, but not the processes
        try:
            for pipe in self._open_pipes():
                with suppress(OSError):  # its process has ended
                    pipe.send(("close", None))
            self._wait_for_ends(_GRACE_S if terminate else timeout)
        finally:
            late = self._env_numbers(lambda process: process.is_alive())
            self._kill_running()
            # Where a worker ended properly, what it started and left running is left alone.
            for process in self.processes:
                if process.exitcode != 0:
                    _signal_group(process, signal.SIGKILL)
            for pipe in self._open_pipes():
                pipe.close()
        if terminate:
            return
        if late:
            logger.error(
                "Environments %s did not close within %s seconds (env_timeout), and their processes were killed.",
                late,
                timeout,
            )
        failed = self._env_numbers(lambda process: process.exitcode == 1)
        if failed:
            logger.warning("Environments %s raised an error in close(), which their processes wrote to stderr.", failed)

    def _kill_running(self) -> None:
        """Ends the processes that are still running, also those that ignore SIGTERM."""
        for process in self.processes:
            if process.is_alive():
                _signal_group(process, signal.SIGTERM)
        self._wait_for_ends(_GRACE_S)
        for process in self.processes:
            if process.is_alive():
                _signal_group(process, signal.SIGKILL)
            process.join()

    def _open_pipes(self) -> list[Any]:
        """Returns the pipes to the environments; Gymnasium closes the pipe of one that raised an error."""
        return [pipe for pipe in self.parent_pipes if pipe is not None]

    def _env_numbers(self, condition: Callable[[Any], bool]) -> list[int]:
        """Returns the numbers of the environments whose process meets a condition."""
        return [number for number, process in enumerate(self.processes, self._first) if condition(process)]

    def _wait_for_ends(self, seconds: float | None) -> None:
        """Waits until all processes have ended, for at most `seconds`; None sets no limit."""
        deadline = None if seconds is None else time.monotonic() + seconds
        pipes = self._open_pipes()
        while running := [process.sentinel for process in self.processes if process.is_alive()]:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([*running, *pipes], left)
            if not ready:
                return
            # A process cannot end before its last answer has been read, although nobody needs it any more.
            for pipe in pipes.copy():
                if pipe not in ready:
                    continue
                try:
                    pipe.recv_bytes()
                except (EOFError, OSError):
                    pipes.remove(pipe)


def _end_reason(code: int) -> str:
    """Returns how a process ended, by its exit code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
