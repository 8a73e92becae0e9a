"""Which of PEFT's methods and options act and learn here as they do in plain PEFT; all others are rejected.

The engine calls the layers of a model itself, with positions, masks and caches of its own. What PEFT puts into these
layers acts all the same. What it does outside of them (virtual tokens before a prompt, a forward pass of its own) would
be left out silently. `scripts/check_adapters.py` compares each method and option with plain PEFT.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ModelLoadError, excerpt, reason_of

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


# Options of adapters by which PEFT imports a module or reads a file elsewhere.
_NAMES_CODE = ("megatron_config", "prompt_tuning_init_state_dict_path")


def read_adapter_config(file: Path) -> dict[str, Any]:
    """Reads an adapter's configuration, which may come from somebody else, before PEFT acts on it.

    Raises:
        ModelLoadError: It cannot be read, is of an unsupported method, or names a module that PEFT would import or a
            file that it would read.
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
    for option in _NAMES_CODE:
        if config.get(option):
            raise ModelLoadError(
                f"{str(file)!r} sets {option}={excerpt(config[option])}, by which an adapter names code or files "
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
