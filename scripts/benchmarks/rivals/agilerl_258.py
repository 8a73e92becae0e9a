"""AgileRL 2.58's turn-level LLM PPO on the same weights: turns a second while acting, samples while learning.

It needs an environment of its own (Python 3.10 to 3.13):

    python -m venv agile && agile/bin/pip install torch==2.13.0 "agilerl[cpu-llm]==2.58.0"
    agile/bin/python scripts/benchmarks/rivals/agilerl_258.py FOLDER act|learn|both

FOLDER is the embedded model's (`llamagym.models.loading.embedded_model_folder()` in the usual environment).

Its settings are the fastest that it offers on a CPU. On Linux its extras install liger-kernel, and it then puts
Triton's kernels into every model (algorithms/core/base.py, `_attach_lora_adapters`), whatever the device and
`use_liger_loss`; the first forward pass on a CPU ends with "RuntimeError: 0 active drivers ([]). There should only be
one." Without the package it refuses to start at all ("LLM dependencies are not installed"). Here it is told before it
loads that the package is missing, as it finds by itself where the extras leave it out (macOS, Windows).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import agilerl
import torch
from peft import LoraConfig
from prompt import STATES, SYSTEM, observed
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import rate_of, serve

MAX_NEW_TOKENS, LEARN_BATCH = 8, 16


def make_agent(folder: str, pad_token_id: int, pad_token: str) -> Any:
    """In float32, with the plain step's LoRA; nothing is recomputed to save memory."""
    agilerl.HAS_LIGER_KERNEL = False
    from agilerl.algorithms.ppo_llm import PPO

    return PPO(
        pad_token_id,
        pad_token,
        model_name=folder,
        model_config={"torch_dtype": torch.float32},
        batch_size=LEARN_BATCH,
        top_k=0,
        max_output_tokens=MAX_NEW_TOKENS,
        max_model_len=256,
        lora_config=LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        gradient_checkpointing=False,
        use_liger_loss=False,
        device="cpu",
    )


def main() -> None:
    """Answer by rates."""
    folder, what = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    agent = make_agent(folder, tokenizer.pad_token_id, tokenizer.pad_token)
    conversations = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": observed(state)}] for state in STATES
    ]
    texts = [
        str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
        for conversation in conversations
    ]

    def prompt(rows: list[str]) -> dict[str, torch.Tensor]:
        encoded = tokenizer(rows, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
        return dict(encoded)

    ids, masks, _ = agent.get_action([prompt(texts[:LEARN_BATCH])])
    rewards = torch.tensor([1.0, -1.0] * (LEARN_BATCH // 2))

    def act() -> float:
        # Its own rollouts hand over the environments' prompts apart, and it generates for one after the other. It does
        # take a padded batch in the place of one prompt: the faster way is the one to be compared with.
        agent.get_action([prompt(texts)])
        return len(texts)

    def learn() -> float:
        agent.learn((list(ids[0].split(1)), list(masks[0].split(1)), rewards))
        return LEARN_BATCH

    def both() -> float:
        sampled, taken, _ = agent.get_action([prompt(texts[:LEARN_BATCH])])
        agent.learn((list(sampled[0].split(1)), list(taken[0].split(1)), rewards))
        return LEARN_BATCH

    serve(rate_of({"act": act, "learn": learn, "both": both}[what]), "agilerl", "torch", "transformers", "peft")


if __name__ == "__main__":
    main()
