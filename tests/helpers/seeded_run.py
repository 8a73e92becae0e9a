"""A run whose global random numbers and agent have seeds of their own; prints what it did.

python -m tests.helpers.seeded_run GLOBAL_SEED SEED...
"""

from __future__ import annotations

import json
import sys

import torch

from llamagym import AutoModelForCausalLMWithValueHead, train
from llamagym.models.registry import lookup_by_architecture, lora_config
from tests.helpers import agents
from tests.helpers.tiny import tiny_base_model, tiny_tokenizer

SIZES = {"batch_size": 6, "mini_batch_size": 3, "learning_rate": 0.01, "warmup_steps": 1}


def run(kind: str, global_seed: int, seed: int) -> None:
    """Train an agent on a plain LoRA that this process drew."""
    torch.manual_seed(global_seed)
    base = tiny_base_model("llama")
    lora = lora_config(lookup_by_architecture(base.config), base.config, None)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base, lora)
    make, context = getattr(agents, kind), "turn"
    tokenizer, texts = tiny_tokenizer("llama"), {"max_new_tokens": 4}
    agent = make(model, tokenizer, None, texts, SIZES, context=context, aim_lora=False, seed=seed)
    if kind == "WordAgent":
        agent.extract_action = lambda text: len(text) % 3
    result = train(agent, agents.CountdownEnv, episodes=4, num_envs=2)
    updates = [{name: value for name, value in of.items() if not name.endswith("_s")} for of in result.updates]
    sys.stdout.write(json.dumps([result.returns, updates]) + "\n")


if __name__ == "__main__":
    for seed in map(int, sys.argv[2:]):
        for kind in ("ChoiceAgent", "WordAgent"):
            run(kind, int(sys.argv[1]), seed)
