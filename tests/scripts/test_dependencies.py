"""The versions that the package allows, and the script that tests both ends of them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.helpers import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
LOWEST = (ROOT / "requirements" / "lowest.txt").read_text(encoding="utf-8")
# Need a CUDA device, an environment's server, or build the pages.
UNTESTED = {"bitsandbytes", "openenv-core"}


def listed(table: str, key: str) -> list[Requirement]:
    """The requirements of a key of pyproject.toml; Python 3.10 has no parser of TOML."""
    section = PROJECT.split(f"\n[{table}]\n")[1].split("\n[")[0]
    found = re.search(rf"^{key} = \[(.*?)\]$", section, re.MULTILINE | re.DOTALL)
    assert found
    return [Requirement(text) for text in re.findall(r'"([^"]+)"', found[1])]


def allowed() -> list[Requirement]:
    extras = (
        "sft",
        "wandb",
        "textworld",
        "minigrid",
        "textarena",
        "openenv",
        "serve",
        "tensorboard",
        "quantization",
        "sweep",
    )
    of_extras = [requirement for extra in extras for requirement in listed("project.optional-dependencies", extra)]
    return listed("project", "dependencies") + of_extras


def test_the_package_sets_lower_bounds_and_leaves_out_releases_only():
    assert {spec.operator for requirement in allowed() for spec in requirement.specifier} <= {">=", "!="}


def test_lowest_requirements_are_the_package_s_lower_bounds():
    bounds = {
        requirement.name.lower(): Version(spec.version)
        for requirement in allowed()
        for spec in requirement.specifier
        if spec.operator == ">=" and requirement.name not in UNTESTED
    }
    lines = [line for line in LOWEST.splitlines() if line and not line.startswith("#")]
    pinned = {requirement.name.lower(): requirement for requirement in map(Requirement, lines)}
    versions = {name: Version(spec.version) for name, pin in pinned.items() for spec in pin.specifier}
    assert versions == bounds


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.syspath_prepend(ROOT / "scripts" / "benchmarks")
    spec = importlib.util.spec_from_file_location("check_dependencies", ROOT / "scripts" / "check_dependencies.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_report_s_tests_are_counted(script):
    report = ElementTree.fromstring(
        "<testsuites><testsuite>"
        '<testcase classname="a" name="passes"/>'
        '<testcase classname="a" name="fails"><failure/></testcase>'
        '<testcase classname="b" name="breaks"><error/></testcase>'
        '<testcase classname="b" name="skips"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    counts = script.counts(report)
    assert counts == {"passed": 1, "failed": 2, "skipped": 1, "failures": ["a::fails", "b::breaks"]}


@pytest.mark.parametrize("name", ["lowest", "current"])
def test_a_set_is_installed_and_its_result_written(script, monkeypatch, tmp_path, name):
    commands = []

    def run(command, **options):
        commands.append([str(part) for part in command])
        for path in (part.split("=")[1] for part in command if str(part).startswith("--junitxml=")):
            Path(path).write_text('<testsuite><testcase classname="a" name="b"/></testsuite>')
        output = '{"python": "3.11.0", "torch": "2.0"}' if "-c" in command else ""
        return script.subprocess.CompletedProcess(command, 0, output, "")

    monkeypatch.setattr(script, "prepare_venv", lambda folder: None)
    monkeypatch.setattr(script, "setting", lambda: {"commit": "c", "uncommitted_changes": False, "hardware": {}})
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    monkeypatch.setattr(script.subprocess, "run", run)
    assert script.main([name, "--environments", str(tmp_path / "venvs"), "--tests", "tests/agent/test_agent.py"]) == 0
    installed = " ".join(commands[0])
    assert ("requirements/lowest.txt" in installed) == (name == "lowest")
    assert ("--upgrade" in installed) == (name == "current")
    assert commands[-1][-1] == "tests/agent/test_agent.py"
    result = script.json.loads((tmp_path / f"dependencies-{name}.json").read_text())
    assert (result["exit_code"], result["passed"], result["failed"], result["commit"]) == (0, 1, 0, "c")
    assert result["versions"]["torch"] == "2.0"
