"""Kills a run repeatedly and checks that it resumes with identical results.

python -m scripts.reliability.kill_and_resume [--kills 50] [--seed 0]

A tiny model with random weights trains with a checkpoint after every update (`tests/helpers/endless_run.py`) and is
killed with `kill -9` at random times. After each kill, the newest checkpoint must be intact and contain all reported
updates but the last. At the end the statistics of all updates must equal those of an uninterrupted run. Writes
results/kill_and_resume.json.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from common import ROOT, setting

from llamagym.saving.checkpoints import newest
from llamagym.saving.manifest import MANIFEST
from llamagym.saving.state_files import read_state

HERE = Path(__file__).resolve().parent


def start(folder: Path) -> subprocess.Popen[str]:
    """Starts or resumes the run."""
    command = [sys.executable, "-m", "tests.helpers.endless_run", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def saved(folder: Path) -> int:
    """Number of updates in the newest intact checkpoint; 0 without checkpoints. Raises if all are damaged."""
    path = newest(folder)
    return 0 if path is None else int(json.loads((path / MANIFEST).read_text())["updates"])


def killed_at_random(folder: Path, kills: int, seed: int) -> Counter[int]:
    """Kills the run at random times; returns how often each number of updates was lost."""
    draw, lost = random.Random(seed), Counter[int]()
    for number in range(kills):
        with start(folder) as process:
            assert process.stdout is not None
            reported = int(process.stdout.readline())
            time.sleep(draw.uniform(0.0, 1.5))
            process.kill()
            lines = process.stdout.read().split()
        reported = max([reported, *map(int, lines)])
        lost[reported - saved(folder)] += 1
        print(f"kill {number + 1}: {reported} updates reported, {saved(folder)} saved")
    return lost


def updates_of(folder: Path, count: int) -> list[dict[str, float]]:
    """Statistics of the first `count` updates, without times."""
    path = newest(folder)
    assert path is not None
    updates = read_state(path, "state")["loop"]["updates"][:count]
    return [{name: value for name, value in update.items() if not name.endswith("_s")} for update in updates]


def uninterrupted(folder: Path, count: int) -> list[dict[str, float]]:
    """Statistics of the first `count` updates of a run that is not interrupted before."""
    with start(folder) as process:
        assert process.stdout is not None
        for _ in range(count + 1):
            process.stdout.readline()
        process.kill()
    return updates_of(folder, count)


def main() -> None:
    """Kill and resume, compare, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    where = setting()
    with tempfile.TemporaryDirectory() as scratch:
        killed, whole = (Path(scratch) / name for name in ("killed", "whole"))
        lost = killed_at_random(killed, args.kills, args.seed)
        count = saved(killed)
        result = {
            "command": f"python -m scripts.reliability.kill_and_resume --kills {args.kills} --seed {args.seed}",
            **where,
            "kills": args.kills,
            "updates": count,
            "updates_lost": {str(number): times for number, times in sorted(lost.items())},
            "same_as_uninterrupted": updates_of(killed, count) == uninterrupted(whole, count),
        }
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "kill_and_resume.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
