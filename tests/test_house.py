"""The house rules: which file may import which, what is exported, what the library never does."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import llamagym

LIBRARY = Path(llamagym.__file__).parent
# A file imports only from files before it.
ORDER = [
    "errors",
    "parsing",
    "losses",
    "generation",
    "chat_template",
    "conversation",
    "batching",
    "choices",
    "model_registry",
    "value_head",
    "loading",
    "backbone",
    "sampling",
    "policy",
    "ppo",
    "ppo_trainer",
    "tracking",
    "agent",
    "training",
    "__init__",
]
# Heavy or optional: imported where they are used first.
LAZY = {"wandb", "bitsandbytes", "textworld", "minigrid", "tensorboard"}
FILES = sorted(LIBRARY.glob("*.py"))


def imports(tree: ast.AST) -> list[str]:
    """The library's own modules that a file imports, anywhere in it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found += [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llamagym"):
            found.append((node.module or "").split(".")[1])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports_flow_one_way(path):
    assert path.stem in ORDER, f"say in ORDER which files {path.name} may import"
    for name in imports(ast.parse(path.read_text())):
        assert ORDER.index(name) < ORDER.index(path.stem), f"{path.name} imports {name}, which comes after it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_optional_packages_are_imported_where_they_are_used(path):
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not LAZY & {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= 400


def test_exports_are_complete_sorted_and_documented():
    assert len(set(llamagym.__all__)) == len(llamagym.__all__)
    for name in llamagym.__all__:
        assert getattr(llamagym, name).__doc__, f"{name} has no docstring"
    namespace: dict[str, object] = {}
    exec("from llamagym import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(llamagym.__all__)
    public = {name for name in vars(llamagym) if not name.startswith("_")} - {path.stem for path in FILES}
    assert public == set(llamagym.__all__)
