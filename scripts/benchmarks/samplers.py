"""Blackjack in free text, learned with replies from the built-in engine or from a server.

python scripts/benchmarks/samplers.py engine
python scripts/benchmarks/samplers.py vllm --url http://127.0.0.1:8000
python scripts/benchmarks/samplers.py llama.cpp --url http://127.0.0.1:8080 --folder served

The agent learns the format from demonstrations first, which name random actions; then all runs learn in the same way,
from batches of the same size. The expected return after each update is exact for the estimated policy: 20 sampled
replies in each of the 280 states, written by the built-in engine with the same weights. The LoRA is small and plain,
since vLLM applies one slowly on a CPU. The servers are started beforehand:

python scripts/servers.py start vllm --port 8000
python scripts/servers.py start llama.cpp --port 8080 --folder served
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
from common import RESULTS, ROOT, command, setting
from peft import LoraConfig

import llamagym as lg

sys.path.insert(0, str(ROOT / "examples"))
from blackjack import BlackjackAgent, hit_probabilities
from blackjack_exact import expected_return

STATISTICS = ("return_mean", "entropy", "approx_kl", "sampler_kl", "invalid_rate", "act_s", "learn_s")
LORA = LoraConfig(r=8, lora_alpha=16, target_modules=["down_proj"], task_type="CAUSAL_LM")


def make_sampler(args: argparse.Namespace) -> lg.Sampler | None:
    """The sampler that the command line names; None for the built-in engine."""
    if args.sampler == "vllm":
        return lg.VLLMSampler(args.url)
    if args.sampler == "llama.cpp":
        return lg.LlamaCppSampler(args.url, args.folder)
    return None


def make_agent(seed: int) -> BlackjackAgent:
    """An agent that has learned the format of replies, and nothing of the game."""
    model, tokenizer, device = lg.load_model_and_tokenizer(peft_config=LORA)
    learner = lg.PPOConfig(batch_size=256)
    options = {"max_new_tokens": 4}
    agent = BlackjackAgent(model, tokenizer, device, options, learner=learner, context="turn", seed=seed)
    agent.free_text = True
    agent.sft_from_jsonl(lg.demonstrations_path("format_blackjack"))
    return agent


def expected_return_of(agent: BlackjackAgent) -> float:
    """Expected return of one hand, with replies of the built-in engine."""
    sampler = agent.sampler
    agent.sampler = None
    try:
        return expected_return(hit_probabilities(agent))
    finally:
        agent.sampler = sampler


def reporter(agent: BlackjackAgent, curve: list[dict[str, float]]) -> Callable[[dict[str, float]], None]:
    """A function that adds a point to the curve after each update."""

    def report(statistics: dict[str, float]) -> None:
        point = {name: round(statistics[name], 5) for name in STATISTICS if name in statistics}
        point["expected_return"] = round(expected_return_of(agent), 4)
        curve.append(point)
        print(len(curve), point, flush=True)

    return report


def main() -> None:
    """Train once and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sampler", choices=["engine", "vllm", "llama.cpp"])
    parser.add_argument("--url", help="address of the server")
    parser.add_argument("--folder", type=Path, help="folder that llama-server runs")
    parser.add_argument("--turns", type=int, default=2560)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    where = setting()
    agent = make_agent(args.seed)
    agent.sampler = make_sampler(args)
    before = expected_return_of(agent)
    print("expected return before:", round(before, 4), flush=True)
    curve: list[dict[str, float]] = []
    env = gym.make("Blackjack-v1", natural=False, sab=False)
    started = time.perf_counter()
    lg.train(agent, env, turns=args.turns, num_envs=64, seed=args.seed, on_update=reporter(agent, curve))
    result: dict[str, Any] = {
        "command": command(),
        **where,
        "sampler": args.sampler,
        "seed": args.seed,
        "turns": args.turns,
        "minutes": round((time.perf_counter() - started) / 60, 1),
        "expected_return_before": round(before, 4),
        "curve": curve,
    }
    path = RESULTS / f"samplers-{args.sampler.replace('.', '-')}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
