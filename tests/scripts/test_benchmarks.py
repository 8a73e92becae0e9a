"""Rivals are measured in processes of their own, in turn with us."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from scripts.reliability import golden_runs, introduced_bugs
from tests.helpers import ROOT

pytestmark = pytest.mark.long

BENCHMARKS = ROOT / "scripts" / "benchmarks"
SERVES = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from common import serve

rates = iter([float(argument) for argument in sys.argv[1:]])

def rate():
    print("a rival's library says something")
    return next(rates)

serve(rate, "numpy", "llamagym-of-nobody")
"""


@pytest.fixture
def common(monkeypatch):
    """The module that the benchmarks share."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import common

    return common


@pytest.fixture
def rival(common, monkeypatch, tmp_path):
    """Makes a script the only rival, and says which interpreter has it."""

    def make(script: str) -> dict[str, Path]:
        path = tmp_path / "rival.py"
        path.write_text(script)
        monkeypatch.setattr(common, "RIVALS", {"rival": str(path)})
        return {"rival": Path(sys.executable)}

    return make


def test_a_rival_answers_in_its_turn_and_says_what_it_has(common, rival):
    # What comes of the first round is not counted.
    expected = [3.0, 1.0, 2.0, 5.0, 4.0]
    turns = iter(range(1, common.ROUNDS + 1))
    result = common.measure({"ours": lambda: next(turns)}, rival(SERVES), 9.0, *expected)
    assert result["rival"]["all"] == expected
    assert result["rival"]["median"] == 3.0
    assert result["rival"]["packages"] == {"numpy": version("numpy"), "llamagym-of-nobody": None}
    assert len(result["ours"]["all"]) == common.ROUNDS - 1
    assert next(turns, None) is None


def test_a_rival_that_ends_is_an_error_with_its_status(common, rival):
    with pytest.raises(RuntimeError, match="rival ended with status 3"):
        common.measure({}, rival("raise SystemExit(3)"))


def test_our_modules_do_not_shadow_a_rivals(common, rival, monkeypatch):
    monkeypatch.setitem(common.ENVIRONMENT, "PYTHONPATH", str(BENCHMARKS))
    with pytest.raises(RuntimeError, match="status 0"):
        common.measure({}, rival("import os; assert 'PYTHONPATH' not in os.environ"))


@pytest.mark.parametrize("bug", introduced_bugs.BUGS, ids=lambda bug: bug.name)
def test_every_bug_that_is_introduced_changes_the_code_as_it_is_today(bug):
    assert (introduced_bugs.ROOT / bug.path).read_text(encoding="utf-8").count(bug.old) == 1


def test_golden_runs_that_differ_are_counted_and_their_statistic_is_named(capsys):
    run = {"weights": "a", "stats": [{"approx_kl": 0.5, "entropy": 1.0}]}
    assert golden_runs.compare({"one": run}, {"one": run}) == 0
    assert golden_runs.compare({"one": run}, {"one": run | {"stats": [{"approx_kl": 0.4, "entropy": 1.0}]}}) == 1
    assert "stats differ; update 0: approx_kl 0.5 -> 0.4" in capsys.readouterr().out
    assert golden_runs.compare({"one": run}, {"two": run}) == 2
