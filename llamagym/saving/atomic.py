"""Files and folders that appear whole or not at all, whatever stops the process that writes them.

A folder's files are written to a temporary folder beside it, flushed to the disk, listed in a manifest with their sizes
and checksums, and put in place by one rename. So a folder under its own name is complete; and should a disk lose or
alter some of it later, the manifest shows it. A folder that is replaced is exchanged with the new one, in one step on
Linux; elsewhere it is renamed first, and renamed back if the process gets no further.

The manifest also protects the user's files. Only a folder that is new, empty, or has a manifest of the same kind is
written to; a model may also be written beside files of other names, such as a tokenizer's. Only files that its manifest
lists are removed, and all others are carried over.
"""

from __future__ import annotations

import ctypes
import hashlib
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from ..errors import CheckpointError, ConfigError
from .file_operations import are_equal, delete_folder, keep_mode, link_file
from .paths import file_inside, user_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SCHEMA = 3
"""Version of the format that is written, and the only one that is read."""

_PIECE = 2**20
_SCRATCH, _ASIDE = ".writing-", ".replaced-"
# Names that `tempfile.mkdtemp` gives.
_SCRATCH_PATTERN = re.compile(rf"{re.escape(_SCRATCH)}[a-z0-9_]{{8}}")
_SCRATCH_FILE = ".llamagym-"
_SCRATCH_FILE_PATTERN = re.compile(rf"{re.escape(_SCRATCH_FILE)}.+-[0-9a-f]{{8}}")
# Only a temporary folder that contains this file, empty, is ours to remove. Its writer holds a lock on it.
_OWNER = "llamagym"
_WHOLE, _RETIRED = "whole", "retired"
# Older temporary folders are treated as abandoned.
_STALE_S = 3600.0
_LARGEST_MANIFEST = 2**24
# Kinds that may be written to a folder without a manifest, beside files of other names.
_SHARES_FOLDER = ("model",)
# Not beside weights, which could be loaded instead.
_WEIGHTS = ("adapter_config.json", "*.safetensors", "*.safetensors.index*.json")
# The only folder that they may be written beside; it is a tokenizer's. Others may be in use while they are replaced.
_TEMPLATES = "additional_chat_templates"


@contextmanager
def written_whole(
    folder: str | Path, kind: str, facts: Mapping[str, Any] | None = None, *, replace: bool = True
) -> Iterator[Path]:
    """While open, files are written to the folder that it yields; closed without an error, that becomes `folder`.

    Args:
        folder: Folder to write: new, empty, or one that this function wrote with the same kind; for a model, also one
            without a manifest, weights and folders. Files in it that its manifest does not list stay.
        kind: What it is, such as "checkpoint", for `verify`.
        facts: Further entries of the manifest, as JSON holds them.
        replace: Whether an older version may be replaced.

    Raises:
        ConfigError: The folder's path is invalid.
        CheckpointError: The folder holds something else, or cannot be written. What lay there is as it was, and no
            temporary file is left. If only the final flush failed, the new version is in place, and the message says
            so.
    """
    folder = user_folder(folder).resolve()
    _require_replaceable(folder, kind)
    missing = [parent for parent in folder.parents if not os.path.exists(parent)]
    scratch: Path | None = None
    is_in_place = False
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        bring_back(folder)
        remove_stale(folder.parent)
        require_own(folder, kind)
        _require_writable(folder)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_SCRATCH))
        (scratch / _OWNER).touch()
        # Not the scratch folder itself, which only its owner may open.
        whole = scratch / _WHOLE
        whole.mkdir()
        with _locked(scratch / _OWNER):
            yield whole
            _seal(whole, {**(facts or {}), "kind": kind, "schema": SCHEMA, "llamagym": own_version()})
            with _locked(folder.parent):
                _put(folder, whole, kind, replace)
            is_in_place = True
            _flush(folder.parent)
    except BaseException as error:
        _clean_up(scratch, missing)
        if not _is_of_writing(error):
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


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file that appears whole or not at all, in place of an older version, whose mode it keeps.

    Raises:
        OSError: The disk is full, or cannot be written; then the older version is as it was.
    """
    _remove_stale_files(path)
    scratch = path.with_name(f"{_SCRATCH_FILE}{path.name}-{secrets.token_hex(4)}")
    try:
        if path.is_file() and not path.is_symlink():
            scratch.touch(0o600)
        # Text may hold a lone surrogate, such as a file's name that is not UTF-8.
        write_file(scratch, [content.encode("utf-8", "replace") if isinstance(content, str) else content])
        _flush(scratch)
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
    for scratch in path.parent.glob(f"{_SCRATCH_FILE}*"):
        belongs = is_scratch_file(scratch.name) and scratch.name.startswith(f"{_SCRATCH_FILE}{path.name}-")
        with suppress(OSError):  # another process deletes it too
            if belongs and time.time() - scratch.lstat().st_mtime > _STALE_S:
                scratch.unlink()


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


def read_manifest(folder: Path, kind: str = "save") -> dict[str, Any]:
    """Read the manifest of a folder that `written_whole` wrote, whatever its kind.

    Args:
        folder: The folder.
        kind: Kind that is expected, for errors.

    Returns:
        The manifest; `files` has the size and the checksum of each file.

    Raises:
        CheckpointError: The manifest is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        if not file_inside(folder, MANIFEST).is_file():
            raise FileNotFoundError(f"{MANIFEST} is missing")
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        files = {name: (size, checksum) for name, (size, checksum) in manifest["files"].items()}
        types = {type(manifest["kind"]), *(type(checksum) for _, checksum in files.values())}
        if types != {str} or {type(manifest["schema"]), *(type(size) for size, _ in files.values())} != {int}:
            raise ValueError("an entry is of another type")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{str(folder)!r} holds no {kind} of llamagym, or a damaged one: its {MANIFEST} cannot be read "
            f"({reason_of(error)})."
        ) from error
    return {**manifest, "files": files}


def verify(folder: Path, kind: str, *, checksums: bool = True) -> dict[str, Any]:
    """Read a folder's manifest, and check that its files are those that were written.

    Args:
        folder: A folder that `written_whole` wrote.
        kind: Its kind.
        checksums: Whether to compare the content of all files, and not their sizes alone.

    Returns:
        The manifest.

    Raises:
        CheckpointError: It is damaged, something else, or of another version.
    """
    bring_back(folder)
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
    """Rejects files that are not as a manifest lists them.

    Args:
        folder: Their folder.
        files: Sizes and checksums by name.
        checksums: Whether to compare checksums, and not sizes alone.

    Raises:
        CheckpointError: A file is missing, cannot be read, or differs.
    """
    for name, (size, checksum) in files.items():
        path = file_inside(folder, name)
        try:
            is_intact = path.is_file() and path.stat().st_size == size
            is_intact = is_intact and not (checksums and _checksum(path) != checksum)
        except OSError as error:
            raise CheckpointError(f"{str(folder)!r}: {name!r} cannot be read: {reason_of(error)}.") from error
        if not is_intact:
            raise CheckpointError(f"{str(folder)!r} is damaged: {name!r} is missing or not what was written.")


def reason_of(error: BaseException) -> str:
    """An error's type and the beginning of its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"


def remove_own(folder: Path) -> None:
    """Delete the files that a folder's manifest lists, and the folder if it holds nothing else.

    Raises:
        CheckpointError: It has no manifest; then nothing is deleted.
    """
    listed = read_manifest(folder)["files"]
    # Without its manifest it does not count, should the rest stay.
    with suppress(OSError):
        (folder / MANIFEST).unlink()
        for name in listed:
            with suppress(OSError, CheckpointError):
                file_inside(folder, name).unlink()
    inner = {str(parent) for name in listed for parent in PurePosixPath(name).parents}
    for parent in sorted(inner, reverse=True):
        with suppress(OSError, CheckpointError):  # it holds other files
            file_inside(folder, parent).rmdir()
    with suppress(OSError):
        folder.rmdir()


def bring_back(folder: Path) -> None:
    """Rename a folder back that a killed process had renamed to replace it."""
    aside = _aside(folder)
    if not os.path.lexists(folder) and _is_own(aside):
        with suppress(OSError), _locked(folder.parent):
            if not os.path.lexists(folder):
                aside.rename(folder)


def bring_back_all(parent: Path) -> None:
    """Calls `bring_back` for every folder in `parent` that was set aside."""
    for aside in parent.glob(f"{_ASIDE}*"):
        bring_back(parent / aside.name.removeprefix(_ASIDE))


def remove_stale(parent: Path) -> None:
    """Deletes temporary folders that killed processes left in a folder, but not those of running processes."""
    for scratch in parent.glob(f"{_SCRATCH}*"):
        with suppress(OSError):  # another process deletes it too
            if _is_scratch(scratch) and not _is_in_use(scratch):
                _remove_scratch(scratch)


def _is_scratch(folder: Path) -> bool:
    """Whether a folder is a temporary one of this library: the user's folders may have such a name, too."""
    if folder.is_symlink() or not _SCRATCH_PATTERN.fullmatch(folder.name):
        return False
    mark = (folder / _OWNER).lstat()
    return stat.S_ISREG(mark.st_mode) and not mark.st_size and {*os.listdir(folder)} <= {_OWNER, _WHOLE, _RETIRED}


def _is_in_use(scratch: Path) -> bool:
    """Whether a temporary folder is in use: a file in it changed within the last hour, or its mark is locked."""
    newest = max(path.lstat().st_mtime for path in (scratch, *scratch.rglob("*")))
    if time.time() - newest <= _STALE_S:
        return True
    if fcntl is not None:
        with (scratch / _OWNER).open("rb") as mark:
            try:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:  # some network file systems have no locks
                return False
    return False


def _remove_scratch(scratch: Path) -> None:
    """Deletes a temporary folder.

    The mark is deleted last, so that a later process can finish an interrupted deletion.
    """
    inner = [scratch / name for name in (_WHOLE, _RETIRED)]
    with suppress(OSError):
        for folder in inner:
            delete_folder(folder)
    if not any(map(os.path.lexists, inner)):
        shutil.rmtree(scratch, ignore_errors=True)


def _clean_up(scratch: Path | None, made: Iterable[Path]) -> None:
    """Remove a temporary folder, and those folders that were made for it and are still empty."""
    if scratch is not None:
        _remove_scratch(scratch)
    for parent in made:
        with suppress(OSError):
            parent.rmdir()


def _require_replaceable(folder: Path, kind: str) -> None:
    """Reject the current working directory and those above it: they cannot be replaced as a whole.

    Raises:
        ConfigError: It is one of them.
    """
    try:
        here = Path.cwd().resolve()
    except OSError:  # it has been deleted
        return
    if here.is_relative_to(folder):
        raise ConfigError(
            f"folder={str(folder)!r} is the current working directory or contains it, and cannot be replaced as a "
            f"whole. Pass a folder of its own, such as 'my-{kind}'."
        )


def require_own(folder: Path, kind: str) -> None:
    """Rejects an existing folder that has files and no manifest of this kind.

    Raises:
        CheckpointError: It is such a folder.
        ConfigError: It is the current working directory, or contains it.
    """
    _require_replaceable(folder.resolve(), kind)
    if not folder.parent.is_dir():
        return
    # While another process renames the folder, it has no manifest.
    with _locked(folder.parent):
        _require_own(folder, kind)


def _require_own(folder: Path, kind: str) -> None:
    """Does the check of `require_own`; the caller holds the lock."""
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
    """Rejects a read-only folder, and one in a read-only folder, where it cannot be renamed.

    Raises:
        PermissionError: It is such a folder.
    """
    for path in (folder.parent, folder):
        if path.exists() and not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(
                f"{str(path)!r} is read-only, and the folder is replaced as a whole. Make it writable, or pass another"
            )


def _is_own(folder: Path) -> bool:
    """Whether a folder has a manifest."""
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return not folder.is_symlink()


def _put(folder: Path, new: Path, kind: str, replace: bool) -> None:
    """Put a new folder in place; an older one of the same kind ends up where the new one was."""
    # Another process may have written it in the meantime.
    _require_own(folder, kind)
    keep_mode(folder, new)
    if not folder.exists() or not os.listdir(folder):
        if os.name == "nt" and folder.exists():
            folder.rmdir()
        new.rename(folder)
        return
    if not replace:
        raise FileExistsError(f"{str(folder)!r} exists")
    has_manifest = (folder / MANIFEST).exists()
    listed = {MANIFEST, *(read_manifest(folder)["files"] if has_manifest else ())}
    carried = _carry_over(folder, new, listed)
    for path in new.rglob("*"):
        keep_mode(folder / path.relative_to(new), path)
    aside = _aside(folder)
    if _is_own(aside):  # of a process that was killed just after its new folder had the name
        _retire(aside, folder, new.parent)
    if not _exchange(new, folder):
        try:
            if not has_manifest:
                # `bring_back` needs one to recognize the folder.
                replace_file(folder / MANIFEST, json.dumps({"kind": kind, "schema": SCHEMA, "files": {}}))
            folder.rename(aside)
            try:
                new.rename(folder)
            except BaseException:
                aside.rename(folder)
                raise
        except BaseException:
            if not has_manifest:
                (folder / MANIFEST).unlink(missing_ok=True)
            raise
        aside.rename(new)
    # Files that were added since.
    _carry_over(new, folder, listed | carried)


def _retire(aside: Path, folder: Path, scratch: Path) -> None:
    """Moves what a killed process had replaced to the temporary folder, or to a name of its own.

    Args:
        aside: The folder that was replaced.
        folder: The folder that replaced it, with links to the files of the user.
        scratch: The temporary folder, which is deleted at the end.
    """
    listed = {MANIFEST, *read_manifest(aside)["files"]}
    if all(are_equal(aside / name, folder / name) for name in _unlisted(aside, listed)):
        aside.rename(scratch / _RETIRED)
        return
    kept = folder.with_name(f"{folder.name}-replaced-{secrets.token_hex(4)}")
    aside.rename(kept)
    logger.warning("%s holds files of yours that %s does not; it is kept.", kept, folder)


def _unlisted(folder: Path, listed: set[str]) -> Iterator[str]:
    """The files, links and empty folders in a folder that are not listed."""
    for inner, folders, files in os.walk(folder):
        here = Path(inner)
        ends = [name for name in folders if (here / name).is_symlink() or not os.listdir(here / name)]
        for name in (*files, *ends):
            relative = (here / name).relative_to(folder).as_posix()
            if relative not in listed:
                yield relative


def _carry_over(old: Path, new: Path, listed: set[str]) -> set[str]:
    """Link the files of an old folder that are not listed into a new one; returns their names."""
    carried = set()
    for name in _unlisted(old, listed):
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


def _aside(folder: Path) -> Path:
    return folder.parent / (_ASIDE + folder.name)


def _is_of_writing(error: BaseException) -> bool:
    """Whether an error comes from writing files; tokenizers raises a bare Exception then."""
    return isinstance(error, (OSError, SafetensorError)) or type(error) is Exception


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """While open, this process holds the lock of a file or folder, where the system has such locks.

    Callers lock the parent folder before they rename a folder in it.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems lock no folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


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


def own_version() -> str:
    """The version of this library, "unknown" where it is not installed."""
    try:
        return version("llamagym")
    except PackageNotFoundError:
        return "unknown"
