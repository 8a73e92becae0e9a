"""Checks of paths: those that users pass, and those inside folders from untrusted sources."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import CheckpointError, ConfigError
from ..options import user_path


def user_folder(path: str | os.PathLike[str], name: str = "folder") -> Path:
    """Returns the absolute path of a folder that a user passed: it exists, or could be created.

    Creates nothing. The path of every folder that the library writes to goes through this function.

    Args:
        path: The path; `~` is expanded, and a relative path starts at the current working directory.
        name: Name of the argument, for errors.

    Raises:
        ConfigError: The path is not valid, cannot be read, or it or a folder above it is a file.
    """
    folder = user_path(path, name)
    try:
        blocking = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
        is_folder = _is_folder(blocking)
        # Fails where a folder on the way may not be read, or links point to each other.
        folder.resolve()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{name}={str(path)!r} cannot be used: {error}. Pass the path of another folder.") from error
    if not is_folder:
        raise ConfigError(
            f"{name}={str(path)!r} is not a folder and cannot be created: {str(blocking)!r} is in the way. Pass the "
            "path of a folder."
        )
    return folder


def _is_folder(path: Path) -> bool:
    """Whether a path that existed is a folder; one that another process is replacing counts as a folder."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        # A link that points to nothing is in the way.
        return not path.is_symlink()


def is_relative_inside(name: Any) -> bool:
    """Whether a name is a relative path without `..`; symbolic links are not checked."""
    if not isinstance(name, str):
        return False
    parts = PurePosixPath(name).parts
    return bool(parts) and not {"..", "/"} & set(parts) and not set("\0\\:") & set(name)


def file_inside(folder: Path, name: str) -> Path:
    """Returns the path of a file in a folder, and rejects one that lies outside of it, symbolic links resolved.

    Args:
        folder: A folder that may come from an untrusted source.
        name: The path of the file relative to the folder, with slashes.

    Raises:
        CheckpointError: The name is absolute, or leads out of the folder, by `..` or by a symbolic link.
    """
    if is_relative_inside(name):
        real_folder = folder.resolve()
        roots = [real_folder]
        # In the cache of the model hub the files of a snapshot are links to the blobs beside it.
        if real_folder.parent.name == "snapshots":
            roots.append(real_folder.parent.parent / "blobs")
        try:
            real = (folder / name).resolve()
        except (OSError, RuntimeError):  # links that point to each other
            real = None
        if real is not None and any(real.is_relative_to(root) for root in roots):
            return folder / name
    raise CheckpointError(
        f"{str(folder)!r} refers to the file {str(name)[:200]!r}, which lies outside of that folder. Its content was "
        "not read."
    )


def require_files_inside(folder: Path) -> None:
    """Rejects a folder that contains anything but files and folders inside it.

    For folders from which other libraries read files of certain names, listed in a manifest or not.

    Args:
        folder: A folder that may come from an untrusted source.

    Raises:
        CheckpointError: A symbolic link leads out of the folder, or there is a pipe, device or socket.
    """
    for inner, folders, files in os.walk(folder):
        for name in (*folders, *files):
            relative = (Path(inner) / name).relative_to(folder).as_posix()
            path = file_inside(folder, relative)
            if not (path.is_file() or path.is_dir()):
                raise CheckpointError(
                    f"{str(folder)!r} contains {relative[:200]!r}, which is neither a file nor a folder. Its content "
                    "was not read. Remove it."
                )
