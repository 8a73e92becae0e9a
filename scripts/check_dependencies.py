"""Tests llamagym with the lowest and with the current releases of its dependencies.

    python scripts/check_dependencies.py lowest current
    python scripts/check_dependencies.py current --tests tests/agent/test_agent.py tests/learners/test_ppo.py

`lowest` installs requirements/lowest.txt, `current` the newest releases that pyproject.toml allows. Each set gets a
virtual environment of its own below --environments, which is reused, and runs the test suite there. The result, with
versions and counts, goes to scripts/benchmarks/results/dependencies-<set>.json. Both sets take several GB of disk.

The daily pins, requirements/base.txt, are what `python scripts/bootstrap.py --test` tests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))

from bootstrap import EMBEDDED_MODEL, prepare_venv, venv_python
from common import RESULTS, ROOT, setting

SETS = ("lowest", "current")
# bitsandbytes needs a CUDA device, and OpenEnv an environment's server.
EXTRAS = ("sft", "wandb", "textworld", "minigrid", "textarena", "serve", "tensorboard", "sweep")
TEST_TOOLS = ("pytest", "pytest-xdist", "hypothesis", "matplotlib", "nbclient", "ipykernel", "ruff", "openai")
_PRINT_VERSIONS = (
    "import importlib.metadata, json, platform; "
    "found = {d.metadata['Name'].lower(): d.version for d in importlib.metadata.distributions()}; "
    "print(json.dumps({'python': platform.python_version(), **dict(sorted(found.items()))}))"
)


def requirements(name: str) -> list[str]:
    """Arguments of `pip install` for a set: the package with its extras, and the tools that its tests need."""
    package = f"{ROOT}[{','.join(EXTRAS)}]"
    if name == "lowest":
        return ["-r", str(ROOT / "requirements" / "lowest.txt"), "-e", package, *TEST_TOOLS]
    return ["--upgrade", "--upgrade-strategy", "eager", "-e", package, *TEST_TOOLS]


def install(name: str, folder: Path) -> Path:
    """Bring a set's virtual environment up to date; returns its interpreter."""
    prepare_venv(folder)
    python = venv_python(folder)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *requirements(name)], check=True)
    subprocess.run([*pip, "--no-deps", EMBEDDED_MODEL], check=True)
    return python


def installed(python: Path) -> dict[str, str]:
    """Versions of Python and of all packages in an environment."""
    result = subprocess.run([str(python), "-c", _PRINT_VERSIONS], capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(result.stdout)
    return versions


def run_tests(python: Path, tests: Sequence[str]) -> dict[str, Any]:
    """Run pytest in one process; returns its exit code (2 if interrupted), counts, and names of tests that failed."""
    # Two threads that share a core wait for each other.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if not report.exists():
            raise SystemExit(f"check_dependencies: pytest ended with code {code} and without a report, see above.")
        return {"exit_code": code, **counts(ElementTree.parse(report).getroot())}


def counts(report: ElementTree.Element) -> dict[str, Any]:
    """Counts of a JUnit report.

    >>> counts(ElementTree.fromstring('<testsuite><testcase classname="a" name="b"/></testsuite>'))
    {'passed': 1, 'failed': 0, 'skipped': 0, 'failures': []}
    """
    cases = list(report.iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
    }


def check(name: str, folder: Path, tests: Sequence[str], installs: bool) -> bool:
    """Install a set, test it and write its result; returns whether all tests passed."""
    python = install(name, folder) if installs else venv_python(folder)
    versions = installed(python)
    print(f"[{name}] " + ", ".join(f"{package} {version}" for package, version in versions.items()), flush=True)
    here = setting()
    result = {
        "command": ["scripts/check_dependencies.py", *sys.argv[1:]],
        **{key: here[key] for key in ("commit", "uncommitted_changes", "hardware")},
        "versions": versions,
        "tests": list(tests) or ["all"],
        **run_tests(python, tests),
    }
    path = RESULTS / f"dependencies-{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"[{name}] {result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped: {path}")
    return result["exit_code"] == 0


def main(argv: Sequence[str]) -> int:
    """Check the sets that the command line names; 0 if all of their tests passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=SETS, help="sets of releases to test")
    parser.add_argument("--tests", nargs="+", default=[], help="arguments of pytest, e.g. paths (default: the suite)")
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".venvs", help="folder of the environments (default: .venvs)"
    )
    parser.add_argument("--no-install", action="store_true", help="use the environments as they are")
    args = parser.parse_args(argv)
    passed = [check(name, args.environments / name, args.tests, not args.no_install) for name in args.sets]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
