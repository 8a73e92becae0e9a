"""Run an example over seeds, and keep one JSON file a run: settings, curve, score, time, memory.

python scripts/benchmarks/learning/run.py blackjack --seeds 0 1 2
python scripts/benchmarks/learning/run.py blackjack --name blackjack-free-text --seeds 0 -- --free-text
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import ROOT, setting

RESULTS = Path(__file__).resolve().parent / "results"
# What the curve keeps of each update's statistics.
CURVE = ("step", "minutes", "expected_return", "return_mean", "entropy", "approx_kl", "explained_variance")


def record(run_dir: Path, command: list[str], where: dict[str, object]) -> dict[str, object]:
    """A run's result from what the example wrote."""
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    curve = [{key: round(update[key], 5) for key in CURVE if key in update} for update in map(json.loads, lines)]
    summary["settings"].pop("run_dir", None)
    return {"command": " ".join(command), **where, **summary, "curve": curve}


def main() -> None:
    """Run each seed in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", help="name of a script in examples/")
    parser.add_argument("--name", help="of the result files, ablations/NAME for a variant; default: the example's")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    # argparse itself would refuse them: `--seeds` takes all values there are.
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, options = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    for seed in args.seeds:
        command = ["python", f"examples/{args.example}.py", "--seed", str(seed), *options]
        with tempfile.TemporaryDirectory() as folder:
            where = setting()
            subprocess.run([sys.executable, *command[1:], "--run-dir", folder], cwd=ROOT, check=True)
            result = record(Path(folder), command, where)
        path = RESULTS / f"{args.name or args.example}-seed{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
