"""What this library needs of PyTorch beyond its documented interface, all in one file.

`tests/test_internals.py` checks each of these against the installed version, and names the one that broke.

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

VERSIONS = ">=2.11"
"""Versions of PyTorch that this file is known to fit."""

Product = Callable[[Tensor], Tensor]
"""Multiplies inputs (..., I) by a weight, giving (..., O)."""

# Rows of inputs that oneDNN lays a weight out for; 1 to 1024 gave layouts alike in speed.
_ROWS = 64

_VERSION = attrgetter("_version")


def can_pack(weight: Tensor) -> bool:
    """Whether this machine multiplies by packed copies of such a weight."""
    if weight.device.type != "cpu" or torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    is_native = weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return is_native or weight.dtype == torch.float32


def pack_float16(weight: Tensor) -> Product:
    """Multiply by a float32 weight (O, I) that float16 holds: kept in float16 by FBGEMM, which computes in float32."""
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    return lambda inputs: torch.ops.quantized.linear_dynamic_fp16(inputs, packed)


def pack(weight: Tensor) -> Product:
    """Multiply by a weight (O, I) laid out by oneDNN."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return lambda inputs: torch.ops.mkldnn._linear_pointwise(inputs, packed, None, "none", [], "")


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """For each tensor, a number that rises whenever it is changed in place."""
    return list(map(_VERSION, tensors))


def has_hooks(tensor: Tensor) -> bool:
    """Whether functions see a tensor's gradient when it is computed; a deep copy has none."""
    return bool(tensor._backward_hooks)


def held_by(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """The containers of a module's submodules, parameters and buffers, by name."""
    return module._modules, module._parameters, module._buffers


def hooks_of(module: nn.Module) -> list[Any]:
    """The module's forward hooks, in two containers that are empty where it has none."""
    return [module._forward_hooks, module._forward_pre_hooks]


def shallow_copy(module: Any) -> Any:
    """A module whose parts may be replaced without changing the original's; parameters are shared."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied
