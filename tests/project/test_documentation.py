"""Every Python block of `docs/` runs, or a comment says why not; names in code and links exist; the site builds.

Blocks of a page run in order, in one namespace, on a tiny model in place of the embedded one. Comments above a block:

    <!-- not run: reason -->                  it cannot be run here
    <!-- run with: 2_000 => 8; a => b -->     with smaller numbers
    <!-- needs: package -->                   only where a package is installed
    <!-- setup                                hidden code, run before the block; ends with -->
"""

from __future__ import annotations

import ast
import builtins
import importlib
import keyword
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import llamagym
from llamagym import load_model_and_tokenizer
from tests.helpers import ROOT
from tests.helpers.agents import make_agent
from tests.helpers.tiny import tiny_base_model, tiny_tokenizer

PAGES = sorted((ROOT / "docs").rglob("*.md"))
# Pages whose blocks are tested elsewhere, for more than that they run.
ELSEWHERE = {
    "README.md": "project/test_readme.py",
    "api.md": "project/test_api.py",
    "from-llamagym.md": "agent/test_ports.py",
    "training.md": "training/test_loop_inputs.py",
}
_PART = re.compile(r"<!-- (?P<key>not run|run with|needs): (?P<value>[^\n]*?) -->\n|"
                   r"<!-- setup\n(?P<setup>.*?)-->\n|"
                   r"^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)  # fmt: skip


class Block(NamedTuple):
    """A fenced block, the comments above it by key, and its line on the page."""

    language: str
    code: str
    notes: dict[str, str]
    line: int


def blocks(text: str) -> list[Block]:
    """A page's fenced blocks and hidden setup code, in order."""
    found: list[Block] = []
    notes: dict[str, str] = {}
    for part in _PART.finditer(text):
        line = text[: part.start()].count("\n") + 1
        if part["key"]:
            notes[part["key"]] = part["value"]
        elif part["setup"] is not None:
            found.append(Block("python", part["setup"], {}, line))
        else:
            found.append(Block(part["language"], part["code"], notes, line + 1))
            notes = {}
    assert not notes, f"a comment stands above no block: {notes}"
    return found


def with_smaller_numbers(block: Block) -> str:
    """The code with the replacements of its comment."""
    code = block.code
    for change in filter(None, block.notes.get("run with", "").split("; ")):
        old, new = change.split(" => ")
        assert old in code, f"line {block.line}: {old!r} does not stand in the block"
        code = code.replace(old, new)
    return code


def test_finds_blocks_and_their_comments():
    page = (
        "text\n<!-- run with: 5 => 1; b => c -->\n```python\na = 5 + b\n```\n\n"
        "<!-- setup\nb = 2\n-->\n<!-- not run: no shell -->\n```sh\nls\n```\n"
    )
    found = blocks(page)
    assert [(b.language, b.code, b.line) for b in found] == [
        ("python", "a = 5 + b\n", 4),
        ("python", "b = 2\n", 7),
        ("sh", "ls\n", 12),
    ]
    assert with_smaller_numbers(found[0]) == "a = 1 + c\n"
    assert found[2].notes == {"not run": "no shell"}
    with pytest.raises(AssertionError, match="does not stand in the block"):
        with_smaller_numbers(Block("python", "a = 1\n", {"run with": "5 => 1"}, 1))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_have_a_language_and_a_reason_if_not_run(page):
    for block in blocks(page.read_text(encoding="utf-8")):
        assert block.language, f"{page.name}:{block.line}: name the block's language"
        if block.language not in ("python", "text", "json"):
            assert block.notes.get("not run"), f"{page.name}:{block.line}: say above the block why it is not run"


def test_other_tests_read_the_pages_left_out():
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / "tests" / test).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Any:
    """`load_model_and_tokenizer` with a tiny model in place of the embedded one."""
    folder = tmp_path_factory.mktemp("model")
    tiny_base_model("llama").save_pretrained(folder)
    tiny_tokenizer("llama").save_pretrained(folder)
    return lambda name, *args, **options: load_model_and_tokenizer(folder, *args, **options)


# Names of other libraries, LlamaGym 0.1.1 and shells that pages show as code.
FOREIGN = {
    # Requests of HTTP.
    "DELETE",
    "GET",
    "POST",
    "ID",
    *("MaskablePPO", "AsyncGRPOTrainer", "custom_module_functions", "custom_updater"),
    *(
        "BaseCallback",
        "CheckpointCallback",
        "StopTrainingOnRewardThreshold",
        "SubprocVecEnv",
        "VecNormalize",
        "Monitor",
    ),
    *("MlpPolicy", "MultiInputPolicy", "evaluate_policy", "n_eval_episodes", "make_vec_env", "deterministic", "logs"),
    *("n_epochs", "n_envs", "n_steps", "ent_coef", "clip_range", "tensorboard_log", "progress_bar", "total_timesteps"),
    *("reset_num_timesteps", "obs", "predict", "learn", "RecordVideo"),
    # llama.cpp's programs.
    *("server", "convert_hf_to_gguf"),
    *("beta", "clip_coef", "gae_lambda", "lr_actor", "lr_critic", "update_epochs"),
    *("current_batch", "model_ref", "ppo_config", "resize_token_embeddings"),
    *("OMP_PROC_BIND", "OMP_PLACES", "HF_TOKEN", "HF_HOME", "WANDB_MODE", "ENV_ID", "FOLDER"),
    *("GET", "POST", "DELETE", "ID"),
    *("OpenAIServerModel", "ToolCallingAgent", "model_id", "api_base", "Session"),
    *("pip", "install", "deps", "python", "nltk", "downloader", "torchrun", "launch", "multi_gpu", "venv", "cores"),
    # Made up on the page.
    *(
        "LakeAgent",
        "lake",
        "walker",
        "demos",
        "im_end",
        "you",
        "my",
        "ok",
        "module",
        "Id",
        "their_module",
        "Env",
        "v0",
        "FILE",
    ),
}
SOURCES = [path for folder in ("llamagym", "examples", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]


def names_in(source: str) -> set[str]:
    """Names that code defines, imports, passes or reads, and the words of strings without spaces, such as keys."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.update((node.asname or node.name).split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not re.search(r"\s", node.value):
            names.update(re.findall(r"[A-Za-z_]\w+", node.value))
    return names - {"use_target_kl"}  # accepted with a message, but not to be shown


@pytest.fixture(scope="module")
def known_names() -> set[str]:
    """All names that a page may show as code."""
    folders_of_files = (
        "docs",
        "examples",
        "llamagym",
        "scripts",
        "research",
        "sft_data",
        "tests",
        ".ci",
        "requirements",
    )
    paths = [path for folder in folders_of_files for path in (ROOT / folder).rglob("*.*")]
    files = {part for path in [*paths, *ROOT.glob("*.*")] for part in re.findall(r"\w+", path.name)}
    folders = {part for path in SOURCES for part in path.relative_to(ROOT).parts}
    code = set().union(*(names_in(path.read_text("utf-8")) for path in SOURCES))
    return {*code, *files, *folders, *dir(builtins), *keyword.kwlist, *FOREIGN, "tests", "docs", "research"}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_names_in_code_exist(page, known_names):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    # Generated tables hold names of other libraries.
    text = re.sub(r"<!-- \w+:begin -->.*?<!-- \w+:end -->", "", text, flags=re.DOTALL)
    # test_untrusted.py checks the tests that a page names.
    spans = [span for span in re.findall(r"`([^`\n]+)`", text) if "::test_" not in span]
    missing = {(span, name) for span in spans for name in re.findall(r"[A-Za-z_]\w+", span) if name not in known_names}
    # `*_internals.py` and `format_*.jsonl` name groups of files.
    assert {(span, name) for span, name in missing if "*" not in span} == set()


def resolves(dotted: str) -> bool:
    """Whether a module or one of its attributes has this name."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for name in parts[count:]:
            found = getattr(found, name, None)
        return found is not None
    return False


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *PAGES, *SOURCES], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_dotted_names_resolve(path):
    dotted = set(re.findall(r"(?<![\w/-])llamagym(?:\.[A-Za-z_]\w*)+", path.read_text(encoding="utf-8")))
    assert [name for name in dotted if not resolves(name)] == []


def test_methods_called_on_an_agent_exist():
    agent = make_agent()
    for page in [ROOT / "README.md", *PAGES]:
        called = re.findall(r"\bagent\.(\w+)", page.read_text(encoding="utf-8"))
        # `agent.py` is a file, and `agent.get_action` AgileRL's.
        assert {name for name in called if not hasattr(agent, name)} <= {"py", "get_action", "learn"}, page.name


def test_references_in_docstrings_exist():
    trees = {path: path.read_text(encoding="utf-8") for path in SOURCES if "llamagym" in path.parts}
    defined = set().union(*map(names_in_definitions, trees.values()), {path.stem for path in trees})
    for path, text in trees.items():
        named = re.findall(r"(?:[Ss]ee|is in|are in|stands in) `([\w.]+)`", text)
        assert [name for name in named if name.split(".")[-1] not in defined] == [], path.name


def names_in_definitions(source: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    fields = {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return fields | {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_navigation_lists_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    listed = re.findall(r": ([\w/-]+\.md)$", navigation, flags=re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in PAGES)


def test_removed_names_are_rejected():
    assert "use_target_kl" not in names_in('options = {"use_target_kl": 1, "target_kl": 2}')
    assert "target_kl" in names_in('options = {"use_target_kl": 1, "target_kl": 2}')
    assert resolves("llamagym.models.lora.set_lora_depth_")
    assert not resolves("llamagym.models.adapter")
    assert not resolves("llamagym.Agents")


def has_code(page: Path) -> bool:
    return page.name not in ELSEWHERE and any(
        block.language == "python" and "not run" not in block.notes for block in blocks(page.read_text("utf-8"))
    )


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if has_code(page)], ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning:textarena")
def test_blocks_run(page, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llamagym, "load_model_and_tokenizer", small)
    # Classes find the module that they were defined in by its name.
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page.read_text(encoding="utf-8")):
        package = block.notes.get("needs")
        if block.language != "python" or "not run" in block.notes or (package and not find_spec(package)):
            continue
        # Lines count from the page's beginning, so that an error names the page's line.
        code = "\n" * (block.line - 1) + with_smaller_numbers(block)
        exec(compile(code, str(page), "exec"), namespace)


@pytest.mark.long
def test_site_builds_and_fetches_nothing_from_other_hosts():
    pytest.importorskip("zensical", reason="needs requirements/docs.txt")
    command = [sys.executable, str(ROOT / "scripts" / "build_docs.py")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    api, maths = ((ROOT / "build" / "site" / name).read_text("utf-8") for name in ("api.html", "how-it-learns.html"))
    assert "terminate_episodes" in api
    assert maths.count("<math ") > 20
