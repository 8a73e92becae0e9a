"""scripts/bootstrap.py, without a network: the plan, what is remembered, what is said when it fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "bootstrap.py"


@pytest.fixture
def bootstrap():
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bootstrap"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bootstrap"]


def test_dry_run_lists_the_steps_in_order():
    command = [sys.executable, str(SCRIPT), "--dry-run", "--test", "--extras", "minigrid", "textworld"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = [line.split(":")[0] for line in output.splitlines()[1:]]
    linux = ["linux"] if sys.platform == "linux" else []
    assert names == ["base", "model", *linux, "dev", "extra-minigrid", "extra-textworld", "package"]


def test_help_shows_both_commands():
    output = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True).stdout
    assert "--run examples/blackjack.py" in output
    assert "--test" in output


def test_a_finished_step_is_not_repeated_until_its_input_changes(bootstrap, tmp_path):
    requirements = tmp_path / "base.txt"
    requirements.write_text("a==1\n")
    steps = [bootstrap.Step("base", ("-r", "base.txt"), (requirements,)), bootstrap.Step("model", ("b==1",))]
    calls: list[list[str]] = []

    def run(command):
        calls.append(command)
        return 0

    python = tmp_path / "python"
    bootstrap.install(steps, bootstrap.Stamps(tmp_path), run, python)
    assert [command[-1] for command in calls] == ["base.txt", "b==1"]
    bootstrap.install(steps, bootstrap.Stamps(tmp_path), run, python)
    assert len(calls) == 2
    requirements.write_text("a==2\n")
    bootstrap.install(steps, bootstrap.Stamps(tmp_path), run, python)
    assert [command[-1] for command in calls[2:]] == ["base.txt"]


def test_a_failed_step_stops_and_is_tried_again(bootstrap, tmp_path):
    steps = [bootstrap.Step("base", ("a==1",)), bootstrap.Step("model", ("b==1",))]
    with pytest.raises(bootstrap.BootstrapError, match="Step 'model' failed.*run the same command again"):
        bootstrap.install(steps, bootstrap.Stamps(tmp_path), lambda command: command[-1] == "b==1", tmp_path)
    stamps = bootstrap.Stamps(tmp_path)
    assert [stamps.is_done(step) for step in steps] == [True, False]


def test_an_optional_step_may_fail(bootstrap, tmp_path, capsys):
    step = bootstrap.Step("linux", ("a==1",), optional=True)
    bootstrap.install([step], bootstrap.Stamps(tmp_path), lambda command: 1, tmp_path)
    assert "going on without it" in capsys.readouterr().out
    assert not bootstrap.Stamps(tmp_path).is_done(step)


def test_a_missing_script_is_named(bootstrap):
    with pytest.raises(bootstrap.BootstrapError, match=r"--run names nowhere.py, which is no file"):
        bootstrap.main(["--run", "nowhere.py"])


def test_everything_after_run_belongs_to_the_script(bootstrap):
    args = bootstrap.parse_args(["--run", "examples/blackjack.py", "--episodes", "5"])
    assert args.run == ["examples/blackjack.py", "--episodes", "5"]


def test_every_check_runs_even_if_one_fails(bootstrap, monkeypatch):
    ran = []
    monkeypatch.setattr(bootstrap, "call", lambda command: ran.append(command[2]) or int(command[2] == "ruff"))
    assert bootstrap.run_tests(Path("python")) == 1
    assert ran == ["ruff", "ruff", "mypy", "pytest"]
