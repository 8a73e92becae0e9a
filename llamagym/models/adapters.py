"""Which of PEFT's methods and options act and learn here as they do in plain PEFT; all others are rejected.

The engine calls the layers of a model itself, with positions, masks and caches of its own. What PEFT puts into these
layers acts all the same. What it does outside of them (virtual tokens before a prompt, a forward pass of its own) would
be left out silently. `scripts/check_adapters.py` compares each method and option with plain PEFT.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from torch import nn

from ..errors import ModelLoadError

# Not AdaLoRA, whose ranks change by calls in a training loop, nor Lily, whose router looks at all tokens of a pass.
SUPPORTED = frozenset(
    {
        "BEFT",
        "BOFT",
        "C3A",
        "DEFT",
        "DELORA",
        "FOURIERFT",
        "FROD",
        "GLORA",
        "GRALORA",
        "HIRA",
        "HRA",
        "IA3",
        "LN_TUNING",
        "LOHA",
        "LOKR",
        "LORA",
        "MISS",
        "OFT",
        "OSF",
        "PEANUT",
        "PSOFT",
        "PVERA",
        "RANDLORA",
        "ROAD",
        "SHIRA",
        "SUPERTUNING",
        "TINYLORA",
        "TRAINABLE_TOKENS",
        "UNILORA",
        "VBLORA",
        "VERA",
        "WAVEFT",
    }
)
"""Methods that equal plain PEFT, by their `peft_type`."""

LORA_OPTIONS = frozenset(
    {
        "alora_invocation_tokens",
        "alpha_pattern",
        "ensure_weight_tying",
        "exclude_modules",
        "fan_in_fan_out",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "lora_dropout",
        "modules_to_save",
        "monteclora_config",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
        "velora_config",
    }
)
"""Options of LoRA that equal plain PEFT; what none of these says must be PEFT's default."""

# The others change the base, which is the reference policy.
_INITS = (True, False, "gaussian", "orthogonal", "mica")
# Options that say nothing about what an adapter computes.
_NEUTRAL = frozenset(
    {"auto_mapping", "base_model_name_or_path", "bias", "inference_mode", "peft_type", "peft_version", "revision"}
    | {"runtime_config", "task_type"}
)


def check_adapter(model: nn.Module) -> None:
    """Reject an adapter that does not act or learn here as it does in plain PEFT.

    Args:
        model: A language model, or PEFT's wrapper around one.

    Raises:
        ModelLoadError: It is such an adapter; the message names its method or option.
    """
    from peft import PeftMixedModel, PeftModel  # takes more than a second to import

    if isinstance(model, PeftMixedModel):
        raise ModelLoadError(
            "The model is a PeftMixedModel, and adapters of several methods at once are not supported. Pass a "
            "PeftModel with one adapter, such as LoRA."
        )
    if not isinstance(model, PeftModel):
        return
    names = list(model.active_adapters)
    for name in names:
        _check(name, model.peft_config[name])
    activated = [name for name in names if getattr(model.peft_config[name], "alora_invocation_tokens", None)]
    if activated and len(names) > 1:
        raise ModelLoadError(
            f"The adapters {names} are active at once, and {activated} among them act from the reply on only. Activate "
            "one adapter: model.set_adapter(name)."
        )
    if activated and getattr(model.get_output_embeddings(), "lora_variant", None):
        raise _rejected(activated[0], "LORA with alora_invocation_tokens", "adapts the output layer, lm_head, as well")


def _check(name: str, config: Any) -> None:
    """Reject what the configuration of one adapter asks for."""
    method = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning:
        raise _rejected(name, method, "puts virtual tokens before each prompt")
    if method not in SUPPORTED:
        raise _rejected(name, method, "does not equal plain PEFT, or was not compared with it")
    bias = getattr(config, "bias", "none")
    if bias != "none":
        biased = f"{method} with bias={bias!r}"
        raise _rejected(name, biased, "trains biases of the base, which is the reference policy")
    if method != "LORA":
        return
    if config.init_lora_weights not in _INITS:
        init = f"{method} with init_lora_weights={config.init_lora_weights!r}"
        raise _rejected(name, init, "changes the base, which is the reference policy, or what is loaded again")
    for field in fields(config):
        usual = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name not in LORA_OPTIONS | _NEUTRAL and getattr(config, field.name) != usual:
            option = f"{method} with {field.name}"
            raise _rejected(name, option, "does not equal plain PEFT, or was not compared with it")


def _rejected(name: str, method: str, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"The adapter {name!r} ({method}) is not supported: it {reason}. Use a method and options that the page on "
        f"models lists as equal to plain PEFT: {', '.join(sorted(SUPPORTED))}."
    )
