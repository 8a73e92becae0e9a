"""Counts what becomes of damaged saves: 2,000 mutated files, and each part of a loop's state with other values.

    python -m scripts.reliability.damaged_files

Mutations, seed and checks are those of tests/test_damaged_files.py. An error other than CheckpointError, or an agent in
memory that a failed load changed, ends the script. What was loaded acts and learns. The counts go to
results/damaged_files.json, and the page on security shows them.
"""

from __future__ import annotations

import json
import platform
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.test_damaged_files import (
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
    """Count, and write the result."""
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
    # Others end this script.
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
