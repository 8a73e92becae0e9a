"""Compare every causal language model of the installed transformers with plain transformers: acting and learning.

python scripts/check_models.py --out scripts/results/models.json

For each architecture that `AutoModelForCausalLM` knows, a tiny random model is built in a process of its own, with a
plain LoRA and with an activated one. An agent plays, and its log-probabilities and gradients are compared with the
model's own forward pass on one unpadded sequence at a time. An architecture is equal, rejected with a reason, differs,
or is not built by transformers alone at this size. Results are written after each; those that are there are kept. The
table in docs/models.md is rendered from them by scripts/readme_tables.py.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import logging
import multiprocessing
import re
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft import LoraConfig
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llamagym import AutoModelForCausalLMWithValueHead, LlamaGymError
from llamagym.text.chat_template import invocation_tokens
from scripts.check_adapters import first_line, randomize
from tests.helpers.agents import WordAgent
from tests.helpers.plain import compare
from tests.helpers.tiny import tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 5e-4
TIMEOUT_S = 180
MEMORY_BYTES = 6 * 2**30
# Larger ones take too long to compare.
MOST_WEIGHTS = 100_000_000

# What configs call the sizes of a model; those that one does not have are left out.
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "embedding_size": 32,
    "emb_dim": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "decoder_ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "decoder_layers": 4,
    "encoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "max_seq_len": 512,
    "seq_length": 512,
    "sliding_window": 24,
    "window_size": 24,
    "attention_window_size": 24,
    "attention_chunk_size": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "query_pre_attn_scalar": 8,
    "is_decoder": True,
    "rotary_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "initializer_range": 0.2,
    "init_std": 0.2,
}
LEFT_OUT: tuple[tuple[str, ...], ...] = (
    (),
    ("head_dim",),
    ("num_key_value_heads",),
    ("head_dim", "num_key_value_heads"),
    ("num_heads", "head_dim"),
    ("num_experts", "num_local_experts", "num_experts_per_tok"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("num_hidden_layers", "head_dim", "num_key_value_heads"),
)
# Sizes of single architectures.
_SHARED = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 300,
    "hidden_size_per_layer_input": 8,
}
_NOTE = {
    "num_key_value_heads": 4,
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "shared_experts_intermediate_size": 16,
    "index_topk": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
}
_EXP = {
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "hc_lowrank": 8,
    "ple_embed_dim": 32,
    "ngram_vocab_size_base": 256,
    "split_ngram_parts": 1,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
MORE_SIZES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "cross_attn_k": 1,
        **{
            f"{part}_config": {name: value for name, value in SIZES.items() if name not in ("head_dim", "is_decoder")}
            for part in ("patcher", "encoder", "decoder", "global")
        },
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note": _NOTE,
    "dots3_note_text": _NOTE,
    "gemma3n_text": _SHARED,
    "gemma4": _SHARED,
    "gemma4_text": _SHARED,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "phi3": {"original_max_position_embeddings": 512},
    "phi4_multimodal": {"original_max_position_embeddings": 512},
    "qwen4_exp": _EXP,
    "qwen4_exp_text": _EXP,
    "reformer": {
        "attention_head_size": 8,
        "feed_forward_size": 64,
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
    },
    # Its heads' sizes are rounded up to 64 in all.
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "num_blocks": 4, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
}


def architectures() -> list[str]:
    """All model types that have a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_model(model_type: str) -> Any:
    """A tiny random model of a type, in float32, whose own forward pass runs.

    Sizes that do not go together in an architecture are left at its defaults, in the order of `LEFT_OUT`.
    """
    errors = []
    for left_out, shrinks_others in itertools.product(LEFT_OUT, (False, True)):
        sizes = {name: value for name, value in SIZES.items() if name not in left_out}
        try:
            model = built(model_type, {**sizes, **MORE_SIZES.get(model_type, {})}, shrinks_others)
            with torch.no_grad():
                model(input_ids=torch.arange(5, 25)[None])
            return model
        except Exception as error:  # of any architecture's own code
            errors.append(error)
    raise errors[0]


def built(model_type: str, sizes: dict[str, Any], shrinks_others: bool) -> Any:
    """A random model of a type and of these sizes, as far as its config has them.

    Args:
        model_type: As transformers names it.
        sizes: By the names that configs use.
        shrinks_others: Whether they also hold for the other parts of a composite model, such as its vision tower.
    """
    tokenizer = tiny_tokenizer("llama")
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": tokenizer.bos_token_id}
    tokens |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    kind = CONFIG_MAPPING[model_type]
    usual = kind()
    text = usual.get_text_config(decoder=True)
    config = sized(type(text), {**sizes, **tokens})
    if text is not usual:
        # A composite model, of which the language model alone is used.
        of_text = next(name for name, part in vars(usual).items() if part is text)
        others = {
            name: sized(type(part), {**sizes, **tokens})
            for name, part in vars(usual).items()
            if isinstance(part, transformers.PreTrainedConfig) and part is not text
        }
        config = kind(**{**(others if shrinks_others else {}), of_text: config})
    with torch.device("meta"):
        weights = sum(w.numel() for w in transformers.AutoModelForCausalLM.from_config(config).parameters())
    if weights > MOST_WEIGHTS:
        raise ValueError(f"the smallest model has {weights:,} weights, at most {MOST_WEIGHTS:,} are compared")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.eval()


def sized(kind: Any, sizes: dict[str, Any]) -> Any:
    """A config of a class with those of the sizes that it knows."""
    known = {*vars(kind()), *getattr(kind, "attribute_map", {})}
    return kind(**{name: value for name, value in sizes.items() if name in known})


def check(model_type: str) -> dict[str, Any]:
    """The result for one model type."""
    try:
        model = tiny_model(model_type)
    except Exception as error:  # of any architecture's own code
        return {"result": "not built", "reason": first_line(error)}
    found: dict[str, Any] = {"class": type(model).__name__}
    for name, activated in (("plain", False), ("activated", True)):
        found[name] = compared(copy.deepcopy(model), activated)
        if found["plain"]["result"] != "equal":
            break
    results = [part["result"] for part in found.values() if isinstance(part, dict)]
    worst = next(result for result in ("error", "differs", "rejected", "equal") if result in results)
    return {**found, "result": worst}


def compared(model: Any, activated: bool) -> dict[str, Any]:
    """The result with a plain LoRA on a whole conversation, or with an activated one on single turns."""
    tokenizer = tiny_tokenizer("llama")
    # Routers return more than a tensor in some architectures, which LoRA does not expect.
    head = model.get_output_embeddings()
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not head]
    layers = [name for name in linear if not re.search(r"router|\bgate\b", name)]
    if activated:
        # PEFT's activated LoRA is one of plain linear layers, not of experts that share a tensor.
        layers = [name for name in layers if re.search(r"attn|attention", name)] or layers
    if "mamba" in model.config.model_type:
        # PEFT does not adapt what these layers compute themselves.
        layers = [name for name in layers if not name.endswith("out_proj")]
    lora = LoraConfig(
        r=4,
        target_modules=layers[len(layers) // 2 :] or "all-linear",
        task_type="CAUSAL_LM",
        alora_invocation_tokens=invocation_tokens(tokenizer) if activated else None,
    )
    try:
        wrapped = AutoModelForCausalLMWithValueHead.from_pretrained(model, lora)
        randomize(wrapped.pretrained_model)
        context = "turn" if activated else "episode"
        agent = WordAgent(wrapped, tokenizer, None, {"max_new_tokens": 6}, context=context, seed=0)
    except LlamaGymError as error:
        return {"result": "rejected", "reason": first_line(error)}
    except Exception as error:
        return {"result": "error", "reason": first_line(error)}
    try:
        numbers = vars(compare(agent, steps=2, envs=2))
    except Exception as error:
        return {"result": "error", "reason": first_line(error)}
    is_equal = all(number < TOLERANCE for number in numbers.values())
    rounded = {key: float(f"{number:.2g}") for key, number in numbers.items()}
    return {"result": "equal" if is_equal else "differs", "max_length": agent.policy.max_length, **rounded}


def in_a_process(model_type: str) -> dict[str, Any]:
    """The result for one model type, computed where neither memory nor time can run away."""
    # A fork has everything imported already.
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=report, args=(model_type, writer))
    process.start()
    writer.close()
    try:
        if not reader.poll(TIMEOUT_S):
            return {"result": "error", "reason": f"took more than {TIMEOUT_S} s"}
        result: dict[str, Any] = reader.recv()
        return result
    except EOFError:
        return {"result": "error", "reason": "the process ended without a result"}
    finally:
        process.kill()
        process.join()


def report(model_type: str, writer: Any) -> None:
    """Send the result for one model type."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        writer.send(check(model_type))
    except Exception as error:  # of any architecture's own code
        writer.send({"result": "error", "reason": first_line(error)})


def main() -> None:
    """Run all architectures that have no result yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "scripts" / "results" / "models.json")
    parser.add_argument("--only", default="", help="run model types whose name contains this, again if need be")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    versions = {package.__name__: package.__version__ for package in (transformers, peft, torch)}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
    found = known.get("architectures", {}) if known.get("versions") == versions else {}
    for model_type in architectures():
        if given.only not in model_type or (model_type in found and not given.only):
            continue
        found[model_type] = in_a_process(model_type)
        print(model_type, found[model_type], flush=True)
        whole = {"versions": versions, "all": architectures(), "architectures": dict(sorted(found.items()))}
        given.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
