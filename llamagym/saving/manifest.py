"""Manifests: `manifest.json` lists the files of a saved folder, with their sizes and checksums.

It also names the kind of the folder ("checkpoint", "agent", "model"), the version of the format, and the version of
llamagym that wrote it. A manifest shows whether a disk lost or altered a file, and which files belong to the library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, reason_of
from .file_operations import checksum_of, write_file
from .paths import file_inside

MANIFEST = "manifest.json"
SCHEMA = 5
"""Version of the format that is written, and the only one that is read."""

_MAX_MANIFEST_BYTES = 2**24


def llamagym_version() -> str:
    """The version of this library; "unknown" where it is not installed."""
    try:
        return version("llamagym")
    except PackageNotFoundError:
        return "unknown"


def write_manifest(folder: Path, kind: str, facts: Mapping[str, Any], paths: Iterable[Path]) -> None:
    """Writes the manifest of a folder.

    Args:
        folder: The folder.
        kind: Kind of the folder, such as "checkpoint".
        facts: Further entries, as JSON holds them.
        paths: The files to list, all in the folder.

    Raises:
        OSError: A file cannot be read, or the manifest cannot be written.
    """
    files = {path.relative_to(folder).as_posix(): [path.stat().st_size, checksum_of(path)] for path in paths}
    manifest = {**facts, "kind": kind, "schema": SCHEMA, "llamagym": llamagym_version(), "files": files}
    write_file(folder / MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n")


def read_manifest(folder: Path, kind: str = "save") -> dict[str, Any]:
    """Reads the manifest of a folder of any kind.

    Args:
        folder: The folder.
        kind: The expected kind, for errors only.

    Returns:
        The manifest; its entry `files` maps each name to a tuple of size and checksum.

    Raises:
        CheckpointError: The manifest is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        if not file_inside(folder, MANIFEST).is_file():
            raise FileNotFoundError(f"{MANIFEST} is missing")
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if type(manifest["kind"]) is not str or type(manifest["schema"]) is not int:
            raise ValueError("its kind or schema is of another type")
        files = {}
        for name, (size, checksum) in manifest["files"].items():
            if type(size) is not int or type(checksum) is not str:
                raise ValueError("a size or checksum is of another type")
            files[name] = (size, checksum)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{str(folder)!r} holds no {kind} of llamagym, or a damaged one: its {MANIFEST} cannot be read "
            f"({reason_of(error)})."
        ) from error
    return {**manifest, "files": files}


def has_manifest(folder: Path) -> bool:
    """Whether a path is a folder, not a link to one, with a readable manifest."""
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return not folder.is_symlink()


def check_manifest(folder: Path, kind: str, *, checksums: bool = True) -> dict[str, Any]:
    """Reads a folder's manifest and checks its files, as `atomic.verify` describes."""
    if not folder.is_dir():
        found = "a file, not a folder" if folder.exists() else "missing"
        raise CheckpointError(f"cannot load a saved {kind}: {str(folder)!r} is {found}. Check the path.")
    manifest = read_manifest(folder, kind)
    if manifest["kind"] != kind:
        raise CheckpointError(f"{str(folder)!r} holds: {manifest['kind'][:80]}; expected: {kind}.")
    if manifest["schema"] != SCHEMA:
        raise CheckpointError(
            f"{str(folder)!r} was written by llamagym {str(manifest.get('llamagym'))[:80]} in format "
            f"{manifest['schema']}, and this version reads format {SCHEMA} only. Use the version that wrote it."
        )
    check_files(folder, manifest["files"], checksums=checksums)
    return manifest


def check_files(folder: Path, files: Mapping[str, tuple[int, str]], *, checksums: bool = True) -> None:
    """Rejects files that differ from a manifest's entries.

    Args:
        folder: The folder that contains them.
        files: Sizes and checksums by name.
        checksums: Whether to compare checksums, and not sizes alone.

    Raises:
        CheckpointError: A file is missing, cannot be read, or differs.
    """
    for name, (size, checksum) in files.items():
        path = file_inside(folder, name)
        try:
            is_intact = path.is_file() and path.stat().st_size == size
            if is_intact and checksums:
                is_intact = checksum_of(path) == checksum
        except OSError as error:
            raise CheckpointError(f"{str(folder)!r}: {name!r} cannot be read: {reason_of(error)}.") from error
        if not is_intact:
            raise CheckpointError(f"{str(folder)!r} is damaged: {name!r} is missing or not what was written.")
