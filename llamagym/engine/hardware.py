"""The machine's memory."""

from __future__ import annotations

import os
from contextlib import suppress

import torch


def memory_bytes(device: torch.device) -> int:
    """Memory of a device; 0 where that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0
