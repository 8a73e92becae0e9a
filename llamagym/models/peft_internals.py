"""All uses of undocumented APIs of PEFT.

`tests/models/test_internals.py` checks each of them against the installed version, and the fallback without it.

Shapes: I input features, O output features, r rank of LoRA.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .private_apis import PrivateApi

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_PLAIN_TYPES = (bool, int, float, str, list, tuple, dict)
_EMBEDDINGS = ("embed_tokens", "lm_head")

LowRank = tuple[tuple[Tensor, Tensor, float], ...]
"""A (r, I), B (O, r) and scale of each product that LoRA adds to a linear layer's output."""


def lora_layers(model: nn.Module) -> list[LoraLayer]:
    """All layers that have LoRA; none if the API of PEFT's layers has changed."""
    if not ADAPTER_LAYERS.works:
        return []
    from peft.tuners.lora import LoraLayer  # PEFT takes more than a second to import

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def restrict_lora_to_layers_(model: nn.Module, kept: set[int]) -> None:
    """Removes LoRA from all modules except for those in the decoder layers with the given numbers."""

    def is_removed(name: str) -> bool:
        layer = re.search(r"\blayers\.(\d+)\.", name)
        return layer is not None and int(layer[1]) not in kept

    adapted = set(lora_layers(model))
    for name, module in list(model.named_modules()):
        if module in adapted and is_removed(name):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, base_of(module))
    tuner: Any = model.base_model
    tuner.targeted_module_names = [name for name in tuner.targeted_module_names if not is_removed(name)]


def has_variants(model: nn.Module) -> bool:
    """Whether a LoRA computes more than the product of its matrices, as DoRA and LoRA on experts do."""
    for layer in lora_layers(model):
        if type(layer).__name__ == "ParamWrapper":
            return True
        if not all(map(_may_be_activated, getattr(layer, "lora_variant", {}).values())):
            return True
    return False


def lora_matrices(model: nn.Module) -> list[tuple[nn.Linear, nn.Linear]]:
    """A and B of each active LoRA on a linear layer."""
    pairs = []
    for layer in lora_layers(model):
        for name, down in layer.lora_A.items():
            if name in layer.active_adapters:
                up = layer.lora_B[name]
                if isinstance(down, nn.Linear) and isinstance(up, nn.Linear):
                    pairs.append((down, up))
    return pairs


def is_lora_weight(name: str) -> bool:
    """Whether a parameter of this name is an A or B matrix of LoRA."""
    return is_lora_a(name) or is_lora_b(name)


def is_lora_a(name: str) -> bool:
    """Whether a parameter of this name is an A matrix (r, I) of LoRA."""
    return ".lora_A." in name


def is_lora_b(name: str) -> bool:
    """Whether a parameter of this name is a B matrix (O, r) of LoRA."""
    return ".lora_B." in name


def count_active_lora(model: nn.Module) -> int:
    """The number of active LoRA adapters, summed over layers of any kind."""
    return sum(name in layer.r for layer in lora_layers(model) for name in layer.active_adapters)


def double_ranks_(model: nn.Module) -> None:
    """Doubles the ranks that layers record for their active LoRA."""
    for layer in lora_layers(model):
        layer.r.update({name: 2 * layer.r[name] for name in layer.active_adapters if name in layer.r})


def layers_with_variants(model: nn.Module) -> list[Any]:
    """All layers whose LoRA is of another kind than the plain one, such as an activated LoRA."""
    return [module for module in model.modules() if getattr(module, "lora_variant", None)]


@contextmanager
def acting_on_every_token(layers: Sequence[Any]) -> Iterator[None]:
    """While open, an activated LoRA acts on every token, as a plain one does; otherwise it acts on none.

    PEFT finds the reply by its invocation tokens in `input_ids`; here the caller passes the reply's tokens alone.

    Args:
        layers: The layers from `layers_with_variants`. Finding them is slow, so callers that decode keep the list.
    """
    original = [layer.lora_variant for layer in layers]
    for layer, variants in zip(layers, original, strict=True):
        # Other variants, such as DoRA, always act on every token.
        others = {name: variant for name, variant in variants.items() if not _may_be_activated(variant)}
        # Not through the layer's `__setattr__`, which checks whether this is a parameter or a module.
        vars(layer)["lora_variant"] = others
    try:
        yield
    finally:
        for layer, variants in zip(layers, original, strict=True):
            vars(layer)["lora_variant"] = variants


def deactivate_(model: nn.Module) -> None:
    """Makes the activated LoRA of a PEFT model a plain one, which acts on every token."""
    adapted: Any = model
    adapted.active_peft_config.alora_invocation_tokens = None
    for layer in layers_with_variants(model):
        for name in layer.active_adapters:
            layer.lora_variant.pop(name, None)


def require_activation(model: nn.Module) -> None:
    """Rejects a model with an activated LoRA if the installed PEFT cannot switch it on and off.

    Raises:
        ModelLoadError: The model has such a LoRA.
    """
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "alora_invocation_tokens", None) is not None:
        ACTIVATION.require()


def base_of(layer: Any) -> Any:
    """A layer without what PEFT added to it; the layer itself if the API of PEFT's layers has changed."""
    if isinstance(layer, nn.Linear):
        return layer
    return getattr(layer, "base_layer", layer) if ADAPTER_LAYERS.works else layer


def variant_types(layer: Any) -> tuple[tuple[str, type], ...]:
    """The type of each adapter's LoRA variant, such as an activated LoRA; empty if this PEFT has no variants."""
    variants: dict[str, Any] = getattr(layer, "lora_variant", {})
    return tuple((adapter, type(variant)) for adapter, variant in variants.items())


def tuner_layers(model: nn.Module) -> list[Any]:
    """All layers that PEFT has adapted, by any method."""
    if not ADAPTER_LAYERS.works:
        return [module for module in model.modules() if type(module).__module__.startswith("peft.tuners.")]
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def adapter_state(layer: Any) -> tuple[object, ...]:
    """The state of an adapted layer apart from its weights: which adapters are active, merged, disabled, how scaled."""
    if not ADAPTER_LAYERS.works:
        return _plain_attributes(layer)
    scaling = getattr(layer, "scaling", {})
    active = tuple(layer.active_adapters)
    merged = tuple(layer.merged_adapters)
    return layer.disable_adapters, active, merged, tuple(scaling.items())


def _plain_attributes(layer: Any) -> tuple[str, ...]:
    """The plain attributes of a layer, without modules, tensors and hooks, each as "name=value"."""
    excluded = {*vars(nn.Module()), "lora_variant"}
    attributes = []
    for name, value in vars(layer).items():
        if name not in excluded and isinstance(value, _PLAIN_TYPES):
            attributes.append(f"{name}={value}")
    return tuple(attributes)


def adapters_by_module(model: nn.Module) -> dict[nn.Module, Any]:
    """Maps each module inside an adapted layer to that layer."""
    return {inner: layer for layer in tuner_layers(model) for inner in layer.modules()}


def merged_into(layer: Any) -> tuple[str, ...]:
    """The adapters that are merged into a layer's weight; merging does not change the weight's version."""
    return tuple(layer.merged_adapters) if ADAPTER_LAYERS.works else _plain_attributes(layer)


def low_rank_of(layer: nn.Module) -> LowRank | None:
    """The product that LoRA adds to a linear layer's output, of one adapter or none; None if it does more than that."""
    if type(layer) is nn.Linear:
        return ()
    return _low_rank_of(layer) if ADAPTER_LAYERS.works else None


def _low_rank_of(layer: Any) -> LowRank | None:
    from peft.tuners.lora import Linear as LoraLinear

    if type(layer) is not LoraLinear or layer.merged:
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or not names:
        return ()
    name, *others = names
    if others or layer.lora_bias[name] or layer.lora_dropout[name].training:
        return None
    variants = getattr(layer, "lora_variant", {})
    if name in variants:
        # Outside of `acting_on_every_token`, an activated LoRA changes nothing.
        return () if ACTIVATED_VARIANT.works and _is_activated(variants[name]) else None
    down: Any = layer.lora_A[name]
    up: Any = layer.lora_B[name]
    return ((down.weight, up.weight, layer.scaling[name]),)


def _may_be_activated(variant: Any) -> bool:
    """Whether a variant is an activated LoRA; True for all if the installed PEFT has no such class."""
    return not ACTIVATED_VARIANT.works or _is_activated(variant)


def _is_activated(variant: Any) -> bool:
    from peft.tuners.lora.variants import ALoraLinearVariant

    return isinstance(variant, ALoraLinearVariant)


def embedding_layer_names() -> set[str]:
    """The module names that PEFT treats as embeddings when it saves an adapter."""
    if not EMBEDDING_NAMES.works:
        return set(_EMBEDDINGS)
    from peft.utils.constants import EMBEDDING_LAYER_NAMES

    return set(EMBEDDING_LAYER_NAMES)


def _small_adapter(**options: Any) -> Any:
    """A linear layer with a LoRA whose B matrix is not zero."""
    from peft import LoraConfig, inject_adapter_in_model

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        config = LoraConfig(r=2, lora_alpha=6, target_modules=["0"], init_lora_weights=False, **options)
        model: Any = inject_adapter_in_model(config, nn.Sequential(nn.Linear(3, 4)))
    return model.eval()[0]


@torch.no_grad()
def _layers_are_as_expected() -> bool:
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    layer = _small_adapter()
    inputs = torch.ones(1, 3, device="cpu")
    low_rank = _low_rank_of(layer)
    if not low_rank or not issubclass(LoraLayer, BaseTunerLayer) or LoraLayer not in type(layer).mro():
        return False
    ((down, up, scale),) = low_rank
    product = layer.base_layer(inputs) + scale * (inputs @ down.T @ up.T)
    state = (layer.disable_adapters, layer.active_adapters, layer.merged_adapters, layer.r, layer.scaling)
    is_known = state == (False, ["default"], [], {"default": 2}, {"default": 3.0})
    layer.merge()
    is_merged = layer.merged and layer.merged_adapters == ["default"] and _low_rank_of(layer) is None
    return bool(is_known and is_merged and torch.allclose(layer(inputs), product, atol=1e-5))


@torch.no_grad()
def _activation_is_switched() -> bool:
    layer = _small_adapter(alora_invocation_tokens=[1], task_type="CAUSAL_LM")
    inputs = torch.ones(1, 2, 3, device="cpu")
    inactive = layer(inputs)
    with acting_on_every_token([layer]):
        active = layer(inputs)
    for name, weight in layer.named_parameters():
        if is_lora_weight(name):
            weight.zero_()
    return torch.equal(layer(inputs), inactive) and not torch.allclose(active, inactive)


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
    "LoRA runs in PEFT's own layers, which takes longer, and is not initialized from observations.",
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
    "Layers with an activated LoRA run in PEFT's own code, which takes longer.",
    lambda: _is_activated(_small_adapter(alora_invocation_tokens=[1], task_type="CAUSAL_LM").lora_variant["default"]),
)
TARGETS = PrivateApi(
    "peft",
    "LoraModel.targeted_module_names",
    "LoRA is not removed from layers that agents which see one turn do not need: learning takes longer.",
    _targets_are_listed,
)
EMBEDDING_NAMES = PrivateApi(
    "peft",
    "peft.utils.constants.EMBEDDING_LAYER_NAMES",
    f"When an adapter is saved, only {' and '.join(_EMBEDDINGS)} count as embeddings.",
    _embeddings_are_named,
)
