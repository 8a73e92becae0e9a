"""The folder of a run: how it is recognized, and which run it belongs to.

`config.json` holds a mark with the run's id. The run's checkpoints hold the same id, so checkpoints of one run are not
continued in the folder of another.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from .. import distributed
from ..errors import ConfigError
from ..options import user_path
from ..saving.atomic import is_scratch_file
from ..saving.checkpoints import manifests, require_no_checkpoints
from ..saving.manifest import llamagym_version
from ..saving.paths import user_folder

CONFIG = "config.json"
MARK = "llamagym"
"""The setting by which a run's folder is recognized."""

_ID_PATTERN = re.compile(r"[0-9a-f]{16}")
# With the version of the package, or "unknown"; a user's setting of the same name does not match.
_MARK_PATTERN = re.compile(rf"(?:unknown|\d[\w.!+]*) run ({_ID_PATTERN.pattern})")
# Files that a run and the examples write.
_FILES = (
    *(CONFIG, "metrics.jsonl", "metrics.csv", "transcripts.jsonl", "scores.json", "policy.json", "played.jsonl"),
    *("summary.json", "mlflow.db"),
)
# Folders that a run, the command line and services write below the run's folder.
_FOLDERS = ("checkpoints", "agent", "llamagym", "wandb", "mlruns")


def new_run_id() -> str:
    """Returns an id for a new run."""
    return secrets.token_hex(8)


def is_run_id(value: object) -> TypeGuard[str]:
    """Whether a value is the id of a run."""
    return isinstance(value, str) and _ID_PATTERN.fullmatch(value) is not None


def mark_of(run_id: str) -> str:
    """Returns the mark for the settings of a run."""
    return f"{llamagym_version()} run {run_id}"


def run_id_of(folder: Path) -> str | None:
    """Returns the id of the run that a folder belongs to; None if the folder has no mark."""
    path = folder / CONFIG
    settings: Any = None
    with suppress(OSError, ValueError, RecursionError):
        if path.is_file() and not path.is_symlink():
            settings = json.loads(path.read_text(encoding="utf-8"))
    mark = settings.get(MARK) if isinstance(settings, dict) else None
    # A setting of this name may be the user's.
    if not isinstance(mark, str):
        return None
    match = _MARK_PATTERN.fullmatch(mark)
    return None if match is None else match[1]


def require_run_folder(folder: Path) -> None:
    """Rejects a folder for a run that contains something else.

    Args:
        folder: The folder, as `user_folder` returns it.

    Raises:
        ConfigError: The folder is neither new, nor empty, nor that of a run, or it cannot be read.
    """
    try:
        all_names = sorted(os.listdir(folder)) if folder.exists() else []
    except OSError as error:
        raise ConfigError(f"run_dir={str(folder)!r} cannot be read: {error}. Pass another folder.") from error
    names = [name for name in all_names if not is_scratch_file(name)]
    # A run may come from somebody else, and writing to a link would write elsewhere.
    for name in names:
        if name in _FILES + _FOLDERS and (folder / name).is_symlink():
            raise ConfigError(
                f"{str(folder / name)!r} is a symbolic link, which is never written to. Remove it, or pass another "
                "run_dir. Checkpoints elsewhere are passed as checkpoint_dir."
            )
    if names and not _is_run_folder(folder, names):
        shown = ", ".join(map(repr, names[:3]))
        if len(names) > 3:
            shown += f" and {len(names) - 3} more"
        raise ConfigError(
            f"run_dir={str(folder)!r} contains files that llamagym did not write ({shown}). Pass a new or empty folder."
        )
    for name in names:
        path = folder / name
        expected = ""
        if name in _FILES and not path.is_file():
            expected = "file"
        elif name in _FOLDERS and not path.is_dir():
            expected = "folder"
        if expected:
            raise ConfigError(
                f"{str(path)!r} is not a {expected}, which is expected there. Move it away, or pass another run_dir."
            )


def _is_run_folder(folder: Path, names: list[str]) -> bool:
    """Whether a folder has the mark of a run, or contains nothing but checkpoints."""
    if run_id_of(folder) is not None:
        return True
    return names == ["checkpoints"] and any(True for _ in manifests(folder / "checkpoints"))


def require_same_run(run_dir: Path, checkpoint_dir: Path) -> None:
    """Rejects checkpoints of a run that a folder does not belong to.

    Args:
        run_dir: The folder to write to.
        checkpoint_dir: The folder of the checkpoints to continue from.

    Raises:
        ConfigError: Both belong to a run, and the runs differ.
    """
    folder_id = run_id_of(run_dir)
    checkpoint_ids = [manifest.get("run") for _, manifest in manifests(checkpoint_dir)]
    if folder_id is not None and checkpoint_ids and checkpoint_ids[-1] != folder_id:
        raise ConfigError(
            f"run_dir={str(run_dir)!r} belongs to run {folder_id}, but the newest checkpoint in "
            f"{str(checkpoint_dir)!r} belongs to run {str(checkpoint_ids[-1])[:80]}. "
            "Pass the run_dir of that run, or a new one."
        )


def require_no_metrics(run_dir: Path) -> None:
    """Rejects the folder of another run, whose metrics would be mixed with those of this one.

    Raises:
        ConfigError: The folder holds metrics.
    """
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size > 0:
        raise ConfigError(
            f"run_dir={str(run_dir)!r} holds the metrics of a run, and no checkpoint to continue from. Pass another "
            "run_dir, or resume=True with the checkpoint_dir of that run."
        )


@dataclass(frozen=True)
class RunFolders:
    """The folders that a call of `train` writes to; `runs` is for an interrupted run without the others."""

    run_dir: Path | None
    checkpoint_dir: Path | None
    runs: Path


def checked_folders(
    run_dir: str | Path | None, checkpoint_dir: str | Path | None, track: Sequence[str], resume: bool
) -> RunFolders:
    """Returns the folders that the arguments of `train` name.

    Raises:
        ConfigError: A folder is missing, invalid, or of something else.
        CheckpointError: The folder has checkpoints, and `resume` is False.
    """
    # Resolved now, since an environment may change the working directory.
    runs = user_path("runs")
    run_folder = None if run_dir is None else user_folder(run_dir, "run_dir")
    checkpoints = None if checkpoint_dir is None else user_folder(checkpoint_dir, "checkpoint_dir")
    if track and run_folder is None:
        raise ConfigError(f"track={track!r} needs the run_dir that trackers write to.")
    if run_folder is not None and checkpoints is None:
        checkpoints = run_folder / "checkpoints"
    if resume and checkpoints is None:
        raise ConfigError("resume=True needs the run_dir or checkpoint_dir of the run to continue.")
    if resume and run_folder is not None and checkpoints is not None:
        require_run_folder(run_folder)
        require_same_run(run_folder, checkpoints)
    if checkpoints is not None and not resume:
        with distributed.main_process_first():
            require_no_checkpoints(checkpoints)
    return RunFolders(run_folder, checkpoints, runs)
