"""Detects every change of a model's weights, so that nothing is used that was computed with other weights.

PyTorch increments a tensor's version at every change in place. Together with the modules and tensors that the model
holds, and the state of its adapters, versions identify a state of the weights. Fused optimizers do not increment them,
so a hook does. The tensors are kept alive, so none can be mistaken for a new one at the same address.

Two kinds of edits are not detected: in-place operations on `weight.data`, and writes through a numpy view. After these,
call `Agent.weights_changed`.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..models.peft_internals import adapter_state, tuner_layers
from ..models.torch_internals import CONTAINERS, containers_of, versions_of
from ..models.value_head import AutoModelForCausalLMWithValueHead

# Called for each tensor before every forward pass, so they are implemented in C.
_REQUIRES_GRAD = attrgetter("requires_grad")
_DTYPE_AND_DEVICE = attrgetter("dtype", "device")
# Most elements of a buffer whose content is compared where a forward pass may recompute it.
_MAX_RECOMPUTED = 2**16


class Change(IntEnum):
    """How much of a model has changed; a higher value includes the lower ones."""

    NONE = 0
    TRAINED = 1
    """Trained weights, or the value head."""
    FROZEN = 2
    """Frozen weights, or the adapters' state: merged, disabled, scaled."""
    PARTS = 3
    """The modules and tensors, which of them are trained, their dtype or device."""


class WeightsState:
    """The last accepted state of a model's weights.

    Attributes:
        number: Number of changes that have been accepted so far.
    """

    def __init__(self, model: AutoModelForCausalLMWithValueHead) -> None:
        """Records the weights as they are now."""
        self._model = model
        self.number = 0
        self.record()

    def change(self) -> Change:
        """Compares the weights with the last accepted state."""
        if not CONTAINERS.works:
            self._find_containers()
        if self._sizes != list(map(len, self._containers)):
            return Change.PARTS
        parts = chain.from_iterable(map(dict.values, self._filled))
        if not all(map(is_, parts, self._parts)):
            return Change.PARTS
        if self._requires_grad != list(map(_REQUIRES_GRAD, self._tensors)):
            return Change.PARTS
        if self._adapters != [adapter_state(layer) for layer in self._tuners]:
            return Change.FROZEN
        versions, addresses = self._current_versions()
        self._ignore_recomputed(versions)
        if versions == self._versions and addresses == self._addresses:
            return Change.NONE
        if self._dtypes_and_devices != list(map(_DTYPE_AND_DEVICE, self._tensors)):
            return Change.PARTS
        for index, is_trained in enumerate(self._is_trained):
            is_same = versions[index] == self._versions[index] and addresses[index] == self._addresses[index]
            if not is_same and not is_trained:
                return Change.FROZEN
        return Change.TRAINED

    def accept(self, change: Change) -> None:
        """Makes the weights as they are now, after a change, the next state."""
        self.number += 1
        if change is Change.TRAINED:
            # All else was compared, and walking through the modules takes 5 % of an optimizer step.
            self._versions, self._addresses = self._current_versions()
        else:
            self.record()

    def record(self) -> None:
        """Makes the weights as they are now the same state: what has changed does not change the policy."""
        self._find_containers()
        self._sizes = list(map(len, self._containers))
        self._parts = list(chain.from_iterable(map(dict.values, self._filled)))
        self._tensors = [part for part in self._parts if isinstance(part, Tensor)]
        head = self._model.v_head
        head_ids = {id(tensor) for tensor in (*head.parameters(), *head.buffers())}
        self._is_trained = [tensor.requires_grad or id(tensor) in head_ids for tensor in self._tensors]
        self._tuners = tuner_layers(self._model)
        self._requires_grad = list(map(_REQUIRES_GRAD, self._tensors))
        self._dtypes_and_devices = list(map(_DTYPE_AND_DEVICE, self._tensors))
        self._versions, self._addresses = self._current_versions()
        self._adapters = [adapter_state(layer) for layer in self._tuners]
        saved = self._model.state_dict(keep_vars=True)
        unsaved_ids = {id(buffer) for name, buffer in self._model.named_buffers() if name not in saved}
        self._recomputed: dict[int, Tensor] = {}
        for index, tensor in enumerate(self._tensors):
            if id(tensor) in unsaved_ids and tensor.numel() <= _MAX_RECOMPUTED:
                self._recomputed[index] = tensor.clone()

    def _ignore_recomputed(self, versions: list[int]) -> None:
        """Accepts new versions of buffers that a pass recomputes with the same content, such as rotary frequencies."""
        for index, content in self._recomputed.items():
            if versions[index] != self._versions[index] and torch.equal(self._tensors[index], content):
                self._versions[index] = versions[index]

    def _find_containers(self) -> None:
        self._containers: list[dict[str, Any]] = []
        for module in self._model.modules():
            self._containers += containers_of(module)
        self._filled = list(filter(None, self._containers))

    def _current_versions(self) -> tuple[list[int], list[int]]:
        return versions_of(self._tensors), list(map(Tensor.data_ptr, self._tensors))


def _increment_versions(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Increments the versions of the weights that a fused optimizer has changed."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version([weight for weight in group["params"] if weight.grad is not None])


register_optimizer_step_post_hook(_increment_versions)
