"""A folder that is replaced: whatever goes wrong, the old one or the new one is there, whole, under its name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from llamagym import CheckpointError
from llamagym.saving import atomic, file_operations
from llamagym.saving.atomic import atomic_folder, replace_file, restore_backup, verify
from llamagym.saving.file_operations import delete_folder
from tests.helpers.killed import as_nobody


def write(folder: Path, text: str) -> None:
    with atomic_folder(folder, "checkpoint") as folder:
        (folder / "a.txt").write_text(text)


def content(folder: Path) -> str:
    verify(folder, "checkpoint")
    return (folder / "a.txt").read_text()


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def exchanges(request, monkeypatch):
    """With the system's exchange, where it has one, and without."""
    if not request.param:
        monkeypatch.setattr(atomic, "exchange_folders", lambda *_: False)
    return request.param


def test_replacing_a_folder_leaves_no_other_files(tmp_path, exchanges):
    for text in ("old", "new", "newest"):
        write(tmp_path / "now", text)
        assert content(tmp_path / "now") == text
        assert [path.name for path in tmp_path.iterdir()] == ["now"]


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
def test_linux_exchanges_two_folders(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert atomic.exchange_folders(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / "other").exists()
    assert (tmp_path / "other" / "one").exists()
    assert not atomic.exchange_folders(tmp_path / "one", tmp_path / "nothing")


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError("no"), CheckpointError), (KeyboardInterrupt(), KeyboardInterrupt)],
    ids=["error", "Ctrl-C"],
)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_failing_rename_keeps_the_old_folder(tmp_path, monkeypatch, nth, error, raised):
    monkeypatch.setattr(atomic, "exchange_folders", lambda *_: False)
    write(tmp_path / "now", "old")
    usual, calls = Path.rename, []

    def rename(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == nth:
            raise error
        return usual(path, target)

    # Bringing back looks first whether there is anything to bring back: no rename of its own here.
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(raised):
        write(tmp_path / "now", "new")
    monkeypatch.undo()
    assert content(tmp_path / "now") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["now"]


KILLED = """
import os, sys
from pathlib import Path
from llamagym import CheckpointError
from llamagym.saving import atomic
atomic.exchange_folders = lambda *_: False
usual, calls = Path.rename, []
def rename(path, target):
    calls.append(path)
    if len(calls) == int(sys.argv[2]):
        os._exit(9)
    return usual(path, target)
Path.rename = rename
with atomic.atomic_folder(Path(sys.argv[1]), "checkpoint") as folder:
    (folder / "a.txt").write_text("new")
os._exit(0)
"""


@pytest.mark.long
@pytest.mark.parametrize(("nth", "expected"), [(1, "old"), (2, "old"), (3, "new"), (4, "new")])
def test_a_kill_at_a_rename_leaves_the_old_or_the_new_folder(tmp_path, nth, expected):
    write(tmp_path / "now", "old")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "now"), str(nth)], check=False)
    assert killed.returncode == (0 if nth == 4 else 9)
    # Much later, when what was left aside counts as stale.
    for left in tmp_path.glob(f"{atomic.SCRATCH_PREFIX}*"):
        aged(left)
    atomic.remove_stale(tmp_path)
    assert content(tmp_path / "now") == expected
    write(tmp_path / "now", "newest")
    assert content(tmp_path / "now") == "newest"
    assert [path.name for path in tmp_path.iterdir()] == ["now"]


def test_a_backup_never_replaces_an_existing_folder(tmp_path):
    write(tmp_path / "now", "new")
    write(tmp_path / ".replaced-now", "old")
    restore_backup(tmp_path / "now")
    assert content(tmp_path / "now") == "new"


def abandoned(folder: Path) -> Path:
    """A temporary folder of a process that was killed two hours ago."""
    (folder / "whole").mkdir(parents=True)
    (folder / "llamagym").touch()
    return aged(folder)


def aged(folder: Path) -> Path:
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - 7200,) * 2, follow_symlinks=False)
    return folder


def test_removes_abandoned_temporary_folders(tmp_path):
    abandoned(tmp_path / ".writing-abcd_123")
    write(tmp_path / "now", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["now"]


@pytest.mark.parametrize("mark", ["folder", "text", "link", "missing"])
def test_keeps_user_folders_named_like_temporary_ones(tmp_path, mark):
    folder = abandoned(tmp_path / ".writing-chapters")
    (folder / "llamagym").unlink()
    if mark == "folder":
        (folder / "llamagym").mkdir()
        (folder / "llamagym" / "chapter1.md").write_text("my text")
    elif mark == "text":
        (folder / "llamagym").write_text("my text")
    elif mark == "link":
        (tmp_path / "empty").touch()
        (folder / "llamagym").symlink_to(tmp_path / "empty")
    aged(folder)
    write(tmp_path / "now", "new")
    assert folder.exists()
    assert os.path.lexists(folder / "llamagym") == (mark != "missing")


def test_keeps_folders_with_other_names_than_temporary_ones(tmp_path):
    for name in (".writing-drafts", ".writing-A-Letter", ".writing-chapters2"):
        abandoned(tmp_path / name)
    write(tmp_path / "now", "new")
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.skipif(file_operations.fcntl is None, reason="needs locks")
def test_keeps_the_locked_temporary_folder_of_a_slow_save(tmp_path):
    with atomic_folder(tmp_path / "slow", "checkpoint") as whole:
        (whole / "a.txt").write_text("slow")
        aged(whole.parent)
        write(tmp_path / "quick", "quick")
        assert whole.exists()
    assert content(tmp_path / "slow") == "slow"


def test_keeps_a_temporary_folder_with_recently_changed_files(tmp_path, monkeypatch):
    monkeypatch.setattr(file_operations, "fcntl", None)
    with atomic_folder(tmp_path / "slow", "checkpoint") as whole:
        (whole / "a.txt").write_text("slow")
        aged(whole.parent)
        (whole / "a.txt").write_text("written just now")
        write(tmp_path / "quick", "quick")
        assert whole.exists()
    assert content(tmp_path / "slow") == "written just now"


@pytest.mark.skipif(os.name == "nt", reason="needs the modes of Unix")
def test_saving_again_keeps_modes(tmp_path, exchanges):
    write(tmp_path / "now", "old")
    (tmp_path / "now" / "notes").mkdir()
    (tmp_path / "now" / "notes" / "diary.txt").write_text("mine")
    modes = {"": 0o700, "a.txt": 0o640, "notes": 0o710, "notes/diary.txt": 0o600}
    for name, mode in modes.items():
        (tmp_path / "now" / name).chmod(mode)
    write(tmp_path / "now", "new")
    assert content(tmp_path / "now") == "new"
    assert {name: (tmp_path / "now" / name).stat().st_mode & 0o777 for name in modes} == modes


@pytest.mark.skipif(os.name == "nt", reason="needs the modes of Unix")
def test_saving_to_an_empty_folder_keeps_its_mode(tmp_path):
    (tmp_path / "now").mkdir(0o700)
    write(tmp_path / "now", "new")
    assert (tmp_path / "now").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.name == "nt", reason="needs the modes of Unix")
@pytest.mark.parametrize("mode", [0o600, 0o444])
def test_replacing_a_file_keeps_its_mode(tmp_path, monkeypatch, mode):
    path = tmp_path / "metrics.csv"
    replace_file(path, "old")
    path.chmod(mode)
    readable = []
    monkeypatch.setattr(atomic, "flush", lambda scratch: readable.append(scratch.stat().st_mode & 0o077))
    replace_file(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == mode
    # Nor may others read it while it is written.
    assert readable == [0]


@pytest.fixture
def open_folder():
    """A folder that `as_nobody` may write to; root's temporary folders of pytest are closed to others."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    delete_folder(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


needs_permissions = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs the permissions of Unix")


@needs_permissions
def test_keeps_read_only_user_folders_and_leaves_no_temporary_folder(open_folder, exchanges):
    def save() -> None:
        write(open_folder / "now", "old")
        (open_folder / "now" / "plots").mkdir()
        (open_folder / "now" / "plots" / "a.png").touch()
        (open_folder / "now" / "link").symlink_to("plots")
        (open_folder / "now" / "plots").chmod(0o550)
        write(open_folder / "now", "new")
        assert content(open_folder / "now") == "new"
        assert names(open_folder / "now") == ["a.txt", "link", "manifest.json", "plots"]
        assert (open_folder / "now" / "plots").stat().st_mode & 0o777 == 0o550
        assert names(open_folder) == ["now"]

    as_nobody(save)


@needs_permissions
@pytest.mark.parametrize("text", ["old", None], ids=["older save", "empty"])
def test_rejects_a_read_only_folder(open_folder, exchanges, text):
    def save() -> None:
        if text is None:
            (open_folder / "now").mkdir()
        else:
            write(open_folder / "now", text)
        (open_folder / "now").chmod(0o550)
        with pytest.raises(CheckpointError, match=r"now' is read-only.*unchanged"):
            write(open_folder / "now", "new")
        assert names(open_folder) == ["now"]
        assert (open_folder / "now").stat().st_mode & 0o777 == 0o550
        assert text is None or content(open_folder / "now") == text

    as_nobody(save)


@needs_permissions
def test_rejects_a_folder_inside_a_read_only_one(open_folder):
    def save() -> None:
        (open_folder / "shared" / "out").mkdir(parents=True)
        (open_folder / "shared").chmod(0o555)
        with pytest.raises(CheckpointError, match=r"shared' is read-only.*replaced as a whole.*unchanged"):
            write(open_folder / "shared" / "out", "new")

    as_nobody(save)


def test_a_temporary_folder_that_cannot_be_deleted_keeps_its_marker(tmp_path, monkeypatch):
    scratch = abandoned(tmp_path / ".writing-abcd_123")
    usual = shutil.rmtree

    def fail(path: Path, *_: object, **__: object) -> None:
        if path.name == "whole":
            raise OSError("busy")
        usual(path)

    monkeypatch.setattr(shutil, "rmtree", fail)
    write(tmp_path / "now", "new")
    assert names(scratch) == ["llamagym", "whole"]
    monkeypatch.undo()
    aged(scratch)
    write(tmp_path / "now", "newest")
    assert names(tmp_path) == ["now"]
