"""The exceptions llamagym raises, all children of `LlamaGymError`.

    LlamaGymError
    ├── ConfigError (ValueError)        an option that is unknown, ill-typed or out of range
    ├── ModelLoadError (RuntimeError)   weights, tokenizer, quantization or adapter cannot be had
    ├── ChatTemplateError (ValueError)  the chat template cannot carry an append-only conversation
    ├── ActionParseError (ValueError)   a reply names no admissible action
    ├── DivergedError (RuntimeError)    losses, gradients or the model's output are no longer finite
    ├── CheckpointError (RuntimeError)  saved state is damaged, foreign, of a later version, or cannot be written
    ├── EnvironmentTimeoutError (TimeoutError)  a step of the environment took too long
    ├── EnvironmentLostError (RuntimeError)  the process of an environment has ended
    ├── RankError (RuntimeError)        of several processes that learn together, one was lost
    ├── EpisodeError (RuntimeError)     the loop called act, reward or terminate out of order
    └── ContextLengthError (ValueError) the conversation no longer fits the model's context

Every message says what failed, what was received, what was expected, and the next move.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# How much of a value an error message shows: characters of a string, entries of a collection, characters in all.
_SHOWN_CHARACTERS, _SHOWN_ENTRIES, _SHOWN_IN_ALL = 80, 8, 240


class LlamaGymError(Exception):
    """Base of every exception that llamagym raises on purpose."""


class ConfigError(LlamaGymError, ValueError):
    """An option is unknown, of the wrong type, or out of range."""


class ModelLoadError(LlamaGymError, RuntimeError):
    """A model, tokenizer, adapter or quantization cannot be loaded."""


class ChatTemplateError(LlamaGymError, ValueError):
    """A chat template cannot render an append-only conversation."""


class ActionParseError(LlamaGymError, ValueError):
    """A reply names no admissible action."""


class DivergedError(LlamaGymError, RuntimeError):
    """Losses or gradients of several optimizer steps in a row, or what the model says, are no longer finite."""


class CheckpointError(LlamaGymError, RuntimeError):
    """Saved state is damaged, belongs to another model or class, or was written by a later version."""


class EnvironmentTimeoutError(LlamaGymError, TimeoutError):
    """A step or reset of the environment took longer than `env_timeout`."""


class EnvironmentLostError(LlamaGymError, RuntimeError):
    """The process of an environment has ended before its run was over."""


class RankError(LlamaGymError, RuntimeError):
    """Of several processes that learn together, one has ended, does not answer, or has other weights."""


class EpisodeError(LlamaGymError, RuntimeError):
    """The environment loop called the agent's methods out of order."""


class ContextLengthError(LlamaGymError, ValueError):
    """A conversation no longer fits the model's context window."""


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """While open, a package that is not installed is an error that names the extra which brings it.

    Args:
        extra: Of this library.
        what: What needs it.

    Raises:
        ConfigError: An import failed.

    >>> with needs("sft", "A warm start"):  # doctest: +ELLIPSIS
    ...     import no_such_package
    Traceback (most recent call last):
    llamagym.errors.ConfigError: ... not installed: no_such_package. Run pip install 'llamagym[sft]'.
    """
    try:
        yield
    except ImportError as error:
        missing = error.name or str(error)
        raise ConfigError(
            f"{what} needs a package that is not installed: {missing}. Run pip install 'llamagym[{extra}]'."
        ) from error


class _ShortRepr(reprlib.Repr):
    """Abbreviates values of any type and size; `reprlib` fails on integers that Python refuses to print."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _SHOWN_CHARACTERS
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = _SHOWN_ENTRIES

    def repr_int(self, number: int, level: int) -> str:
        """Digits up to 64 bits; beyond, the size."""
        return repr(number) if number.bit_length() <= 64 else f"<int of {number.bit_length()} bits>"


def excerpt(value: object) -> str:
    """Returns a short repr of a value for an error message, whatever the value is.

    >>> excerpt("a" * 1000) == repr("a" * 1000)[:38] + "..." + repr("a" * 1000)[-39:]
    True
    >>> excerpt(10**5000)
    '<int of 16610 bits>'
    """
    text = _ShortRepr().repr(value)
    return text if len(text) <= _SHOWN_IN_ALL else f"{text[:_SHOWN_IN_ALL]}..."


def reason_of(error: BaseException) -> str:
    """An error's type and the beginning of its message, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"


def did_you_mean(received: str, expected: Iterable[str]) -> str:
    """A hint naming the closest of the expected spellings, or all of them.

    >>> did_you_mean("learning_rat", ["learning_rate", "gamma"])
    "Did you mean 'learning_rate'?"
    >>> did_you_mean("zzz", ["learning_rate", "gamma"])
    "Expected one of ['gamma', 'learning_rate']."
    """
    candidates = sorted(expected)
    close = difflib.get_close_matches(received, candidates, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Expected one of {candidates}."
