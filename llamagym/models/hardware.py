"""What the machine has: devices, what they compute natively, memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigError

PASS_TOKENS = 1024
"""Tokens in one pass that keep a processor as busy as more would."""
# An accelerator takes some 10 ms to be told what a pass computes, however much that is: so many weights times tokens.
_WORTH_A_PASS = 10**12
PACKED_SHARE = 1 / 16
"""The share of the machine's memory that packed copies of weights may take."""


class Precision(NamedTuple):
    """What suits the weights of models on one kind of device; float32 where nothing else does.

    Attributes:
        has_bfloat16: Whether this machine's multiplies bfloat16 faster than float32; then that is taken.
        float16_above: Else models of more parameters than these are loaded in float16, if their activations stay in
            its range.
    """

    has_bfloat16: Callable[[], bool]
    float16_above: float


def _processor_has_bfloat16() -> bool:
    # ARM's support varies, so that it counts as none.
    has = torch.cpu.get_capabilities()
    if has.get("amx_bf16", False):
        return True
    # Intel's since Sapphire Rapids, which know AVX512-FP16, leave bfloat16 to AMX. Where a virtual machine hides that,
    # a pass's products take up to 1.8 times as long in bfloat16 as in float32.
    leaves_it_to_amx = "Intel" in has.get("cpu_name", "") and has.get("avx512_fp16", False)
    return has.get("avx512_bf16", False) and not leaves_it_to_amx


# Attention is PyTorch's own on all of them (SDPA), where the architecture has it: it takes the masks of token trees.
_PRECISIONS = {
    "cpu": Precision(_processor_has_bfloat16, math.inf),
    "cuda": Precision(lambda: torch.cuda.is_bf16_supported(including_emulation=False), -1),
    "mps": Precision(lambda: False, 1e9),
}


def precision_on(device: torch.device | str) -> Precision:
    """What suits weights on a device."""
    return _PRECISIONS.get(torch.device(device).type, Precision(lambda: False, math.inf))


def pass_tokens(device: torch.device, weights: int) -> int:
    """How many tokens to forward in one pass through so many weights; more of a small model on an accelerator."""
    return PASS_TOKENS * (1 if device.type == "cpu" else min(max(_WORTH_A_PASS // (PASS_TOKENS * weights), 1), 8))


def memory_bytes(device: torch.device) -> int:
    """Memory of a device, or what a container allows of it; 0 where that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    with suppress(AttributeError, ValueError, OSError):
        return int(min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), container_limit()))
    return 0


def check_one_device(model: nn.Module) -> None:
    """Refuse a model whose weights do not all lie on one device.

    Raises:
        ConfigError: They are spread, or some of them lie on none, which is what offloading leaves.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        raise ConfigError(
            f"The model's weights lie on {' and '.join(sorted(map(str, devices)))}; expected one device for all of them"
            ", the value head's too. Load it with device_map={'': 'cuda:0'} or without device_map, and move it whole: "
            "model.to('cuda:0'). Several GPUs hold one copy each (see docs/scaling.md)."
        )


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


def sum_dtype(states: Tensor) -> torch.dtype:
    """The dtype for sums of states whose order differs between acting and learning: attention's and LoRA's.

    In another order a sum differs in its last bit. Of float32 sums, one in some ten thousand then rounds to another
    bfloat16, and the layers amplify a single such difference to the size of all of bfloat16's rounding. Of float64 sums
    next to none does. Nor are float64 states summed in less.
    """
    return torch.float64 if states.dtype in (torch.bfloat16, torch.float64) else torch.float32
