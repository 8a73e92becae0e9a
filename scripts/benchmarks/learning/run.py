"""Run an example over seeds, and keep one JSON file a run: settings, curve, score, time, memory.

python scripts/benchmarks/learning/run.py blackjack --seeds 0 1 2
python scripts/benchmarks/learning/run.py blackjack --name blackjack-free-text --seeds 0 -- --free-text
python scripts/benchmarks/learning/run.py mastermind --seeds 0 --keep runs/mastermind   # stopped, it can go on
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import ROOT, setting

RESULTS = Path(__file__).resolve().parent / "results"
# What the curve keeps of each update's statistics.
CURVE = ("step", "minutes", "expected_return", "return_mean", "entropy", "approx_kl", "explained_variance")


def record(run_dir: Path, command: list[str], where: dict[str, object], is_resumed: bool) -> dict[str, object]:
    """A run's result from what the example wrote.

    Args:
        run_dir: The run's folder.
        command: The command that ran it.
        where: Commit, packages and hardware.
        is_resumed: Whether this process only continued the run; then its memory and processor time are not those of
            the whole run and are left out.
    """
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    curve = [{key: round(update[key], 5) for key in CURVE if key in update} for update in map(json.loads, lines)]
    for of_this_machine in ("run_dir", "resume"):
        summary["settings"].pop(of_this_machine, None)
    summary["turns_per_second"] = summary["turns"] / summary["minutes"] / 60
    if not is_resumed:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        summary["processor_minutes"] = (used.ru_utime + used.ru_stime) / 60
        # In KiB on Linux, which the benchmarks run on.
        summary["peak_memory_gib"] = used.ru_maxrss / 2**20
    return {"command": " ".join(command), **where, **summary, "curve": curve}


def run_seed(args: argparse.Namespace, seed: int, options: list[str]) -> dict[str, object]:
    """Run the example with a seed, or continue it in the folder where it was stopped, and return its result."""
    program = [f"examples/{args.example}.py"]
    if args.variant:
        program = ["scripts/benchmarks/learning/variant.py", args.variant, args.example]
    command = ["python", *program, "--seed", str(seed), *options]
    keep_dir = (args.keep / f"seed{seed}").resolve() if args.keep else None
    where = setting()
    with nullcontext(keep_dir) if keep_dir else tempfile.TemporaryDirectory() as parent:
        run_dir = Path(parent) / "run"
        is_resumed = (run_dir / "checkpoints").is_dir()
        resume = ["--resume"] if is_resumed else []
        subprocess.run([sys.executable, *command[1:], "--run-dir", str(run_dir), *resume], cwd=ROOT, check=True)
        return record(run_dir, command, where, is_resumed)


def main() -> None:
    """Run each seed in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", help="name of a script in examples/")
    parser.add_argument("--name", help="of the result files, ablations/NAME for a variant; default: the example's")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument(
        "--keep",
        type=Path,
        help="folder for the runs' files; a run that was stopped there continues",
    )
    parser.add_argument("--variant", help="change the agent: bare-numbers or no-calibration, see variant.py")
    # argparse itself would refuse them: `--seeds` takes all values there are.
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, options = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    for seed in args.seeds:
        # One seed per process, so that memory and processor time are its own.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            result = pool.submit(run_seed, args, seed, options).result()
        path = RESULTS / f"{args.name or args.example}-seed{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
