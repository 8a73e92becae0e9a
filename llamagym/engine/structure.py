"""A key for models that compute alike except for their weights, so that one check per process holds for all of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from ..models.peft_internals import adapter_state, lora_layers, tuner_layers, variant_types
from ..models.torch_internals import HOOKS, forward_hooks_of
from ..models.transformers_internals import attention_function, attention_name, has_attention
from .acceleration import is_enabled


def structure_of(lm: nn.Module) -> Hashable | None:
    """A key that two causal language models share only if they run the same operations on tensors of the same shapes.

    Returns:
        None if a hook, or a method of a single module, may compute anything.
    """
    if not HOOKS.works:
        return None
    modules: list[Hashable] = []
    for name, module in lm.named_modules():
        if any(forward_hooks_of(module)) or "forward" in vars(module):
            return None
        settings = tuple(item for item in vars(module).items() if isinstance(item[1], int | float | str | None))
        modules.append((name, type(module), type(module).forward, settings))
    tensors = tuple(
        (name, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
        for name, tensor in [*lm.named_parameters(), *lm.named_buffers()]
    )
    variants = tuple(map(variant_types, lora_layers(lm)))
    config: Any = lm.config
    attention = attention_name(config)
    return (
        tuple(modules),
        tensors,
        tuple(map(adapter_state, tuner_layers(lm))),
        variants,
        config.to_json_string(),
        attention,
        attention_function(attention) if has_attention(attention) else None,
        torch.get_num_threads(),
        is_enabled(),
    )
