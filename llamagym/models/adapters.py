"""Which of PEFT's methods and options act and learn here as they do in plain PEFT; all others are rejected.

The engine calls the layers of a model itself, with positions, masks and caches of its own. What PEFT puts into these
layers acts all the same. What it does outside of them (virtual tokens before a prompt, a forward pass of its own) would
be left out silently. `scripts/check_adapters.py` compares each method and option with plain PEFT.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import ModelLoadError

SUPPORTED = frozenset(
    {
        "LORA",
    }
)
"""Methods that were compared with plain PEFT, by their `peft_type`."""


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
    for name in model.active_adapters:
        _check(name, model.peft_config[name])


def _check(name: str, config: Any) -> None:
    method = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning:
        raise _rejected(name, method, "puts virtual tokens before each prompt, which is not supported")
    if method not in SUPPORTED:
        raise _rejected(name, method, "was not compared with plain PEFT")
    if (bias := getattr(config, "bias", "none")) != "none":
        raise _rejected(
            name, f"{method} with bias={bias!r}", "trains biases of the base, which then serves as no reference"
        )


def _rejected(name: str, method: str, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"The adapter {name!r} ({method}) {reason}. Use LoraConfig or another of {sorted(SUPPORTED)}; the page on "
        "models lists their options."
    )
