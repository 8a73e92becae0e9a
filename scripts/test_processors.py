"""Run the tests as other processors, thread counts and kernel switches would compute them.

A processor with AVX-512 can also compute as one with AVX2 or with neither: environment variables tell PyTorch, MKL and
oneDNN which instructions to use. Each combination of instruction set, number of threads and kernels on or off is one
run of pytest, two at a time. One line per combination reports its result; the exit code is 1 if any test failed.

`--tests` selects the tests: `numerical` ones, which compare numbers computed in different ways (a few minutes), those
of the `short` or the `long` run, or `all` (six hours of one core). A result file is written after each combination,
with its commit and its processor. Combinations that passed with the same packages are not run again, so that a run can
be continued later, on another processor, and after a change that the finished combinations need not see. Delete the
file to start over.

    python scripts/test_processors.py --tests numerical --out result.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))
from common import processor, setting, versions  # noqa: E402

# From the fewest instructions to the most, as PyTorch names them: what MKL and oneDNN call the same.
INSTRUCTIONS = {
    "default": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "DNNL_MAX_CPU_ISA": "SSE41"},
    "avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "DNNL_MAX_CPU_ISA": "AVX2"},
    "avx512": {},
}
THREADS = (1, 3)
AT_ONCE = 2


@dataclass
class Combination:
    """One way to compute, and what came of the tests."""

    instructions: str
    threads: int
    kernels: bool
    commit: str = ""
    processor: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """The combination in words."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.instructions}, {threads}, {'kernels' if self.kernels else 'no kernels'}"

    def environment(self) -> dict[str, str]:
        """The environment variables that make a process compute this way."""
        return {
            "ATEN_CPU_CAPABILITY": self.instructions,
            **INSTRUCTIONS[self.instructions],
            "LLAMAGYM_CPU_KERNELS": str(int(self.kernels)),
            "LLAMAGYM_TEST_THREADS": str(self.threads),
            "OMP_NUM_THREADS": str(self.threads),
            "NUMBA_NUM_THREADS": str(self.threads),
            # Threads that wait must not keep a core from those that compute, where there are more threads than cores.
            "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }


def best_instructions() -> str:
    """The largest set in `INSTRUCTIONS` that this processor has."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability().lower())"
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    found = answer.stdout.strip()
    return found if found in INSTRUCTIONS else "default"


def run(combination: Combination, selection: list[str]) -> str:
    """Run the tests in a combination and note the counts; returns pytest's output."""
    started = time.monotonic()
    combination.passed = combination.failed = combination.skipped = 0
    combination.processor_seconds = 0.0
    combination.failures = []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *selection]
        environment = os.environ | combination.environment()
        finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        combination.seconds = round(time.monotonic() - started, 1)
        if not report.exists():
            combination.failed = 1
            combination.failures = [f"pytest exited with {finished.returncode} and no report"]
            return finished.stdout + finished.stderr
        for case in ElementTree.parse(report).iter("testcase"):
            _count(combination, case)
    if finished.returncode and not combination.failed:
        combination.failed = 1
        combination.failures = [f"pytest exited with {finished.returncode}"]
    return finished.stdout + finished.stderr


def _count(combination: Combination, case: ElementTree.Element) -> None:
    """Add one test's outcome."""
    combination.processor_seconds = round(combination.processor_seconds + float(case.get("time", 0)), 2)
    if case.find("failure") is not None or case.find("error") is not None:
        combination.failed += 1
        combination.failures.append(f"{case.get('classname')}::{case.get('name')}")
    elif case.find("skipped") is not None:
        combination.skipped += 1
    else:
        combination.passed += 1


def selection_of(tests: str) -> list[str]:
    """Arguments with which pytest runs the `numerical` tests, the `short` run, the `long` one or `all` of them."""
    if tests == "numerical":
        return [*_numerical_files(), "-m", "numerical and not long"]
    markers = {"short": ["-m", "not long"], "long": ["-m", "long"], "all": []}
    return markers[tests]


class Result:
    """The combinations and their results, written to a file after each of them.

    Attributes:
        combinations: All that this processor offers.
        pending: Those that still have to run.
    """

    def __init__(self, tests: str, path: Path | None) -> None:
        """Take over what a file of the same tests and packages holds of combinations that passed."""
        names = list(INSTRUCTIONS)
        offered = names[: names.index(best_instructions()) + 1]
        self.skipped_instructions = names[len(offered) :]
        self.combinations = [Combination(*of) for of in itertools.product(offered, THREADS, (True, False))]
        self._path = path
        here = setting()
        self._commit = here.pop("commit") + (" and uncommitted changes" if here.pop("uncommitted_changes") else "")
        del here["hardware"]
        self._about = {"command": f"python scripts/test_processors.py --tests {tests}", **here}
        self._lock = threading.Lock()
        earlier = json.loads(path.read_text("utf-8")) if path is not None and path.exists() else {}
        if all(earlier.get(key) == value for key, value in self._about.items()):
            passed = {str(each): each for each in (Combination(**record) for record in earlier["combinations"])}
            self.combinations = [passed.get(str(each), each) for each in self.combinations]
        self.pending = [each for each in self.combinations if each.failed or not each.passed]

    def take(self, combination: Combination) -> None:
        """Write the combinations that have run, of which this one is the latest."""
        combination.commit = self._commit
        combination.processor = processor()
        if self._path is None:
            return
        done = [asdict(each) for each in self.combinations if each.failed or each.passed]
        result = {
            **self._about,
            "tools": versions("numba", "pytest"),
            "skipped_instructions": self.skipped_instructions,
            "combinations": done,
        }
        with self._lock:
            self._path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def main() -> int:
    """Run the tests in every combination that the processor offers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", choices=("numerical", "short", "long", "all"), default="all", help="default: all")
    parser.add_argument("--out", type=Path, help="a file to write the result to, as JSON")
    arguments = parser.parse_args()
    selection = selection_of(arguments.tests)
    result = Result(arguments.tests, arguments.out)
    print(f"{processor()}, {os.cpu_count()} cores", flush=True)
    for name in result.skipped_instructions:
        print(f"{name}: skipped, this processor lacks it", flush=True)

    def run_and_save(combination: Combination) -> str:
        output = _run_and_report(combination, selection)
        result.take(combination)
        return output

    with ThreadPoolExecutor(AT_ONCE) as pool:
        outputs = list(pool.map(run_and_save, result.pending))
    for combination, output in zip(result.pending, outputs, strict=True):
        if combination.failed:
            print(f"\n{combination}:\n{output}")
    return int(any(combination.failed for combination in result.combinations))


def _numerical_files() -> list[str]:
    """The files that hold numerical tests: to import the others takes as long as these tests."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "pytest.mark.numerical" in path.read_text("utf-8")]


def _run_and_report(combination: Combination, selection: list[str]) -> str:
    output = run(combination, selection)
    counts = f"{combination.passed} passed, {combination.failed} failed, {combination.skipped} skipped"
    print(f"{combination}: {counts} in {combination.seconds:.0f} s", flush=True)
    return output


if __name__ == "__main__":
    sys.exit(main())
