"""Writes a LoRA as a GGUF file, which llama.cpp applies to the GGUF file of its base.

An activated LoRA is written as one: the file names its invocation tokens, and llama.cpp applies it from their last
occurrence on. So in both engines, what comes before a reply does not depend on the adapter.

Shapes: r rank, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .peft_internals import acting_on_every_token, layers_with_variants, lora_layers, low_rank_of
from .value_head import AutoModelForCausalLMWithValueHead

# The files of a folder that `llama-server` runs, and the name by which it knows the model.
GGUF_ADAPTER = "adapter.gguf"
GGUF_BASE = "base.gguf"
GGUF_PRESET = "server.ini"
GGUF_MODEL = "agent"

# GGUF architecture by `model_type`.
_ARCHITECTURES = {
    "llama": "LLAMA",
    "smollm3": "SMOLLM3",
    "phi": "PHI2",
    "phi3": "PHI3",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "gemma": "GEMMA",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
}
# Architectures whose queries and keys GGUF stores with the two numbers that are rotated together side by side.
_INTERLEAVED = ("LLAMA", "SMOLLM3")


def write_gguf_adapter(model: AutoModelForCausalLMWithValueHead, path: Path) -> None:
    """Writes the adapter of a model as a GGUF file.

    Args:
        model: A model with a LoRA on linear layers, plain or activated.
        path: File to write.

    Raises:
        ConfigError: The model has no adapter, one that GGUF cannot hold, or an unknown architecture, or the package
            `gguf` is missing.
    """
    if not model.is_peft_model:
        raise ConfigError(
            "the model has no adapter: all weights are its own. Write them by save_pretrained, and convert that folder "
            "with convert_hf_to_gguf.py, which is part of llama.cpp."
        )
    pretrained: Any = model.pretrained_model
    lm: Any = pretrained.get_base_model()
    config = lm.config.get_text_config()
    _reject_other_weights(pretrained)
    architecture = _ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise ConfigError(
            f"adapters of the architecture {config.model_type!r} cannot be written as GGUF, only those of "
            f"{', '.join(_ARCHITECTURES)}. Write this one by save_pretrained, and convert it with llama.cpp's "
            "convert_lora_to_gguf.py."
        )
    tensors = _tensors(lm, config, architecture)
    invocation_tokens = getattr(pretrained.active_peft_config, "alora_invocation_tokens", None)
    _write(path, architecture, tensors, invocation_tokens)


def _reject_other_weights(pretrained: Any) -> None:
    """Rejects a model with trained weights beside LoRA's, which a file of an adapter would lack."""
    config = pretrained.active_peft_config
    for option in ("modules_to_save", "trainable_token_indices"):
        if getattr(config, option, None):
            raise ConfigError(
                f"{option}={getattr(config, option)} was trained beside the LoRA, and a GGUF adapter cannot hold it. "
                "Train without it, or keep the adapter in PEFT's format, by save_pretrained."
            )


def _tensors(lm: Any, config: Any, architecture: str) -> dict[str, Tensor]:
    """A (r, I) and B (O, r) of each adapted layer, float32, by the names that GGUF gives them; B holds the scale."""
    gguf = _import_gguf()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], config.num_hidden_layers)
    adapted = set(lora_layers(lm))
    tensors: dict[str, Tensor] = {}
    with acting_on_every_token(layers_with_variants(lm)):
        for name, layer in lm.named_modules():
            if layer not in adapted:
                continue
            low_rank = low_rank_of(layer)
            gguf_name = names.get_name(name)
            if low_rank is None or gguf_name is None:
                raise ConfigError(
                    f"the adapter of {name!r} cannot be written as GGUF, which holds only a LoRA on linear layers: one "
                    "active adapter, not merged, without bias or DoRA, in evaluation mode. Keep the adapter in PEFT's "
                    "format, by save_pretrained."
                )
            if gguf_name == "output" and config.tie_word_embeddings:
                raise ConfigError(
                    f"the adapter of {name!r} cannot be written as GGUF: this model's output layer is its "
                    "embedding, and llama.cpp would adapt neither. Leave it out of target_modules."
                )
            for down, up, scale in low_rank:
                up = scale * up.detach().float().cpu()
                if architecture in _INTERLEAVED:
                    up = _interleaved(name, up, config)
                tensors[f"{gguf_name}.weight.lora_a"] = down.detach().float().cpu()
                tensors[f"{gguf_name}.weight.lora_b"] = up
    if not tensors:
        raise ConfigError("no LoRA of this model is active, so there is nothing to write. Enable its adapter first.")
    return tensors


def _interleaved(name: str, up: Tensor, config: Any) -> Tensor:
    """B (O, r) of a layer with its rows in GGUF's order, which differs for queries and keys.

    transformers rotates the first half of a head's numbers together with the second half, GGUF each pair of neighbors.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.rpartition(".")[2])
    if heads is None:
        return up
    rank = up.shape[1]
    return up.reshape(heads, 2, -1, rank).transpose(1, 2).reshape(-1, rank)


def _write(path: Path, architecture: str, tensors: dict[str, Tensor], invocation_tokens: list[int] | None) -> None:
    gguf = _import_gguf()
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[architecture]])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    # Alpha 0: llama.cpp applies no further scale, since B holds it.
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)
    if invocation_tokens is not None:
        # The key of llama.cpp, which older versions of the package lack.
        key = "adapter.alora.invocation_tokens"
        writer.add_key_value(key, list(invocation_tokens), gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.to(torch.float32).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _import_gguf() -> Any:
    if find_spec("gguf") is None:
        raise ConfigError("writing GGUF needs the package 'gguf'. Install it: pip install gguf")
    import gguf

    return gguf
