"""Introduces bugs into a copy of the repository, one at a time, and finds the first test that fails.

    python scripts/reliability/introduced_bugs.py

For each bug the short tests run, starting with the files that most likely detect it, and the long tests only if the
short ones pass. Writes results/introduced_bugs.json. --only NAME tries a single bug.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RESULT = Path(__file__).resolve().parent / "results" / "introduced_bugs.json"
SHORT, LONG = ("-m", "not long"), ("-m", "long")


@dataclass(frozen=True)
class Bug:
    """A bug, as a change of one line.

    Attributes:
        name: The mistake.
        path: The file.
        old: The text to replace; it occurs once.
        new: The replacement.
        likely: Test files that run first, without their folder, `test_` and `.py`.
    """

    name: str
    path: str
    old: str
    new: str
    likely: tuple[str, ...] = ()


BUGS = (
    Bug(
        "the surrogate takes the larger of the clipped and the unclipped objective",
        "llamagym/learners/losses.py",
        "PolicyLoss(masked_mean(torch.maximum(unclipped, clipped), mask)",
        "PolicyLoss(masked_mean(torch.minimum(unclipped, clipped), mask)",
        ("losses",),
    ),
    Bug(
        "a value is bootstrapped after termination, too",
        "llamagym/agent/collector.py",
        "            if is_truncated and self.learner.has_critic:\n",
        "            if final is not None and self.learner.has_critic:\n",
        ("agent",),
    ),
    Bug(
        "position ids of decisions begin one too early",
        "llamagym/engine/token_tree.py",
        "positions[row, base:end] = decision.start",
        "positions[row, base:end] = decision.start - 1",
        ("invariants",),
    ),
    Bug(
        "cached activations outlive a change of the trained weights",
        "llamagym/policy/policy.py",
        "                workspace.prefix_cache.remove_outdated()\n",
        "                pass\n",
        ("weights",),
    ),
    Bug(
        "decisions see the padding of their history instead of its tokens",
        "llamagym/engine/backbone.py",
        "is_filled = torch.cat([is_cached, torch.arange(size) < new_lengths], dim=1)",
        "is_filled = torch.cat([is_cached, torch.arange(size) >= new_lengths], dim=1)",
        ("invariants",),
    ),
    Bug(
        "a checkpoint omits the optimizer's moments",
        "llamagym/learners/state.py",
        'return {**state, "state": {str(number): moments for number, moments in state["state"].items()}}',
        'return {**state, "state": {}}',
        ("resume_cases",),
    ),
    Bug(
        "rewards go to the environments in reverse order",
        "llamagym/training/play.py",
        "[self._ids[i] for i in outcomes])",
        "[self._ids[i] for i in reversed(outcomes)])",
        ("overlap",),
    ),
    Bug(
        "the learner ignores the temperature of free text",
        "llamagym/policy/evaluation.py",
        "temperatures = torch.full((len(hidden),), temperature, device=hidden.device)",
        "temperatures = torch.full((len(hidden),), 1.0, device=hidden.device)",
        ("writing",),
    ),
    Bug(
        "of equally likely choices the last is taken, not the first",
        "llamagym/policy/sampling.py",
        "(logprobs.argmax(-1) if greedy",
        "(logprobs.shape[1] - 1 - logprobs.flip(-1).argmax(-1) if greedy",
        ("writing",),
    ),
    Bug(
        "the gradient of LoRA's B lacks the scale in fused layers",
        "llamagym/engine/cpu/low_rank.py",
        "grad_up = (grad_rows.T @ low).mul_(ctx.scale)",
        "grad_up = grad_rows.T @ low",
        ("low_rank",),
    ),
)


def copy_of_the_repository(folder: Path) -> Path:
    """Copies all files that git tracks or would add; returns the folder."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    compiled = Path("llamagym") / "engine" / "cpu" / "__pycache__"
    if (ROOT / compiled).is_dir():
        # Compiled kernels, since compilation takes minutes. numba checks the source's modification time, which is kept.
        shutil.copytree(ROOT / compiled, folder / compiled)
    return folder


def write(path: Path, text: str) -> None:
    """Writes a source file and deletes its bytecode, which could pass as current: same size, same second."""
    path.write_text(text, encoding="utf-8")
    for old in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        old.unlink()


def first_failure(folder: Path, *arguments: str) -> str | None:
    """Runs the tests; returns the first that fails, or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    settings = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - |$)", done.stdout, flags=re.MULTILINE)
    if failed is None:
        raise SystemExit(f"pytest failed, but no test did:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return failed[1]


def diff(bug: Bug, before: str, after: str) -> str:
    """The bug as a patch."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), bug.path, bug.path, "", "", n=0, lineterm="")
    return "\n".join(lines)


def look_for(bug: Bug, folder: Path) -> dict[str, str | None]:
    """Introduces a bug, runs the tests, and restores the file; returns the first failed test and its run."""
    path = folder / bug.path
    before = path.read_text(encoding="utf-8")
    if before.count(bug.old) != 1:
        raise SystemExit(f"{bug.path} contains {bug.old!r} {before.count(bug.old)} times; expected once. Update BUGS.")
    after = before.replace(bug.old, bug.new)
    write(path, after)
    found: dict[str, str | None] = {"bug": bug.name, "diff": diff(bug, before, after), "run": None, "test": None}
    likely = []
    for name in bug.likely:
        (file,) = folder.glob(f"tests/**/test_{name}.py")
        likely.append(str(file))
    for run, options, files in (("short", SHORT, likely), ("short", SHORT, []), ("all", LONG, [])):
        test = first_failure(folder, *options, *files)
        if test is not None:
            found |= {"run": run, "test": test}
            break
    write(path, before)
    if found["test"] is not None and first_failure(folder, found["test"]) is not None:
        raise SystemExit(f"{found['test']} also fails without the bug, so it does not detect it.")
    return found


def main() -> int:
    """Try all bugs; returns 0 if tests detect each of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[bug.name for bug in BUGS], help="try this bug only and write no result")
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as temporary:
        folder = copy_of_the_repository(Path(temporary))
        found = []
        for bug in BUGS:
            if only in (None, bug.name):
                found.append(look_for(bug, folder))
                print(f"{bug.name}: {found[-1]['run']}: {found[-1]['test']}", flush=True)
    if only is None:
        RESULT.write_text(
            json.dumps({"command": "python scripts/reliability/introduced_bugs.py", "bugs": found}, indent=1) + "\n"
        )
    return 0 if all(each["test"] for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
