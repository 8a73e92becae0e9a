"""Measures a newcomer's first minutes on a fresh clone with empty caches: the README's commands and its first snippet.

python scripts/benchmarks/first_minutes.py                          three repetitions of everything; takes 40 minutes
python scripts/benchmarks/first_minutes.py --skip blackjack snippet --name only-tests

Run it on an idle machine. It clones the commit at HEAD, so commit first. Writes results/first-minutes.json, or another
file of that folder with --name, so that parts can be measured one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, save

PARTS = ("blackjack", "snippet", "tests")


def timed(command: list[str], clone: Path, home: Path) -> tuple[float, str, float]:
    """Runs a command in the clone with empty caches.

    Returns:
        Total seconds, the output, and the longest time between two lines after the set-up, in seconds.
    """
    # Ignore caches and settings of other runs on this machine.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "NUMBA_", "OMP_"))}
    environment |= {"HOME": str(home), "PYTHONUNBUFFERED": "1"}
    started = latest = time.perf_counter()
    lines: list[str] = []
    silence = 0.0
    with subprocess.Popen(
        command, cwd=clone, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            now = time.perf_counter()
            if any("ready after" in printed for printed in lines):
                silence = max(silence, now - latest)
            latest = now
            lines.append(line)
            sys.stderr.write(line)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed with code {process.returncode}.")
    return time.perf_counter() - started, "".join(lines), silence


def blackjack(clone: Path, home: Path) -> dict[str, Any]:
    """The first command: set-up and 2.5 minutes of learning."""
    command = ["python3", "scripts/bootstrap.py", "--run", "examples/blackjack.py"]
    seconds, printed, silence = timed(command, clone, home)
    (path,) = (clone / "runs").glob("blackjack-*/summary.json")
    summary = json.loads(path.read_text())
    setup = re.search(r"ready after (\d+) s", printed)
    kept = ("minutes", "episodes", "expected_return_before", "expected_return_after", "expected_return_greedy")
    return {
        "seconds": round(seconds, 1),
        "setup_s": int(setup[1]) if setup else None,
        "longest_silence_s": round(silence, 1),
        **{name: summary[name] for name in kept},
        "report_kib": round((path.parent / "report.html").stat().st_size / 1024),
    }


def snippet(clone: Path, home: Path, seed: int) -> dict[str, Any]:
    """The README's first snippet with another seed, in the environment that the first command set up."""
    code = re.findall(r"```python\n(.*?)```", (clone / "README.md").read_text(), flags=re.DOTALL)[0]
    assert "seed=0)" in code
    path = clone / "runs" / f"snippet-{seed}.py"
    path.write_text(code.replace("seed=0)", f"seed={seed})"))
    seconds, printed, _ = timed([str(clone / ".venv" / "bin" / "python"), str(path)], clone, home)
    returns = {
        name: float(value) for name, value in re.findall(r"^(random|before|after): (\S+)$", printed, re.MULTILINE)
    }
    return {"seed": seed, "seconds": round(seconds, 1), **returns}


def tests(clone: Path, home: Path) -> dict[str, Any]:
    """The second command, after the first one."""
    seconds, printed, _ = timed(["python3", "scripts/bootstrap.py", "--test"], clone, home)
    summary = re.findall(r"^.*\d+ passed.*$", printed, re.MULTILINE)
    return {"seconds": round(seconds, 1), "summary": re.sub(r" in .*|=", "", summary[-1]).strip()}


def main() -> None:
    """Measure, and save after each repetition."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--skip", nargs="+", choices=PARTS, default=[], help="parts to leave out")
    parser.add_argument("--name", default="first-minutes", help="name of the result file (default: first-minutes)")
    args = parser.parse_args()
    measured: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS if part not in args.skip}
    for repetition in range(args.repetitions):
        with tempfile.TemporaryDirectory() as folder:
            clone, home = Path(folder) / "clone", Path(folder) / "home"
            home.mkdir()
            subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
            if "blackjack" in measured:
                measured["blackjack"].append(blackjack(clone, home))
            else:
                timed(["python3", "scripts/bootstrap.py"], clone, home)
            (clone / "runs").mkdir(exist_ok=True)
            if "snippet" in measured:
                measured["snippet"].append(snippet(clone, home, seed=repetition))
            if "tests" in measured:
                measured["tests"].append(tests(clone, home))
        save(args.name, measured)


if __name__ == "__main__":
    main()
