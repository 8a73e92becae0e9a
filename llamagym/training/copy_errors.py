"""Errors of an environment's copies: which copy raised one, and how it comes from a process of its own.

There it travels by itself: Gymnasium would make a new exception of its class from its text, which fails for classes
that take other arguments, wait forever for one that cannot be pickled, and stumble over a `%` in its text.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import gymnasium

# What an exception of an environment is marked with: the number of its copy.
_MARK = "llamagym_copy"


class RemoteError(Exception):
    """Carries an exception, with its traceback as text, from one process to another."""

    def __init__(self, sent: RemoteError | tuple[bytes | None, str, int]) -> None:
        """Carry what `carry` packed, or what another one carries: Gymnasium wraps exceptions in their own class."""
        super().__init__(sent.args[0] if isinstance(sent, RemoteError) else sent)

    @classmethod
    def carry(cls, error: Exception) -> RemoteError:
        """Pack an exception that `mark` has seen."""
        trace = "".join(traceback.format_exception(error))
        return cls((_pickled(error), trace, getattr(error, _MARK)))

    def unpack(self) -> Exception:
        """The exception, or one with its text if it could not be pickled."""
        pickled, trace, number = self.args[0]
        # Written by this library, in a process that it started.
        error = RuntimeError(trace.rstrip().rpartition("\n")[2]) if pickled is None else pickle.loads(pickled)
        assert isinstance(error, Exception)
        mark(error, number)
        return error

    def __str__(self) -> str:
        """The traceback of where it was raised."""
        return f"\n{self.args[0][1]}"


def mark(error: Exception, number: int) -> None:
    """Note that the copy with this number raised it."""
    setattr(error, _MARK, number)


def failed_copy(error: BaseException) -> int | None:
    """The number of the copy that raised an exception; None if none of them did."""
    number: int | None = getattr(error, _MARK, None)
    return number


@contextmanager
def unpacked() -> Iterator[None]:
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
