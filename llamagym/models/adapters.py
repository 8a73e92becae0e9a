"""The methods and options of PEFT that are supported; all others are rejected.

The engine calls the layers of a model itself, with its own positions, masks and caches. Adapters inside of these layers
act as in plain PEFT. Adapters outside of them (virtual tokens before a prompt, a forward pass of their own) would be
ignored silently. `scripts/check_adapters.py` compares each method and option with plain PEFT.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ModelLoadError, excerpt, reason_of

# Not AdaLoRA, which needs calls in the training loop to change its ranks, nor Lily, whose router sees all tokens of a
# pass.
SUPPORTED = frozenset({
    "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA", "HRA", "IA3",
    "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "PVERA", "RANDLORA", "ROAD",
    "SHIRA", "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT",
})  # fmt: skip
"""The `peft_type` of each supported method."""

LORA_OPTIONS = frozenset({
    "alora_invocation_tokens", "alpha_pattern", "ensure_weight_tying", "exclude_modules", "fan_in_fan_out",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_bias", "lora_dropout",
    "modules_to_save", "monteclora_config", "r", "rank_pattern", "target_modules", "target_parameters",
    "trainable_token_indices", "use_dora", "use_rslora", "velora_config",
})  # fmt: skip
"""Supported options of LoRA; all others must have PEFT's default."""

# Other initializations change the base, which is the reference policy.
_INITS = (True, False, "gaussian", "orthogonal", "mica")
# Options that do not change what an adapter computes.
_NEUTRAL = frozenset(
    {"auto_mapping", "base_model_name_or_path", "bias", "inference_mode", "peft_type", "peft_version", "revision"}
    | {"runtime_config", "task_type"}
)
# Options that make PEFT import a module, or read a file elsewhere.
_REFERENCES = ("megatron_config", "prompt_tuning_init_state_dict_path")


def read_adapter_config(file: Path) -> dict[str, Any]:
    """Reads the configuration of an adapter, which may be untrusted, before PEFT uses it.

    Raises:
        ModelLoadError: It cannot be read, is of an unsupported method, or names a module that PEFT would import or a
            file that PEFT would read.
    """
    try:
        config = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelLoadError(f"{str(file)!r} cannot be read: {reason_of(error)}. Save the adapter again.") from error
    method = config.get("peft_type")
    # PEFT opens files named in the configuration of some other methods.
    if not (isinstance(method, str) and method in SUPPORTED):
        raise ModelLoadError(
            f"{str(file)!r} has peft_type={excerpt(method)}; expected one of {', '.join(sorted(SUPPORTED))}. Use an "
            "adapter of one of these methods."
        )
    for option in _REFERENCES:
        if config.get(option):
            raise ModelLoadError(
                f"{str(file)!r} sets {option}={excerpt(config[option])}, which refers to code or files "
                "elsewhere. Remove it if you trust the adapter and do not need it."
            )
    for option in ("base_model_name_or_path", "revision"):
        if not isinstance(config.get(option), (str, type(None))):
            raise ModelLoadError(
                f"{str(file)!r} has {option}={excerpt(config[option])}; expected a string or null. Save the adapter "
                "again, or correct it."
            )
    return config


def check_adapter(model: nn.Module) -> None:
    """Rejects an adapter with an unsupported method or option.

    Args:
        model: A language model, or PEFT's wrapper around one.

    Raises:
        ModelLoadError: The adapter is not supported; the message names its method or option.
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
        _check_config(name, model.peft_config[name])
    activated = [name for name in names if getattr(model.peft_config[name], "alora_invocation_tokens", None)]
    if activated and len(names) > 1:
        raise ModelLoadError(
            f"The adapters {names} are active at once, and {activated} among them are activated LoRA. Activate one "
            "adapter: model.set_adapter(name)."
        )
    if activated and getattr(model.get_output_embeddings(), "lora_variant", None):
        raise _rejected(activated[0], "LORA with alora_invocation_tokens", "adapts the output layer, lm_head, as well")


def _check_config(name: str, config: Any) -> None:
    """Rejects an unsupported method or option in the configuration of one adapter."""
    method = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning:
        raise _rejected(name, method, "puts virtual tokens before each prompt")
    if method not in SUPPORTED:
        raise _rejected(name, method, "does not equal plain PEFT, or was not compared with it")
    bias = getattr(config, "bias", "none")
    if bias != "none":
        option = f"{method} with bias={bias!r}"
        raise _rejected(name, option, "trains biases of the base, which is the reference policy")
    if method != "LORA":
        return
    if config.init_lora_weights not in _INITS:
        option = f"{method} with init_lora_weights={config.init_lora_weights!r}"
        raise _rejected(name, option, "changes the base, which is the reference policy, or what is loaded again")
    for field in fields(config):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name not in LORA_OPTIONS | _NEUTRAL and getattr(config, field.name) != default:
            option = f"{method} with {field.name}"
            raise _rejected(name, option, "does not equal plain PEFT, or was not compared with it")


def _rejected(name: str, method: str, reason: str) -> ModelLoadError:
    """The error for an unsupported adapter."""
    return ModelLoadError(
        f"The adapter {name!r} ({method}) is not supported: it {reason}. Use a method and options that the page on "
        f"models lists as equal to plain PEFT: {', '.join(sorted(SUPPORTED))}."
    )
