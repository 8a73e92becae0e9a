"""Exceptions of environments: which environment raised one, and how it is sent from another process.

It is sent pickled: Gymnasium would build a new exception of its class from its text, which fails for classes that take
other arguments, waits forever for one that cannot be pickled, and fails at a `%` in the text.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import gymnasium

# The attribute of an exception that holds the number of the environment that raised it.
_MARK = "llamagym_copy"


class RemoteError(Exception):
    """Carries an exception, with its traceback as text, from one process to another."""

    def __init__(self, sent: RemoteError | tuple[bytes | None, str, int]) -> None:
        """Carry what `carry` packed, or what another one carries: Gymnasium wraps exceptions in their own class."""
        super().__init__(sent.args[0] if isinstance(sent, RemoteError) else sent)

    @classmethod
    def carry(cls, error: Exception, number: int) -> RemoteError:
        """Pack the exception of the environment with this number."""
        trace = "".join(traceback.format_exception(error))
        return cls((_pickled(error), trace, number))

    def unpack(self) -> Exception:
        """The exception, or one with its text if it could not be pickled."""
        pickled, trace, number = self.args[0]
        # Written by this library, in a process that it started.
        error = RuntimeError(trace.rstrip().rpartition("\n")[2]) if pickled is None else pickle.loads(pickled)
        assert isinstance(error, Exception)
        return with_env_number(error, number)

    def __str__(self) -> str:
        """The traceback of where it was raised."""
        return f"\n{self.args[0][1]}"


def with_env_number(error: Exception, number: int) -> Exception:
    """The exception with the number of the environment that raised it.

    One whose attributes cannot be set, such as a frozen dataclass, is replaced by a RuntimeError with its text: Python
    itself cannot pass it through a context manager, since that sets its traceback.
    """
    try:
        setattr(error, _MARK, number)
        error.__traceback__ = error.__traceback__
    except Exception:  # whatever a user's class raises
        error = RuntimeError(f"{type(error).__name__}: {error}")
        setattr(error, _MARK, number)
    return error


def failed_env_number(error: BaseException) -> int | None:
    """The number of the environment that raised an exception; None if none of them did."""
    number: int | None = vars(error).get(_MARK)
    return number


@contextmanager
def raise_remote_errors() -> Iterator[None]:
    """While open, an exception that a process of its own sends is raised here, caused by its traceback there.

    Gymnasium says nothing meanwhile: it would print the same traceback, and use it as a format.
    """
    level, gymnasium.logger.min_level = gymnasium.logger.min_level, gymnasium.logger.ERROR + 1
    try:
        yield
    except RemoteError as remote:
        raise remote.unpack() from remote
    finally:
        gymnasium.logger.min_level = level


def _pickled(error: Exception) -> bytes | None:
    """An exception's bytes, if they give it back."""
    try:
        pickled = pickle.dumps(error)
        return pickled if isinstance(pickle.loads(pickled), type(error)) else None
    except Exception:  # whatever a user's class makes of it
        return None
