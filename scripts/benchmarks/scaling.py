"""Cost per turn by length of the episode, and throughput by number of environments.

python scripts/benchmarks/scaling.py
"""

from __future__ import annotations

import argparse
import time

import torch
from common import save
from workload import dtype_of, make_agent, player, simulate_update

from llamagym.agent.agent import collector_of

LENGTHS = (1, 2, 5, 10, 20, 30, 40, 50)
ENVS = (1, 4, 16, 64, 256)


def episode_length() -> list[dict]:
    """Tokens forwarded and seconds of single turns in one growing conversation, for choices and free text."""
    rows = []
    for free_text in (False, True):
        agent = make_agent(free_text, context="episode")
        for turn in range(1, max(LENGTHS) + 1):
            before, started = agent.policy.tokens_forwarded, time.perf_counter()
            agent.act((12 + turn % 9, 1 + turn % 10, 0))
            agent.assign_reward(0.0)
            if turn in LENGTHS:
                last = collector_of(agent).actor.conversation(0).turns[-1]
                rows.append(
                    {
                        "free_text": free_text,
                        "turn": turn,
                        "new_prompt_tokens": len(last.prompt.ids),
                        "reply_tokens": len(last.reply.ids),
                        "tokens_forwarded": agent.policy.tokens_forwarded - before,
                        "seconds": time.perf_counter() - started,
                    }
                )
    return rows


def environments() -> list[dict]:
    """Turns per second by number of environments; an update is simulated every 256 turns, within 2 to 16 steps."""
    rows = []
    for free_text in (False, True):
        for count in ENVS:
            agent = make_agent(free_text)
            play = player(agent, count)
            play(2)
            steps, turns, started = max(2, min(16, 256 // count)), 0, time.perf_counter()
            while turns < min(512, 16 * count):
                simulate_update(agent)
                turns += play(steps)
            rows.append(
                {
                    "free_text": free_text,
                    "environments": count,
                    "turns_per_second": turns / (time.perf_counter() - started),
                }
            )
    return rows


def main() -> None:
    """Measure both; there are no options."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    dtype = dtype_of(make_agent(free_text=False))
    save("scaling", {"dtype": dtype, "episode_length": episode_length(), "environments": environments()})


if __name__ == "__main__":
    main()
