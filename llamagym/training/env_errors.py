"""Exceptions of environments: which environment raised one, and how a worker process sends it to the main process.

It is sent pickled. Gymnasium would build a new exception of its class from its text. That fails for classes that take
other arguments, hangs for exceptions that cannot be pickled, and fails at a `%` in the text.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import gymnasium

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
