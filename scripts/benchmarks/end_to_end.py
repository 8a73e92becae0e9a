"""Throughput of acting and learning together, compared with TRL, AgileRL, and LlamaGym on its own script.

python scripts/benchmarks/end_to_end.py [--trl-python PATH] [--agilerl-python PATH] [--llamagym-python PATH]

PATH is the interpreter of a virtual environment; the script in rivals/ lists its packages. TRL 1.16 is also in
llamagym's own environment. The task is Blackjack in free text of up to 8 tokens, with 64 environments and one optimizer
step per batch. LlamaGym's script has one environment and replies of up to 32 tokens; only imports, model and device
differ. AgileRL and LlamaGym compute in float32. All are measured in alternation.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from common import Rival, Work, named, parse_args, rate_of, rates_in_turn, save
from peft import LoraConfig
from transformers import AutoTokenizer
from workload import dtype_of, make_agent, player

from llamagym import AutoModelForCausalLMWithValueHead
from llamagym.agent.agent import collector_of
from llamagym.models.loading import embedded_model_folder

sys.path.insert(0, str(Path(__file__).resolve().parent / "rivals"))
from blackjack_script import LORA, script_work

ENVS, ROUNDS = 64, 4


def batched_work(dtype: str, batch: int) -> tuple[Work, str]:
    """Acting and learning of our agent with a batch size; also returns its dtype."""
    agent = make_agent(True, dtype=dtype, batch_size=batch, mini_batch_size=batch, ppo_epochs=1, learning_rate=1e-5)
    play = player(agent, ENVS)

    def work() -> float:
        turns, before = 0, -1
        while collector_of(agent).buffered_turns > before:
            before = collector_of(agent).buffered_turns
            turns += play(1)
        return turns

    return work, dtype_of(agent)


def ported_work(dtype: str) -> Work:
    """LlamaGym's script, ported to this library."""
    folder = str(embedded_model_folder())
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        folder, dtype=getattr(torch, dtype), peft_config=LoraConfig(**LORA)
    )
    return script_work(model, AutoTokenizer.from_pretrained(folder))


def main() -> None:
    """Measure everything in one run."""
    dtype_option, pythons = parse_args(__doc__, ("trl_1.16", "agilerl_2.58", "llamagym_0.1.1"))
    torch.manual_seed(0)
    batched, dtype = batched_work(dtype_option, 256)
    works: dict[str, Work] = {"llamagym": batched, "llamagym script": ported_work(dtype)}
    modes = {"trl_1.16": dtype, "agilerl_2.58": "both", "llamagym_0.1.1": "script"}
    with ExitStack() as stack:
        rivals = {
            name: stack.enter_context(Rival.from_script(name, python, embedded_model_folder(), modes[name]))
            for name, python in pythons.items()
        }
        rates = {name: rate_of(work) for name, work in works.items()} | {n: rival.rate for n, rival in rivals.items()}
        result: dict[str, Any] = rates_in_turn(rates, ROUNDS)
    for name, rival in rivals.items():
        ours = "llamagym script" if name == "llamagym_0.1.1" else "llamagym"
        result[name] |= {"packages": rival.packages, "ours_over": result[ours]["median"] / result[name]["median"]}
    save(named("end-to-end", dtype), {"unit": "turns learned per second, medians", "dtype": dtype, **result})


if __name__ == "__main__":
    main()
