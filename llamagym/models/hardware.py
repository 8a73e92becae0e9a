"""Precision and memory of the machine's devices; weights in 8 or 4 bits by bitsandbytes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn

from ..errors import ConfigError, ModelLoadError

PASS_TOKENS = 1024
"""Tokens in one pass that use a CPU fully."""
# Weights times tokens whose computation hides the 10 ms that an accelerator needs to launch a pass.
_MIN_WORK_PER_PASS = 10**12
# Number of tokens that are computed in the time that a pass takes to read all weights: 12 to 16 for SmolLM2-135M on two
# cores with AVX-512, in both dtypes. On an accelerator, launching the operations costs as much as computing some 128.
_WEIGHTS_COST = 16
_WEIGHTS_COST_OF_ACCELERATORS = 128
PACKED_SHARE = 1 / 16
"""The share of the machine's memory for packed copies of weights."""


class Precision(NamedTuple):
    """The rule for the dtype of weights on one type of device: bfloat16, else float16 for large models, else float32.

    Attributes:
        has_bfloat16: Returns whether this machine's device multiplies bfloat16 faster than float32.
        float16_above: Number of parameters above which models are loaded in float16, if their activations stay in its
            range.
    """

    has_bfloat16: Callable[[], bool]
    float16_above: float


def _processor_has_bfloat16() -> bool:
    # ATEN_CPU_CAPABILITY tells PyTorch to use fewer instructions than the processor has.
    if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX", "AVX2"):
        return False
    # ARM's support varies, so ARM counts as slower.
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("amx_bf16", False):
        return True
    # Intel processors with AVX512-FP16 (since Sapphire Rapids) are fast in bfloat16 by AMX only. If a virtual machine
    # hides AMX, bfloat16 takes up to 1.8 times as long as float32.
    needs_amx = "Intel" in capabilities.get("cpu_name", "") and capabilities.get("avx512_fp16", False)
    return capabilities.get("avx512_bf16", False) and not needs_amx


_PRECISIONS = {
    "cpu": Precision(_processor_has_bfloat16, math.inf),
    "cuda": Precision(lambda: torch.cuda.is_bf16_supported(including_emulation=False), -1),
    "mps": Precision(lambda: False, 1e9),
}


def precision_on(device: torch.device | str) -> Precision:
    """The rule for the dtype of weights on a device."""
    return _PRECISIONS.get(torch.device(device).type, Precision(lambda: False, math.inf))


def pass_tokens(device: torch.device, weights: int) -> int:
    """The number of tokens per forward pass of a model with so many weights; small models take more on accelerators."""
    if device.type == "cpu":
        return PASS_TOKENS
    factor = _MIN_WORK_PER_PASS // (PASS_TOKENS * weights)
    return PASS_TOKENS * min(max(factor, 1), 8)


def weights_cost(device: torch.device) -> int:
    """Number of tokens that are computed in the time that a pass takes to read all weights."""
    return _WEIGHTS_COST if device.type == "cpu" else _WEIGHTS_COST_OF_ACCELERATORS


def min_rows(states: Tensor) -> int:
    """The minimum number of rows of such states whose products are rounded as in training batches.

    oneDNN multiplies a single row of bfloat16 in another order than two or more.
    """
    return 2 if states.device.type == "cpu" and states.dtype == torch.bfloat16 else 1


def memory_bytes(device: torch.device) -> int:
    """Memory of a device in bytes, or a container's limit below it; 0 if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    with suppress(AttributeError, ValueError, OSError):
        return int(min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), container_limit()))
    return 0


def check_one_device(model: nn.Module) -> None:
    """Rejects a model whose weights do not all lie on one device.

    Raises:
        ConfigError: They lie on several devices, or some of them on none, as after offloading.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        raise ConfigError(
            f"The model's weights lie on {' and '.join(sorted(map(str, devices)))}; expected one device for all of them"
            ", the value head's too. Load it with device_map={'': 'cuda:0'} or without device_map, and move it whole: "
            "model.to('cuda:0'). Several GPUs hold one copy each (see docs/scaling.md)."
        )


def container_limit(processes: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> float:
    """The memory limit of this process's control groups in bytes (Linux, versions 1 and 2); infinity without a limit.

    Args:
        processes: File that lists the groups of the process.
        mounted: Folder that the control groups are mounted at.
    """
    limits = [math.inf]
    with suppress(OSError):
        for line in processes.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            # Version 1 names controllers, version 2 does not.
            folder = mounted / "memory" if controllers else mounted
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            # A group's limit holds for all groups below it. Inside a container, its own group is the root.
            for part in ("", *group.strip("/").split("/")):
                folder /= part
                with suppress(OSError, ValueError):  # no such file, or "max"
                    limits.append(int((folder / name).read_text()))
    return min(limits)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory has run out; on a CPU, PyTorch raises a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def sum_dtype(states: Tensor) -> torch.dtype:
    """The dtype for sums whose order differs between acting and learning: in attention and in LoRA.

    A sum in another order differs in its last bit. One in about ten thousand float32 sums then rounds to another
    bfloat16 number, and the layers amplify a single such difference to the size of all rounding errors of bfloat16.
    Almost no float64 sum does. float64 states are summed in float64.
    """
    return torch.float64 if states.dtype in (torch.bfloat16, torch.float64) else torch.float32


def is_quantized(in_8bit: bool, in_4bit: bool, device_type: str, peft_config: object) -> bool:
    """Whether to quantize; rejects, before any download, options that cannot work.

    Args:
        in_8bit: Whether to quantize to 8 bits.
        in_4bit: Whether to quantize to 4 bits.
        device_type: Type of the weights' device, e.g. "cuda".
        peft_config: The adapter; False for none.

    Raises:
        ConfigError: Both are True.
        ModelLoadError: The device or this installation cannot quantize, or there is no adapter to train.
    """
    if not (in_8bit or in_4bit):
        return False
    if in_8bit and in_4bit:
        raise ConfigError("load_in_8bit and load_in_4bit exclude each other. Drop one.")
    option = "load_in_8bit" if in_8bit else "load_in_4bit"
    if device_type != "cuda":
        raise ModelLoadError(f"{option} needs a CUDA device, and the device is {device_type!r}. Drop {option}.")
    if find_spec("bitsandbytes") is None:
        raise ModelLoadError(f"{option} needs bitsandbytes. Install it (pip install bitsandbytes), or drop {option}.")
    if peft_config is False:
        raise ModelLoadError(f"quantized weights cannot be trained themselves. Drop {option} or peft_config=False.")
    return True


def computing_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a language model's matrix products; bfloat16 for quantized weights, whatever the model's dtype."""
    dtype: torch.dtype = model.dtype  # type: ignore[assignment]
    return torch.bfloat16 if getattr(model, "is_quantized", False) else dtype


def quantization_config(in_8bit: bool, dtype: torch.dtype) -> transformers.BitsAndBytesConfig:
    """The configuration for transformers: 8 bits, or else 4 bits (NF4), with products in `dtype`."""
    return transformers.BitsAndBytesConfig(
        load_in_8bit=in_8bit,
        load_in_4bit=not in_8bit,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
    )
