"""A folder of checkpoints: which is the newest that is whole, which the best, and which may go."""

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
from .atomic import MANIFEST, bring_back, bring_back_all, remove_own, verify
from .paths import file_inside

logger = logging.getLogger(__name__)

KIND = "checkpoint"
_NAME = "checkpoint-"
# Other programs count their checkpoints without leading zeros.
_PATTERN = re.compile(rf"{_NAME}\d{{12,}}")
# Characters of an option that an error shows.
_LONG = 80


def require_none(root: Path) -> None:
    """Rejects a folder that already has checkpoints: a new run's would be mixed with them.

    Raises:
        CheckpointError: It has.
    """
    if found := _all(root):
        raise CheckpointError(
            f"{str(root)!r} holds checkpoints of an earlier run, the newest is {found[-1].name}. Pass resume=True to "
            "continue it, or another folder."
        )


def path_of(root: Path, turns: int) -> Path:
    """Where the checkpoint after so many turns lies; names sort as turns do."""
    return root / f"{_NAME}{turns:012d}"


def find(folder: Path) -> Path:
    """A folder that is a checkpoint, or the newest whole one in it.

    Raises:
        CheckpointError: It is neither a checkpoint nor a folder with checkpoints, or all of them are damaged or of
            another version.
    """
    bring_back(folder)
    if (folder / MANIFEST).exists():
        verify(folder, KIND)
        return folder
    if not folder.exists():
        raise CheckpointError(f"there is no folder {str(folder)!r}. Pass what save_checkpoint() wrote.")
    found = newest(folder)
    if found is None:
        raise CheckpointError(
            f"{str(folder)!r} is neither a checkpoint nor a folder with checkpoints. Pass what save_checkpoint() wrote."
        )
    return found


def check_options(
    folder: Path,
    name: str,
    options: Mapping[str, Any],
    free: Collection[str] = (),
    fixed: Collection[str] = (),
    allowed: Collection[str] = (),
) -> list[str]:
    """Reject other options than those that a checkpoint's manifest holds under a name.

    Options that only one of the two knows are left out: they are another version's.

    Args:
        folder: The checkpoint.
        name: What its manifest calls them.
        options: The current ones, as JSON holds them.
        free: Options that may differ.
        fixed: Options that nobody can allow to differ, since the saved state depends on them.
        allowed: Names, or first parts of names, of what the user allows to differ.

    Returns:
        Names of the options that differ and are allowed to.

    Raises:
        CheckpointError: Others differ.
    """
    saved = verify(folder, KIND, checksums=False).get(name, {})
    differences = dict(_differences("", saved, options, free))
    accepted = [path for path in differences if _is_allowed(path, allowed) and not _is_fixed(path, fixed)]
    rejected = [path for path in differences if path not in accepted]
    if not rejected:
        return accepted
    changeable = [path for path in rejected if not _is_fixed(path, fixed)]
    hint = f" To continue with the new values, pass allow_changes={changeable}." if changeable else ""
    raise CheckpointError(
        f"{str(folder)!r} is a checkpoint of a run with other options: "
        f"{'; '.join(differences[path] for path in rejected)}. Pass those that were saved to go on with that run, or "
        f"begin another run in another folder.{hint}"
    )


def _is_allowed(path: str, allowed: Collection[str]) -> bool:
    """Whether a name such as "learner.gamma", or a first part of it, is among those that are allowed."""
    parts = path.split(".")
    return any(".".join(parts[:count]) in allowed for count in range(1, len(parts) + 1))


def _is_fixed(path: str, fixed: Collection[str]) -> bool:
    return path.split(".")[-1] in fixed


def newest(root: Path) -> Path | None:
    """The newest checkpoint that is whole; None if there are none at all.

    Raises:
        CheckpointError: There are some, all of them damaged or of another version.
    """
    wrong: list[CheckpointError] = []
    for path in reversed(_all(root)):
        try:
            # A link may lead to a checkpoint of another run.
            file_inside(root, path.name)
            verify(path, KIND)
        except CheckpointError as error:
            logger.warning("%s Taking an older one.", error)
            wrong.append(error)
        else:
            return path
    if wrong:
        raise CheckpointError(
            f"None of the {len(wrong)} checkpoints in {str(root)!r} can be read; the newest: {wrong[0]} To restart, "
            "pass another folder."
        )
    return None


def best(root: Path) -> Path | None:
    """The whole checkpoint of the update whose episodes returned the most; None if there is none."""
    return _best(manifests(root))


def _best(manifests: Iterable[tuple[Path, dict[str, Any]]]) -> Path | None:
    scored = [(_fact(manifest, "return_mean"), path) for path, manifest in manifests]
    for _, path in sorted(pair for pair in scored if not math.isnan(pair[0]))[::-1]:
        with suppress(CheckpointError):
            verify(path, KIND)
            return path
    return None


def prune(root: Path, keep: int, written: Path, run: str) -> None:
    """Delete a run's checkpoints but for the newest `keep`, the best, and the one that was just written.

    The last may not be among the newest: a damaged one of more turns may lie there, from before a run was resumed.
    Checkpoints of other runs, symbolic links and files that a checkpoint's manifest does not list are left alone.

    Args:
        root: The folder of the checkpoints.
        keep: How many of the newest are kept.
        written: The checkpoint that was just written.
        run: Id of the run, as its checkpoints' manifests have it.
    """
    ours = [(path, manifest) for path, manifest in manifests(root) if manifest.get("run") == run]
    kept = {*[path for path, _ in ours[-keep:]], _best(ours), written}
    for path, _ in ours:
        if path not in kept and not path.is_symlink():
            with suppress(CheckpointError):
                remove_own(path)


def _all(root: Path) -> list[Path]:
    bring_back_all(root)
    return sorted(path for path in root.glob(f"{_NAME}*") if _PATTERN.fullmatch(path.name) and path.is_dir())


def manifests(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The checkpoints in a folder that are readable, by the sizes of their files, and their manifests; oldest first."""
    for path in _all(root):
        with suppress(CheckpointError):
            file_inside(root, path.name)
            yield path, verify(path, KIND, checksums=False)


def _fact(manifest: dict[str, Any], name: str) -> float:
    value = manifest.get(name)
    return as_number(value) if isinstance(value, (int, float)) else math.nan


def difference(name: str, saved: Any, passed: Any) -> str:
    """Describes a changed option."""
    are_texts = isinstance(saved, str) and isinstance(passed, str)
    if not are_texts:
        saved = repr(saved)
        passed = repr(passed)
    was = _around(saved, passed)
    is_now = _around(passed, saved)
    return f"{name} was {was!r} and is now {is_now!r}" if are_texts else f"{name} was {was} and is now {is_now}"


def _differences(path: str, saved: Any, passed: Any, free: Collection[str]) -> Iterator[tuple[str, str]]:
    """The names of options that differ, each with both values."""
    if isinstance(saved, dict) and isinstance(passed, dict):
        for name in saved:
            if name in passed and name not in free:
                yield from _differences(f"{path}.{name}".lstrip("."), saved[name], passed[name], free)
    elif saved != passed:
        yield path, difference(path, saved, passed)


def _around(text: str, other: str) -> str:
    """Excerpt of a long text around its first difference from another."""
    if len(text) <= _LONG:
        return text
    pairs = enumerate(zip(text, other, strict=False))
    first = next((i for i, (one, another) in pairs if one != another), min(len(text), len(other)))
    start = max(0, first - _LONG // 2)
    end = start + _LONG
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"
