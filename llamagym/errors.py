"""The exceptions of llamagym, all subclasses of `LlamaGymError`, and helpers for their messages.

    LlamaGymError
    ├── ConfigError (ValueError)        an option is unknown, ill-typed or out of range
    ├── ModelLoadError (RuntimeError)   weights, tokenizer, quantization or adapter cannot be loaded
    ├── ChatTemplateError (ValueError)  the chat template cannot render an append-only conversation
    ├── ActionParseError (ValueError)   a reply names no admissible action
    ├── DivergedError (RuntimeError)    losses, gradients or the model's output are no longer finite
    ├── CheckpointError (RuntimeError)  saved state is damaged, of another model or version, or cannot be written
    ├── EnvironmentTimeoutError (TimeoutError)  a step of the environment took too long
    ├── EnvironmentLostError (RuntimeError)  the process of an environment has ended
    ├── SamplerError (RuntimeError)     a server that samples replies failed
    ├── RankError (RuntimeError)        one of several processes that learn together was lost
    ├── EpisodeError (RuntimeError)     the loop called act, reward or terminate out of order
    └── ContextLengthError (ValueError) the conversation no longer fits the model's context

Every message says what failed, the value received, what was expected, and the next step.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Limits on values in error messages: characters of a string, entries of a collection, characters in total.
_MAX_CHARACTERS = 80
_MAX_ENTRIES = 8
_MAX_TOTAL = 240


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
    """Losses or gradients of several optimizer steps in a row, or the model's output, are no longer finite."""


class CheckpointError(LlamaGymError, RuntimeError):
    """Saved state is damaged, belongs to another model or class, or was written by a later version."""


class EnvironmentTimeoutError(LlamaGymError, TimeoutError):
    """A step or reset of the environment took longer than `env_timeout`."""


class EnvironmentLostError(LlamaGymError, RuntimeError):
    """The process of an environment has ended before its run was over."""


class RankError(LlamaGymError, RuntimeError):
    """One of several processes that learn together has ended, does not answer, or has different weights."""


class SamplerError(LlamaGymError, RuntimeError):
    """A server that samples replies cannot be reached, does not answer, or answers with an error."""


class EpisodeError(LlamaGymError, RuntimeError):
    """The environment loop called the agent's methods out of order."""


class ContextLengthError(LlamaGymError, ValueError):
    """A conversation no longer fits the model's context window."""


@contextmanager
def needs(extra: str, feature: str) -> Iterator[None]:
    """While open, an ImportError becomes a `ConfigError` that names the extra to install.

    Args:
        extra: Name of an extra of this library.
        feature: The feature that needs the package, for the message.

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
            f"{feature} needs a package that is not installed: {missing}. Run pip install 'llamagym[{extra}]'."
        ) from error


class _ShortRepr(reprlib.Repr):
    """Abbreviates values of any type and size; `reprlib` fails on integers that Python refuses to print."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _MAX_CHARACTERS
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = _MAX_ENTRIES

    def repr_int(self, number: int, level: int) -> str:
        """Returns the digits of a number of up to 64 bits, and the size of a larger one."""
        return repr(number) if number.bit_length() <= 64 else f"<int of {number.bit_length()} bits>"


def excerpt(value: object) -> str:
    """Returns a short repr of any value for an error message.

    >>> excerpt("a" * 1000) == repr("a" * 1000)[:38] + "..." + repr("a" * 1000)[-39:]
    True
    >>> excerpt(10**5000)
    '<int of 16610 bits>'
    """
    text = _ShortRepr().repr(value)
    return text if len(text) <= _MAX_TOTAL else f"{text[:_MAX_TOTAL]}..."


def reason_of(error: BaseException) -> str:
    """An error's type and the beginning of its message, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"


def did_you_mean(received: str, expected: Iterable[str]) -> str:
    """Returns a hint that names the closest expected spelling, or all of them if none is close.

    >>> did_you_mean("learning_rat", ["learning_rate", "gamma"])
    "Did you mean 'learning_rate'?"
    >>> did_you_mean("zzz", ["learning_rate", "gamma"])
    "Expected one of ['gamma', 'learning_rate']."
    """
    candidates = sorted(expected)
    close = difflib.get_close_matches(received, candidates, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Expected one of {candidates}."
