"""Keeps quiet what other libraries tell each other, not the user, when a model is loaded."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


def _is_of_use(record: logging.LogRecord) -> bool:
    """Whether the warning is about more than a CPU kernel for 4-bit weights, which this library never uses."""
    return "gemm_4bit_forward" not in str(record.msg)


# PEFT imports bitsandbytes wherever it is installed, and on some processors bitsandbytes warns as it is imported.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_of_use)


@contextmanager
def loading_quietly() -> Iterator[None]:
    """While open, only a terminal gets transformers' progress bar, and PEFT's deprecations are silent."""
    hides_bar = transformers_logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    with warnings.catch_warnings():
        # PEFT 0.21 asks transformers 5 for a property under its old name whenever it wraps a model.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        if hides_bar:
            transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            if hides_bar:
                transformers_logging.enable_progress_bar()
