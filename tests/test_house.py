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
# A file imports only from files before it. Names without a file yet hold their place.
ORDER = [
    "errors",
    "hardware",
    "options",
    "parsing",
    "losses",
    "generation",
    "chat_template",
    "conversation",
    "batching",
    "demonstrations",
    "choices",
    "model_registry",
    "hub",
    "value_head",
    "loading",
    "adapter",
    "keeping",
    "history",
    "attention",
    "parts",
    "masks",
    "packing",
    "low_rank",
    "compiling",
    "kernels",
    "attention_gradients",
    "rowwise",
    "likelihood",
    "fusing",
    "transformer",
    "memory",
    "backbone",
    "writing",
    "sampling",
    "reading",
    "evaluation",
    "policy",
    "controllers",
    "learner_config",
    "minibatches",
    "trust_region",
    "sampled",
    "learner",
    "critic",
    "ppo",
    "ppo_trainer",
    "grpo",
    "algorithms",
    "sft",
    "replay",
    "tracking",
    "checkpoint",
    "alarms",
    "interface",
    "agent",
    "training",
    "__init__",
]
# Heavy or optional: imported where they are used first.
LAZY = {"wandb", "bitsandbytes", "textworld", "minigrid", "tensorboard"}
FILES = sorted(LIBRARY.rglob("*.py"))
LINES = 350
# Larger than that today; it may shrink, no other file may join it.
LARGE = {"agent.py": 400}


def place(path: Path) -> str:
    """Where a file stands in ORDER: its own name, or that of the folder it lies in."""
    relative = path.relative_to(LIBRARY)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def name_of(path: Path) -> str:
    """The file as seen from the library's folder."""
    return path.relative_to(LIBRARY).as_posix()


def imports(tree: ast.AST, package: tuple[str, ...]) -> set[str]:
    """The library's own modules that a file of `package` imports, be it in a function or for type checking only."""
    dotted: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*start, *([node.module] if node.module else [])])
            # `from . import ppo` names modules; `from llamagym import Agent` names what all of them together export.
            bare = module == "llamagym"
            dotted += [f"{module}.{alias.name}" for alias in node.names] if bare else [module]
    ours = [name.split(".") for name in dotted if name.split(".")[0] == "llamagym"]
    places = {place(path) for path in FILES}
    return {name[1] if len(name) > 1 and name[1] in places else "__init__" for name in ours}


def faults(where: str, imported: set[str]) -> set[str]:
    """The imports that the order forbids to a file at `where`."""
    if where == "envs":
        return imported - {"errors", "envs"}
    return {name for name in imported if name not in ORDER[: ORDER.index(where)]}


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


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_flow_one_way(path):
    where = place(path)
    assert where in {*ORDER, "envs"}, f"say in ORDER which files {name_of(path)} may import"
    package = ("llamagym", *path.relative_to(LIBRARY).parts[:-1])
    wrong = faults(where, imports(ast.parse(path.read_text()), package))
    assert not wrong, f"{name_of(path)} imports {sorted(wrong)}, which ORDER does not put before it"


@pytest.mark.parametrize(
    ("source", "package", "found"),
    [
        ("from .ppo import PPO", ("llamagym",), {"ppo"}),
        ("from . import ppo, agent", ("llamagym",), {"ppo", "agent"}),
        ("import llamagym.ppo as p", ("llamagym",), {"ppo"}),
        ("from llamagym.ppo import PPO", ("llamagym",), {"ppo"}),
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
    assert faults("losses", {"errors", "agent"}) == {"agent"}
    assert faults("ppo", {"ppo"}) == {"ppo"}
    assert faults("agent", {"__init__"}) == {"__init__"}
    assert faults("envs", {"errors", "parsing"}) == {"parsing"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_optional_packages_are_imported_where_they_are_used(path):
    early = LAZY & top_level_imports(ast.parse(path.read_text()))
    assert not early, f"{name_of(path)} imports {sorted(early)} at once; import it in the function that needs it"


def test_imports_at_once_are_told_from_those_in_functions():
    source = (
        "try:\n    import wandb\nexcept ImportError:\n    pass\nclass A:\n    def f(self):\n        import minigrid\n"
    )
    assert top_level_imports(ast.parse(source)) == {"wandb"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= LARGE.get(name_of(path), LINES)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_library_does_not_print(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


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


def test_large_tensors_come_in_large_pages_unless_the_user_says_otherwise():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system has no large pages")
    assert page_faults() < page_faults(THP_MEM_ALLOC_ENABLE="0") / 2
