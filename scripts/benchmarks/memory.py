"""Resident memory of the default Blackjack run, sampled twice per second, against the number of hands played.

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
from threading import Thread
from typing import IO

from common import ROOT, save


def resident_gib(pid: int) -> float:
    """Resident memory of a process; 0 once it has ended."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 2**20 if found else 0.0


class Counter(Thread):
    """Reads the example's progress lines in a thread; `hands` is the number of hands in the latest one."""

    def __init__(self, lines: IO[str]) -> None:
        """Starts the thread."""
        super().__init__(daemon=True)
        self.hands = 0
        self._lines = lines
        self.start()

    def run(self) -> None:
        """Reads until the example ends."""
        for line in self._lines:
            if found := re.search(r"([\d,]+) episodes", line):
                self.hands = int(found[1].replace(",", ""))


def main() -> None:
    """Run the example and sample its memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=30_000)
    args = parser.parse_args()
    hands, gib = [], []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "examples/blackjack.py", "--episodes", str(args.episodes), "--run-dir", folder]
        with subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            assert process.stderr is not None
            counter = Counter(process.stderr)
            while process.poll() is None:
                if resident := resident_gib(process.pid):
                    hands.append(counter.hands)
                    gib.append(round(resident, 3))
                time.sleep(0.5)
        updates = [json.loads(line)["step"] for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    save("memory", {"peak_gib": max(gib), "updates_at_hands": updates, "samples": {"hands": hands, "gib": gib}})


if __name__ == "__main__":
    main()
