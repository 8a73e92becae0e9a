"""Operations on files and folders: compare, link and delete them, and copy their permissions."""

from __future__ import annotations

import filecmp
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path


def delete_folder(folder: Path) -> None:
    """Deletes a folder if it exists, with the read-only folders in it.

    Raises:
        OSError: A file or folder cannot be deleted.
    """
    if not os.path.lexists(folder):
        return
    folder.chmod(stat.S_IRWXU)
    # Files are left as they are: they may be links to those of the user.
    for parent, folders, _ in os.walk(folder):
        for path in (Path(parent) / name for name in folders):
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
