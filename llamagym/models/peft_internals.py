"""What this library needs of PEFT beyond its documented interface, all in one file.

`tests/test_internals.py` checks each of these against the installed version, and names the one that broke.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

VERSIONS = ">=0.21"
"""Versions of PEFT that this file is known to fit."""

LowRank = tuple[tuple[Tensor, Tensor, float], ...]
"""A (r, I), B (O, r) and scale of each product that LoRA adds to a linear layer's."""


def lora_layers(model: nn.Module) -> list[LoraLayer]:
    """All layers that LoRA was added to."""
    from peft.tuners.lora import LoraLayer  # PEFT takes more than a second to import

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def keep_layers_(model: nn.Module, kept: set[int]) -> None:
    """Put modules that LoRA was added to back as they were, but for those in decoder layers of these numbers."""
    from peft.tuners.lora import LoraLayer

    def goes(name: str) -> bool:
        layer = re.search(r"\blayers\.(\d+)\.", name)
        return layer is not None and int(layer[1]) not in kept

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer) and goes(name):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, module.get_base_layer())
    tuner: Any = model.base_model
    tuner.targeted_module_names = [name for name in tuner.targeted_module_names if not goes(name)]


def projections(model: nn.Module) -> list[tuple[nn.Linear, nn.Linear]]:
    """A and B of each active LoRA on a linear layer."""
    return [
        (down, up)
        for layer in lora_layers(model)
        for name, down in layer.lora_A.items()
        if name in layer.active_adapters
        if isinstance(down, nn.Linear) and isinstance(up := layer.lora_B[name], nn.Linear)
    ]


def is_low_rank(name: str) -> bool:
    """Whether a parameter of this name is one of LoRA's matrices."""
    return is_down(name) or is_up(name)


def is_down(name: str) -> bool:
    """Whether a parameter of this name is an A (r, I)."""
    return ".lora_A." in name


def is_up(name: str) -> bool:
    """Whether a parameter of this name is a B (O, r)."""
    return ".lora_B." in name


def count_active(model: nn.Module) -> int:
    """How many active LoRA there are, on layers of any kind."""
    return sum(name in layer.r for layer in lora_layers(model) for name in layer.active_adapters)


def double_ranks_(model: nn.Module) -> None:
    """Let layers know that the rank of their active LoRA has doubled."""
    for layer in lora_layers(model):
        layer.r.update({name: 2 * layer.r[name] for name in layer.active_adapters if name in layer.r})


@contextmanager
def acting_on_every_token(model: nn.Module) -> Iterator[None]:
    """While open, an activated LoRA changes all tokens it is given, as a plain one does; otherwise it changes none.

    PEFT finds the reply by its invocation tokens in `input_ids`; here the caller passes the reply's tokens alone.
    """
    layers = lora_layers(model)
    variants = [layer.lora_variant for layer in layers]
    for layer in layers:
        layer.lora_variant = {}
    try:
        yield
    finally:
        for layer, variant in zip(layers, variants, strict=True):
            layer.lora_variant = variant


def base_of(layer: Any) -> Any:
    """A layer without what PEFT added to it."""
    return getattr(layer, "base_layer", layer)


def tuner_layers(model: nn.Module) -> list[Any]:
    """All layers that PEFT changed."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def adapter_state(layer: Any) -> tuple[object, ...]:
    """What the adapters of such a layer do now, beyond what their weights say."""
    scaling = getattr(layer, "scaling", {})
    return layer.disable_adapters, tuple(layer.active_adapters), tuple(layer.merged_adapters), tuple(scaling.items())


def adapters_by_module(model: nn.Module) -> dict[nn.Module, Any]:
    """For each module inside a layer that PEFT changed, that layer."""
    return {inner: layer for layer in tuner_layers(model) for inner in layer.modules()}


def merged_into(layer: Any) -> tuple[str, ...]:
    """Adapters whose products have been added to a layer's own weight, which does not change its version."""
    return tuple(layer.merged_adapters)


def low_rank_of(layer: nn.Module) -> LowRank | None:
    """What LoRA adds to a linear layer's product now, of one adapter or none; None if it does more than that."""
    if type(layer) is nn.Linear:
        return ()
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.lora.variants import ALoraLinearVariant

    if type(layer) is not LoraLinear or layer.merged:
        return None
    names = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]
    if not names:
        return ()
    name, *others = names
    variant = layer.lora_variant.get(name)
    if others or layer.lora_bias[name] or layer.lora_dropout[name].training:
        return None
    if variant is not None:
        # Without an invocation, an activated LoRA changes nothing.
        return () if isinstance(variant, ALoraLinearVariant) else None
    down: Any = layer.lora_A[name]
    up: Any = layer.lora_B[name]
    return ((down.weight, up.weight, layer.scaling[name]),)


def names_of_embeddings() -> set[str]:
    """What PEFT takes for embeddings when it saves an adapter."""
    from peft.utils.constants import EMBEDDING_LAYER_NAMES

    return set(EMBEDDING_LAYER_NAMES)
