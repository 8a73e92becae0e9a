"""Records short training runs with fixed seeds and compares them bit by bit with those of another commit.

    python -m scripts.reliability.golden_runs record before.json
    python -m scripts.reliability.golden_runs compare before.json

Record before a refactoring and compare after it on the same machine, since other processors round differently. The
runs are those of tests/helpers/resumed_run.py and a few more: PPO with both critics, GRPO, REINFORCE, replay, warm
start, references; choices and free text, one turn or the whole conversation as context; float32 and bfloat16.
`compare` exits with 1 if a run differs, and prints its statistic with the largest relative difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.helpers.agents import ChoiceAgent, make_agent
from tests.helpers.resumed_run import CASES, Talker, demonstrations, learn, make

UPDATES = 4
_REINFORCE = {"algorithm": "reinforce", "reinforce": {"batch_size": 16}, "context": "turn"}
ALL_CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    **CASES,
    "REINFORCE": (ChoiceAgent, _REINFORCE),
    "REINFORCE, free text": (Talker, _REINFORCE),
    "GRPO, whole conversations": (Talker, {"algorithm": "grpo", "grpo": {"group_size": 4}, "context": "episode"}),
    "gradient critic, free text": (Talker, {"ppo": {"critic": "gradient"}}),
    "trust region": (ChoiceAgent, {"ppo": {"target_kl": 1e-4, "ppo_epochs": 3}}),
}


def run(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Trains a case's agent for a few updates; returns its statistics, returns and a checksum of its weights."""
    kind, options = ALL_CASES[name]
    # `make` passes options that REINFORCE does not have.
    build = make_agent if name.startswith("REINFORCE") else make
    agent = build(kind, **dict(options))
    for weight in agent.policy.model.parameters():
        if not weight.requires_grad:
            weight.data = weight.data.to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        if name.startswith("warm start"):
            agent.sft_from_jsonl(demonstrations(Path(folder)), epochs=1)
        result = learn(agent, UPDATES)
    found: dict[str, Any] = json.loads(json.dumps(result))
    return found


def runs() -> dict[str, Any]:
    """All cases in both dtypes, by name."""
    torch.set_num_threads(1)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    # Without an adapter all weights are trained, and trained weights are float32.
    cases = [(case, dtype) for case in ALL_CASES for dtype in dtypes if (case, dtype) != ("all weights", "bfloat16")]
    return {f"{case}, {dtype}": run(case, dtypes[dtype]) for case, dtype in cases}


def largest_difference(before: list[dict[str, float]], after: list[dict[str, float]]) -> str:
    """The statistic that differs most between two runs, relative to its size."""
    worst = 0.0
    text = "statistics are equal"
    for update, (old, new) in enumerate(zip(before, after, strict=False)):
        for key in sorted(old.keys() | new.keys()):
            one = old.get(key)
            other = new.get(key)
            if one == other or (one != one and other != other):
                continue
            is_relative = isinstance(one, float) and isinstance(other, float)
            difference = abs(one - other) / max(abs(one), abs(other)) if is_relative else float("inf")
            if difference > worst:
                worst = difference
                text = f"update {update}: {key} {one} -> {other}"
    return text


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Prints for each run whether it is equal; returns the number of different runs."""
    different = 0
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            different += 1
            print(f"{name}: only {'before' if name in before else 'after'}")
            continue
        parts = [part for part in before[name] if json.dumps(before[name][part]) != json.dumps(after[name].get(part))]
        if parts:
            different += 1
            print(
                f"{name}: {', '.join(parts)} differ; {largest_difference(before[name]['stats'], after[name]['stats'])}"
            )
        else:
            print(f"{name}: equal")
    return different


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("path", type=Path, help="the file with the recorded runs")
    arguments = parser.parse_args()
    found = runs()
    if arguments.action == "record":
        arguments.path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    return min(1, compare(json.loads(arguments.path.read_text(encoding="utf-8")), found))


if __name__ == "__main__":
    sys.exit(main())
