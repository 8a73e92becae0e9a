"""Checkpoints of a run: the states of the agent and the training loop, in one folder that is written atomically."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from .. import distributed
from ..agent.agent import Agent, collector_of
from ..agent.checkpoint import loading_checkpoint
from ..errors import CheckpointError
from ..learners.base import Stats
from ..options import as_json
from ..saving.atomic import require_replaceable, verify
from ..saving.checkpoints import KIND, check_options, checkpoint_path, newest, prune
from ..saving.paths import file_inside
from ..saving.state_files import as_checkpoint_error
from .env_processes import failed_env_number
from .loop_state import check_loop_state
from .play import Play
from .run_folder import is_run_id, new_run_id

logger = logging.getLogger(__name__)


class SavedRun:
    """Writes and reads the checkpoints of a run.

    Attributes:
        root: The folder of the checkpoints.
        run_id: Distinguishes the checkpoints of this run from those of others in the same folder.
        state_file: The file that the loop's state was read from; None if the run was not resumed.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        agent: Agent,
        play: Play,
        options: Mapping[str, Any],
        allow_changes: Collection[str] = (),
        run_id: str = "",
    ) -> None:
        """Sets where checkpoints are and what they belong to.

        Args:
            root: The folder of the checkpoints.
            keep: Number of newest checkpoints to keep, besides the best one.
            agent: The agent that learns.
            play: The environments that it acts in.
            options: Options that must be the same when the run is resumed.
            allow_changes: Names of options that may differ nevertheless; see `train`.
            run_id: Id of a new run; empty draws one. A resumed run has the id in its checkpoint.
        """
        self.root = root
        self._keep = keep
        self._agent = agent
        self._play = play
        self._options = as_json(options)
        self._allow_changes = allow_changes
        self.state_file: Path | None = None
        self.run_id = run_id or new_run_id()

    def write(self, loop: dict[str, Any], turns: int, updates: Sequence[Stats]) -> None:
        """Writes a checkpoint with the state of the training loop, and deletes old ones.

        Raises:
            CheckpointError: The disk is full or cannot be written; older checkpoints are unchanged.
        """
        facts = {
            "turns": turns,
            "updates": len(updates),
            "train": self._options,
            "run": self.run_id,
            "return_mean": updates[-1]["return_mean"] if updates else None,
        }
        path = checkpoint_path(self.root, turns)
        # A run may come from somebody else, and a link could lead to the checkpoint of another run.
        file_inside(self.root, path.name)
        if distributed.is_main_process():
            _move_damaged_aside(path)
        try:
            self._agent.save_checkpoint(path, {**loop, "play": self._play.state_dict()}, facts)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} Older checkpoints are unchanged; make room, or pass another checkpoint_dir."
            ) from error
        if distributed.is_main_process():
            prune(self.root, self._keep, path, self.run_id)

    def read(self, resuming: ExitStack) -> dict[str, Any] | None:
        """Restores agent and environments from the newest checkpoint; returns the loop's state, None without one.

        Args:
            resuming: Exit stack; unwinding it with an exception restores the agent's own state.

        Raises:
            CheckpointError: No checkpoint is readable, or the newest does not match this run.
        """
        with distributed.main_process_first():
            path = newest(self.root)
        if path is None:
            logger.info("No checkpoint in %s; starting a new run", self.root)
            return None
        changed = check_options(path, "train", self._options, fixed={"seed"}, allowed=self._allow_changes)
        restarting = ("num_envs", "group_size", "environment", "judge")
        starts_again = any(name.split(".")[0] in restarting for name in changed)
        saved_id = verify(path, KIND, checksums=False).get("run")
        if is_run_id(saved_id):
            self.run_id = saved_id
        loading = loading_checkpoint(
            collector_of(self._agent), path, keep_episodes=not starts_again, allow_changes=tuple(self._allow_changes)
        )
        loop = resuming.enter_context(loading)
        with as_checkpoint_error(path, "state.json"):
            check_loop_state(loop, self._options["num_envs"], starts_again)
            self._play.check_actions(loop["play"], starts_again)
        try:
            self._play.resume(loop["play"], starts_again, may_change_choices="choices" in self._allow_changes)
        except CheckpointError as error:
            raise CheckpointError(f"{str(path / 'state.json')!r}: {error}") from error
        self.state_file = path / "state.json"
        logger.info("Resuming from %s, after %d turns", path, loop["turns"])
        return loop


def _move_damaged_aside(path: Path) -> None:
    """Renames what is at a new checkpoint's path unless its checkpoint manifest is readable.

    It may be a damaged checkpoint: then the run continued from an older one and has reached the same turn again.
    """
    try:
        require_replaceable(path, KIND)
    except (CheckpointError, OSError):  # a damaged folder, or a file
        # No checkpoint has such a name.
        aside = path.with_name(f"{path.name}-damaged-{secrets.token_hex(4)}")
        with suppress(OSError):  # writing the checkpoint reports it
            path.rename(aside)
            logger.warning(
                "%s is damaged and in the way of a checkpoint: it is moved to %r, with all its files. Delete it if you "
                "do not need them.",
                path,
                aside.name,
            )


@contextmanager
def saved_on_error(save: Callable[[], None] | None, folder: Path | None) -> Iterator[None]:
    """While open, an exception saves the state before the failed step in `folder`; `save` is None without a folder."""
    try:
        yield
    except Exception as error:
        number = failed_env_number(error)
        where = "" if number is None else f" in environment {number}"
        # Several processes can save together only, so they resume from the last checkpoint.
        if save is not None and distributed.world_size() == 1:
            try:
                save()
            except Exception as failure:  # the training's own error is the one to raise
                logger.error("Training has failed%s, and its state could not be saved: %s", where, failure)
            else:
                logger.error(
                    "Training has failed%s; the last complete state is saved in %s. To continue, pass resume=True.",
                    where,
                    folder,
                )
        elif where:
            logger.error("Training has failed%s.", where)
        raise
