"""A LangChain agent that answers from an address book, trained unchanged through a served agent.

python scripts/benchmarks/unchanged_agent.py --seed 0

Needs what examples/langchain_agent.py needs, which plays the episodes. The share of right answers is over held-out
questions, greedy and sampled, before and after; the same program then asks the saved agent. Random calls of the same
format are the baseline before, since the warm start shows nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from typing import Any

from common import RESULTS, ROOT, command, setting

import llamagym as lg

sys.path.insert(0, str(ROOT / "examples"))
from langchain_agent import HELD_OUT_SEED, make_agent, mean_reward, play, play_and_reward

STATISTICS = ("episodes", "return_mean", "entropy", "approx_kl", "turns_per_episode", "act_s", "learn_s")


def right_answers(agent: lg.Agent, questions: int, greedy: bool) -> float:
    """Share of right answers to held-out questions."""
    agent.eval(greedy=greedy)
    with lg.serve(agent) as url:
        return mean_reward(play, url, range(HELD_OUT_SEED, HELD_OUT_SEED + questions))


def main() -> None:
    """Learn, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--questions", type=int, default=256)
    args = parser.parse_args()
    path = RESULTS / f"unchanged-agent-seed{args.seed}.json"
    result: dict[str, Any] = {"command": command(), **setting(), "seed": args.seed, "batch_size": args.batch_size}
    agent = make_agent(args.seed, learner=lg.PPOConfig(batch_size=args.batch_size))
    result["before"] = right_answers(agent, args.questions, greedy=False)
    result["curve"] = []
    started = time.monotonic()

    def on_update(stats: Any) -> None:
        point = {"minutes": (time.monotonic() - started) / 60}
        point |= {name: float(stats[name]) for name in STATISTICS}
        result["curve"].append({name: round(value, 4) for name, value in point.items()})
        print(result["curve"][-1], flush=True)

    agent.train()
    with lg.serve(agent, on_update=on_update) as url:
        first = 1000 * args.episodes * args.seed
        mean_reward(play_and_reward, url, range(first, first + args.episodes))
    result["episodes"] = args.episodes
    result["minutes"] = round((time.monotonic() - started) / 60, 2)
    result["after"] = right_answers(agent, args.questions, greedy=False)
    with tempfile.TemporaryDirectory() as folder:
        agent.save(folder)
        result["after_greedy"] = right_answers(lg.ChatAgent.load(folder), args.questions, greedy=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
