"""All uses of undocumented APIs of PyTorch.

`tests/models/test_internals.py` checks each of them against the installed version, and the fallback without it.

Shapes: I input features, O output features.
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
"""Multiplies inputs (..., I) by a weight; returns outputs (..., O)."""

# Input rows for which oneDNN chooses the layout of a weight. Layouts for 1 to 1024 rows are equally fast.
_LAYOUT_ROWS = 64

_VERSION = attrgetter("_version")
_CONTAINERS = attrgetter("_modules", "_parameters", "_buffers")
_HOOKS = attrgetter("_forward_hooks", "_forward_pre_hooks")


def can_pack(weight: Tensor) -> bool:
    """Whether this machine can multiply by a packed copy of a weight of this dtype and device."""
    if weight.device.type != "cpu" or torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    if weight.dtype == torch.float32:
        return FLOAT16_PACKING.works or PACKING.works
    return weight.dtype == torch.bfloat16 and PACKING.works and BFLOAT16_PRODUCTS.works and _has_bfloat16_products()


def _has_bfloat16_products() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_float16(weight: Tensor) -> Product:
    """Packs a float32 weight (O, I) whose values float16 represents exactly; FBGEMM computes in float32."""
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    return lambda inputs: torch.ops.quantized.linear_dynamic_fp16(inputs, packed)


def pack(weight: Tensor) -> Product:
    """Packs a weight (O, I) in a layout of oneDNN."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS)
    return lambda inputs: torch.ops.mkldnn._linear_pointwise(inputs, packed, None, "none", [], "")


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """One number per tensor, which changes whenever the tensor is changed in place."""
    if VERSION_COUNTERS.works:
        return list(map(_VERSION, tensors))
    return [_checksum(tensor.detach()) for tensor in tensors]


def _checksum(tensor: Tensor) -> int:
    """A number that depends on all values of a tensor."""
    # The hash alone is an exclusive or, in which pairs of equal values cancel.
    return hash((torch.hash_tensor(tensor).item(), tensor.sum(dtype=torch.float64).item()))


def containers_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """A module's submodules, parameters and buffers by name: its own dictionaries, or copies as a fallback."""
    if CONTAINERS.works:
        containers: tuple[dict[str, Any], ...] = _CONTAINERS(module)
        return containers
    parameters = dict(module.named_parameters(recurse=False))
    buffers = dict(module.named_buffers(recurse=False))
    return dict(module.named_children()), parameters, buffers


def forward_hooks_of(module: nn.Module) -> list[Any]:
    """A module's forward hooks and forward pre-hooks: two dictionaries, empty if it has none."""
    return list(_HOOKS(module))


def shallow_copy(module: Any) -> Any:
    """Copies a module such that submodules can be replaced in the copy alone; parameters are shared."""
    copied = copy.copy(module)
    copied._modules = dict(_CONTAINERS(module)[0])
    return copied


def _multiplies(pack_weight: Callable[[Tensor], Product]) -> bool:
    """Whether a small product with a packed weight is exact."""
    weight = torch.arange(12.0, device="cpu").view(3, 4)
    inputs = torch.arange(8.0, device="cpu").view(2, 4)
    with torch.no_grad():
        return torch.equal(pack_weight(weight)(inputs), inputs @ weight.T)


def _versions_increase() -> bool:
    weight = torch.zeros(1, device="cpu")
    before = _VERSION(weight)
    unchanged = _VERSION(weight)
    weight.add_(1)
    return bool(before == unchanged < _VERSION(weight))


def _containers_are_live() -> bool:
    module = nn.Sequential(nn.Identity())
    submodules, parameters, _ = _CONTAINERS(module)
    copied = shallow_copy(module)
    copied[0] = nn.Flatten()
    module.register_parameter("weight", nn.Parameter(torch.zeros(1, device="cpu")))
    return isinstance(submodules["0"], nn.Identity) and isinstance(copied[0], nn.Flatten) and "weight" in parameters


def _hooks_are_listed() -> bool:
    module = nn.Identity()
    hooks, pre_hooks = forward_hooks_of(module)
    is_empty = not hooks and not pre_hooks
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    return is_empty and len(hooks) == len(pre_hooks) == 1


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
    "Changes of weights are detected by a checksum before every pass: everything takes longer.",
    _versions_increase,
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
