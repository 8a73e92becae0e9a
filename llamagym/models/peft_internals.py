"""What this library needs of PEFT beyond its documented interface, all in one file.

`tests/test_internals.py` checks each of these against the installed version, and what happens without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .private_apis import PrivateApi

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_PLAIN = (bool, int, float, str, list, tuple, dict)
_EMBEDDINGS = ("embed_tokens", "lm_head")

LowRank = tuple[tuple[Tensor, Tensor, float], ...]
"""A (r, I), B (O, r) and scale of each product that LoRA adds to a linear layer's."""


def lora_layers(model: nn.Module) -> list[LoraLayer]:
    """All layers that LoRA was added to; none if PEFT's layers have changed."""
    if not ADAPTER_LAYERS.works:
        return []
    from peft.tuners.lora import LoraLayer  # PEFT takes more than a second to import

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def keep_layers_(model: nn.Module, kept: set[int]) -> None:
    """Put modules that LoRA was added to back as they were, but for those in decoder layers of these numbers."""

    def goes(name: str) -> bool:
        layer = re.search(r"\blayers\.(\d+)\.", name)
        return layer is not None and int(layer[1]) not in kept

    adapted = set(lora_layers(model))
    for name, module in list(model.named_modules()):
        if module in adapted and goes(name):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, base_of(module))
    tuner: Any = model.base_model
    tuner.targeted_module_names = [name for name in tuner.targeted_module_names if not goes(name)]


def has_variants(model: nn.Module) -> bool:
    """Whether a LoRA has weights or computations of its own beside its matrices, as DoRA and LoRA of experts do."""
    if any(type(layer).__name__ == "ParamWrapper" for layer in lora_layers(model)):
        return True
    variants = [variant for layer in lora_layers(model) for variant in getattr(layer, "lora_variant", {}).values()]
    return not all(map(_may_be_activated, variants))


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
    layers: list[Any] = [module for module in model.modules() if getattr(module, "lora_variant", None)]
    variants = [layer.lora_variant for layer in layers]
    for layer, of_layer in zip(layers, variants, strict=True):
        # Other variants, such as DoRA, act on every token as they are.
        layer.lora_variant = {name: variant for name, variant in of_layer.items() if not _may_be_activated(variant)}
    try:
        yield
    finally:
        for layer, variant in zip(layers, variants, strict=True):
            layer.lora_variant = variant


def require_activation(model: nn.Module) -> None:
    """Check that an activated LoRA, if a model has one, can be switched between some tokens and all of them.

    Raises:
        ModelLoadError: It cannot, with the installed version of PEFT.
    """
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "alora_invocation_tokens", None) is not None:
        ACTIVATION.require()


def base_of(layer: Any) -> Any:
    """A layer without what PEFT added to it; the layer itself if PEFT's layers have changed."""
    if isinstance(layer, nn.Linear):
        return layer
    return getattr(layer, "base_layer", layer) if ADAPTER_LAYERS.works else layer


def variant_types(layer: Any) -> tuple[tuple[str, type], ...]:
    """The variants of a LoRA layer by adapter, such as an activated one; none if this PEFT does not name them."""
    variants: dict[str, Any] = getattr(layer, "lora_variant", {})
    return tuple((adapter, type(variant)) for adapter, variant in variants.items())


def tuner_layers(model: nn.Module) -> list[Any]:
    """All layers that PEFT changed."""
    if not ADAPTER_LAYERS.works:
        return [module for module in model.modules() if type(module).__module__.startswith("peft.tuners.")]
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def adapter_state(layer: Any) -> tuple[object, ...]:
    """What the adapters of such a layer do now, beyond what their weights say."""
    if not ADAPTER_LAYERS.works:
        return _plain_attributes(layer)
    scaling = getattr(layer, "scaling", {})
    return layer.disable_adapters, tuple(layer.active_adapters), tuple(layer.merged_adapters), tuple(scaling.items())


def _plain_attributes(layer: Any) -> tuple[str, ...]:
    """All that a layer holds beside modules, tensors and hooks."""
    others = {*vars(nn.Module()), "lora_variant"}
    own = {name: value for name, value in vars(layer).items() if name not in others}
    return tuple(f"{name}={value}" for name, value in own.items() if isinstance(value, _PLAIN))


def adapters_by_module(model: nn.Module) -> dict[nn.Module, Any]:
    """For each module inside a layer that PEFT changed, that layer."""
    return {inner: layer for layer in tuner_layers(model) for inner in layer.modules()}


def merged_into(layer: Any) -> tuple[str, ...]:
    """Adapters whose products have been added to a layer's own weight, which does not change its version."""
    return tuple(layer.merged_adapters) if ADAPTER_LAYERS.works else _plain_attributes(layer)


def low_rank_of(layer: nn.Module) -> LowRank | None:
    """What LoRA adds to a linear layer's product now, of one adapter or none; None if it does more than that."""
    if type(layer) is nn.Linear:
        return ()
    return _low_rank_of(layer) if ADAPTER_LAYERS.works else None


def _low_rank_of(layer: Any) -> LowRank | None:
    from peft.tuners.lora import Linear as LoraLinear

    if type(layer) is not LoraLinear or layer.merged:
        return None
    names = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]
    if not names:
        return ()
    name, *others = names
    if others or layer.lora_bias[name] or layer.lora_dropout[name].training:
        return None
    variants = getattr(layer, "lora_variant", {})
    if name in variants:
        # Without an invocation, an activated LoRA changes nothing.
        return () if ACTIVATED_VARIANT.works and _is_activated(variants[name]) else None
    down: Any = layer.lora_A[name]
    up: Any = layer.lora_B[name]
    return ((down.weight, up.weight, layer.scaling[name]),)


def _may_be_activated(variant: Any) -> bool:
    """Whether a variant is an activated LoRA; where the installed PEFT has no such class, any may be one."""
    return not ACTIVATED_VARIANT.works or _is_activated(variant)


def _is_activated(variant: Any) -> bool:
    from peft.tuners.lora.variants import ALoraLinearVariant

    return isinstance(variant, ALoraLinearVariant)


def names_of_embeddings() -> set[str]:
    """What PEFT takes for embeddings when it saves an adapter."""
    if not EMBEDDING_NAMES.works:
        return set(_EMBEDDINGS)
    from peft.utils.constants import EMBEDDING_LAYER_NAMES

    return set(EMBEDDING_LAYER_NAMES)


def _small_adapter(**options: Any) -> Any:
    """A linear layer with LoRA, whose B is not zero."""
    from peft import LoraConfig, inject_adapter_in_model

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        config = LoraConfig(r=2, lora_alpha=6, target_modules=["0"], init_lora_weights=False, **options)
        model: Any = inject_adapter_in_model(config, nn.Sequential(nn.Linear(3, 4)))
    return model.eval()[0]


@torch.no_grad()
def _layers_are_as_expected() -> bool:
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    layer, inputs = _small_adapter(), torch.ones(1, 3, device="cpu")
    low_rank = _low_rank_of(layer)
    if not low_rank or not issubclass(LoraLayer, BaseTunerLayer) or LoraLayer not in type(layer).mro():
        return False
    ((down, up, scale),) = low_rank
    product = layer.base_layer(inputs) + scale * (inputs @ down.T @ up.T)
    state = layer.disable_adapters, layer.active_adapters, layer.merged_adapters, layer.r, layer.scaling
    is_known = state == (False, ["default"], [], {"default": 2}, {"default": 3.0})
    layer.merge()
    is_merged = layer.merged and layer.merged_adapters == ["default"] and _low_rank_of(layer) is None
    return bool(is_known and is_merged and torch.allclose(layer(inputs), product, atol=1e-5))


@torch.no_grad()
def _activation_is_switched() -> bool:
    layer = _small_adapter(alora_invocation_tokens=[1], task_type="CAUSAL_LM")
    inputs = torch.ones(1, 2, 3, device="cpu")
    before = layer(inputs)
    with acting_on_every_token(layer):
        within = layer(inputs)
    for name, weight in layer.named_parameters():
        if is_low_rank(name):
            weight.zero_()
    return torch.equal(layer(inputs), before) and not torch.allclose(within, before)


def _targets_are_listed() -> bool:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        tuner: Any = get_peft_model(nn.Sequential(nn.Linear(1, 1)), LoraConfig(target_modules=["0"])).base_model
    return list(tuner.targeted_module_names) == ["0"]


def _embeddings_are_named() -> bool:
    from peft.utils.constants import EMBEDDING_LAYER_NAMES

    return set(_EMBEDDINGS) <= set(EMBEDDING_LAYER_NAMES)


ADAPTER_LAYERS = PrivateApi(
    "peft",
    "BaseTunerLayer and LoraLayer: active_adapters, base_layer, disable_adapters, lora_A, lora_B, lora_bias, "
    "lora_dropout, merged, merged_adapters, r, scaling",
    "LoRA runs as PEFT has it, which takes longer, and is not aimed at what differs between observations.",
    _layers_are_as_expected,
)
ACTIVATION = PrivateApi(
    "peft",
    "LoraLayer.lora_variant",
    "The registry's models get an ordinary LoRA instead of an activated one, which takes longer; a model that has an "
    "activated one needs another version of PEFT.",
    _activation_is_switched,
)
ACTIVATED_VARIANT = PrivateApi(
    "peft",
    "peft.tuners.lora.variants.ALoraLinearVariant",
    "Layers with an activated LoRA run as PEFT has them, which takes longer.",
    lambda: _is_activated(_small_adapter(alora_invocation_tokens=[1], task_type="CAUSAL_LM").lora_variant["default"]),
)
TARGETS = PrivateApi(
    "peft",
    "LoraModel.targeted_module_names",
    "LoRA stays on as many layers as for whole conversations, where an agent sees one turn: learning takes longer.",
    _targets_are_listed,
)
EMBEDDING_NAMES = PrivateApi(
    "peft",
    "peft.utils.constants.EMBEDDING_LAYER_NAMES",
    f"Adapters of modules other than {' and '.join(_EMBEDDINGS)} are taken for none of embeddings when they are saved.",
    _embeddings_are_named,
)
