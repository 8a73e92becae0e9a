"""Rules for the whole library: which module may import which, what is exported, what no module does."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import llamagym

LIBRARY = Path(llamagym.__file__).parent
# The packages that each package may import, beside itself. A nested package, with a dot, has its own rules.
PACKAGES = {
    "saving": set(),
    "text": set(),
    "models": {"saving", "text"},
    "engine": {"text", "models"},
    "engine.cpu": {"models"},
    "policy": {"text", "models", "engine"},
    "learners": {"text", "models", "policy"},
    "policy.samplers": {"saving", "models", "policy"},
    "trl_compat": {"models", "policy", "learners"},
    "agent": {"saving", "text", "models", "policy", "learners"},
    "training": {"saving", "text", "models", "policy", "learners", "agent", "training.report"},
    "envs": set(),
    "serving": {"text", "models", "policy", "learners", "agent"},
    "cli": {"saving", "text", "models", "policy", "learners", "training", "agent", "serving"},
    "training.report": {"agent", "learners", "saving"},
}
# Modules that any module may import.
BASE_MODULES = {"errors", "options", "distributed"}
# Modules outside of packages; each may import those before it.
TOP_LEVEL_MODULES = ["errors", "options", "distributed", "api", "__init__", "__main__"]
# The only module of the engine that imports the CPU kernels.
KERNEL_IMPORTER = "engine/acceleration.py"
# Heavy or optional packages, to be imported in the functions that use them.
LAZY = {"wandb", "bitsandbytes", "textworld", "minigrid", "textarena", "openenv", "tensorboard"}
# Packages that the first use of a name must not import, so that it takes less than a second beside torch and
# transformers.
HEAVY = {
    *LAZY,
    "datasets",
    "fastapi",
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
    "uvicorn",
}
FILES = sorted(LIBRARY.rglob("*.py"))
MAX_LINES = 600
MAX_TOP_LEVEL_ENTRIES = 19


def package_of(name: str) -> str:
    """Returns the package of a module by its dotted name; for a module outside of packages, its own name."""
    first, *rest = name.split(".")
    nested = ".".join([first, *rest[:1]])
    return nested if nested in PACKAGES else first


def package_of_file(path: Path) -> str:
    """Returns the package of a file, or its own name, as `package_of`."""
    return package_of(".".join(path.relative_to(LIBRARY).with_suffix("").parts))


def name_of(path: Path) -> str:
    """Returns the path of a file relative to the library's folder."""
    return path.relative_to(LIBRARY).as_posix()


def imports(tree: ast.AST, package: tuple[str, ...]) -> set[str]:
    """Returns the library's modules that a file of `package` imports anywhere, as dotted names without "llamagym"."""
    dotted: list[list[str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = [*start, *(node.module.split(".") if node.module else [])]
            # `from . import name` may name a module, or something that the package exports.
            named = [[*module, alias.name] for alias in node.names]
            dotted += [name if is_ours(name[1:]) else module for name in named]
    return {".".join(name[1:]) or "__init__" for name in dotted if name[0] == "llamagym"}


def is_ours(parts: list[str]) -> bool:
    """Whether the library has such a module or package."""
    path = LIBRARY.joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()


def forbidden(importer: str, imported: set[str]) -> set[str]:
    """Returns the imported modules that `importer`, a package or a module outside of packages, may not import."""
    packages = {name: package_of(name) for name in imported}
    if importer in PACKAGES:
        allowed = PACKAGES[importer] | BASE_MODULES | {importer}
        return {name for name, package in packages.items() if package not in allowed}
    not_below = set(TOP_LEVEL_MODULES[TOP_LEVEL_MODULES.index(importer) :])
    if importer in BASE_MODULES:
        not_below |= PACKAGES.keys()
    return {name for name, package in packages.items() if package in not_below}


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """Returns the modules that import each other in a cycle, and those that import them."""
    remaining = dict(graph)
    while done := [name for name, imported in remaining.items() if not imported & remaining.keys()]:
        for name in done:
            del remaining[name]
    return sorted(remaining)


def top_level_imports(tree: ast.Module) -> set[str]:
    """Returns the packages that a file imports outside of functions."""
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
    """Returns the library's modules that one of its files imports."""
    return imports(ast.parse(path.read_text()), ("llamagym", *path.relative_to(LIBRARY).parts[:-1]))


def test_modules_import_lower_layers_only():
    for path in FILES:
        importer = package_of_file(path)
        assert importer in {*PACKAGES, *TOP_LEVEL_MODULES}, f"add {importer} to PACKAGES or TOP_LEVEL_MODULES"
        imported = imports_of(path)
        if name_of(path) == KERNEL_IMPORTER:
            imported = {name for name in imported if package_of(name) != "engine.cpu"}
        wrong = forbidden(importer, imported)
        assert not wrong, f"{name_of(path)} imports {sorted(wrong)}, which {importer} may not import"


def test_imports_have_no_cycle():
    graph = {".".join(path.relative_to(LIBRARY).with_suffix("").parts): imports_of(path) for path in FILES}
    assert cycles(graph) == []
    assert cycles({"a": {"b"}, "b": {"a"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]


def test_engine_imports_cpu_kernels_through_one_module():
    assert "engine.cpu" in map(package_of, imports_of(LIBRARY / KERNEL_IMPORTER))


@pytest.mark.parametrize(
    ("source", "package", "found"),
    [
        ("from .ppo import PPO", ("llamagym", "learners"), {"learners.ppo"}),
        ("from . import ppo, grpo", ("llamagym", "learners"), {"learners.ppo", "learners.grpo"}),
        ("import llamagym.learners.ppo as p", ("llamagym",), {"learners.ppo"}),
        ("from llamagym.learners.ppo import PPO", ("llamagym",), {"learners.ppo"}),
        ("from ..policy import evaluation", ("llamagym", "learners"), {"policy.evaluation"}),
        ("from llamagym import Agent", ("llamagym",), {"__init__"}),
        ("import llamagym", ("llamagym",), {"__init__"}),
        ("from ..errors import ConfigError", ("llamagym", "envs"), {"errors"}),
        ("def f():\n    from .agent import Agent", ("llamagym",), {"agent"}),
        ("if TYPE_CHECKING:\n    from .agent import Agent", ("llamagym",), {"agent"}),
        ("import torch\nfrom trl import PPOTrainer", ("llamagym",), set()),
    ],
)
def test_all_import_forms_are_found(source, package, found):
    assert imports(ast.parse(source), package) == found


def test_forbidden_imports_are_found():
    imported = {"errors", "models.lora", "policy.evaluation", "engine.cpu.packing"}
    assert forbidden("engine", imported) == {"policy.evaluation", "engine.cpu.packing"}
    assert forbidden("engine.cpu", {"models.lora", "engine.masks"}) == {"engine.masks"}
    assert forbidden("errors", {"policy.evaluation", "agent"}) == {"policy.evaluation", "agent"}
    assert forbidden("agent", {"__init__", "policy.policy"}) == {"__init__"}
    assert forbidden("envs", {"errors", "envs.babyai", "text.parsing"}) == {"text.parsing"}


def test_library_has_few_top_level_entries():
    listing = subprocess.run(["git", "ls-files", "."], cwd=LIBRARY, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not in a git checkout")
    assert len({name.split("/")[0] for name in listing.stdout.split()}) <= MAX_TOP_LEVEL_ENTRIES


def test_optional_packages_are_imported_in_functions():
    for path in FILES:
        early = LAZY & top_level_imports(ast.parse(path.read_text()))
        assert not early, (
            f"{name_of(path)} imports {sorted(early)} at top level; import it in the function that uses it"
        )


def loaded_by(code: str) -> set[str]:
    """Returns the modules that a new process has loaded after running some code."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_first_use_loads_no_heavy_packages():
    assert HEAVY & loaded_by("from llamagym import Agent") == set()


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_import_and_help_load_neither_torch_nor_transformers(arguments):
    run = (
        "import sys, runpy\n"
        f"sys.argv[1:] = {arguments}\n"
        "try:\n    runpy.run_module('llamagym', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n    assert end.code == 0"
    )
    assert {"torch", "transformers"} & loaded_by(run) == set()
    assert "torch" in loaded_by("import llamagym; llamagym.Agent")


@pytest.mark.long
def test_names_of_heavy_packages_exist():
    # If one of these were renamed, the test above could not fail.
    assert loaded_by("import peft, transformers; transformers.AutoModelForCausalLM") >= {
        "peft",
        "torch._dynamo",
        "torch.distributed.tensor",
        "transformers.modeling_utils",
        "transformers.models.auto.auto_factory",
    }


def test_top_level_imports_exclude_functions():
    source = (
        "try:\n    import wandb\nexcept ImportError:\n    pass\nclass A:\n    def f(self):\n        import minigrid\n"
    )
    assert top_level_imports(ast.parse(source)) == {"wandb"}


def test_files_stay_below_the_maximum_length():
    lines = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_library_does_not_print():
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
    api = vars(llamagym.api)
    public = {name for name in api if not name.startswith("_")} - {package_of_file(path) for path in FILES}
    assert public - {"annotations"} == set(llamagym.__all__) == set(dir(llamagym)) - {"__version__"}
    with pytest.raises(AttributeError, match="has no attribute 'agents'"):
        llamagym.agents  # noqa: B018


def page_faults(**environment: str) -> int:
    """Returns the number of page faults of a new process that imports the library and then fills 250 MB."""
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
def test_large_tensors_use_large_pages_unless_disabled_by_the_user():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("transparent huge pages are not available")
    assert page_faults() < page_faults(THP_MEM_ALLOC_ENABLE="0") / 2
