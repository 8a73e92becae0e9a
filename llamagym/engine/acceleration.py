"""The only entry to `engine/cpu/`: kernels that make the engine faster on a CPU, and are never required.

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
from .attention import attend_in_parts, may_hold_scores


def is_enabled() -> bool:
    """Whether `cpu/` may be used at all."""
    return os.environ.get("LLAMAGYM_CPU_KERNELS", "1") != "0"


def likelihood_kernels(logits: Tensor) -> ModuleType | None:
    """`cpu.likelihood` if it can compute with such logits, else None."""
    if not is_enabled() or logits.device.type != "cpu":
        return None
    from .cpu import compiling, likelihood  # numba takes a second to import

    return likelihood if compiling.has_kernels(logits) else None


class Acceleration:
    """A context in which a model runs on this machine's kernels; outside of it the model is unchanged."""

    def __init__(self, lm: nn.Module, body: nn.Module) -> None:
        """Find the layers of a causal language model, and of its body, that can be accelerated."""
        self._packed: Any = None
        self._fused: Any = None
        self._open = ExitStack()
        if is_enabled() and next(body.parameters()).device.type == "cpu":
            from .cpu.fused_layer import Fused
            from .cpu.packing import Packed

            self._packed = Packed(lm, int(PACKED_SHARE * memory_bytes(torch.device("cpu"))))
            if HOOKS.works and ATTENTION_NAME.works:
                self._fused = Fused(body, self._packed, may_hold_scores, attend_in_parts)

    def __enter__(self) -> None:
        """Use the kernels; weights that changed outside of the context are packed again."""
        for part in (self._packed, self._fused):
            if part is not None:
                self._open.enter_context(part)

    def __exit__(self, *error: object) -> None:
        """Use the model's own operations again."""
        self._open.close()

    def forget_copies(self) -> None:
        """Drop all packed weights; later passes pack those that they use."""
        if self._packed is not None:
            self._packed.forget()

    def temporary_copies(self) -> AbstractContextManager[None]:
        """Drop the packed weights that are made while this is open, and no others, when it closes."""
        return nullcontext() if self._packed is None else self._packed.temporary()

    def unfuse(self, fault: str | None = None) -> None:
        """Run all layers unfused from now on.

        Args:
            fault: What is wrong with fused layers, if anything: then other models' run unfused as well.
        """
        if fault is not None and self._fused is not None and self._fused.has_layers:
            DECODER_LAYER.disable(fault)
        self._fused = None
