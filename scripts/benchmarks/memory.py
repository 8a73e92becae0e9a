"""Claim (e): resident memory of the default Blackjack run, sampled twice a second, beside the hands played.

python scripts/benchmarks/memory.py [--episodes 30000]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, save


def resident_gib(pid: int) -> float:
    """Resident memory of a process; 0 once it has ended."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 2**20 if found else 0.0


def main() -> None:
    """Run the example and watch it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=30_000)
    args = parser.parse_args()
    samples = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "examples/blackjack.py", "--episodes", str(args.episodes), "--run-dir", folder]
        started = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None:
                samples.append((round(time.perf_counter() - started, 1), round(resident_gib(process.pid), 3)))
                time.sleep(0.5)
        updates = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((Path(folder) / "summary.json").read_text())
    # The example counts minutes from its first hand; it began so long after the process did.
    setup_s = samples[-1][0] - 60 * summary["minutes"]
    rows = []
    for update in updates:
        until = [gib for seconds, gib in samples if seconds - setup_s <= 60 * update["minutes"]]
        rows.append({"hands": update["step"], "gib": until[-1], "peak_gib": max(until)})
    save("memory", {"peak_gib": summary["peak_memory_gib"], "by_update": rows})


if __name__ == "__main__":
    main()
