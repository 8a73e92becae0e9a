"""Keeps quiet what other libraries tell each other, not the user, when a model is loaded."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from transformers.utils import logging as transformers_logging

from .transformers_internals import gguf_bar_hidden


def _is_of_use(record: logging.LogRecord) -> bool:
    """Whether the warning is about more than a CPU kernel for 4-bit weights, which this library never uses."""
    return "gemm_4bit_forward" not in str(record.msg)


# PEFT imports bitsandbytes wherever it is installed, and on some processors bitsandbytes warns as it is imported.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_of_use)


def is_terminal(stream: Any) -> bool:
    """Whether a stream is an open terminal; a program without a console has None for stderr."""
    return stream is not None and not stream.closed and stream.isatty()


@contextmanager
def loading_quietly(reads_gguf: bool = False) -> Iterator[None]:
    """While open, only a terminal gets transformers' progress bars, and PEFT's deprecations are silent.

    Args:
        reads_gguf: Whether a GGUF file is read, which has a bar of its own.
    """
    hides_bar = transformers_logging.is_progress_bar_enabled() and not is_terminal(sys.stderr)
    with warnings.catch_warnings():
        # PEFT 0.21 asks transformers 5 for a property under its old name whenever it wraps a model.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        if hides_bar:
            transformers_logging.disable_progress_bar()
        try:
            with gguf_bar_hidden() if reads_gguf and hides_bar else nullcontext():
                yield
        finally:
            if hides_bar:
                transformers_logging.enable_progress_bar()
