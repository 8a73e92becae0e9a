"""Memory and speed of models larger than the embedded one, on a CPU.

python scripts/benchmarks/larger_models.py [--threads 2]

Models have their true sizes but random weights, and a tokenizer that splits text into bytes, so nothing is downloaded
and replies are random. Every observation is new. Times are CPU seconds per thread; wall-clock times are recorded as
well, and are longer on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import ROOT, save
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from llamagym import Agent, AutoModelForCausalLMWithValueHead
from llamagym.agent.agent import collector_of
from llamagym.models.registry import lookup, lora_config
from llamagym.text.chat_template import invocation_tokens

sys.path.insert(0, str(ROOT))
from tests.helpers.tiny import tiny_tokenizer

ENVS, TURNS, NEW_TOKENS = 8, 2, 8
MODELS: dict[str, tuple[str, PretrainedConfig]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": (
        "llama",
        LlamaConfig(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": (
        "qwen2",
        Qwen2Config(
            vocab_size=151_936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32_768,
            tie_word_embeddings=True,
        ),
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (
        "llama",
        LlamaConfig(
            vocab_size=32_000,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=22,
            num_attention_heads=32,
            num_key_value_heads=4,
            max_position_embeddings=2048,
        ),
    ),
}


class Chatter(Agent):
    """Accepts every reply as an action."""

    def get_system_prompt(self) -> str:
        """A short prompt."""
        return "Name a number."

    def format_observation(self, observation: Any) -> str:
        """About fifty bytes, all of them new after the first few."""
        return f"{observation:08d} is the number that was named before."

    def extract_action(self, response: str) -> str:
        """Returns the reply unchanged."""
        return response


def status_gib(field: str) -> float:
    """A field of this process's memory status on Linux, in GiB: VmRSS (resident) or VmHWM (peak resident)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 2**20


class Stage:
    """Seconds and peak memory of one stage."""

    def __init__(self) -> None:
        """Starts the stage; resets the peak to the current memory."""
        Path("/proc/self/clear_refs").write_text("5")
        self._clock, self._processor = time.perf_counter(), time.process_time()

    def end(self) -> dict[str, float]:
        """Ends the stage; returns its seconds and peak memory."""
        return {
            "clock_s": time.perf_counter() - self._clock,
            "processor_s": (time.process_time() - self._processor) / torch.get_num_threads(),
            "peak_gib": status_gib("VmHWM"),
        }


def measure(name: str, threads: int) -> dict[str, Any]:
    """Measures one model: acting in free text and one update, each after a warm-up round."""
    torch.set_num_threads(threads)
    family, config = MODELS[name]
    entry = lookup(name)
    assert entry is not None
    dtype = entry.dtype_for("cpu")
    result: dict[str, Any] = {"dtype": str(dtype), "threads": threads, "imported_gib": status_gib("VmRSS")}
    tokenizer = tiny_tokenizer(family)
    config.eos_token_id = tokenizer.eos_token_id
    base = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        base, lora_config(entry, config, invocation_tokens(tokenizer))
    )
    result |= {
        "parameters": sum(weight.numel() for weight in base.parameters()),
        "weights_gib": sum(weight.nbytes for weight in model.parameters()) / 2**30,
        "loaded_gib": status_gib("VmRSS"),
    }
    ppo = {"batch_size": 10**9, "target_kl": None, "ppo_epochs": 4, "mini_batch_size": ENVS}
    agent = Chatter(model, tokenizer, None, {"max_new_tokens": NEW_TOKENS}, ppo, context="turn", seed=0)
    shown = 0
    for counted in (False, True):
        acting, before = Stage(), agent.policy.tokens_forwarded
        for _ in range(TURNS):
            agent.act_batch([shown + env for env in range(ENVS)])
            agent.assign_rewards([float(env % 2) for env in range(ENVS)])
            agent.terminate_episodes(list(range(ENVS)))
            shown += ENVS
        acted = acting.end() | {"tokens": agent.policy.tokens_forwarded - before, "turns": ENVS * TURNS}
        episodes, collector_of(agent).buffer = collector_of(agent).buffer, []
        learning = Stage()
        stats = agent.learner.update(episodes)
        if counted:
            learned = learning.end() | {"tokens": stats["learn_tokens"], "turns": ENVS * TURNS, "epochs": 4}
            result |= {"acting": acted, "update": learned}
    result["turns_per_second"] = ENVS * TURNS / result["acting"]["processor_s"]
    result["peak_gib"] = max(result["acting"]["peak_gib"], result["update"]["peak_gib"])
    return result


def main() -> None:
    """Measure each model in its own process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--model", choices=MODELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model:
        print(json.dumps(measure(args.model, args.threads)))
        return
    rows = {}
    for name in MODELS:
        command = [sys.executable, __file__, "--threads", str(args.threads), "--model", name]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        rows[name] = json.loads(output.splitlines()[-1])
    save("larger-models", {"environments": ENVS, "new_tokens": NEW_TOKENS, "load": os.getloadavg(), "models": rows})


if __name__ == "__main__":
    main()
