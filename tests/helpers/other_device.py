"""A second device for machines that have none: tensors that say that they lie on `other:0`.

It is a backend of PyTorch's like CUDA's, written in Python: each of its tensors holds a CPU tensor, on which it
computes. What CUDA refuses is refused here as well: an operation on tensors of two devices, and random numbers from
another device's generator. As there, a CPU tensor of no dimension may take part in most operations, CPU tensors may
index, and `copy_` and `to` lead from one device to the other.

A process has the device for good, and other libraries may then choose it; so it is for processes of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "other"
_aten = torch.ops.aten
# What leads from one device to another.
_LEADS = {_aten.copy_.default, _aten._to_copy.default}
# What takes a CPU tensor among its indices, which are its second argument.
_INDEXES = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}
# What takes none at all, not even one without a dimension.
_JOINS = {_aten.cat.default, _aten.stack.default}
_LIBRARY = torch.library.Library("aten", "IMPL")


class OtherTensor(Tensor):
    """A tensor of the other device."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> OtherTensor:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made: OtherTensor = Tensor._make_wrapper_subclass(cls, held.shape, **layout, device=f"{NAME}:0")
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the tensors that are held."""
        kwargs = dict(kwargs or {})
        _check(function, args, kwargs)
        if function is _aten.copy_.default:
            _held(args[0]).copy_(_held(args[1]))
            return args[0]
        if function is _aten._fused_sdp_choice.default:
            return 0  # PyTorch's plain attention
        device = kwargs.pop("device", None)
        leaves = device is not None and torch.device(device).type == "cpu"
        result = function(*map(_held, args), **{name: _held(value) for name, value in kwargs.items()})
        if leaves:
            return result.clone() if any(result is _held(arg) for arg in args) else result
        own = {id(arg.held): arg for arg in (*args, *kwargs.values()) if isinstance(arg, OtherTensor)}
        if isinstance(result, (list, tuple)):
            return type(result)(_wrapped(part, own) for part in result)
        return _wrapped(result, own)

    def tolist(self) -> Any:
        """Numbers, as of a tensor that is brought to the CPU."""
        return self.cpu().tolist()

    def __repr__(self) -> str:
        """The numbers and where they are."""
        return f"{NAME}({self.held!r})"


def _held(part: Any) -> Any:
    if isinstance(part, OtherTensor):
        return part.held
    return type(part)(map(_held, part)) if type(part) in (list, tuple) else part


def _wrapped(part: Any, own: dict[int, OtherTensor]) -> Any:
    """A result as a tensor of this device; what an operation changed in place is what it was given."""
    if not isinstance(part, Tensor):
        return part
    return own[id(part)] if id(part) in own else OtherTensor(part)


def _check(function: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse what a real device refuses."""
    if function in _LEADS:
        return
    used = (args[0], *args[2:]) if function in _INDEXES else args
    for part in _flat((*used, *kwargs.values())):
        is_strange = isinstance(part, Tensor) and not isinstance(part, OtherTensor)
        if is_strange and (part.dim() or function in _JOINS):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {function} found at least two devices, {NAME}:0 "
                f"and cpu, the latter of a tensor of shape {tuple(part.shape)}."
            )
        if isinstance(part, torch.Generator):
            raise RuntimeError(f"Expected a generator of {NAME!r}, but {function} found one of {part.device}.")


def _flat(parts: Any) -> Any:
    for part in parts:
        if type(part) in (list, tuple):
            yield from _flat(part)
        else:
            yield part


class _Module:
    """The module that PyTorch expects of a device backend."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass


def install() -> torch.device:
    """Make the device known to this process; returns it."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())

    def empty(size: Any, *, dtype: Any = None, **layout: Any) -> OtherTensor:
        return OtherTensor(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **layout: Any) -> OtherTensor:
        return OtherTensor(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        _held(target).copy_(_held(source))
        return target

    for name, function in (("empty.memory_format", empty), ("empty_strided", empty_strided), ("_copy_from", copy_from)):
        _LIBRARY.impl(name, function, "PrivateUse1")
    # As of a real device, a parameter that is moved stays the same object.
    torch.__future__.set_swap_module_params_on_conversion(True)
    return torch.device(f"{NAME}:0")
