"""The README's code runs, links exist, and tables agree with the code."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from llamagym import Agent, GenerationConfig, PPOConfig
from llamagym.learners.replay import ReplayConfig
from tests.helpers import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
RESEARCH = ROOT.resolve() / "research"
TABLES = ROOT / "scripts" / "readme_tables.py"
FIRST, LOOP, REST = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_snippets_are_short():
    assert len(FIRST.splitlines()) <= 30
    assert len(LOOP.splitlines()) <= 12
    assert len(REST.splitlines()) <= 10


def test_readme_is_short():
    assert len(README.splitlines()) <= 120


PAGES = [
    ROOT / "README.md",
    *(page for folder in ("docs", "research") for page in sorted((ROOT / folder).rglob("*.md"))),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    if not RESEARCH.is_dir():  # a source distribution has no research log
        links = [link for link in links if not (page.parent / link).resolve().is_relative_to(RESEARCH)]
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_exist(page):
    missing = []
    for file, name in re.findall(r"\]\(([^):\s]*\.md)?#([^)\s]+)\)", page.read_text(encoding="utf-8")):
        target = page.parent / file if file else page
        # The test above finds files that do not exist.
        text = target.read_text(encoding="utf-8") if target.exists() else f"# {name}"
        if name not in map(anchor, re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)):
            missing.append(f"{file}#{name}")
    assert missing == []


def test_every_row_of_reliability_links_tests():
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\|[^\n]*\| tests \|\n\|[-|]+\n((?:\|.*\n)+)", page, flags=re.MULTILINE)
    links_a_test = re.compile(r"\]\(\.\./tests/[\w/]+/test_\w+\.py\)")
    assert [row for row in table.splitlines() if not links_a_test.search(row.rsplit(" | ", 1)[-1])] == []


def test_architecture_names_existing_files_and_all_packages():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    way = page.split("## One turn, from `act` to a gradient")[1].split("\n## ")[0]
    named = re.findall(r"`(llamagym/[\w/]+\.py)`", way)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert len(way.splitlines()) <= 50
    packages = {path.name for path in (ROOT / "llamagym").iterdir() if path.is_dir() and path.name[0].isalpha()}
    assert [name for name in packages if f"| `{name}/` |" not in page] == []


@pytest.mark.long
def test_snippets_run_and_print_nothing_else(tmp_path):
    """All code of the README in its order, with fewer episodes and a smaller batch."""
    code = "\n".join((FIRST, LOOP, REST)).replace("minutes=2.5", "episodes=300")
    for long in ("episodes=5000,", "episodes=2000,", "episodes=500)"):
        assert long in code
        code = code.replace(long, "episodes=200" + long[-1])
    code = code.replace("seed=0)", 'seed=0, ppo_config_dict={"batch_size": 128})', 1)
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    printed = result.stdout.splitlines()
    returns = [line for line in printed if re.match(r"(random|before|after): -?\d", line)]
    hands = [line for line in printed if re.search(r"hands, mean return [+-]\d", line)]
    assert len(returns) == 3
    assert len(hands) >= 1
    # A result has five lines, and an evaluation one.
    assert len(printed) == len(returns) + len(hands) + 6
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
    assert (tmp_path / "my-agent").is_dir()
    # Progress is all that goes to stderr.
    progress = re.compile(r"(update \d+: )?\d+%, [\d,]+ episodes|evaluating before|(before|after|random): -?\d")
    assert [line for line in result.stderr.splitlines() if not progress.match(line)] == []


def options_of(owner: str) -> dict[str, object]:
    """The options of an owner on the page of options, with the defaults it shows."""
    shown: dict[str, object] = {}
    for names, defaults in re.findall(rf"^\| (`[^|]*) \| `{owner}` \| ([^|]*) \|", OPTIONS, flags=re.MULTILINE):
        values = [ast.literal_eval(value.strip().strip("`")) for value in defaults.split(",")]
        options = dict(zip(re.findall(r"`(\w+)`", names), values, strict=True))
        assert not shown.keys() & options.keys(), f"{owner} has options in two rows"
        shown.update(options)
    return shown


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_loops_pass_terminated_and_truncated(page):
    """Without `terminated` an episode that was terminated and truncated at once counts as cut off."""
    calls = re.findall(r"terminate_episodes?\(([^)]*)\)", page.read_text(encoding="utf-8"))
    assert [call for call in calls if "truncated=truncated" in call and "terminated=" not in call] == []


@pytest.mark.parametrize(
    ("owner", "config"), [("ppo", PPOConfig), ("generate", GenerationConfig), ("replay", ReplayConfig)]
)
def test_options_page_lists_every_option_with_its_default(owner, config):
    assert options_of(owner) == {field.name: field.default for field in fields(config)}


def test_options_page_lists_every_option_of_the_agent_with_its_default():
    parameters = inspect.signature(Agent.__init__).parameters
    given = {"self", "model", "tokenizer", "old_options"}
    defaults = {name: parameters[name].default for name in parameters.keys() - given}
    # An empty dictionary cannot be a default argument; None stands for it, but for replay, where it means none.
    defaults |= {name: {} for name in defaults if name.endswith("_dict") and name != "replay_config_dict"}
    assert options_of("Agent") == defaults


@pytest.mark.long
def test_options_page_lists_the_example_s_flags():
    command = [sys.executable, str(ROOT / "examples" / "blackjack.py"), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("options:")[1]
    flags = set(re.findall(r"^  (?:-h, )?(--[\w-]+)", shown, flags=re.MULTILINE)) - {"--help"}
    listed = re.findall(r"The Blackjack script's options: `([^`]+)`", OPTIONS)
    assert flags
    assert set(listed[0].split()) == flags


@pytest.mark.long
def test_generated_tables_are_up_to_date():
    result = subprocess.run([sys.executable, str(TABLES), "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """The script, with a temporary README."""
    spec = importlib.util.spec_from_file_location("readme_tables", TABLES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = tmp_path / "README.md"
    monkeypatch.setattr(module, "PAGES", {page: {"a": lambda: "new a", "b": lambda: "new b"}})
    module.README = page
    return module


def test_only_generated_sections_change(tables, capsys):
    old = "top\n<!-- b:begin -->\nold b\n<!-- b:end -->\nmiddle\n<!-- a:begin -->\n<!-- a:end -->\nbottom\n"
    new = "top\n<!-- b:begin -->\nnew b\n<!-- b:end -->\nmiddle\n<!-- a:begin -->\nnew a\n<!-- a:end -->\nbottom\n"
    tables.README.write_text(old)
    assert tables.main(["--check"]) == 1
    assert "Run python scripts/readme_tables.py" in capsys.readouterr().err
    assert tables.README.read_text() == old
    assert tables.main([]) == 0
    assert tables.README.read_text() == new
    assert tables.main(["--check"]) == 0


@pytest.mark.parametrize(
    "text",
    [
        "no markers\n",
        "<!-- a:begin -->\n",
        "<!-- a:end -->\n<!-- a:begin -->\n",
        "<!-- a:begin -->\n<!-- a:begin -->\n<!-- a:end -->\n",
    ],
)
def test_rejects_missing_markers_and_changes_nothing(tables, text):
    tables.README.write_text(text)
    with pytest.raises(ValueError, match="once each, in this order"):
        tables.main([])
    assert tables.README.read_text() == text
