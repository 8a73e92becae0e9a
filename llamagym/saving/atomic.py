"""Files and folders that are replaced as a whole or not at all, whatever stops the process that writes them.

A folder's files are written to a temporary folder beside it, flushed to the disk, listed in a manifest with their sizes
and checksums, and put in place by one rename. So a folder under its own name is complete; if a disk later loses or
alters some of it, the manifest shows it. A folder that is replaced is exchanged with the new one, in one step on
Linux. Elsewhere it is first renamed to a backup, which is renamed back if the process gets no further.

The manifest also protects the user's files. Only a folder that is new, empty, or has a manifest of the same kind is
written to; a model may also be written beside files of other names, such as a tokenizer's. Only files that its manifest
lists are removed, and all others are carried over.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from ..errors import CheckpointError, ConfigError, reason_of
from .file_operations import (
    are_equal,
    delete_folder,
    exchange_folders,
    flush,
    is_locked,
    keep_mode,
    link_file,
    locked,
    write_file,
)
from .manifest import MANIFEST, SCHEMA, check_manifest, has_manifest, read_manifest, write_manifest
from .paths import file_inside, user_folder

logger = logging.getLogger(__name__)

SCRATCH_PREFIX = ".writing-"
# Names that `tempfile.mkdtemp` gives.
_SCRATCH_PATTERN = re.compile(rf"{re.escape(SCRATCH_PREFIX)}[a-z0-9_]{{8}}")
_SCRATCH_FILE_PREFIX = ".llamagym-"
_SCRATCH_FILE_PATTERN = re.compile(rf"{re.escape(_SCRATCH_FILE_PREFIX)}.+-[0-9a-f]{{8}}")
_BACKUP_PREFIX = ".replaced-"
# Only a temporary folder that contains this file, empty, may be deleted. Its writer holds a lock on it.
_MARKER = "llamagym"
# The new folder, and an old backup, inside of a temporary folder.
_NEW = "whole"
_OLD = "retired"
# Older temporary folders are treated as abandoned.
STALE_S = 3600.0
# Kinds that may be written to a folder without a manifest, beside files of other names.
_SHARES_FOLDER = ("model",)
# A folder with weights is not shared: they could be loaded instead of the new ones.
_WEIGHTS = ("adapter_config.json", "*.safetensors", "*.safetensors.index*.json")
# The only subfolder that a model may be written beside; it is a tokenizer's. Others may be in use meanwhile.
_TEMPLATES = "additional_chat_templates"


@contextmanager
def atomic_folder(
    folder: str | Path, kind: str, facts: Mapping[str, Any] | None = None, *, replace: bool = True
) -> Iterator[Path]:
    """Yields a temporary folder to write files to; closed without an error, it becomes `folder`.

    Args:
        folder: Folder to write: new, empty, or one that this function wrote with the same kind; for a model, also one
            without a manifest, weights and folders. Files in it that its manifest does not list stay.
        kind: Kind of the folder, such as "checkpoint", for `verify`.
        facts: Further entries of the manifest, as JSON holds them.
        replace: Whether an older version may be replaced.

    Raises:
        ConfigError: The folder's path is invalid.
        CheckpointError: The folder holds something else, or cannot be written. It is unchanged, and no temporary file
            is left. If only the final flush failed, the new version is in place, and the message says so.
    """
    folder = user_folder(folder).resolve()
    _reject_working_directory(folder, kind)
    missing_parents = [parent for parent in folder.parents if not os.path.exists(parent)]
    scratch: Path | None = None
    is_in_place = False
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        restore_backup(folder)
        remove_stale(folder.parent)
        require_replaceable(folder, kind)
        _require_writable(folder)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=SCRATCH_PREFIX))
        (scratch / _MARKER).touch()
        # Not the temporary folder itself, which only its owner may open.
        new = scratch / _NEW
        new.mkdir()
        with locked(scratch / _MARKER):
            yield new
            _seal(new, kind, facts or {}, scratch / _MARKER)
            with locked(folder.parent):
                _install(new, folder, kind, replace)
            is_in_place = True
            flush(folder.parent)
    except BaseException as error:
        _clean_up(scratch, missing_parents)
        if not _is_write_error(error):
            raise
        if is_in_place:
            raise CheckpointError(
                f"the {kind} {str(folder)!r} is written, but the disk reports an error: {reason_of(error)}. It may be "
                "lost should the machine stop. Save again, or to another disk."
            ) from error
        raise CheckpointError(
            f"cannot write the {kind} {str(folder)!r}: {reason_of(error)}. What was there before is unchanged."
        ) from error
    _clean_up(scratch, [])


def verify(folder: Path, kind: str, *, checksums: bool = True) -> dict[str, Any]:
    """Checks a folder that `atomic_folder` wrote, after it restored the backup of a killed process.

    Args:
        folder: The folder.
        kind: The expected kind.
        checksums: Whether to compare the content of all files, and not their sizes alone.

    Returns:
        The manifest.

    Raises:
        CheckpointError: The folder is missing, damaged, of another kind, or of another version.
    """
    restore_backup(folder)
    return check_manifest(folder, kind, checksums=checksums)


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a file that appears whole or not at all, in place of an older version, whose mode it keeps.

    Raises:
        OSError: The disk is full, or cannot be written; the older version is unchanged.
    """
    _remove_stale_files(path)
    if isinstance(content, str):
        # Text may hold a lone surrogate, such as a file's name that is not UTF-8.
        content = content.encode("utf-8", "replace")
    scratch = path.with_name(f"{_SCRATCH_FILE_PREFIX}{path.name}-{secrets.token_hex(4)}")
    try:
        if path.is_file() and not path.is_symlink():
            scratch.touch(0o600)
        write_file(scratch, content)
        flush(scratch)
        keep_mode(path, scratch)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def is_scratch_file(name: str) -> bool:
    """Whether a file's name is one that `replace_file` gives to temporary files."""
    return _SCRATCH_FILE_PATTERN.fullmatch(name) is not None


def _remove_stale_files(path: Path) -> None:
    """Deletes temporary files that killed processes left when they replaced a file."""
    prefix = f"{_SCRATCH_FILE_PREFIX}{path.name}-"
    for scratch in path.parent.glob(f"{_SCRATCH_FILE_PREFIX}*"):
        belongs = is_scratch_file(scratch.name) and scratch.name.startswith(prefix)
        with suppress(OSError):  # another process deletes it too
            if belongs and time.time() - scratch.lstat().st_mtime > STALE_S:
                scratch.unlink()


def remove_saved(folder: Path) -> None:
    """Deletes the files that a folder's manifest lists, and the folder if it holds nothing else.

    Raises:
        CheckpointError: The folder has no manifest; nothing is deleted.
    """
    saved_files = read_manifest(folder)["files"]
    with suppress(OSError):
        # First, so that a deletion that fails halfway does not leave a folder that counts as a damaged save.
        (folder / MANIFEST).unlink()
        for name in saved_files:
            with suppress(OSError, CheckpointError):
                file_inside(folder, name).unlink()
    subfolders = {str(parent) for name in saved_files for parent in PurePosixPath(name).parents}
    for subfolder in sorted(subfolders, reverse=True):
        with suppress(OSError, CheckpointError):  # it holds other files
            file_inside(folder, subfolder).rmdir()
    with suppress(OSError):
        folder.rmdir()


def restore_backup(folder: Path) -> None:
    """Renames a folder's backup back, if a process was killed before it had put the new folder in place."""
    backup = _backup_of(folder)
    if not os.path.lexists(folder) and has_manifest(backup):
        with suppress(OSError), locked(folder.parent):
            if not os.path.lexists(folder):
                backup.rename(folder)


def restore_backups(parent: Path) -> None:
    """Calls `restore_backup` for every backup in a folder."""
    for backup in parent.glob(f"{_BACKUP_PREFIX}*"):
        restore_backup(parent / backup.name.removeprefix(_BACKUP_PREFIX))


def _backup_of(folder: Path) -> Path:
    """The path that a folder is renamed to while it is replaced without an exchange."""
    return folder.parent / (_BACKUP_PREFIX + folder.name)


def remove_stale(parent: Path) -> None:
    """Deletes temporary folders that killed processes left in a folder, but not those of running processes."""
    for scratch in parent.glob(f"{SCRATCH_PREFIX}*"):
        with suppress(OSError):  # another process deletes it too
            if _is_scratch(scratch) and not _is_in_use(scratch):
                _remove_scratch(scratch)


def _is_scratch(folder: Path) -> bool:
    """Whether a folder is a temporary one of this library: the user's folders may have such a name, too."""
    if folder.is_symlink() or not _SCRATCH_PATTERN.fullmatch(folder.name):
        return False
    marker = (folder / _MARKER).lstat()
    is_empty_file = stat.S_ISREG(marker.st_mode) and not marker.st_size
    return is_empty_file and {*os.listdir(folder)} <= {_MARKER, _NEW, _OLD}


def _is_in_use(scratch: Path) -> bool:
    """Whether a temporary folder is in use: a file in it changed within the last hour, or its marker is locked."""
    newest = max(path.lstat().st_mtime for path in (scratch, *scratch.rglob("*")))
    return time.time() - newest <= STALE_S or is_locked(scratch / _MARKER)


def _remove_scratch(scratch: Path) -> None:
    """Deletes a temporary folder, its marker last, so that a later process can finish an interrupted deletion."""
    subfolders = [scratch / _NEW, scratch / _OLD]
    with suppress(OSError):
        for folder in subfolders:
            delete_folder(folder)
    if not any(map(os.path.lexists, subfolders)):
        shutil.rmtree(scratch, ignore_errors=True)


def _clean_up(scratch: Path | None, created_parents: Iterable[Path]) -> None:
    """Deletes a temporary folder, and the parents that were created for it and are still empty."""
    if scratch is not None:
        _remove_scratch(scratch)
    for parent in created_parents:
        with suppress(OSError):
            parent.rmdir()


def _reject_working_directory(folder: Path, kind: str) -> None:
    """Rejects the current working directory and those above it: they cannot be replaced as a whole."""
    try:
        here = Path.cwd().resolve()
    except OSError:  # it has been deleted
        return
    if here.is_relative_to(folder):
        raise ConfigError(
            f"folder={str(folder)!r} is the current working directory or contains it, and cannot be replaced as a "
            f"whole. Pass a folder of its own, such as 'my-{kind}'."
        )


def require_replaceable(folder: Path, kind: str) -> None:
    """Rejects an existing folder that has files and no manifest of this kind.

    Raises:
        CheckpointError: It is such a folder.
        ConfigError: It is the current working directory, or contains it.
    """
    _reject_working_directory(folder.resolve(), kind)
    if not folder.parent.is_dir():
        return
    # While another process renames the folder, it has no manifest.
    with locked(folder.parent):
        check_replaceable(folder, kind)


def check_replaceable(folder: Path, kind: str) -> None:
    """Does the check of `require_replaceable`; the caller holds the lock."""
    names = sorted(os.listdir(folder)) if os.path.lexists(folder) else []
    if kind in _SHARES_FOLDER and MANIFEST not in names:
        names = [name for name in names if _is_in_the_way(folder / name)]
    if not names:
        return
    try:
        found = read_manifest(folder)["kind"]
    except CheckpointError as error:
        listing = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise CheckpointError(
            f"{str(folder)!r} holds files ({listing}) and no manifest of this version of llamagym. Saving replaces a "
            "folder as a whole. Pass a new or empty folder."
        ) from error
    if found != kind:
        raise CheckpointError(
            f"{str(folder)!r} holds: {found[:80]}; saving there would replace it with: {kind}. Pass another folder."
        )


def _is_in_the_way(path: Path) -> bool:
    """Whether a model may not be written beside a file or folder."""
    is_weights = any(fnmatchcase(path.name, pattern) for pattern in _WEIGHTS)
    return is_weights or (path.is_dir() and path.name != _TEMPLATES)


def _require_writable(folder: Path) -> None:
    """Raises a PermissionError for a read-only folder, and for one in a read-only folder, where no rename works."""
    for path in (folder.parent, folder):
        if path.exists() and not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(
                f"{str(path)!r} is read-only, and the folder is replaced as a whole. Make it writable, or pass another"
            )


def _seal(folder: Path, kind: str, facts: Mapping[str, Any], marker: Path) -> None:
    """Flushes a folder's files to the disk, then writes its manifest.

    Args:
        folder: The new folder.
        kind: Its kind.
        facts: Further entries of the manifest.
        marker: A new file, which has the mode that the process gives to files.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in paths:
        # safetensors creates files that only their owner can read.
        keep_mode(marker, path)
        flush(path)
    write_manifest(folder, kind, facts, paths)
    flush(folder / MANIFEST)
    for path in folder.rglob("*"):
        if path.is_dir():
            flush(path)
    flush(folder)


def _install(new: Path, folder: Path, kind: str, replace: bool) -> None:
    """Puts a new folder in place; an older one of the same kind ends up where the new one was."""
    # Another process may have written it in the meantime.
    check_replaceable(folder, kind)
    keep_mode(folder, new)
    if not folder.exists() or not os.listdir(folder):
        if os.name == "nt" and folder.exists():
            folder.rmdir()
        new.rename(folder)
        return
    if not replace:
        raise FileExistsError(f"{str(folder)!r} exists")
    had_manifest = (folder / MANIFEST).exists()
    saved_files = {MANIFEST}
    if had_manifest:
        saved_files.update(read_manifest(folder)["files"])
    carried = _carry_over(folder, new, saved_files)
    for path in new.rglob("*"):
        keep_mode(folder / path.relative_to(new), path)
    backup = _backup_of(folder)
    if has_manifest(backup):  # of a process that was killed just after its new folder was in place
        _discard_backup(backup, folder, new.parent)
    if not exchange_folders(new, folder):
        _exchange_by_renames(new, folder, kind, had_manifest)
    # Files that were added since.
    _carry_over(new, folder, saved_files | carried)


def _exchange_by_renames(new: Path, folder: Path, kind: str, had_manifest: bool) -> None:
    """Exchanges a new folder and an old one, with or without a manifest; an error leaves the old one in place."""
    backup = _backup_of(folder)
    try:
        if not had_manifest:
            # `restore_backup` recognizes a backup by its manifest.
            replace_file(folder / MANIFEST, json.dumps({"kind": kind, "schema": SCHEMA, "files": {}}))
        folder.rename(backup)
        try:
            new.rename(folder)
        except BaseException:
            backup.rename(folder)
            raise
    except BaseException:
        if not had_manifest:
            (folder / MANIFEST).unlink(missing_ok=True)
        raise
    backup.rename(new)


def _discard_backup(backup: Path, folder: Path, scratch: Path) -> None:
    """Moves the backup of a killed process to a temporary folder, or to a new name if it has other files of the user.

    Args:
        backup: The folder that was replaced.
        folder: The folder that replaced it, with links to the files of the user.
        scratch: The temporary folder.
    """
    saved_files = {MANIFEST, *read_manifest(backup)["files"]}
    if all(are_equal(backup / name, folder / name) for name in _unlisted(backup, saved_files)):
        backup.rename(scratch / _OLD)
        return
    kept = folder.with_name(f"{folder.name}-replaced-{secrets.token_hex(4)}")
    backup.rename(kept)
    logger.warning("%s holds files of yours that %s does not; it is kept.", kept, folder)


def _unlisted(folder: Path, saved_files: set[str]) -> Iterator[str]:
    """Yields the files, links and empty folders in a folder that are not among the saved files."""
    for parent, folders, files in os.walk(folder):
        here = Path(parent)
        leaves = [name for name in folders if (here / name).is_symlink() or not os.listdir(here / name)]
        for name in (*files, *leaves):
            relative = (here / name).relative_to(folder).as_posix()
            if relative not in saved_files:
                yield relative


def _carry_over(old: Path, new: Path, saved_files: set[str]) -> set[str]:
    """Links the files of an old folder that are not among the saved files into a new one; returns their names."""
    carried = set()
    for name in _unlisted(old, saved_files):
        path = old / name
        target = new / name
        if path.is_dir() and not path.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
            continue
        if os.path.lexists(target):
            raise FileExistsError(
                f"{name!r} is in the way: no {MANIFEST} lists it, and a file of this name is to be written. Move it, "
                "or pass another folder"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        link_file(path, target)
        carried.add(name)
    return carried


def _is_write_error(error: BaseException) -> bool:
    """Whether an error comes from writing files; tokenizers raises a bare Exception then."""
    return isinstance(error, (OSError, SafetensorError)) or type(error) is Exception
