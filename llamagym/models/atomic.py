"""Folders that appear whole or not at all, whatever stops the process that writes them.

Files are written aside, flushed to the disk, listed in a manifest with their sizes and checksums, and put in place by
one rename. So a folder under its own name is complete; and should a disk lose or alter some of it later, the manifest
tells. A folder that is replaced changes places with the new one, in one step on Linux; elsewhere it is set aside first,
and brought back should that be as far as it went.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

MANIFEST = "manifest.json"
SCHEMA = 1
"""Version of what is written; raised when older versions could not read it."""

_PIECE = 2**20
_SCRATCH, _ASIDE = ".writing-", ".replaced-"
# What is an hour old was left by a process that was killed.
_STALE_S = 3600.0


@contextmanager
def written_whole(
    folder: Path, kind: str, facts: Mapping[str, Any] | None = None, *, replace: bool = True
) -> Iterator[Path]:
    """While open, files are written into the folder that it yields; closed without an error, that becomes `folder`.

    Args:
        folder: What to write; what lies there is replaced in the end, and left alone by an error.
        kind: What it is, such as "checkpoint", for `verify`.
        facts: What the manifest says beside that, as JSON holds it.
        replace: Whether what lies there may be replaced; if not, that is an `OSError`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    bring_back(folder)
    remove_stale(folder.parent)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_SCRATCH))
    try:
        # Not the scratch folder itself, which only its owner may open.
        whole = scratch / "whole"
        whole.mkdir()
        yield whole
        _seal(whole, {"kind": kind, "schema": SCHEMA, "llamagym": _own_version(), **(facts or {})})
        if replace and folder.exists():
            _replace(folder, whole)
        else:
            whole.rename(folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_file(path: Path, parts: Iterable[Any]) -> None:
    """Write a file from buffers of bytes, by `os.write` in pieces of a megabyte at most.

    Raises:
        OSError: The disk is full, or cannot be written.
    """
    with path.open("wb", buffering=0) as file:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(file.fileno(), left[:_PIECE]) :]


def verify(folder: Path, kind: str, *, checksums: bool = True) -> dict[str, Any]:
    """Read a folder's manifest, and make sure that its files are what was written.

    Args:
        folder: What `written_whole` wrote.
        kind: What it must be.
        checksums: Whether to read all files through; their sizes are compared in any case.

    Returns:
        The manifest.

    Raises:
        CheckpointError: It is damaged, something else, or of a later version.
    """
    bring_back(folder)
    if not folder.is_dir():
        found = "a file, not a folder" if folder.exists() else "missing"
        raise CheckpointError(f"cannot load a saved {kind}: {str(folder)!r} is {found}. Check the path.")
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        found, schema, files = manifest["kind"], manifest["schema"], dict(manifest["files"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{str(folder)!r} is no {kind} of llamagym, or a damaged one: its {MANIFEST} cannot be read ({error!r})."
        ) from error
    if found != kind:
        raise CheckpointError(f"{str(folder)!r} holds: {found}; expected: {kind}.")
    if schema > SCHEMA:
        raise CheckpointError(
            f"{str(folder)!r} was written by llamagym {manifest.get('llamagym')} in format {schema}, and this version "
            f"reads formats up to {SCHEMA}. Upgrade llamagym."
        )
    for name, (size, checksum) in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size or (checksums and _checksum(path) != checksum):
            raise CheckpointError(f"{str(folder)!r} is damaged: {name!r} is missing or not what was written.")
    return manifest


def bring_back(folder: Path) -> None:
    """Put a folder back in place that a killed process had set aside to replace it, and no more."""
    if not folder.exists():
        with suppress(FileNotFoundError):
            _aside(folder).rename(folder)


def bring_back_all(parent: Path) -> None:
    """Do so for every folder in another."""
    for aside in parent.glob(f"{_ASIDE}*"):
        bring_back(parent / aside.name.removeprefix(_ASIDE))


def remove_stale(parent: Path) -> None:
    """Delete what killed processes left in a folder, but not what running ones write there."""
    for scratch in parent.glob(f"{_SCRATCH}*"):
        with suppress(FileNotFoundError):  # another process deletes it too
            if time.time() - scratch.stat().st_mtime > _STALE_S:
                shutil.rmtree(scratch, ignore_errors=True)


def _replace(folder: Path, new: Path) -> None:
    """Put a new folder in the place of one, which goes where the new one was, or stays if that fails."""
    aside = _aside(folder)
    if aside.exists():  # of a process that was killed just after its new folder had the name
        aside.rename(new.with_name("older"))
    if _exchange(new, folder):
        return
    folder.rename(aside)
    try:
        new.rename(folder)
    except BaseException:
        aside.rename(folder)
        raise
    aside.rename(new)


def _aside(folder: Path) -> Path:
    return folder.with_name(_ASIDE + folder.name)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; False where the system or the file system cannot."""
    at_cwd, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    return bool(renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0)


def _seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Flush a folder's files to the disk, then write its manifest."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in paths:
        _flush(path)
    files = {path.relative_to(folder).as_posix(): [path.stat().st_size, _checksum(path)] for path in paths}
    write_file(folder / MANIFEST, [json.dumps({**manifest, "files": files}, indent=1).encode() + b"\n"])
    _flush(folder / MANIFEST)
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        _flush(inner)


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders, and writes their lists through
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_PIECE):
            digest.update(block)
    return digest.hexdigest()


def _own_version() -> str:
    try:
        return version("llamagym")
    except PackageNotFoundError:
        return "unknown"
