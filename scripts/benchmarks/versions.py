"""Compares this version with an earlier one: throughput of acting and learning per CPU second, and memory.

git worktree add /tmp/before COMMIT
python scripts/benchmarks/versions.py /tmp/before

Each version runs in its own process with the same options and the packages of this environment. An update of several
optimizer steps follows every few games, so weights change as often as in a user's run. CPU time is less sensitive to
other load on the machine than wall-clock time. Workloads that a run omits keep their earlier values; each workload
names its commit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from common import ENVIRONMENT, RESULTS, ROOT, Rate, Rival, git, rates_in_turn, save, serve

WORDS = ("red", "green", "old", "new", "small", "large", "door", "key", "lamp", "river", "bridge", "tower", "stone")
OPTIONS = {
    "batch_size": 10**9,
    "mini_batch_size": 64,
    "ppo_epochs": 2,
    "learning_rate": 1e-5,
    "gamma": 1.0,
    "entropy_coef": 0.01,
    "target_kl": None,
    "value_learning_rate": 3e-3,
    "cliprange_value": 0.2,
}
# Environments, turns per episode, episodes per environment between updates, words per observation (0: Blackjack's
# states), maximum tokens per reply (0: choices), and context.
WORKLOADS = {
    "repeated": (64, 1, 4, 0, 8, "turn"),
    "repeated-choices": (64, 1, 4, 0, 0, "turn"),
    "unique": (64, 1, 4, 30, 8, "turn"),
    "unique-choices": (64, 1, 4, 30, 0, "turn"),
    "conversation": (16, 6, 1, 30, 16, "episode"),
    "single": (1, 4, 4, 10, 32, "turn"),
}
# Turns acted in and learned from per second of CPU time; tokens learned from per second of CPU time, since replies in
# free text differ in length; memory in GiB.
WORK = ("act", "learn", "learn_tokens", "memory")


def observations(words: int) -> Iterator[str]:
    """Random texts: a number of words, which hardly ever repeat, or for 0 Blackjack's states, which often do."""
    rng = np.random.default_rng(0)
    while True:
        if words:
            yield " ".join(rng.choice(WORDS, words))
        else:
            yield f"You hold {rng.integers(12, 21)}, the dealer shows {rng.integers(1, 11)}."


def serve_version(kind: str) -> None:
    """Serve the rates and the memory of the version of llamagym on this process's path, for one workload."""
    import llamagym  # the version on PYTHONPATH

    num_envs, turns, games, words, tokens, context = WORKLOADS[kind]

    class Player(llamagym.Agent):
        def get_system_prompt(self) -> str:
            return "You play a game. Answer with one word: stick or hit."

        def format_observation(self, observation: str) -> str:
            return observation

        def get_action_choices(self, observation: str) -> list[str] | None:
            return None if tokens else ["stick", "hit"]

        def extract_action(self, response: str) -> int:
            return len(response) % 2

    model, tokenizer, device = llamagym.load_model_and_tokenizer("smollm2-135m", device="cpu")
    sampling = {"max_new_tokens": max(tokens, 1)}
    agent: Any = Player(model, tokenizer, device, sampling, OPTIONS, context=context, seed=0)
    texts, ids = observations(words), list(range(num_envs))
    spent = {"act": 0.0, "learn": 0.0, "learn_tokens": 0}

    def play() -> None:
        started = time.process_time()
        for _ in range(games):
            for _ in range(turns):
                agent.act_batch(list(itertools.islice(texts, num_envs)), ids)
                agent.assign_rewards(np.arange(num_envs, dtype=float) % 3, ids)
            agent.terminate_episodes(ids)
        spent["act"] = time.process_time() - started
        # Up to version 0.2.0 the buffer was an attribute of the agent.
        buffer = agent._buffer if hasattr(agent, "_buffer") else agent._collector.buffer
        batch = list(buffer)
        buffer.clear()
        started, forwarded = time.process_time(), agent.policy.tokens_forwarded
        agent.learner.update(batch)
        spent["learn"] = time.process_time() - started
        spent["learn_tokens"] = agent.policy.tokens_forwarded - forwarded

    def act() -> float:
        play()
        return num_envs * turns * games / spent["act"]

    def learn() -> float:
        return num_envs * turns * games / spent["learn"]

    def learn_tokens() -> float:
        return spent["learn_tokens"] / spent["learn"]

    def memory() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    rates: dict[str, Rate] = {"act": act, "learn": learn, "learn_tokens": learn_tokens, "memory": memory}
    serve(rates, "llamagym")


def compare(kind: str, folders: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Measures both versions on one workload, in alternation; returns medians, all rounds, and ratios after/before."""
    with ExitStack() as stack:
        rivals = {
            name: stack.enter_context(
                Rival(name, [sys.executable, __file__, "--serve", kind], ENVIRONMENT | {"PYTHONPATH": str(folder)})
            )
            for name, folder in folders.items()
        }
        rates = {
            (name, work): (lambda rival=rival, work=work: rival.rate(work))
            for name, rival in rivals.items()
            for work in WORK
        }
        measured = rates_in_turn(rates, rounds)
    result: dict[str, Any] = {"commit": git("rev-parse", "HEAD")}
    for work in WORK:
        before, after = (measured[name, work] for name in ("before", "after"))
        result[work] = {"before": before, "after": after, "ratio": after["median"] / before["median"]}
        print(f"{kind} {work}: {before['median']:.2f} before, {after['median']:.2f} after", flush=True)
    return result


def main() -> None:
    """Measure all workloads, or serve one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="a checkout of the earlier version")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=6, help="number of rounds; the first is not counted")
    parser.add_argument("--serve", choices=WORKLOADS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve_version(args.serve)
        return
    if args.before is None:
        parser.error("the checkout of the earlier version is missing")
    earlier = git("-C", str(args.before.resolve()), "rev-parse", "HEAD")
    folders = {"before": args.before.resolve(), "after": ROOT}
    results = {kind: compare(kind, folders, args.rounds) for kind in args.workloads}
    name = f"versions-{earlier[:7]}"
    result = RESULTS / f"{name}.json"
    measured = json.loads(result.read_text())["workloads"] if result.exists() else {}
    save(name, {"before": earlier, "options": OPTIONS, "workloads": measured | results})


if __name__ == "__main__":
    main()
