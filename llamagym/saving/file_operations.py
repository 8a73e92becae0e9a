"""Operations on single files and folders: write, flush, lock, exchange, compare, link and delete.

Each is one step of what `atomic` does, without any knowledge of manifests or temporary folders.
"""

from __future__ import annotations

import ctypes
import filecmp
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

BLOCK_BYTES = 2**20


def write_file(path: Path, content: bytes) -> None:
    """Writes a file by `os.write`, in blocks of at most a megabyte.

    Raises:
        OSError: The disk is full, or cannot be written.
    """
    remaining = memoryview(content)
    with path.open("wb", buffering=0) as file:
        while remaining:
            written = os.write(file.fileno(), remaining[:BLOCK_BYTES])
            remaining = remaining[written:]


def flush(path: Path) -> None:
    """Waits until the content of a file, or the listing of a folder, is on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders, and writes their listings through
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum_of(path: Path) -> str:
    """The SHA-256 checksum of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
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


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock of a file; False where the system has no locks."""
    if fcntl is None:
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # some network file systems have no locks
            return False
    return False


def exchange_folders(one: Path, other: Path) -> bool:
    """Exchanges two folders in one step; returns False where the system or the file system cannot."""
    at_cwd = -100  # AT_FDCWD of renameat2(2)
    exchange = 2  # RENAME_EXCHANGE
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    return bool(renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0)


def delete_folder(folder: Path) -> None:
    """Deletes a folder if it exists, with the read-only folders in it.

    Raises:
        OSError: A file or folder cannot be deleted.
    """
    if not os.path.lexists(folder):
        return
    folder.chmod(stat.S_IRWXU)
    # The modes of files stay: a file may be a hard link to one of the user's.
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            path = Path(parent) / name
            if not path.is_symlink():
                path.chmod(stat.S_IRWXU)
    shutil.rmtree(folder)


def are_equal(one: Path, other: Path) -> bool:
    """Whether two paths are equal links, or files with the same content."""
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and os.readlink(one) == os.readlink(other)
    if one.is_dir():
        return other.is_dir()
    return other.is_file() and filecmp.cmp(one, other, shallow=False)


def link_file(path: Path, target: Path) -> None:
    """Creates a hard link, or a copy where the file system has no hard links; copies symbolic links as links."""
    if path.is_symlink():
        target.symlink_to(os.readlink(path))
        return
    try:
        os.link(path, target)
    except OSError:
        shutil.copy2(path, target)


def keep_mode(old: Path, new: Path) -> None:
    """Gives a file or folder the permissions of the one that it replaces, if there is one."""
    with suppress(OSError):  # `old` does not exist, or the file system has no permissions
        if not (old.is_symlink() or new.is_symlink()):
            new.chmod(stat.S_IMODE(old.stat().st_mode))
