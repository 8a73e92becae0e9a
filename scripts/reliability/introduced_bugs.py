"""Introduce ten bugs into a copy of the repository, one after the other, and find the first test that fails.

    python scripts/reliability/introduced_bugs.py

Each bug is looked for by the short test run, with the files that are likeliest to notice it in front, and by the whole
test run only if the short one passes. Writes results/introduced_bugs.json. With --only NAME one bug is looked for.
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
    """A change of one line.

    Attributes:
        name: The mistake.
        path: The file.
        old: The text that is replaced, which occurs once.
        new: The text in its place.
        likely: Test files that run first, without `tests/test_` and `.py`.
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
        "            if cut[index] and self.learner.has_critic:\n",
        "            if finals[index] is not None and self.learner.has_critic:\n",
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
        "llamagym/policy/score.py",
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
        "llamagym/engine/cpu/fused_layer.py",
        "grad_up = (grad_rows.T @ low).mul_(ctx.scale)",
        "grad_up = grad_rows.T @ low",
        ("low_rank",),
    ),
)


def copy_of_the_repository(folder: Path) -> Path:
    """The files that git knows, or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    compiled = Path("llamagym") / "engine" / "cpu" / "__pycache__"
    if (ROOT / compiled).is_dir():
        # Kernels, which take minutes to compile. numba knows them by their source file's time, which was kept.
        shutil.copytree(ROOT / compiled, folder / compiled)
    return folder


def write(path: Path, text: str) -> None:
    """Write a source file and drop its bytecode, which Python would take for current if size and second agree."""
    path.write_text(text, encoding="utf-8")
    for old in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        old.unlink()


def first_failure(folder: Path, *arguments: str) -> str | None:
    """The first test that fails, or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    settings = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - |$)", done.stdout, flags=re.MULTILINE)
    if failed is None:
        raise SystemExit(f"pytest failed without a failed test:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return failed[1]


def diff(bug: Bug, before: str, after: str) -> str:
    """The bug as a patch."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), bug.path, bug.path, "", "", n=0, lineterm="")
    return "\n".join(lines)


def look_for(bug: Bug, folder: Path) -> dict[str, str | None]:
    """Introduce a bug, run the tests, and take it back."""
    path = folder / bug.path
    before = path.read_text(encoding="utf-8")
    if before.count(bug.old) != 1:
        raise SystemExit(
            f"{bug.path} holds {bug.old!r} {before.count(bug.old)} times; expected once. Update the table."
        )
    after = before.replace(bug.old, bug.new)
    write(path, after)
    found: dict[str, str | None] = {"bug": bug.name, "diff": diff(bug, before, after), "run": None, "test": None}
    likely = [f"tests/test_{name}.py" for name in bug.likely]
    for run, options, files in (("short", SHORT, likely), ("short", SHORT, []), ("all", LONG, [])):
        test = first_failure(folder, *options, *files)
        if test is not None:
            found |= {"run": run, "test": test}
            break
    write(path, before)
    if found["test"] is not None and first_failure(folder, found["test"]) is not None:
        raise SystemExit(f"{found['test']} fails without the bug, too, so it does not show that the bug is found.")
    return found


def main() -> int:
    """Look for all bugs; 0 if each is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[bug.name for bug in BUGS], help="look for this bug and write nothing")
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
