"""Throughput and memory of acting and learning on one GPU, compared with `generate` on the same weights.

python scripts/benchmarks/gpu.py [--dtype float32]

The workloads are those of `workloads.py` with more environments, since launching kernels takes as long for ten rows as
for a thousand. An update is one epoch over the turns of a round, in four optimizer steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from common import named, parser_of, save
from workload import dtype_of, plain_model
from workloads import WORKLOADS, Workload, agent_of, generate_work, round_of

ROUNDS = 3
CASES = {
    "unique-choices": (64, 512),
    "unique": (64, 512),
    "conversation": (64,),
    "repeated-choices": (512,),
}


def seconds_of(work: Callable[[], Any]) -> tuple[float, Any]:
    """Runs a function; returns its seconds, including its GPU work, and its result."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return time.perf_counter() - started, result


def measure(workload: Workload, dtype: str) -> dict[str, Any]:
    """Medians over rounds; the first round is not counted."""
    torch.cuda.reset_peak_memory_stats()
    turns = workload.envs * workload.turns
    agent = agent_of(workload, dtype, "cuda", batch_size=turns, ppo_epochs=1, learning_rate=1e-6)
    play, update = round_of(workload, agent), agent.learner.update
    spent: list[float] = []
    updates: list[dict[str, float]] = []

    def timed(*arguments: Any) -> dict[str, float]:
        seconds, stats = seconds_of(lambda: update(*arguments))
        spent.append(seconds)
        updates.append(stats)
        return stats

    agent.learner.update = timed  # type: ignore[method-assign]
    rounds = []
    for _ in range(1 + ROUNDS):
        del spent[:]
        seconds, played = seconds_of(play)
        rounds.append((played / (seconds - sum(spent)), played / sum(spent) if spent else None, played / seconds))
    acting, learning, both = zip(*rounds[1:], strict=True)
    learned = [rate for rate in learning if rate is not None]
    row = {
        "turns_per_second": statistics.median(both),
        "acting": statistics.median(acting),
        "learning": statistics.median(learned) if learned else None,
        "ratio_error": max((error for stats in updates if (error := stats["ratio_error"]) == error), default=None),
        "gpu_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    if workload.free_text:
        work = generate_work(workload, agent, plain_model(agent).to("cuda"), workload.envs)
        rates = [turns / seconds_of(work)[0] for _ in range(1 + ROUNDS)]
        row["generate"] = statistics.median(rates[1:])
    return row | {"dtype": dtype_of(agent)}


def main() -> None:
    """Measure everything in one run."""
    dtype = parser_of(__doc__).parse_args().dtype
    torch.manual_seed(0)
    setting = {"unit": "turns per second", "gpu": torch.cuda.get_device_name()}
    rows = {}
    for name, counts in CASES.items():
        for count in counts:
            row = measure(replace(WORKLOADS[name], envs=count), dtype)
            rows[f"{name}, {count} environments"] = row
            # After each case, in case the run is interrupted.
            save(named("gpu", row["dtype"]), {**setting, "cases": rows})


if __name__ == "__main__":
    main()
