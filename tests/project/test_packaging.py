"""An installation contains the version, every package, and the demonstrations of the repository's top level."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import llamagym
from llamagym.errors import ConfigError
from tests.helpers import ROOT

NAMES = sorted(path.stem for path in (ROOT / "sft_data").glob("*.jsonl"))
# Run in an environment that has only the built package, away from the repository.
LOOK = """
import json, llamagym
found = [str(llamagym.demonstrations_path(name)) for name in json.loads({names!r})]
texts = [open(path, encoding="utf-8").read() for path in found]
print(json.dumps({{"file": llamagym.__file__, "version": llamagym.__version__, "found": found, "texts": texts}}))
"""


def test_the_version_is_named_once():
    assert re.fullmatch(r"\d+\.\d+\.\d+", llamagym.__version__)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'version = { attr = "llamagym.__version__" }' in project
    assert not re.search(r'^version = "', project, re.MULTILINE)
    # Formats that cannot refer to it.
    assert f"\nversion: {llamagym.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {llamagym.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_package_is_listed():
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "llamagym").rglob("__init__.py")]
    packages = {".".join(folder.parts) for folder in folders}
    assert settings["packages"] == sorted(packages | set(settings["package-dir"]))


def test_unknown_demonstrations_are_refused_with_the_names_of_those_available():
    with pytest.raises(ConfigError, match=r"No demonstrations named 'format_blackjak'") as refused:
        llamagym.demonstrations_path("format_blackjak")
    assert NAMES
    assert all(name in str(refused.value) for name in NAMES)


def copy_of_repository(target: Path) -> Path:
    """The files that git tracks, so that nothing else can be packed and nothing is written into the checkout."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not in a git checkout")
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    return target


def build(kind: str, source: Path, target: Path) -> Path:
    """Builds an sdist, a wheel or an editable wheel, by the hooks that pip calls."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
    built = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = target.iterdir()
    return path


def without_python_path() -> dict[str, str]:
    """The environment variables of a user: what PYTHONPATH leads to would count as installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def look(python: Path, folder: Path, **variables: str) -> dict:
    """The installed package as a process finds it that starts in an empty folder."""
    command = [str(python), "-c", LOOK.format(names=json.dumps(NAMES))]
    variables = without_python_path() | variables
    seen = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert seen.returncode == 0, seen.stderr
    return json.loads(seen.stdout)


def installed(wheel: Path, folder: Path) -> Path:
    """The interpreter of a fresh environment with a wheel; dependencies are taken from the one that runs the tests."""
    venv.create(folder, with_pip=True, symlinks=os.name != "nt")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, env=without_python_path(), check=True, capture_output=True)
    (site,) = folder.rglob("site-packages")
    # Paths in a .pth file come after the environment's own, and .pth files there are not read: no other llamagym is.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.long
@pytest.mark.parametrize("kind", ["wheel", "wheel of an sdist", "editable"])
def test_an_installation_holds_the_demonstrations(kind, tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    source = copy_of_repository(tmp_path / "clone")
    if kind == "wheel of an sdist":
        shutil.unpack_archive(build("sdist", source, tmp_path / "sdist"), tmp_path / "unpacked")
        (source,) = (tmp_path / "unpacked").iterdir()
        assert not (source / "research").exists()
    wheel = build("editable" if kind == "editable" else "wheel", source, tmp_path / "wheel")
    python = installed(wheel, tmp_path / "venv")
    empty = tmp_path / "empty"
    empty.mkdir()
    seen = look(python, empty)
    home = source if kind == "editable" else tmp_path / "venv"
    for path in (seen["file"], *seen["found"]):
        assert Path(path).is_relative_to(home)
    assert seen["version"] == llamagym.__version__
    assert seen["texts"] == [(ROOT / "sft_data" / f"{name}.jsonl").read_text(encoding="utf-8") for name in NAMES]
    about = "from importlib.metadata import version; print(version('llamagym'))"
    named = subprocess.run([str(python), "-c", about], cwd=empty, capture_output=True, text=True, check=True).stdout
    assert named.strip() == llamagym.__version__


@pytest.mark.long
def test_a_clone_that_is_not_installed_has_version_and_demonstrations(tmp_path):
    source = copy_of_repository(tmp_path / "clone")
    seen = look(Path(sys.executable), tmp_path, PYTHONPATH=str(source))
    assert seen["version"] == llamagym.__version__
    assert {Path(path).parent for path in seen["found"]} == {source / "sft_data"}
