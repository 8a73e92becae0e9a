"""Training: an agent, many copies of an environment, a progress bar, and checkpoints to resume from."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ..agent import Agent
from ..errors import ConfigError
from ..learners import ranks
from ..learners.base import Stats
from ..models.checkpoints import require_none
from ..options import as_seed, check_arguments
from .environments import EnvSource, copies_for, failed_copy, opened
from .evaluation import own_conversations, require_positive
from .interrupts import EXIT_CODE, Interrupts
from .play import Play
from .saved_run import SavedRun
from .tracking import MultiTracker, Progress, Tracker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingResult:
    """What `train` did, before it was resumed as well.

    Attributes:
        returns: Undiscounted return of each finished episode, in the order of their ends.
        updates: Statistics of each update.
        turns: Environment steps taken.
        message: Why no update ran; empty if one did.
    """

    returns: list[float]
    updates: list[Stats]
    turns: int
    message: str


def train(
    agent: Agent,
    env: EnvSource,
    episodes: int | None = None,
    num_envs: int | None = None,
    seed: int | None = None,
    on_update: Callable[[Stats], bool | None] | None = None,
    tracker: Tracker | None = None,
    group_size: int | None = None,
    *,
    minutes: float | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int = 10,
    keep_checkpoints: int = 3,
    resume: bool = False,
    handle_signals: bool = True,
    env_timeout: float | None = None,
) -> TrainingResult:
    """Let the agent act and learn for a number of episodes, or for some time.

    With `checkpoint_dir` a run can be stopped at any moment and resumed: a resumed run computes, bit for bit on a CPU,
    what it would have computed without the stop at its last checkpoint. Episodes under way go on where an environment
    depends on its seed and on actions alone; elsewhere they begin anew, which is said. An error of the environment or
    of learning saves the state of before the step that failed.

    Of several processes that learn together (`accelerate launch`), each calls this with the same arguments and acts in
    `num_envs` copies of its own; episodes, updates, turns and returns are counted over all of them. The first alone
    writes: checkpoints, to a tracker, to the terminal. An error in one ends all, which go on from the last checkpoint.

    Args:
        agent: Who learns; switched to `train()`.
        env: An environment's id, an environment, or a function that makes one. With `num_envs` > 1 an environment must
            have a spec to be copied from.
        episodes: Stop when this many have ended; unfinished ones are dropped. None: when `minutes` are over.
        num_envs: Copies that are acted in at once. None: 64, fewer if groups of episodes do not divide that, or 1 of an
            environment that cannot be copied.
        seed: Of the episodes' reset seeds; None draws one, from the agent's seed if it has one.
        on_update: Called with the statistics of each update, in every process; returning True ends the training.
        tracker: Receives them first. If it fails, that is said, and training goes on.
        group_size: Episodes that share a reset seed, in a row of as many copies; None is what the learner compares, 1
            for a learner that compares none.
        minutes: Stop when so many are over, those before a resumed run's stop among them. None: no limit.
        checkpoint_dir: Where checkpoints are written; None writes none.
        checkpoint_every: Updates between two checkpoints.
        keep_checkpoints: How many are kept: the newest, and the best beside them.
        resume: Whether to go on from the newest whole checkpoint in `checkpoint_dir`; without any, training begins.
        handle_signals: With `checkpoint_dir`: at Ctrl-C or SIGTERM finish the step, save, and exit with status 130; a
            second one stops at once.
        env_timeout: Seconds that a step or reset may take, when episodes are played again too; copies then run in
            processes of their own. None steps them in this one, without a limit.

    Returns:
        Returns and statistics.

    Raises:
        ConfigError: An argument is of the wrong type or out of range, `num_envs` is no multiple of `group_size`, or
            `env` cannot be made or copied.
        CheckpointError: There are checkpoints, and `resume` is False, none of them can be read, or the newest is of
            another model or of a run with other options.
        EnvironmentTimeoutError: The environment took longer than `env_timeout`.
        SystemExit: A signal ended the training, with status 130.
    """
    check_arguments(train, locals())
    require_positive(
        episodes=episodes, num_envs=num_envs, checkpoint_every=checkpoint_every, keep_checkpoints=keep_checkpoints
    )
    if episodes is None and minutes is None:
        raise ConfigError("Nothing says how long to train. Pass episodes, minutes, or both.")
    if minutes is not None and not 0 < minutes < math.inf:
        raise ConfigError(f"minutes={minutes}. Pass a positive number, or None for no limit.")
    seed = as_seed(seed)
    size = agent.learner.group_size if group_size is None else group_size
    if num_envs is None:
        num_envs = copies_for(env, max(size, 1))
    if size < 1 or num_envs % size:
        raise ConfigError(
            f"num_envs={num_envs} does not divide into groups of {size} episodes that start alike. Pass a multiple of "
            f"{max(size, 1)}, or another group_size."
        )
    if env_timeout is not None and not 0 < env_timeout < math.inf:
        raise ConfigError(f"env_timeout={env_timeout}. Pass a positive number of seconds, or None for no limit.")
    if resume and checkpoint_dir is None:
        raise ConfigError("resume=True needs the checkpoint_dir of the run to go on with.")
    if checkpoint_dir is not None and not resume:
        with ranks.first_goes_first():
            require_none(Path(checkpoint_dir))
    agent.train()
    trackers = MultiTracker(*([] if tracker is None or not ranks.is_first() else [tracker]))
    run = _Run(on_update, trackers, episodes, minutes)
    ids = list(range(num_envs))
    with (
        opened(env, num_envs, env_timeout) as copies,
        own_conversations(agent, ids),
        Progress(episodes) as progress,
        Interrupts(listens=handle_signals and checkpoint_dir is not None) as interrupts,
    ):
        entropy = agent.draw_seed() if seed is None else seed
        play = Play(agent, copies, ids, entropy, size, (ranks.rank(), ranks.count()))
        saved = None
        if checkpoint_dir is not None:
            options = {"num_envs": num_envs, "group_size": size, "seed": seed}
            saved = SavedRun(Path(checkpoint_dir), keep_checkpoints, agent, play, options)
        before = saved.read() if saved and resume else None
        if before is None:
            play.begin()
        else:
            run.load_state_dict(before)
            progress.resume(run.returns, len(run.updates))
        with _saved_on_error(run, saved):
            while not run.is_over:
                ended, stats = play.step()
                of_all, signals, late = zip(*ranks.gather((ended, interrupts.stops, run.is_late)), strict=True)
                run.take(list(chain(*of_all)), stats, len(ids) * ranks.count(), late[0], progress)
                is_due = bool(stats) and len(run.updates) % checkpoint_every == 0
                stops = any(signals)
                if saved and (is_due or run.is_over or stops):
                    saved.write(run.state_dict(), run.turns, run.updates)
                if stops:
                    logger.warning("Stopped after %d turns; resume=True goes on from %s.", run.turns, checkpoint_dir)
                    raise SystemExit(EXIT_CODE)
    message = "" if run.updates else agent.why_no_update()
    if message:
        logger.warning(message)
    return TrainingResult(run.returns, run.updates, run.turns, message)


class _Run:
    """How far a run has come."""

    def __init__(
        self,
        on_update: Callable[[Stats], bool | None] | None,
        tracker: MultiTracker,
        episodes: int | None,
        minutes: float | None,
    ) -> None:
        self._on_update, self._tracker, self._episodes = on_update, tracker, episodes
        self._seconds = math.inf if minutes is None else 60 * minutes
        self._began = time.perf_counter()
        self.returns: list[float] = []
        self.updates: list[Stats] = []
        self.turns = 0
        self._was_ended = False

    @property
    def is_over(self) -> bool:
        """Whether enough has been played."""
        is_enough = self._episodes is not None and len(self.returns) >= self._episodes
        return self._was_ended or is_enough

    @property
    def is_late(self) -> bool:
        """Whether its time is over."""
        return self._elapsed >= self._seconds

    @property
    def _elapsed(self) -> float:
        """Seconds since the run began, without those in which it was stopped."""
        return time.perf_counter() - self._began

    def take(
        self, ended: Sequence[tuple[int, float]], stats: Stats, turns: int, is_late: bool, progress: Progress
    ) -> None:
        """Take in a step: episodes that ended, an update if there was one, and whether it was the last in time."""
        self.turns += turns
        self._was_ended = is_late
        new = [value for _, value in ended]
        if self._episodes is not None:
            new = new[: self._episodes - len(self.returns)]
        self.returns += new
        progress.advance(new, stats)
        if stats:
            self.updates.append(stats)
            self._tracker.log(stats, len(self.returns))
            self._was_ended |= any(ranks.gather(bool(self._on_update and self._on_update(stats))))

    def state_dict(self) -> dict[str, Any]:
        return {
            "returns": self.returns,
            "updates": self.updates,
            "turns": self.turns,
            "tracker": self._tracker.position(),
            "seconds": self._elapsed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.returns, self.updates, self.turns = state["returns"], state["updates"], state["turns"]
        self._began = time.perf_counter() - state["seconds"]
        self._was_ended = ranks.gather(self.is_late)[0]
        self._tracker.rewind(state["tracker"])


@contextmanager
def _saved_on_error(run: _Run, saved: SavedRun | None) -> Iterator[None]:
    """Save what there was before a step that fails."""
    try:
        yield
    except Exception as error:
        copy = failed_copy(error)
        where = "" if copy is None else f" in copy {copy} of the environment"
        if saved is not None and ranks.count() == 1:
            saved.write(run.state_dict(), run.turns, run.updates)
            logger.error("Training has failed%s; its last whole state is saved.", where)
        elif where:
            logger.error("Training has failed%s.", where)
        raise
