"""The registry of language models: an entry for each model, and a fallback for each family.

An entry defines, before weights are read, which modules get LoRA, how to sample while training (`GenerationConfig`),
which dtype to use on a device, and how much memory the weights need. A model that is not registered gets the fallback
of its family, with a warning.

By default LoRA adapts the attention's query and output projections and the MLP's down-projection in the last half of
the layers, of which an agent that sees one turn keeps half (see `lora`). Autograd stops at the first adapted layer, so
the frozen layers below cost no backward pass and give the same output in the rollout and in every epoch of an update.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import transformers

from ..errors import ConfigError, did_you_mean
from ..options import Options
from .hardware import precision_on

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationConfig(Options):
    """Options of sampling replies.

    Attributes:
        max_new_tokens: Maximum length of a free-text reply, in tokens.
        do_sample: False takes the most likely token or choice, which does not explore and is for inference.
        temperature: Divisor of logits (of choices: scores), in sampling and in training.
        top_p: Nucleus sampling in inference; off while learning, since a truncated distribution biases the ratio.
        top_k: Top-k sampling in inference; also off while learning. 0 switches it off.
        max_draft_tokens: Maximum number of tokens of free text that are guessed and verified in one pass. This changes
            the speed, not the distribution (see `policy.drafts`). 0 switches it off.
    """

    max_new_tokens: int = 32
    do_sample: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_draft_tokens: int = 16

    @property
    def draft_limit(self) -> int:
        """Maximum number of tokens of a draft: a reply's last token is sampled in any case."""
        return min(self.max_draft_tokens, self.max_new_tokens - 1)

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        super().__post_init__()
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens} allows no reply. Pass at least 1.")
        if self.temperature <= 0:
            raise ConfigError(
                f"temperature={self.temperature} is not positive. Pass do_sample=False for the most likely reply."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} is outside (0, 1]. 1.0 switches it off.")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} is negative. 0 switches it off.")
        if self.max_draft_tokens < 0:
            raise ConfigError(f"max_draft_tokens={self.max_draft_tokens} is negative. 0 switches it off.")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any] | Options) -> GenerationConfig:
        """Reads options, with or without a `generate/` prefix.

        >>> GenerationConfig.from_dict({"generate/max_new_tokens": 8}).max_new_tokens
        8
        """
        if isinstance(options, Mapping):
            options = {str(key).removeprefix("generate/"): value for key, value in options.items()}
        return super().from_dict(options)


BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32

EMBEDDED_NAME = "smollm2-135m"
"""The default model, whose weights come from a package and need no model hub."""

PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'Instruct: ' + message['content'] + '\n' }}"
    "{% else %}{{ 'Output:\n' + message['content'] + eos_token + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Output:\n' }}{% endif %}"
)
"""The chat template for models that have none: the question-and-answer format of phi-2's model card.

The reply stands on its own line after `Output:`, not after a space as on the card. Prompt and reply then meet at a
token boundary, and a reply is rendered exactly as it was sampled. It ends with the end-of-text token.
"""

# bitsandbytes: int8 keeps one fp32 scale per row (negligible); nf4 keeps one fp32 scale per 64 weights.
_BYTES_PER_WEIGHT = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "8bit": 1.0, "4bit": 0.5 + 4 / 64}


@dataclass(frozen=True)
class ModelEntry:
    """One model, or the fallback for one family of models.

    Attributes:
        name: The short name, unique in the table.
        hub_id: The repository on the model hub; None for a family's fallback.
        family: One of `FAMILIES`, or "unknown".
        lora_target_modules: Names of the adapted modules, all present in every adapted layer; "all-linear" where
            the architecture is unknown.
        lora_layer_fraction: The fraction of the layers, counted from the last, that get LoRA; in (0, 1].
        lora_r: Rank of LoRA.
        lora_alpha: Numerator of LoRA's scale, `lora_alpha / lora_r`.
        generation: Sampling options while training; top-p and top-k are off, since both would bias the ratio of new to
            old probabilities.
        fp16_safe: Whether the activations stay within float16's range.
        parameter_count: Number of weights, tied ones counted once; None where unknown.
        template_notes: Peculiarities of the chat template.
        aliases: Other names, e.g. older spellings of `hub_id`.
    """

    name: str
    hub_id: str | None
    family: str
    lora_target_modules: tuple[str, ...] | str = ("q_proj", "o_proj", "down_proj")
    lora_layer_fraction: float = 0.5
    lora_r: int = 16
    lora_alpha: int = 32
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    fp16_safe: bool = True
    parameter_count: int | None = None
    template_notes: str = ""
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Rejects a fraction of layers outside (0, 1]."""
        fraction = self.lora_layer_fraction
        if not isinstance(fraction, int | float) or not 0.0 < fraction <= 1.0:
            raise ConfigError(
                f"lora_layer_fraction of {self.name!r} is {fraction!r}; expected a fraction in (0, 1]. "
                "Use 1.0 to adapt every layer."
            )

    def dtype_for(self, device: torch.device | str) -> torch.dtype:
        """The dtype to load the model in on `device`.

        CPU: bfloat16 if the processor multiplies it faster than float32 (by AMX, or by AVX512-BF16 on AMD and older
        Intel processors), else float32. CUDA: bfloat16 if native, else float16. MPS: float32 up to a billion
        parameters, float16 above. Models whose activations exceed float16, and all other devices: float32.

        >>> lookup("microsoft/phi-2").dtype_for("mps")
        torch.float16
        """
        precision = precision_on(device)
        if precision.has_bfloat16():
            return BF16
        if self.fp16_safe and (self.parameter_count or 0) > precision.float16_above:
            return FP16
        return FP32

    def memory_gib(self, dtype: torch.dtype = FP32, quantization: str | None = None) -> float:
        """Memory of the weights alone in GiB, without activations, KV caches and optimizer states.

        With quantization it is a lower bound, since embeddings keep 16 bits.

        Args:
            dtype: float32, bfloat16 or float16; ignored with quantization.
            quantization: "8bit", "4bit" or None.

        Raises:
            ConfigError: The entry has no parameter count, or `dtype` or `quantization` is not one of the above.

        >>> round(lookup("TinyLlama/TinyLlama-1.1B-Chat-v1.0").memory_gib(torch.bfloat16), 2)
        2.05
        """
        if self.parameter_count is None:
            raise ConfigError(
                f"{self.name!r} has no parameter_count, so its memory cannot be estimated. "
                "Register an entry with parameter_count set."
            )
        storage = quantization or str(dtype).removeprefix("torch.")
        if storage not in _BYTES_PER_WEIGHT:
            raise ConfigError(f"no memory estimate for {storage!r}. {did_you_mean(storage, _BYTES_PER_WEIGHT)}")
        return self.parameter_count * _BYTES_PER_WEIGHT[storage] / 2**30


def _family(family: str, template_notes: str, **options: Any) -> ModelEntry:
    """The fallback entry of a family."""
    return ModelEntry(family, None, family, template_notes=template_notes, **options)


_CHATML = "ChatML; a conversation without a system prompt gets a default one."
_FAMILIES = {
    entry.family: entry
    for entry in (
        _family("llama", "The template varies: Zephyr, Llama-2 or Llama-3 style; the last has several end tokens."),
        _family("phi", "No template: the plain one is used.", lora_target_modules=("q_proj", "dense", "fc2")),
        _family(
            "phi3", "Several end tokens; closes a conversation with one.", lora_target_modules=("o_proj", "down_proj")
        ),
        _family("smollm", _CHATML),
        _family("qwen2", _CHATML),
        _family("qwen3", "ChatML; drops the thinking of earlier turns."),
        _family("gemma", "Rejects a system role, and two consecutive messages of one role.", fp16_safe=False),
    )
}
FAMILIES = tuple(_FAMILIES)
"""The families with a fallback entry."""

_FAMILY_OF_MODEL_TYPE = {
    **{name: name for name in ("llama", "phi", "phi3", "qwen2", "qwen3", "gemma")},
    "smollm3": "smollm",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
}


def _model(hub_id: str, family: str, parameter_count: int, name: str | None = None) -> ModelEntry:
    """The entry of a model, with the defaults of its family."""
    return replace(_FAMILIES[family], name=name or hub_id, hub_id=hub_id, parameter_count=parameter_count)


_MODELS = (
    _model("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm", 134_515_008, name=EMBEDDED_NAME),
    _model("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "llama", 1_100_048_384),
    _model("microsoft/phi-2", "phi", 2_779_683_840),
    _model("microsoft/phi-3-mini-4k-instruct", "phi3", 3_821_079_552),
    _model("HuggingFaceTB/SmolLM-1.7B-Instruct", "smollm", 1_711_376_384),
    _model("Qwen/Qwen2-1.5B-Instruct", "qwen2", 1_543_714_304),
    _model("Qwen/Qwen2.5-0.5B-Instruct", "qwen2", 494_032_768),
)


def _keys(entry: ModelEntry) -> set[str]:
    """The names that find `entry` in `lookup`, in lower case: like the hub, it ignores case."""
    return {key.casefold() for key in (entry.name, entry.hub_id, *entry.aliases) if key}


# All registered models, by the names that find them.
ENTRIES_BY_KEY: dict[str, ModelEntry] = {key: entry for entry in _MODELS for key in _keys(entry)}


def entries() -> tuple[ModelEntry, ...]:
    """All registered models in order of registration, without the fallbacks of families."""
    return tuple(dict.fromkeys(ENTRIES_BY_KEY.values()))


def lookup(name: str) -> ModelEntry | None:
    """The entry of `name` (short name, hub id or alias, in any case), or None if it is not registered.

    >>> lookup("smollm2-135m") is lookup("HuggingFaceTB/SmolLM2-135M-Instruct")
    True
    """
    return ENTRIES_BY_KEY.get(name.casefold())


def register(entry: ModelEntry, *, replace: bool = False) -> None:
    """Adds a model to the registry of this process.

    Args:
        entry: The model, which `lookup` finds by its name, hub id and aliases.
        replace: Whether to replace the entry with the same name.

    Raises:
        ConfigError: `entry` is not a ModelEntry, or one of its names belongs to an entry that may not be replaced.
    """
    if not isinstance(entry, ModelEntry):
        raise ConfigError(f"cannot register {entry!r}: expected a ModelEntry, received a {type(entry).__name__}.")
    owners = {ENTRIES_BY_KEY[key] for key in _keys(entry) if key in ENTRIES_BY_KEY}
    for owner in owners:
        if not replace or owner.name.casefold() != entry.name.casefold():
            raise ConfigError(
                f"cannot register {entry.name!r}: one of its names {sorted(_keys(entry))} belongs to {owner.name!r}. "
                "Choose other names, or pass replace=True with that entry's own name."
            )
    for owner in owners:
        for key in _keys(owner):
            del ENTRIES_BY_KEY[key]
    ENTRIES_BY_KEY.update(dict.fromkeys(_keys(entry), entry))


def lookup_by_architecture(config: PretrainedConfig) -> ModelEntry:
    """The entry for a model that is not registered: its family's fallback, or a general one. Logs a warning.

    Args:
        config: The model's configuration. Its `model_type` determines the family; SmolLM has Llama's architecture and
            is recognized by its name.
    """
    text_config = config.get_text_config()
    name = config.name_or_path or f"a {config.model_type} model"
    family = _FAMILY_OF_MODEL_TYPE.get(text_config.model_type)
    if family == "llama" and "smollm" in name.casefold():
        family = "smollm"
    if family is None:
        logger.warning(
            "%s has the unknown architecture %r: LoRA adapts every linear layer. Choose the modules with "
            "llamagym.models.registry.register().",
            name,
            config.model_type,
        )
        entry = ModelEntry(name, None, "unknown", "all-linear", lora_layer_fraction=1.0, fp16_safe=False)
    else:
        logger.warning(
            "%s is not in the registry: using the defaults of the family %r (architecture %r).",
            name,
            family,
            config.model_type,
        )
        entry = replace(_FAMILIES[family], name=name)
    return replace(entry, parameter_count=_count_parameters(text_config))


def _count_parameters(config: PretrainedConfig) -> int | None:
    """The number of weights, from a model on the meta device; None if it cannot be built, which loading reports."""
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception:  # transformers has no such class, or a value in `config` is invalid
        return None
    count: int = sum(parameter.numel() for parameter in model.parameters())
    return count


def lora_config(
    entry: ModelEntry, model_config: PretrainedConfig, invocation_tokens: Sequence[int] | None = None
) -> LoraConfig:
    """The LoRA configuration of an entry. Dropout is 0, since it would make new and old policy differ.

    Args:
        entry: The registry's entry.
        model_config: Configuration of the model. The last `lora_layer_fraction` of its layers, rounded, at least one,
            are adapted.
        invocation_tokens: Tokens at the start of a reply, from which on an activated LoRA acts; None for a plain LoRA.

    >>> from transformers import LlamaConfig
    >>> lora_config(lookup("smollm2-135m"), LlamaConfig(num_hidden_layers=30)).layers_to_transform[0]
    15
    """
    from peft import LoraConfig  # takes more than a second to import

    layers = None
    if entry.lora_layer_fraction < 1.0:
        total = model_config.get_text_config().num_hidden_layers
        adapted = max(1, round(entry.lora_layer_fraction * total))
        layers = list(range(total - adapted, total))
    targets = entry.lora_target_modules
    return LoraConfig(
        r=entry.lora_r,
        lora_alpha=entry.lora_alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        layers_to_transform=layers,
        task_type="CAUSAL_LM",
        alora_invocation_tokens=None if invocation_tokens is None else list(invocation_tokens),
    )
