"""Notices every change of a model's weights, so that nothing is used that was computed with other ones.

PyTorch raises a tensor's version at every change in place. Together with which modules and tensors the model holds, and
what its adapters do, this tells one state of the weights from another. Fused optimizers, which do not raise it, are
made to. Tensors are held, so none can be mistaken for a new one at the same address.

Two kinds of edits leave no trace: in-place operations on `weight.data`, and writes through a numpy view. Who makes them
says so (`Agent.weights_changed`).
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

# Called for each tensor before every forward pass, so they are functions of C.
_NEEDS_GRADIENT = attrgetter("requires_grad")
_KIND = attrgetter("dtype", "device")
# Elements of a buffer whose content is compared where a pass may compute it again.
_SMALL = 2**16


class Change(IntEnum):
    """What has changed, from nothing to all."""

    NONE = 0
    TRAINED = 1
    """Weights that learn, or the value head."""
    FROZEN = 2
    """Weights that do not, or what adapters do: merged, switched off, scaled."""
    PARTS = 3
    """Which modules and tensors there are, which of them learn, their dtype or device."""


class WeightsState:
    """The state that a model's weights were last seen in.

    Attributes:
        number: How many changes have been accepted so far.
    """

    def __init__(self, model: AutoModelForCausalLMWithValueHead) -> None:
        """See the weights as they are now."""
        self._model = model
        self.number = 0
        self.keep()

    def change(self) -> Change:
        """What has changed since the last state that was accepted."""
        if not CONTAINERS.works:
            self._look_at_holders()
        if self._sizes != list(map(len, self._holders)):
            return Change.PARTS
        held = chain.from_iterable(map(dict.values, self._filled))
        if not all(map(is_, held, self._held)):
            return Change.PARTS
        if self._need_gradients != list(map(_NEEDS_GRADIENT, self._tensors)):
            return Change.PARTS
        if self._adapters != [adapter_state(layer) for layer in self._tuners]:
            return Change.FROZEN
        versions, places = self._versions_now()
        self._overlook_recomputed(versions)
        if versions == self._versions and places == self._places:
            return Change.NONE
        if self._kinds != list(map(_KIND, self._tensors)):
            return Change.PARTS
        now, before = zip(versions, places, strict=True), zip(self._versions, self._places, strict=True)
        changed = (new != old for new, old in zip(now, before, strict=True))
        are_frozen = (changes and not learns for changes, learns in zip(changed, self._learns, strict=True))
        return Change.FROZEN if any(are_frozen) else Change.TRAINED

    def accept(self, change: Change) -> None:
        """Take the weights as they are now, after a change, for another state."""
        self.number += 1
        if change is Change.TRAINED:
            # All else was compared, and walking through the modules takes as long as 5 % of an optimizer step.
            self._versions, self._places = self._versions_now()
        else:
            self.keep()

    def keep(self) -> None:
        """Take the weights as they are now for the same state: what changed does not change the policy."""
        self._look_at_holders()
        self._sizes = list(map(len, self._holders))
        self._held = list(chain.from_iterable(map(dict.values, self._filled)))
        self._tensors = [part for part in self._held if isinstance(part, Tensor)]
        of_head = {id(part) for part in (*self._model.v_head.parameters(), *self._model.v_head.buffers())}
        self._learns = [tensor.requires_grad or id(tensor) in of_head for tensor in self._tensors]
        self._tuners = tuner_layers(self._model)
        self._need_gradients = list(map(_NEEDS_GRADIENT, self._tensors))
        self._kinds = list(map(_KIND, self._tensors))
        self._versions, self._places = self._versions_now()
        self._adapters = [adapter_state(layer) for layer in self._tuners]
        saved = self._model.state_dict(keep_vars=True)
        computed = {id(buffer) for name, buffer in self._model.named_buffers() if name not in saved}
        self._computed = {
            place: tensor.clone()
            for place, tensor in enumerate(self._tensors)
            if id(tensor) in computed and tensor.numel() <= _SMALL
        }

    def _overlook_recomputed(self, versions: list[int]) -> None:
        """Take buffers that a pass computes again, such as frequencies of positions, for the same while they are."""
        for place, content in self._computed.items():
            if versions[place] != self._versions[place] and torch.equal(self._tensors[place], content):
                self._versions[place] = versions[place]

    def _look_at_holders(self) -> None:
        modules = list(self._model.modules())
        self._holders: list[dict[str, Any]] = [holder for module in modules for holder in containers_of(module)]
        self._filled = list(filter(None, self._holders))

    def _versions_now(self) -> tuple[list[int], list[int]]:
        return versions_of(self._tensors), list(map(Tensor.data_ptr, self._tensors))


def _raise_versions(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise the versions of what a fused optimizer has changed."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version([weight for weight in group["params"] if weight.grad is not None])


register_optimizer_step_post_hook(_raise_versions)
