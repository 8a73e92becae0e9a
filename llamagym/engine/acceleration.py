"""The only entry to `engine/cpu/`: kernels that make the engine faster on a CPU and are never required.

`LLAMAGYM_CPU_KERNELS=0` switches them off; then everything runs on PyTorch's and transformers' own operations.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..models.hardware import PACKED_SHARE, memory_bytes
from ..models.torch_internals import HOOKS
from ..models.transformers_internals import ATTENTION_NAME, DECODER_LAYER
from .attention import attend_in_parts, may_store_scores


def is_enabled() -> bool:
    """Whether `engine/cpu/` may be used."""
    return os.environ.get("LLAMAGYM_CPU_KERNELS", "1") != "0"


def likelihood_kernels(logits: Tensor) -> ModuleType | None:
    """The module `cpu.likelihood` if it can compute with such logits, else None."""
    if not is_enabled() or logits.device.type != "cpu":
        return None
    from .cpu import compiling, likelihood  # numba takes a second to import

    return likelihood if compiling.has_kernels(logits) else None


class Acceleration:
    """A context in which a model runs on this machine's kernels; outside of it the model is unchanged.

    Attributes:
        packed_weights: The `PackedWeights` of the model; None without kernels.
    """

    def __init__(self, lm: nn.Module, body: nn.Module) -> None:
        """Finds the layers of a causal language model, and of its body, that can be accelerated."""
        self.packed_weights: Any = None
        self._fused: Any = None
        self._open = ExitStack()
        if is_enabled() and next(body.parameters()).device.type == "cpu":
            from .cpu.fused_layer import FusedLayers
            from .cpu.packing import PackedWeights

            self.packed_weights = PackedWeights(lm, int(PACKED_SHARE * memory_bytes(torch.device("cpu"))))
            if HOOKS.works and ATTENTION_NAME.works:
                self._fused = FusedLayers(body, self.packed_weights, may_store_scores, attend_in_parts)

    def __enter__(self) -> None:
        """Uses the kernels; weights that changed outside of the context are packed again."""
        for context in (self.packed_weights, self._fused):
            if context is not None:
                self._open.enter_context(context)

    def __exit__(self, *error: object) -> None:
        """Uses the model's own operations again."""
        self._open.close()

    def drop_packed_weights(self) -> None:
        """Drops the packed copies of weights; later passes pack them again."""
        if self.packed_weights is not None:
            self.packed_weights.clear()

    def temporary_packing(self) -> AbstractContextManager[None]:
        """Drops the weights that are packed while this is open, and no others, on closing."""
        return nullcontext() if self.packed_weights is None else self.packed_weights.temporary()

    def unfuse(self, fault: str | None = None) -> None:
        """Runs all layers unfused from now on.

        Args:
            fault: The error of fused layers, if there is one; then other models' layers run unfused as well.
        """
        if fault is not None and self._fused is not None and self._fused.has_layers:
            DECODER_LAYER.disable(fault)
        self._fused = None
