"""The learning results: runs by name, and what their seeds say together."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "learning" / "results"
ABLATIONS = RESULTS / "ablations"
# Student's t for a confidence of 95 %, by the number of values, from 2 on; more than 10 are treated as 10.
_STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

# How experiments are called; others go by the name of their files.
TITLES = {
    "blackjack": "Blackjack",
    "blackjack-bfloat16": "Blackjack in bfloat16",
    "blackjack-free-text": "Blackjack in free text",
    "blackjack-free-text-bfloat16": "Blackjack in free text, bfloat16",
    "frozenlake": "FrozenLake",
    "cartpole": "CartPole",
    "text-world": "TextWorld, unseen games",
    "babyai": "BabyAI, unseen missions",
    "taxi": "Taxi, one seed",
    "mastermind": "Mastermind, whole conversation",
    "guess_number": "Guess the number, whole conversation, one seed",
}

Run = dict[str, Any]


def runs_by_name(folder: Path | None = None) -> dict[str, list[Run]]:
    """The runs of each experiment in order of their seeds; `file` says where each lies (NAME-seedN.json)."""
    found: dict[str, list[Run]] = {}
    for path in sorted((folder or RESULTS).glob("*-seed*.json")):
        run = {"file": path.name, **json.loads(path.read_text(encoding="utf-8"))}
        found.setdefault(path.stem.rpartition("-seed")[0], []).append(run)
    return {name: sorted(runs, key=lambda run: int(run["seed"])) for name, runs in found.items()}


def table_row(*cells: str) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def half_width(values: Sequence[float]) -> float:
    """Half the 95 % interval of the mean of two or more values, by Student's t.

    >>> round(half_width([1.0, 2.0, 3.0]), 2)
    2.48
    """
    return _STUDENT_T[min(len(values), 10) - 2] * statistics.stdev(values) / len(values) ** 0.5
