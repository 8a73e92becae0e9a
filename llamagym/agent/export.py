"""A trained agent as a folder that plain transformers and PEFT load: weights, tokenizer, model card, options."""

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
    """Write an agent's files into a folder.

    Args:
        agent: The agent.
        actor: Its actor.
        folder: An empty folder.
        options: The agent's constructor options as JSON holds them.
        environment: Name of its environment, for the card.
        results: Measurements by name, for the card.
        merged: Whether to merge a LoRA into the weights and write these.

    Raises:
        ConfigError: `merged` is True and there is no adapter, or one that cannot be merged.
    """
    policy, tokenizer = actor.policy, actor.tokenizer
    model = _merged(policy.model) if merged else policy.model
    pretrained: Any = model.pretrained_model
    model.write_files(folder)
    tokenizer.save_pretrained(str(folder))
    state = {"options": options, **choices_record(policy), "rng": policy.rng.get_state()}
    dtype = str(pretrained.dtype).removeprefix("torch.")
    write_state(folder, STATE, {**state, "class": type(agent).__name__, "dtype": dtype, "device": policy.device.type})
    card = Card(
        type(agent).__name__,
        str(pretrained.active_peft_config.base_model_name_or_path) if model.is_peft_model else "",
        dtype,
        agent.get_system_prompt(),
        options["response_prefix"],
        policy.generation,
        ends := end_ids(pretrained, tokenizer),
        actor.chat_template.closing_id(ends),
        [(str(tokenizer.decode(list(ids))), ids) for ids in policy.offered],
        policy.calibration.prior if policy.calibration else {},
        policy.calibration.deviation if policy.calibration else 1.0,
        type(agent).get_action_choices is not TextInterface.get_action_choices,
        environment,
        {name: value for name, value in options.items() if value not in (None, "", {})},
        results or {},
    )
    (folder / "README.md").write_text(card.text(), encoding="utf-8")


def read_export(
    folder: Path, device: str | torch.device, dtype: str | torch.dtype, model: AutoModelForCausalLMWithValueHead | None
) -> tuple[AutoModelForCausalLMWithValueHead, PreTrainedTokenizerBase, dict[str, Any]]:
    """Read what `write_export` wrote into a folder of this kind.

    Args:
        folder: The folder.
        device: As for `load_model_and_tokenizer`.
        dtype: As for `load_model_and_tokenizer`, but "auto" is what it was saved in, on a device of the same kind.
        model: The model, where it cannot be loaded by its base's name.

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
    if model is not None:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        return model, tokenizer, state
    if dtype == "auto" and resolve_device(device).type == state.get("device"):
        dtype = str(state["dtype"])
    return *load_model_and_tokenizer(folder, device, dtype)[:2], state


def _merged(model: AutoModelForCausalLMWithValueHead) -> AutoModelForCausalLMWithValueHead:
    """A copy whose LoRA is part of its weights."""
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
