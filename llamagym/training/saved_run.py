"""A run's checkpoints: the agent's state and the loop's, in one folder that appears whole or not at all."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from .. import distributed
from ..agent.agent import Agent
from ..errors import CheckpointError
from ..learners.base import Stats
from ..options import as_json
from ..saving.atomic import require_own, verify
from ..saving.checkpoints import KIND, check_options, newest, path_of, prune
from ..saving.paths import file_inside
from ..saving.state_files import named_on_error
from .env_errors import failed_env_number
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
        """Keep the newest `keep` checkpoints, and the best, in a folder.

        Args:
            root: The folder.
            keep: Number of checkpoints kept.
            agent: The learning agent.
            play: The environments it plays in.
            options: What the run must be resumed with.
            allow_changes: Names of what may differ all the same; see `train`.
            run_id: Id of the run, unless checkpoints have one; empty draws one.
        """
        self.root = root
        self._keep, self._agent, self._play, self._options = keep, agent, play, as_json(options)
        self._allow_changes = allow_changes
        self.state_file: Path | None = None
        self.run_id = run_id or new_run_id()

    def write(self, loop: dict[str, Any], turns: int, updates: Sequence[Stats]) -> None:
        """Writes a checkpoint and deletes those that are not kept.

        Raises:
            CheckpointError: The disk is full or cannot be written; older checkpoints are as they were.
        """
        facts = {
            "turns": turns,
            "updates": len(updates),
            "train": self._options,
            "run": self.run_id,
            "return_mean": updates[-1]["return_mean"] if updates else None,
        }
        path = path_of(self.root, turns)
        # A run may come from somebody else: a link would lead to a checkpoint of another one.
        file_inside(self.root, path.name)
        if distributed.is_main_process():
            _move_damaged_aside(path)
        try:
            self._agent.save_checkpoint(path, {**loop, "play": self._play.state_dict()}, facts)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} Older checkpoints are as they were; make room, or pass another checkpoint_dir."
            ) from error
        if distributed.is_main_process():
            prune(self.root, self._keep, path, self.run_id)

    def read(self, resuming: ExitStack) -> dict[str, Any] | None:
        """Brings agent and environments to the newest checkpoint, and returns the loop's state; None without one.

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
        self.run_id = saved_id if is_run_id(saved_id) else self.run_id
        loading = self._agent.loading_checkpoint(
            path, keep_episodes=not starts_again, allow_changes=tuple(self._allow_changes)
        )
        loop = resuming.enter_context(loading)
        with named_on_error(path, "state.json"):
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
    """Renames a file or folder at the checkpoint's path that has no readable checkpoint manifest.

    A resumed run reaches the turns of a damaged checkpoint again, since it continues from an older one.
    """
    try:
        require_own(path, KIND)
    except (CheckpointError, OSError):  # it is damaged, or a file
        # A name that no checkpoint has.
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
    """While open, an exception saves the state before the step that failed, if there is a folder for checkpoints."""
    try:
        yield
    except Exception as error:
        copy = failed_env_number(error)
        where = "" if copy is None else f" in copy {copy} of the environment"
        # With several processes, saving needs all of them; resume from the last checkpoint.
        if save is not None and distributed.count() == 1:
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
