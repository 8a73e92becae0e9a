"""The machine's memory."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

import torch


def memory_bytes(device: torch.device) -> int:
    """Memory of a device, or what a container allows of it; 0 where that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    with suppress(AttributeError, ValueError, OSError):
        return int(min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), container_limit()))
    return 0


def container_limit(processes: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that this process's control groups allow (Linux, versions 1 and 2); infinity where there is no limit.

    Args:
        processes: Lists the groups that the process is in.
        mounted: Where groups are described.
    """
    limits = [math.inf]
    with suppress(OSError):
        for line in processes.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            folder, name = (mounted / "memory", "memory.limit_in_bytes") if controllers else (mounted, "memory.max")
            # A group's limit holds for all below it. Seen from inside a container, its own group is the root.
            for part in ("", *group.strip("/").split("/")):
                folder /= part
                with suppress(OSError, ValueError):  # no such file, or "max"
                    limits.append(int((folder / name).read_text()))
    return min(limits)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out; PyTorch has no class of its own for that on a CPU."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)
