"""Weights in 8 or 4 bits by bitsandbytes."""

from __future__ import annotations

from importlib.util import find_spec

import torch
import transformers
from torch import nn

from ..errors import ConfigError, ModelLoadError


def is_quantized(in_8bit: bool, in_4bit: bool, device_type: str, peft_config: object) -> bool:
    """Whether to quantize; rejects options that cannot work before anything is downloaded.

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
