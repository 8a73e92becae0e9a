"""Saves an agent as a folder that plain transformers and PEFT load: weights, tokenizer, options, model card."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from ..errors import CheckpointError, ConfigError
from ..models.loading import load_model_and_tokenizer, resolve_device
from ..models.lora import is_activated
from ..models.value_head import AutoModelForCausalLMWithValueHead
from ..policy.saved import choices_record
from ..saving.atomic import verify
from ..saving.paths import require_files_inside
from ..saving.state_files import read_state, write_state
from ..text.chat_template import end_ids
from .actor import Actor
from .model_card import Card
from .text_interface import TextInterface

KIND = "agent"
STATE = "agent"


def write_export(
    agent: TextInterface,
    actor: Actor,
    folder: Path,
    options: Mapping[str, Any],
    environment: str = "",
    results: Mapping[str, Any] | None = None,
    merged: bool = False,
) -> None:
    """Writes an agent's files into a folder.

    Args:
        agent: The agent.
        actor: The agent's actor.
        folder: An empty folder.
        options: The agent's constructor options as JSON values.
        environment: Name of the environment, for the card.
        results: Measurements by name, for the card.
        merged: Whether to merge a LoRA into the weights and write these.

    Raises:
        ConfigError: `merged` is True, and there is no adapter that can be merged.
    """
    policy = actor.policy
    tokenizer = actor.tokenizer
    model = _merged(policy.model) if merged else policy.model
    pretrained: Any = model.pretrained_model
    model.write_files(folder)
    tokenizer.save_pretrained(str(folder))
    dtype = str(pretrained.dtype).removeprefix("torch.")
    state = {
        "options": options,
        **choices_record(policy),
        "rng": policy.rng.get_state(),
        "class": type(agent).__name__,
        "dtype": dtype,
        "device": policy.device.type,
    }
    write_state(folder, STATE, state)
    ends = end_ids(pretrained, tokenizer)
    calibration = policy.calibration
    card = Card(
        agent=type(agent).__name__,
        base=str(pretrained.active_peft_config.base_model_name_or_path) if model.is_peft_model else "",
        dtype=dtype,
        system_prompt=agent.get_system_prompt(),
        prefix=options["response_prefix"],
        generation=policy.generation,
        end_ids=ends,
        closing_id=actor.chat_template.closing_id(ends),
        choices=[(str(tokenizer.decode(list(ids))), ids) for ids in policy.offered],
        prior=calibration.prior if calibration else {},
        deviation=calibration.deviation if calibration else 1.0,
        offers_choices=type(agent).get_action_choices is not TextInterface.get_action_choices,
        environment=environment,
        settings={name: value for name, value in options.items() if value not in (None, "", {})},
        results=results or {},
    )
    (folder / "README.md").write_text(card.text(), encoding="utf-8")


def read_export(
    folder: Path, device: str | torch.device, dtype: str | torch.dtype, model: AutoModelForCausalLMWithValueHead | None
) -> tuple[AutoModelForCausalLMWithValueHead, PreTrainedTokenizerBase, dict[str, Any]]:
    """Reads a folder that `write_export` wrote.

    Args:
        folder: The folder.
        device: As for `load_model_and_tokenizer`.
        dtype: As for `load_model_and_tokenizer`, but "auto" is the saved dtype, on a device of the same type.
        model: The model, if it cannot be loaded by its base's name.

    Returns:
        Model, tokenizer, and the agent's state.

    Raises:
        CheckpointError: The folder is damaged, something else, or of a later version.
    """
    verify(folder, KIND)
    require_files_inside(folder)
    state = read_state(folder, STATE)
    names = {"model", "tokenizer", "device", "sft_warm_start"} & state["options"].keys()
    if names:
        raise CheckpointError(f"{str(folder / STATE)!r} has options that are never saved: {sorted(names)}.")
    tokenizer: Any
    if model is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        return model, tokenizer, state
    if dtype == "auto" and resolve_device(device).type == state.get("device"):
        dtype = str(state["dtype"])
    loaded, tokenizer, _ = load_model_and_tokenizer(folder, device, dtype)
    return loaded, tokenizer, state


def _merged(model: AutoModelForCausalLMWithValueHead) -> AutoModelForCausalLMWithValueHead:
    """Returns a copy of a model whose LoRA is merged into its weights.

    Raises:
        ConfigError: There is no adapter that can be merged.
    """
    if not model.is_peft_model:
        raise ConfigError("merged=True, but there is no adapter to merge: all weights are the model's own. Drop it.")
    if is_activated(model.pretrained_model) or getattr(model.pretrained_model, "is_quantized", False):
        raise ConfigError(
            "merged=True, but this adapter cannot be merged: an activated LoRA changes replies and leaves what comes "
            "before them alone, and a quantized base would be rounded again. Drop it, and load the adapter with PEFT."
        )
    copied: Any = deepcopy(model)
    copied.pretrained_model = copied.pretrained_model.merge_and_unload()
    result: AutoModelForCausalLMWithValueHead = copied
    return result
