"""Numbers on the pages are those of committed result files, which name their command, commit, versions and hardware."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT

BENCHMARKS = ROOT / "scripts" / "benchmarks"
MEASURED = ("benchmarks", "speed", "larger-models", "scaling")
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in MEASURED)]
# These cite the log, where a measurement has no file.
OTHER_PAGES = sorted(set((ROOT / "docs").glob("*.md")) - set(PAGES))
# With a fraction or with thousands; not a version, a date or a part of a name.
NUMBER = re.compile(r"(?<![\w.,/-])-?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+)(?!\w|[.,]\d|/)")
# Whole numbers of two digits or more; not a part of a version, a date, a range or a name.
WHOLE = re.compile(r"(?<![\w.,/#:-])-?\d{2,}(?!\w|[.,]\d|[/:]|-\d)")
# Numbers in a page's text that are not measured: settings, goals, versions, limits.
NOT_MEASURED = {
    "README.md": {"3.10", "3.13"},
    "benchmarks.md": {"32", "95", "280"},
    "speed.md": {"16", "50"},
    "scaling.md": {"64", "512"},
    "larger-models.md": {"2,048", "15", "60"},
    "environments.md": {"3.11"},
}
# Quotients of a file's numbers, which a test computes.
COMPUTED = {"larger-models.md": {"386", "165", "74"}}
# Operations are in units of 1e9 and 1e12 on the pages.
UNITS = (1.0, 1e9, 1e12)
REQUIRED = {"command", "commit", "hardware"}
RESULTS = sorted(path for folder in ("results", "learning/results") for path in (BENCHMARKS / folder).rglob("*.json"))


def numbers_in(result: Any) -> Iterator[float]:
    """All numbers of a result file."""
    if isinstance(result, dict):
        for part in result.values():
            yield from numbers_in(part)
    elif isinstance(result, list):
        for part in result:
            yield from numbers_in(part)
    elif isinstance(result, (int, float)) and not isinstance(result, bool):
        yield float(result)


def is_rounded(shown: str, value: float) -> bool:
    """Whether a number on a page is a value of a file, rounded to the places shown."""
    plain = shown.replace(",", "")
    places = len(plain.partition(".")[2])
    half = 0.5 * 10**-places
    return any(abs(value / unit - float(plain)) <= half * (1 + 1e-9) for unit in UNITS)


def text_of(page: str) -> str:
    """A page without code and without generated tables, which another test compares."""
    page = re.sub(r"<!-- (\S+):begin -->.*?<!-- \1:end -->", "", page, flags=re.DOTALL)
    page = re.sub(r"```.*?```|arXiv:[\d.]+|\(https?://[^)]*\)", "", page, flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`|^    .*$", "", page, flags=re.MULTILINE)


def unfounded(text: str, folder: Path, *patterns: re.Pattern[str]) -> list[str]:
    """The numbers of a page's text that no result file linked in the same section has.

    Args:
        text: The page.
        folder: The page's folder.
        patterns: Patterns of numbers; by default those with a fraction or thousands.
    """
    missing = []
    for section in re.split(r"^(?=#)", text, flags=re.MULTILINE):
        links = re.findall(r"\]\(([^)#\s]+\.json)\)", section)
        values = [value for link in links for value in numbers_in(json.loads((folder / link).read_text("utf-8")))]
        shown = [number for pattern in patterns or (NUMBER,) for number in pattern.findall(section)]
        missing += [number for number in shown if not any(is_rounded(number, value) for value in values)]
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_numbers_are_in_linked_files(page):
    text = text_of(page.read_text(encoding="utf-8"))
    known = NOT_MEASURED.get(page.name, set()) | COMPUTED.get(page.name, set())
    assert [number for number in unfounded(text, page.parent, NUMBER, WHOLE) if number not in known] == []


def test_rates_of_larger_models_are_quotients_of_their_file():
    result = json.loads((BENCHMARKS / "results" / "larger-models.json").read_text(encoding="utf-8"))
    acting = [model["acting"] for model in result["models"].values()]
    assert {str(round(each["tokens"] / each["processor_s"])) for each in acting} == COMPUTED["larger-models.md"]


@pytest.mark.parametrize("page", OTHER_PAGES, ids=lambda page: page.stem)
def test_numbers_of_other_pages_are_in_linked_files_or_the_log(page):
    if not (ROOT / "research").is_dir():
        pytest.skip("a source distribution has no research log")
    log = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "research").glob("*.md"))
    known = set(NUMBER.findall(log)) | NOT_MEASURED.get(page.name, set())
    shown = unfounded(text_of(page.read_text(encoding="utf-8")), page.parent)
    assert [number for number in shown if number not in known] == []


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.stem)
def test_tables_are_up_to_date(page):
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "scripts" / "readme_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = page.read_text(encoding="utf-8")
    assert tables.render(page.name, text, tables.PAGES[page]) == text, "Run python scripts/readme_tables.py"


def test_finds_numbers_without_a_file(tmp_path):
    (tmp_path / "a.json").write_text('{"rates": [0.1234, 1250.0], "operations": 7.1e11, "is_small": true}')
    page = "# A\n0.123 and 1,250 and 0.71 T ([result](a.json)), 0.124, TRL 1.16 of 2026-11-29.\n# B\n0.123\n"
    assert unfounded(page, tmp_path) == ["0.124", "1.16", "0.123"]
    assert unfounded("# A\n12 and 13 turns, of 2026-11-29 ([result](a.json))", tmp_path, WHOLE) == ["12", "13"]
    hidden = "<!-- x:begin -->\n0.5\n<!-- x:end -->\n`0.6`\n\n    0.7\n```text\n0.8\n```\n"
    assert unfounded(text_of(hidden), tmp_path) == []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_result_files_name_command_commit_and_hardware(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    if path.stem == "processes":
        # `note` describes two launches of a script.
        result["command"] = result["note"]
    sessions = result.get("sessions", {"": result})
    for session in sessions.values():
        assert session.keys() >= REQUIRED
        assert session.keys() & {"packages", "versions"}


@pytest.mark.parametrize("name", ["ablation.json", "ablation-bfloat16.json"])
def test_ablation_values_name_their_session(name):
    result = json.loads((BENCHMARKS / "results" / name).read_text(encoding="utf-8"))
    used = {value["session"] for row in result["rows"].values() for value in row.values()}
    assert used == set(result["sessions"])
    assert "commit" not in result


def test_new_ablation_session_keeps_the_others(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import ablation

    old = {"commit": "1" * 40, "command": "old"}
    saved = {"sessions": {"a": old, "b": old}, "rows": {"cpu/": {"act": {"session": "a"}, "learn": {"session": "b"}}}}
    merged = ablation.merged(saved, {"cpu/": {"act": {"all": [1.0]}}}, {"commit": "2" * 40, "command": "new"})
    row = merged["rows"]["cpu/"]
    assert row["learn"] == {"session": "b"}
    assert merged["sessions"][row["act"]["session"]]["command"] == "new"
    assert set(merged["sessions"]) == {"b", row["act"]["session"]}
