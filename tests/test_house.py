"""The house rules: which file may import which, what is exported, what the library never does."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import llamagym

LIBRARY = Path(llamagym.__file__).parent
# What the files of each wing may import, its own beside; files outside of wings stand in the order below them. A wing
# within another, with a dot, has rules of its own.
WINGS = {
    "saving": set(),
    "text": set(),
    "models": {"saving", "text"},
    "engine": {"text", "models"},
    "engine.cpu": {"models"},
    "policy": {"text", "models", "engine"},
    "learners": {"text", "models", "policy"},
    "trl_compat": {"models", "policy", "learners"},
    "agent": {"saving", "text", "models", "policy", "learners"},
    "training": {"saving", "text", "models", "policy", "learners", "agent", "training.report"},
    "envs": set(),
    "cli": {"saving", "text", "models", "policy", "learners", "training", "agent"},
    "training.report": {"agent", "saving"},
}
# Importable from anywhere.
BASICS = {"errors", "options", "distributed"}
OUTSIDE = ["errors", "options", "distributed", "__init__", "__main__"]
# The one file of the engine that opens the door to what a processor computes faster.
DOOR = "engine/acceleration.py"
# Heavy or optional: imported where they are used first.
LAZY = {"wandb", "bitsandbytes", "textworld", "minigrid", "textarena", "openenv", "tensorboard"}
# What must not come along with `import llamagym`, which is to cost less than a second beside torch and transformers.
HEAVY = {
    *LAZY,
    "datasets",
    "numba",
    "pandas",
    "peft",
    "pyarrow",
    "scipy",
    "sympy",
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.models.auto.auto_factory",
    "trl",
}
FILES = sorted(LIBRARY.rglob("*.py"))
LINES = 600
ENTRIES = 17


def wing_of(name: str) -> str:
    """The wing of a file by its dotted name, or that name's first part where it lies in none."""
    first, *rest = name.split(".")
    nested = ".".join([first, *rest[:1]])
    return nested if nested in WINGS else first


def place(path: Path) -> str:
    """The wing that a file lies in, or its own name."""
    return wing_of(".".join(path.relative_to(LIBRARY).with_suffix("").parts))


def name_of(path: Path) -> str:
    """The file as seen from the library's folder."""
    return path.relative_to(LIBRARY).as_posix()


def imports(tree: ast.AST, package: tuple[str, ...]) -> set[str]:
    """The library's own files, as dotted names below it, that a file of `package` imports, wherever it does."""
    dotted: list[list[str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = [*start, *(node.module.split(".") if node.module else [])]
            # `from . import ppo` names files where there are such; else it names what the package exports.
            named = [[*module, alias.name] for alias in node.names]
            dotted += [name if is_ours(name[1:]) else module for name in named]
    return {".".join(name[1:]) or "__init__" for name in dotted if name[0] == "llamagym"}


def is_ours(parts: list[str]) -> bool:
    """Whether there is such a file or wing."""
    path = LIBRARY.joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()


def faults(where: str, imported: set[str]) -> set[str]:
    """The imports that the house forbids to a file of a wing, or to one outside of wings, at `where`."""
    wings = {name: wing_of(name) for name in imported}
    if where in WINGS:
        return {name for name, wing in wings.items() if wing not in WINGS[where] | BASICS | {where}}
    above = OUTSIDE[OUTSIDE.index(where) :]
    return {name for name, wing in wings.items() if wing in above or (where in BASICS and wing in WINGS)}


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Files that import each other in a circle."""
    left = dict(graph)
    while done := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in done:
            del left[name]
    return sorted(left)


def top_level_imports(tree: ast.Module) -> set[str]:
    """Packages imported as soon as the file is: everything outside functions."""
    found: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return found


def imports_of(path: Path) -> set[str]:
    """What a file of the library imports from it."""
    return imports(ast.parse(path.read_text()), ("llamagym", *path.relative_to(LIBRARY).parts[:-1]))


def test_imports_run_down_the_house():
    for path in FILES:
        where = place(path)
        assert where in {*WINGS, *OUTSIDE}, f"say in WINGS or OUTSIDE what {name_of(path)} may import"
        imported = imports_of(path)
        if name_of(path) == DOOR:
            imported = {name for name in imported if wing_of(name) != "engine.cpu"}
        wrong = faults(where, imported)
        assert not wrong, f"{name_of(path)} imports {sorted(wrong)}, which no file of {where} may"


def test_imports_run_in_no_circle():
    graph = {".".join(path.relative_to(LIBRARY).with_suffix("").parts): imports_of(path) for path in FILES}
    assert circles(graph) == []
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]


def test_the_door_to_the_processor_is_used():
    assert "engine.cpu" in map(wing_of, imports_of(LIBRARY / DOOR))


@pytest.mark.parametrize(
    ("source", "package", "found"),
    [
        ("from .ppo import PPO", ("llamagym", "learners"), {"learners.ppo"}),
        ("from . import ppo, grpo", ("llamagym", "learners"), {"learners.ppo", "learners.grpo"}),
        ("import llamagym.learners.ppo as p", ("llamagym",), {"learners.ppo"}),
        ("from llamagym.learners.ppo import PPO", ("llamagym",), {"learners.ppo"}),
        ("from ..policy import score", ("llamagym", "learners"), {"policy.score"}),
        ("from llamagym import Agent", ("llamagym",), {"__init__"}),
        ("import llamagym", ("llamagym",), {"__init__"}),
        ("from ..errors import ConfigError", ("llamagym", "envs"), {"errors"}),
        ("def f():\n    from .agent import Agent", ("llamagym",), {"agent"}),
        ("if TYPE_CHECKING:\n    from .agent import Agent", ("llamagym",), {"agent"}),
        ("import torch\nfrom trl import PPOTrainer", ("llamagym",), set()),
    ],
)
def test_every_way_to_import_is_seen(source, package, found):
    assert imports(ast.parse(source), package) == found


def test_forbidden_imports_are_found():
    told = {"errors", "models.lora", "policy.score", "engine.cpu.packing"}
    assert faults("engine", told) == {"policy.score", "engine.cpu.packing"}
    assert faults("engine.cpu", {"models.lora", "engine.masks"}) == {"engine.masks"}
    assert faults("errors", {"policy.score", "agent"}) == {"policy.score", "agent"}
    assert faults("agent", {"__init__", "policy.policy"}) == {"__init__"}
    assert faults("envs", {"errors", "envs.babyai", "conversation.parsing"}) == {"conversation.parsing"}


def test_the_house_has_few_doors():
    listing = subprocess.run(["git", "ls-files", "."], cwd=LIBRARY, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not in a git checkout")
    assert len({name.split("/")[0] for name in listing.stdout.split()}) <= ENTRIES


def test_optional_packages_are_imported_where_they_are_used():
    for path in FILES:
        early = LAZY & top_level_imports(ast.parse(path.read_text()))
        assert not early, f"{name_of(path)} imports {sorted(early)} at once; import it in the function that needs it"


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh process has loaded after some code."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_the_import_is_light():
    assert HEAVY & loaded_by("import llamagym") == set()


@pytest.mark.long
def test_heavy_imports_are_seen():
    # Were one of these renamed, the test above would pass whatever is imported.
    assert loaded_by("import peft, transformers; transformers.AutoModelForCausalLM") >= {
        "peft",
        "torch._dynamo",
        "torch.distributed.tensor",
        "transformers.modeling_utils",
        "transformers.models.auto.auto_factory",
    }


def test_imports_at_once_are_told_from_those_in_functions():
    source = (
        "try:\n    import wandb\nexcept ImportError:\n    pass\nclass A:\n    def f(self):\n        import minigrid\n"
    )
    assert top_level_imports(ast.parse(source)) == {"wandb"}


def test_files_stay_small():
    lines = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > LINES} == {}


def test_the_library_does_not_print():
    for path in FILES:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        prints = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        assert not prints, f"{name_of(path)} prints in the lines {prints}"


def test_exports_are_complete_sorted_and_documented():
    # Constants, then classes, then functions, as ruff sorts them.
    rank = {name: (0 if name.isupper() else 1 if name[0].isupper() else 2, name) for name in llamagym.__all__}
    assert llamagym.__all__ == sorted(rank, key=rank.__getitem__), "unsorted or repeated"
    for name in llamagym.__all__:
        assert getattr(llamagym, name).__doc__, f"{name} has no docstring"
    namespace: dict[str, object] = {}
    exec("from llamagym import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(llamagym.__all__)
    public = {name for name in vars(llamagym) if not name.startswith("_")} - {place(path) for path in FILES}
    assert public == set(llamagym.__all__)


def page_faults(**environment: str) -> int:
    """How often a fresh process that has imported the library asks the system for memory, to fill 250 MB."""
    code = (
        "import llamagym, torch, resource\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "before, filled = faults(), [torch.ones(64, 49152) for _ in range(20)]\n"
        "print(faults() - before)"
    )
    kept = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    command = [sys.executable, "-c", code]
    return int(subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.long
def test_large_tensors_come_in_large_pages_unless_the_user_says_otherwise():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system has no large pages")
    assert page_faults() < page_faults(THP_MEM_ALLOC_ENABLE="0") / 2
