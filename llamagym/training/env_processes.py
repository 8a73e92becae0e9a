"""Environments in worker processes: none outlives its run, and the error for a lost one names its environment.

Each worker leads a process group, so that ending it also ends what its environment has started, such as a game server.

An exception of an environment knows the environment's number, and is sent to the main process pickled. Gymnasium would
build a new exception of its class from its text. That fails for classes that take other arguments, hangs for exceptions
that cannot be pickled, and fails at a `%` in the text.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from ..errors import EnvironmentLostError

# Attribute of an exception: the number of the environment that raised it.
_ENV_NUMBER = "llamagym_env_number"


class RemoteError(Exception):
    """Carries an exception, with its traceback as text, from one process to another."""

    def __init__(self, source: RemoteError | tuple[bytes | None, str, int]) -> None:
        """Wraps what `pack` built; or copies another RemoteError, since Gymnasium calls the class with the error."""
        super().__init__(source.args[0] if isinstance(source, RemoteError) else source)

    @classmethod
    def pack(cls, error: Exception, number: int) -> RemoteError:
        """Packs the exception of the environment with this number."""
        trace = "".join(traceback.format_exception(error))
        return cls((_pickled(error), trace, number))

    def unpack(self) -> Exception:
        """Returns the exception; a RuntimeError with its text if it could not be pickled."""
        pickled, trace, number = self.args[0]
        if pickled is None:
            last_line = trace.rstrip().rpartition("\n")[2]
            return with_env_number(RuntimeError(last_line), number)
        # Safe to unpickle: this library wrote it, in a process that it started.
        error = pickle.loads(pickled)
        assert isinstance(error, Exception)
        return with_env_number(error, number)

    def __str__(self) -> str:
        """Returns the traceback in the other process."""
        return f"\n{self.args[0][1]}"


def with_env_number(error: Exception, number: int) -> Exception:
    """Stores in an exception the number of the environment that raised it, and returns the exception.

    An exception whose attributes cannot be set, such as a frozen dataclass, is replaced by a RuntimeError with its
    text. Python cannot pass it through a context manager, which sets its traceback.
    """
    try:
        setattr(error, _ENV_NUMBER, number)
        error.__traceback__ = error.__traceback__
    except Exception:  # a user's class may raise anything
        error = RuntimeError(f"{type(error).__name__}: {error}")
        setattr(error, _ENV_NUMBER, number)
    return error


def failed_env_number(error: BaseException) -> int | None:
    """Returns the number of the environment that raised an exception; None if none of them did."""
    number: int | None = vars(error).get(_ENV_NUMBER)
    return number


@contextmanager
def raise_remote_errors() -> Iterator[None]:
    """While open, an exception of a worker process is raised here, caused by its traceback there.

    Gymnasium's own log is off meanwhile: it would print the same traceback, and use it as a format string.
    """
    level = gymnasium.logger.min_level
    gymnasium.logger.min_level = gymnasium.logger.ERROR + 1
    try:
        yield
    except RemoteError as remote:
        raise remote.unpack() from remote
    finally:
        gymnasium.logger.min_level = level


def _pickled(error: Exception) -> bytes | None:
    """Returns a pickled exception; None if unpickling it does not return an exception of its class."""
    try:
        pickled = pickle.dumps(error)
        is_same_class = isinstance(pickle.loads(pickled), type(error))
    except Exception:  # a user's class may raise anything
        return None
    return pickled if is_same_class else None


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
            # Processes that were started by a worker that exited with 0 are left running.
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
