"""Final return of Blackjack with the defaults after the same number of hands, by batch size.

python scripts/benchmarks/batch_sizes.py 32 128 512 2048 8192 --seeds 0 1 2

The agent is the README's with the default context, the whole conversation. Conversations are too many to enumerate, so
the return is the mean of 50,000 played hands, which has a standard error of 0.004. Each run has its own process and
writes results/batch-sizes/SIZE-seedN.json. Runs that have a result are skipped, so an interrupted series can continue.
"""

from __future__ import annotations

import argparse
import json
import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import gymnasium as gym
from common import RESULTS, command, setting

from llamagym import Agent, PPOConfig, evaluate, load_model_and_tokenizer, train

FOLDER = RESULTS / "batch-sizes"
HANDS = 60_000
EVALUATED_HANDS = 50_000
HELD_OUT_SEED = 1_000_000
# Number of consecutive hands whose mean return is one point of the learning curve.
HANDS_PER_POINT = 3_000


class BlackjackAgent(Agent):
    """The agent of the README."""

    def get_system_prompt(self) -> str:
        """The task."""
        return "You play blackjack. Answer with one word: stick or hit."

    def format_observation(self, observation: tuple[int, int, int]) -> str:
        """The hand in words."""
        player, dealer, usable_ace = observation
        hand = f"soft {player}" if usable_ace else f"{player}"
        return f"You hold {hand}, the dealer shows {dealer}."

    def get_action_choices(self, observation: tuple[int, int, int]) -> list[str]:
        """The two possible replies."""
        return ["stick", "hit"]

    def extract_action(self, response: str) -> int:
        """The action's number."""
        return ["stick", "hit"].index(response)


def run(batch_size: int, seed: int, hands: int) -> dict[str, Any]:
    """Train one agent, then evaluate it; returns the result."""
    model, tokenizer, device = load_model_and_tokenizer("smollm2-135m")
    agent = BlackjackAgent(model, tokenizer, device, seed=seed, ppo_config_dict=PPOConfig(batch_size=batch_size))
    env = gym.make("Blackjack-v1", natural=False, sab=False)
    result = train(agent, env, episodes=hands, seed=seed, on_update=report)
    after = evaluate(agent, env, episodes=EVALUATED_HANDS, seed=HELD_OUT_SEED, num_envs=128, greedy=False)
    points = range(0, len(result.returns) - HANDS_PER_POINT + 1, HANDS_PER_POINT)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "batch_size": batch_size,
        "seed": seed,
        "episodes": len(result.returns),
        "updates": len(result.updates),
        "minutes": round(result.minutes, 1),
        "processor_minutes": round((usage.ru_utime + usage.ru_stime) / 60, 1),
        "dtype": str(agent.policy.model.pretrained_model.dtype).removeprefix("torch."),
        "return_after": after.mean,
        "standard_error": after.standard_error,
        "final_entropy": result.updates[-1]["entropy"],
        "curve": [round(mean(result.returns[start : start + HANDS_PER_POINT]), 4) for start in points],
    }


def report(statistics: dict[str, float]) -> None:
    """Print a line every 25 updates."""
    if statistics["updates"] % 25 == 0:
        print({name: round(statistics[name], 4) for name in ("updates", "return_mean", "entropy", "approx_kl")})


def main() -> None:
    """Run all combinations that have no result yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batch_sizes", type=int, nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--hands", type=int, default=HANDS, help=f"default: {HANDS}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder for the results")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for batch_size in args.batch_sizes:
            path = args.folder / f"{batch_size}-seed{seed}.json"
            if path.exists():
                continue
            where = setting()
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                result = pool.submit(run, batch_size, seed, args.hands).result()
            path.write_text(json.dumps({"command": command(), **where, **result}, indent=1) + "\n")
            print(f"batches of {batch_size}, seed {seed}: {result['return_after']:.3f}")


if __name__ == "__main__":
    main()
