"""What this library needs of PyTorch beyond its documented interface, all in one file.

`tests/test_internals.py` checks each of these against the installed version, and what happens without it.

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from .private_apis import PrivateApi

Product = Callable[[Tensor], Tensor]
"""Multiplies inputs (..., I) by a weight, giving (..., O)."""

# Rows of inputs that oneDNN lays a weight out for; 1 to 1024 gave layouts alike in speed.
_ROWS = 64

_VERSION = attrgetter("_version")
_CONTAINERS = attrgetter("_modules", "_parameters", "_buffers")
_HOOKS = attrgetter("_forward_hooks", "_forward_pre_hooks")


def can_pack(weight: Tensor) -> bool:
    """Whether this machine multiplies by packed copies of such a weight."""
    if weight.device.type != "cpu" or torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    if weight.dtype == torch.float32:
        return FLOAT16_PACKING.works or PACKING.works
    return weight.dtype == torch.bfloat16 and PACKING.works and BFLOAT16_PRODUCTS.works and _has_bfloat16_products()


def _has_bfloat16_products() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_float16(weight: Tensor) -> Product:
    """Multiply by a float32 weight (O, I) that float16 holds: kept in float16 by FBGEMM, which computes in float32."""
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    return lambda inputs: torch.ops.quantized.linear_dynamic_fp16(inputs, packed)


def pack(weight: Tensor) -> Product:
    """Multiply by a weight (O, I) laid out by oneDNN."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return lambda inputs: torch.ops.mkldnn._linear_pointwise(inputs, packed, None, "none", [], "")


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """For each tensor, a number that changes whenever the tensor is changed in place."""
    if VERSION_COUNTERS.works:
        return list(map(_VERSION, tensors))
    return [_checksum(tensor.detach()) for tensor in tensors]


def _checksum(tensor: Tensor) -> int:
    """A number that depends on all of a tensor's content."""
    # The hash alone is an exclusive or, in which pairs of equal numbers cancel.
    return hash((torch.hash_tensor(tensor).item(), tensor.sum(dtype=torch.float64).item()))


def held_by(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """A module's submodules, parameters and buffers, by name: its own containers, or copies if they are not live."""
    if CONTAINERS.works:
        containers: tuple[dict[str, Any], ...] = _CONTAINERS(module)
        return containers
    parameters, buffers = module.named_parameters(recurse=False), module.named_buffers(recurse=False)
    return dict(module.named_children()), dict(parameters), dict(buffers)


def hooks_of(module: nn.Module) -> list[Any]:
    """The module's forward hooks, in two containers that are empty where it has none."""
    return list(_HOOKS(module))


def shallow_copy(module: Any) -> Any:
    """A module whose parts may be replaced without changing the original's; parameters are shared."""
    copied = copy.copy(module)
    copied._modules = dict(_CONTAINERS(module)[0])
    return copied


def _multiplies(pack_weight: Callable[[Tensor], Product]) -> bool:
    """Whether a small product is exact."""
    weight = torch.arange(12.0, device="cpu").view(3, 4)
    inputs = torch.arange(8.0, device="cpu").view(2, 4)
    with torch.no_grad():
        return torch.equal(pack_weight(weight)(inputs), inputs @ weight.T)


def _versions_rise() -> bool:
    weight = torch.zeros(1, device="cpu")
    before = _VERSION(weight)
    unchanged = _VERSION(weight)
    weight.add_(1)
    return bool(before == unchanged < _VERSION(weight))


def _containers_are_live() -> bool:
    body = nn.Sequential(nn.Identity())
    parts, parameters, _ = _CONTAINERS(body)
    copied = shallow_copy(body)
    copied[0] = nn.Flatten()
    body.register_parameter("weight", nn.Parameter(torch.zeros(1, device="cpu")))
    return isinstance(parts["0"], nn.Identity) and isinstance(copied[0], nn.Flatten) and "weight" in parameters


def _hooks_are_listed() -> bool:
    module = nn.Identity()
    before, before_input = hooks_of(module)
    is_empty = not before and not before_input
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    return is_empty and len(before) == len(before_input) == 1


FLOAT16_PACKING = PrivateApi(
    "torch",
    "torch.ops.quantized.linear_prepack_fp16, linear_dynamic_fp16",
    "float32 weights are not packed in float16: products of few rows take longer.",
    lambda: _multiplies(pack_float16),
)
PACKING = PrivateApi(
    "torch",
    "torch.ops.mkldnn._reorder_linear_weight, _linear_pointwise",
    "Weights that float16 cannot hold are not packed: products of few rows take longer.",
    lambda: _multiplies(pack),
)
BFLOAT16_PRODUCTS = PrivateApi(
    "torch",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported",
    "bfloat16 weights are not packed: products of few rows take longer.",
    lambda: isinstance(torch.ops.mkldnn._is_mkldnn_bf16_supported(), bool),
)
VERSION_COUNTERS = PrivateApi(
    "torch",
    "Tensor._version",
    "Changes of weights are noticed by their content, which is read before every pass: everything takes longer.",
    _versions_rise,
)
CONTAINERS = PrivateApi(
    "torch",
    "Module._modules, _parameters, _buffers",
    "Frozen layers run in every pass, and changed modules are found by a search: everything takes longer.",
    _containers_are_live,
)
HOOKS = PrivateApi(
    "torch",
    "Module._forward_hooks, _forward_pre_hooks",
    "Decoder layers run unfused, which takes longer.",
    _hooks_are_listed,
)
