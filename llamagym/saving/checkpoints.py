"""Folders of checkpoints: the newest whole one, the best one, and those to delete."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..options import as_number
from .atomic import remove_saved, restore_backup, restore_backups, verify
from .manifest import MANIFEST
from .paths import file_inside

logger = logging.getLogger(__name__)

KIND = "checkpoint"
_PREFIX = "checkpoint-"
# Other programs count their checkpoints without leading zeros.
_PATTERN = re.compile(rf"{_PREFIX}\d{{12,}}")
# Length of the excerpt of an option in an error.
_EXCERPT_CHARS = 80


def require_no_checkpoints(root: Path) -> None:
    """Rejects a folder that already has checkpoints: those of a new run would be mixed with them.

    Raises:
        CheckpointError: The folder has checkpoints.
    """
    if found := _checkpoints(root):
        raise CheckpointError(
            f"{str(root)!r} holds checkpoints of an earlier run, the newest is {found[-1].name}. Pass resume=True to "
            "continue it, or another folder."
        )


def checkpoint_path(root: Path, turns: int) -> Path:
    """The path of the checkpoint after so many turns; names sort by turns."""
    return root / f"{_PREFIX}{turns:012d}"


def find(folder: Path) -> Path:
    """Returns a folder that is a checkpoint itself, or the newest whole checkpoint in it.

    Raises:
        CheckpointError: The folder is neither a checkpoint nor a folder with checkpoints, or all of them are damaged
            or of another version.
    """
    restore_backup(folder)
    if (folder / MANIFEST).exists():
        verify(folder, KIND)
        return folder
    if not folder.exists():
        raise CheckpointError(f"{str(folder)!r} does not exist. Pass a folder that save_checkpoint() wrote.")
    found = newest(folder)
    if found is None:
        raise CheckpointError(
            f"{str(folder)!r} is neither a checkpoint nor a folder with checkpoints. Pass one that save_checkpoint() "
            "wrote."
        )
    return found


def check_options(
    folder: Path,
    name: str,
    options: Mapping[str, Any],
    ignored: Collection[str] = (),
    fixed: Collection[str] = (),
    allowed: Collection[str] = (),
) -> list[str]:
    """Rejects options that differ from those in a checkpoint's manifest.

    Options that only one of the two has are not compared: another version of llamagym has added or removed them.

    Args:
        folder: The checkpoint.
        name: Key of the options in the manifest.
        options: The current options, as JSON holds them.
        ignored: Options that may differ.
        fixed: Options that cannot be allowed to differ, since the saved state depends on them.
        allowed: Names, or first parts of names, of the options that the user allows to differ.

    Returns:
        Names of the options that differ and are allowed to.

    Raises:
        CheckpointError: Other options differ.
    """
    saved = verify(folder, KIND, checksums=False).get(name, {})
    differences = dict(_differences("", saved, options, ignored))
    accepted = []
    rejected = []
    changeable = []
    for path in differences:
        is_fixed = path.split(".")[-1] in fixed
        if _is_allowed(path, allowed) and not is_fixed:
            accepted.append(path)
        else:
            rejected.append(path)
            if not is_fixed:
                changeable.append(path)
    if not rejected:
        return accepted
    hint = ""
    if changeable == rejected:
        hint = f" To continue with the new values, pass allow_changes={changeable}."
    raise CheckpointError(
        f"{str(folder)!r} is a checkpoint of a run with other options: "
        f"{'; '.join(differences[path] for path in rejected)}. Pass those that were saved to continue that run, or "
        f"begin another run in another folder.{hint}"
    )


def _is_allowed(path: str, allowed: Collection[str]) -> bool:
    """Whether a name such as "learner.gamma", or a first part of it, is among those that are allowed."""
    parts = path.split(".")
    return any(".".join(parts[:count]) in allowed for count in range(1, len(parts) + 1))


def newest(root: Path) -> Path | None:
    """The newest whole checkpoint in a folder; None if it has no checkpoints.

    Raises:
        CheckpointError: All checkpoints are damaged or of another version.
    """
    errors: list[CheckpointError] = []
    for path in reversed(_checkpoints(root)):
        try:
            # A link may lead to a checkpoint of another run.
            file_inside(root, path.name)
            verify(path, KIND)
        except CheckpointError as error:
            logger.warning("%s Taking an older one.", error)
            errors.append(error)
        else:
            return path
    if errors:
        raise CheckpointError(
            f"None of the {len(errors)} checkpoints in {str(root)!r} can be read; the newest: {errors[0]} To restart, "
            "pass another folder."
        )
    return None


def best(root: Path) -> Path | None:
    """The intact checkpoint with the highest mean return of its last update's episodes; None without checkpoints."""
    return _best(manifests(root))


def _best(manifests: Iterable[tuple[Path, dict[str, Any]]]) -> Path | None:
    scored = []
    for path, manifest in manifests:
        return_mean = manifest.get("return_mean")
        if isinstance(return_mean, (int, float)) and not math.isnan(as_number(return_mean)):
            scored.append((as_number(return_mean), path))
    for _, path in sorted(scored, reverse=True):
        with suppress(CheckpointError):
            verify(path, KIND)
            return path
    return None


def prune(root: Path, keep: int, written: Path, run: str) -> None:
    """Deletes a run's checkpoints except for the newest `keep`, the best, and the one that was just written.

    The one that was just written may not be among the newest: a resumed run may have left a damaged one of more turns.
    Checkpoints of other runs, symbolic links and files that a checkpoint's manifest does not list are left alone.

    Args:
        root: The folder of the checkpoints.
        keep: Number of the newest checkpoints to keep.
        written: The checkpoint that was just written.
        run: Id of the run, as in the manifests of its checkpoints.
    """
    of_run = [(path, manifest) for path, manifest in manifests(root) if manifest.get("run") == run]
    paths = [path for path, _ in of_run]
    kept = {*paths[-keep:], _best(of_run), written}
    for path in paths:
        if path not in kept and not path.is_symlink():
            with suppress(CheckpointError):
                remove_saved(path)


def _checkpoints(root: Path) -> list[Path]:
    restore_backups(root)
    return sorted(path for path in root.glob(f"{_PREFIX}*") if _PATTERN.fullmatch(path.name) and path.is_dir())


def manifests(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The checkpoints in a folder whose files have the right sizes, with their manifests; oldest first."""
    for path in _checkpoints(root):
        with suppress(CheckpointError):
            file_inside(root, path.name)
            yield path, verify(path, KIND, checksums=False)


def describe_change(name: str, saved: Any, passed: Any) -> str:
    """Describes a changed option."""
    if isinstance(saved, str) and isinstance(passed, str):
        return f"{name} was {_around(saved, passed)!r} and is now {_around(passed, saved)!r}"
    saved = repr(saved)
    passed = repr(passed)
    return f"{name} was {_around(saved, passed)} and is now {_around(passed, saved)}"


def _differences(path: str, saved: Any, passed: Any, ignored: Collection[str]) -> Iterator[tuple[str, str]]:
    """The names of options that differ, each with a description of its change."""
    if isinstance(saved, dict) and isinstance(passed, dict):
        for name in saved:
            if name in passed and name not in ignored:
                yield from _differences(f"{path}.{name}".lstrip("."), saved[name], passed[name], ignored)
    elif saved != passed:
        yield path, describe_change(path, saved, passed)


def _around(text: str, other: str) -> str:
    """An excerpt of a long text around its first difference from another text."""
    if len(text) <= _EXCERPT_CHARS:
        return text
    common = 0
    while common < min(len(text), len(other)) and text[common] == other[common]:
        common += 1
    start = max(0, common - _EXCERPT_CHARS // 2)
    end = start + _EXCERPT_CHARS
    before = "..." if start else ""
    after = "..." if end < len(text) else ""
    return f"{before}{text[start:end]}{after}"
