"""Learning results: runs by name, and statistics over seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy import stats

RESULTS = Path(__file__).resolve().parent / "learning" / "results"
ABLATIONS = RESULTS / "ablations"
COMPARISONS = RESULTS / "comparisons"
SPARSE_REWARDS = RESULTS.parent.parent / "results" / "sparse-rewards"
BATCH_SIZES = SPARSE_REWARDS.parent / "batch-sizes"

# Titles of experiments; others are named after their files.
TITLES = {
    "blackjack": "Blackjack",
    "blackjack-bfloat16": "Blackjack in bfloat16",
    "blackjack-defaults": "Blackjack with the defaults",
    "blackjack-free-text": "Blackjack in free text",
    "blackjack-free-text-bfloat16": "Blackjack in free text, bfloat16",
    "frozenlake": "FrozenLake",
    "frozenlake-defaults": "FrozenLake with the defaults",
    "address_book": "Tool calls in free text, whole conversation",
    "cartpole": "CartPole",
    "cartpole-defaults": "CartPole with the defaults",
    "cartpole-two-decimals": "CartPole to two decimals",
    "text-world": "TextWorld, unseen games",
    "text-world-defaults": "TextWorld with the defaults, unseen games",
    "text-world-printed": "TextWorld as printed, whole conversation, unseen games",
    "text-world-locked-door-free-text": "TextWorld's locked door in free text, whole conversation, unseen games",
    "babyai-defaults": "BabyAI with the defaults, unseen missions",
    "babyai-go-to-local": "BabyAI GoToLocal, unseen missions",
    "babyai-memory": "MiniGrid MemoryS7, at most 40 steps, whole conversation",
    "babyai-memory-shown-episodes": "MiniGrid MemoryS7 after imitating 2,000 episodes, whole conversation",
    "taxi": "Taxi",
    "mastermind": "Mastermind, whole conversation",
    "mastermind-10000-games": "Mastermind after imitating 10,000 games, whole conversation",
    "guess_number": "Guess the number, whole conversation",
}

Run = dict[str, Any]


def runs_by_name(folder: Path | None = None) -> dict[str, list[Run]]:
    """The runs of each experiment, sorted by seed; a run's `file` is its file name, NAME-seedN.json."""
    found: dict[str, list[Run]] = {}
    for path in sorted((folder or RESULTS).glob("*-seed*.json")):
        run = {"file": path.name, **json.loads(path.read_text(encoding="utf-8"))}
        found.setdefault(path.stem.rpartition("-seed")[0], []).append(run)
    return {name: sorted(runs, key=lambda run: int(run["seed"])) for name, runs in found.items()}


def title(name: str, runs: Sequence[Run]) -> str:
    """An experiment's title, with the number of seeds if there are fewer than three."""
    return TITLES.get(name, name) + {1: ", one seed", 2: ", two seeds"}.get(len(runs), "")


def table_row(*cells: str) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def half_width(values: Sequence[float]) -> float:
    """Half the 95 % interval of the mean of two or more values, by Student's t.

    >>> round(half_width([1.0, 2.0, 3.0]), 2)
    2.48
    """
    return float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
