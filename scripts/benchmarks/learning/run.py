"""Run an example over seeds, and keep one JSON file a run: settings, curve, score, time, memory.

python scripts/benchmarks/learning/run.py blackjack --seeds 0 1 2
python scripts/benchmarks/learning/run.py blackjack --name blackjack-free-text --seeds 0 -- --free-text
python scripts/benchmarks/learning/run.py mastermind --seeds 0 --keep runs/mastermind   # stopped, it can go on
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
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
    for of_this_machine in ("run_dir", "checkpoint_dir", "checkpoint_every"):
        summary["settings"].pop(of_this_machine, None)
    if summary["settings"].pop("resume", False):
        # Of the last process alone, where an example counts them.
        summary.pop("processor_minutes", None)
    return {"command": " ".join(command), **where, **summary, "curve": curve}


def checkpoints(run_dir: Path) -> list[str]:
    """Options with which a run writes checkpoints, and goes on from those it has."""
    folder = run_dir / "checkpoints"
    again = ["--resume"] if any((run_dir / begun).exists() for begun in ("warm-start", "before.json")) else []
    return ["--checkpoint-dir", str(folder), "--checkpoint-every", "1", *again]


def main() -> None:
    """Run each seed in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", help="name of a script in examples/")
    parser.add_argument("--name", help="of the result files, ablations/NAME for a variant; default: the example's")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument(
        "--keep",
        type=Path,
        help="folder for runs' files and checkpoints; a run that is there goes on. A checkpoint after each "
        "update drops all caches, which takes time where observations recur",
    )
    # argparse itself would refuse them: `--seeds` takes all values there are.
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, options = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    for seed in args.seeds:
        command = ["python", f"examples/{args.example}.py", "--seed", str(seed), *options]
        kept = args.keep and (args.keep / f"seed{seed}").resolve()
        with nullcontext(kept) if kept else tempfile.TemporaryDirectory() as folder:
            where = setting()
            files = ["--run-dir", str(folder), *(checkpoints(kept) if kept else [])]
            subprocess.run([sys.executable, *command[1:], *files], cwd=ROOT, check=True)
            result = record(Path(folder), command, where)
        path = RESULTS / f"{args.name or args.example}-seed{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
