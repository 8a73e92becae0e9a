"""Compare every method and option of the installed PEFT with plain PEFT: acting, learning, saving and loading.

python scripts/check_adapters.py --out scripts/results/adapters.json

Each case puts an adapter with random weights on a tiny random model. An agent plays, and its log-probabilities and
gradients are compared with PEFT's own forward pass on one unpadded sequence at a time. Then the agent is saved and
loaded, and plain PEFT loads the same folder. A case is equal, rejected with a reason, or differs. The table in
docs/models.md is rendered from the result by scripts/readme_tables.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llamagym import AutoModelForCausalLMWithValueHead, LlamaGymError
from llamagym.text.chat_template import invocation_tokens
from tests.helpers.agents import WordAgent
from tests.helpers.plain import compare, plain_logits, reference_error, trained_weights
from tests.helpers.tiny import tiny_base_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent
# Log-probabilities of the tiny models in float32, and gradients relative to their norm.
TOLERANCE = 5e-4
LINEAR = ["q_proj", "o_proj", "down_proj"]
SEED = 0
# Among the tokens of every prompt of the tiny tokenizer.
TOKEN_IDS = list(range(40, 90))

# Options that a method needs beside its targets, or instead of them.
METHODS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 100, "target_modules": LINEAR},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
    "BOFT": {"target_modules": LINEAR, "boft_block_size": 4},
    "C3A": {"target_modules": LINEAR, "block_size": 8},
    "CARTRIDGE": {"num_virtual_tokens": 4},
    "CPT": {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]},
    "FOURIERFT": {"target_modules": LINEAR, "n_frequency": 50},
    "IA3": {"target_modules": LINEAR, "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm", "post_attention_layernorm"]},
    "MISS": {"target_modules": LINEAR, "r": 4},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 4, "num_tasks": 2},
    "OFT": {"target_modules": LINEAR, "oft_block_size": 4},
    "PREFIX_TUNING": {"num_virtual_tokens": 4},
    "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "P_TUNING": {"num_virtual_tokens": 4},
    "ROAD": {"target_modules": LINEAR, "group_size": 4},
    "SHIRA": {"target_modules": LINEAR, "r": 4},
    "TRAINABLE_TOKENS": {"token_indices": TOKEN_IDS, "target_modules": ["embed_tokens"]},
    "VBLORA": {"target_modules": LINEAR, "vector_length": 4, "num_vectors": 16, "topk": 2},
    "WAVEFT": {"target_modules": LINEAR, "n_frequency": 50},
    "XLORA": {"hidden_size": 32, "adapters": {}},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "alora_invocation_tokens": {"alora_invocation_tokens": None},
    "alora_invocation_tokens, lm_head": {"alora_invocation_tokens": None, "target_modules": ["o_proj", "lm_head"]},
    "alora_invocation_tokens, modules_to_save": {"alora_invocation_tokens": None, "modules_to_save": ["lm_head"]},
    "alora_invocation_tokens, embed_tokens": {
        "alora_invocation_tokens": None,
        "target_modules": ["embed_tokens", "o_proj"],
    },
    "target_modules='all-linear'": {"target_modules": "all-linear"},
    "target_modules=['embed_tokens']": {"target_modules": ["embed_tokens", "o_proj"]},
    "target_modules=['lm_head']": {"target_modules": ["lm_head", "o_proj"]},
    "target_parameters": {"target_modules": [], "target_parameters": ["self_attn.o_proj.weight"]},
    "exclude_modules": {"target_modules": "all-linear", "exclude_modules": ["q_proj"]},
    "layers_to_transform": {"layers_to_transform": [2, 3]},
    "layer_replication": {"layer_replication": [[0, 3], [1, 4]]},
    "modules_to_save=['embed_tokens']": {"modules_to_save": ["embed_tokens"]},
    "modules_to_save=['lm_head']": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": TOKEN_IDS},
    "ensure_weight_tying": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "bias='all'": {"bias": "all"},
    "bias='lora_only'": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True},
    "lora_dropout": {"lora_dropout": 0.5},
    "use_rslora": {"use_rslora": True},
    "use_dora": {"use_dora": True},
    "use_dora, embed_tokens": {"use_dora": True, "target_modules": ["embed_tokens", "o_proj"]},
    "rank_pattern, alpha_pattern": {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"o_proj": 3}},
    "init_lora_weights='gaussian'": {"init_lora_weights": "gaussian"},
    "init_lora_weights='orthogonal'": {"init_lora_weights": "orthogonal"},
    "init_lora_weights='pissa'": {"init_lora_weights": "pissa"},
    "init_lora_weights='pissa_niter_4'": {"init_lora_weights": "pissa_niter_4"},
    "init_lora_weights='olora'": {"init_lora_weights": "olora"},
    "init_lora_weights='mica'": {"init_lora_weights": "mica"},
    "fan_in_fan_out": {"fan_in_fan_out": False},
    "use_bdlora": {"use_bdlora": "BdLoraConfig"},
    "velora_config": {"velora_config": "VeloraConfig"},
    "monteclora_config": {"monteclora_config": "MontecloraConfig"},
    "arrow_config": {"arrow_config": "ArrowConfig"},
    "kasa_config": {"kasa_config": "KasaConfig"},
}


def cases() -> dict[str, Callable[[], Any]]:
    """A function that makes the configuration of each case, by its name."""
    made: dict[str, Callable[[], Any]] = {}
    for method in sorted(PEFT_TYPE_TO_CONFIG_MAPPING, key=str):
        name = str(getattr(method, "value", method))
        kind = PEFT_TYPE_TO_CONFIG_MAPPING[method]
        options = METHODS.get(name, {"target_modules": LINEAR})
        made[name] = lambda kind=kind, options=options: kind(task_type="CAUSAL_LM", **options)
    for name, options in OPTIONS.items():
        made[f"LORA: {name}"] = lambda options=options: lora_config(options)
    return made


def lora_config(options: Mapping[str, Any]) -> Any:
    """A LoRA of rank 4 with some options; the name of a class stands for one with its defaults."""
    given = {"r": 4, "target_modules": LINEAR, "task_type": "CAUSAL_LM", **options}
    if "alora_invocation_tokens" in options:
        given["alora_invocation_tokens"] = invocation_tokens(tiny_tokenizer("llama"))
    for name, value in options.items():
        if isinstance(value, str) and value.endswith("Config"):
            given[name] = getattr(__import__("peft.tuners.lora.config", fromlist=[value]), value)()
    return peft.LoraConfig(**given)


def base_folder(folder: Path) -> Path:
    """A tiny base on the disk, as an adapter names it."""
    path = folder / "base"
    if not path.exists():
        tiny_base_model("llama").save_pretrained(path)
        tiny_tokenizer("llama").save_pretrained(path)
    return path


def load_base(folder: Path) -> Any:
    """The base, with the end tokens of its tokenizer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base_folder(folder), dtype=torch.float32)
    model.generation_config.eos_token_id = tiny_tokenizer("llama").eos_token_id
    return model


@torch.no_grad()
def randomize(model: Any) -> None:
    """Move all weights that learn, so that the adapter does something."""
    rng = torch.Generator().manual_seed(SEED)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.add_(0.05 * torch.randn(weight.shape, generator=rng))


def check(name: str, make: Callable[[], Any], folder: Path) -> dict[str, Any]:
    """The result of one case."""
    torch.manual_seed(SEED)
    try:
        wrapped = peft.get_peft_model(load_base(folder), make())
        randomize(wrapped)
        ids = torch.arange(5, 25)[None]
        wrapped.eval()(input_ids=ids)
    except Exception as error:  # of any method
        return {"result": "not run by PEFT alone", "reason": first_line(error)}
    try:
        model = AutoModelForCausalLMWithValueHead(wrapped)
        agent = WordAgent(model, tiny_tokenizer("llama"), None, {"max_new_tokens": 6}, context=context_of(name), seed=0)
    except LlamaGymError as error:
        return {"result": "rejected", "reason": first_line(error)}
    difference = compare(agent, steps=2, envs=2)
    learn(peft.get_peft_model(load_base(folder), make()))
    reference = reference_error(agent, load_base(folder).eval())
    saved = folder / "".join(letter if letter.isalnum() else "_" for letter in name)
    loading = loading_error(agent, saved, folder)
    numbers = {**vars(difference), "reference": reference, "loading": loading}
    # NaN is smaller than nothing.
    is_equal = all(number < TOLERANCE for number in numbers.values())
    return {"result": "equal" if is_equal else "differs", **{key: float(f"{n:.2g}") for key, n in numbers.items()}}


def learn(wrapped: Any) -> None:
    """Let a fresh adapter learn from one batch, and check that its weights have changed."""
    options = {"batch_size": 4, "mini_batch_size": 4, "ppo_epochs": 1, "learning_rate": 0.01, "warmup_steps": 1}
    # One step, however far it leads.
    options["target_kl"] = None
    model = AutoModelForCausalLMWithValueHead(wrapped)
    agent = WordAgent(model, tiny_tokenizer("llama"), None, {"max_new_tokens": 3}, options, context="turn", seed=0)
    before = [weight.detach().clone() for weight in trained_weights(agent)]
    for turn in range(4):
        agent.act("x" * turn)
        agent.assign_reward(float(turn % 2))
        agent.terminate_episode()
    if agent.policy.num_updates != 1 or all(map(torch.equal, before, trained_weights(agent))):
        raise AssertionError("the adapter has not learned")


def context_of(name: str) -> str:
    """An activated LoRA is compared turn by turn, where PEFT finds its one invocation."""
    return "turn" if "alora" in name else "episode"


def loading_error(agent: Any, saved: Path, folder: Path) -> float:
    """Largest difference of logits after saving and loading, by an agent and by plain PEFT."""
    ids = list(range(5, 25))
    expected = plain_logits(agent.policy.model.pretrained_model, ids, 15)
    agent.save(saved)
    loaded = WordAgent.load(saved, "cpu")
    plain = peft.PeftModel.from_pretrained(load_base(folder), saved).eval()
    errors = [
        (plain_logits(model, ids, 15) - expected).abs().max() for model in (loaded.policy.model.pretrained_model, plain)
    ]
    return float(torch.stack(errors).detach().max())


def first_line(error: Exception) -> str:
    """The first line of an error, without line breaks and at a length for a table."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {text}"[:400]


def main() -> None:
    """Run all cases, and write results after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "scripts" / "results" / "adapters.json")
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, make in cases().items():
            if given.only not in name:
                continue
            try:
                found[name] = check(name, make, Path(scratch))
            except Exception as error:  # a fault of llamagym: neither equal nor rejected
                found[name] = {"result": "error", "reason": first_line(error)}
            print(name, found[name], flush=True)
            gc.collect()
    versions = {package.__name__: package.__version__ for package in (peft, transformers, torch)}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"versions": versions, "cases": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
