"""Counts the outcomes of loading damaged saves: 2,000 mutated files, and each field of a loop's state replaced.

    python -m scripts.reliability.damaged_files

Mutations, seed and checks are those of tests/saving/test_damaged_files.py. The script stops at an error other than
CheckpointError, or at a failed load that changed the agent in memory. Agents that were loaded must act and learn. The
counts go to results/damaged_files.json, and the page on security shows them.
"""

from __future__ import annotations

import json
import platform
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.saving.test_damaged_files import (
    SEED,
    another_agent,
    damaged_loops,
    fuzz_agent,
    fuzz_checkpoint,
    save_all,
    save_run,
    try_damaged_loops,
)

RESULT = Path(__file__).resolve().parent / "results" / "damaged_files.json"


def main() -> None:
    """Load all damaged saves and write the counts."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_all(folder / "saved")
        stopped = save_run(folder / "saved", folder / "stopped")
        counts = {
            "agents": fuzz_agent(folder / "saved", folder / "agents", range(1000)),
            "checkpoints": fuzz_checkpoint(
                folder / "saved", another_agent(folder / "saved"), folder / "checkpoints", range(1000)
            ),
            "loop_states": try_damaged_loops(folder / "saved", stopped, folder / "loops", damaged_loops(stopped)),
        }
    # Always 0, since the script stops otherwise.
    totals = {"other_errors": 0, "failed_loads_that_changed_the_agent": 0}
    record = {
        "command": "python -m scripts.reliability.damaged_files",
        "commit": commit,
        "hardware": f"{platform.machine()}, CPU",
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "safetensors", "tokenizers")},
        "seed": SEED,
        "counts": counts,
        **totals,
    }
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
