"""Silences messages of other libraries while a model is loaded, where they do not concern the user."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from transformers.utils import logging as transformers_logging

from .transformers_internals import gguf_progress_hidden


def _is_relevant(record: logging.LogRecord) -> bool:
    """False for the warning about a missing CPU kernel for 4-bit weights, which this library never uses."""
    return "gemm_4bit_forward" not in str(record.msg)


# PEFT imports bitsandbytes wherever it is installed, and on some processors bitsandbytes warns as it is imported.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_relevant)


def is_terminal(stream: Any) -> bool:
    """Whether a stream is an open terminal; without a console, stderr is None."""
    return stream is not None and not stream.closed and stream.isatty()


@contextmanager
def loading_quietly(reads_gguf: bool = False) -> Iterator[None]:
    """While open, shows transformers' progress bars on a terminal only, and hides PEFT's deprecation warnings.

    Args:
        reads_gguf: Whether a GGUF file is read, which has a progress bar of its own.
    """
    hides_progress = transformers_logging.is_progress_bar_enabled() and not is_terminal(sys.stderr)
    with warnings.catch_warnings():
        # PEFT 0.21 asks transformers 5 for a property under its old name whenever it wraps a model.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        if hides_progress:
            transformers_logging.disable_progress_bar()
        try:
            with gguf_progress_hidden() if reads_gguf and hides_progress else nullcontext():
                yield
        finally:
            if hides_progress:
                transformers_logging.enable_progress_bar()
