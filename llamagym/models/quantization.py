"""Weights in 8 or 4 bits, by bitsandbytes."""

from __future__ import annotations

from importlib.util import find_spec

import torch
import transformers
from torch import nn

from ..errors import ConfigError, ModelLoadError


def is_quantized(in_8bit: bool, in_4bit: bool, device_type: str, peft_config: object) -> bool:
    """Whether to quantize; refuses what cannot work before anything is downloaded.

    Args:
        in_8bit: Whether 8 bits are asked for.
        in_4bit: Whether 4 bits are.
        device_type: Where the weights will lie, e.g. "cuda".
        peft_config: The adapter; False for none.

    Raises:
        ConfigError: Both are asked for.
        ModelLoadError: Weights cannot be quantized there, or not without an adapter.
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
    """What a language model's products are rounded to; those of quantized weights to 16 bits, whatever its dtype."""
    dtype: torch.dtype = model.dtype  # type: ignore[assignment]
    return torch.bfloat16 if getattr(model, "is_quantized", False) else dtype


def quantization_config(in_8bit: bool, dtype: torch.dtype) -> transformers.BitsAndBytesConfig:
    """Transformers' configuration: 8 bit, or else 4 bit (NF4), computing in `dtype`."""
    return transformers.BitsAndBytesConfig(
        load_in_8bit=in_8bit,
        load_in_4bit=not in_8bit,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
    )
