"""Training: an agent acts and learns in many environments, with a progress bar and checkpoints to resume from."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from .. import distributed
from ..agent.agent import Agent, collector_of
from ..errors import CheckpointError, ConfigError
from ..learners.base import Learner, Stats
from ..options import as_seed, check_arguments, explains_wrong_calls, require_positive
from .callbacks import Callback, Callbacks, is_false, make_plain_
from .comparison import Comparison
from .environments import EnvSource, open_envs, require_env_timeout, resolve_num_envs
from .episodes import Judge
from .evaluation import own_conversations
from .pictures import Pictures
from .play import Play, StepResult
from .players import AgentPlayer
from .progress import Progress
from .report import write_report
from .report.scores import Score, read_scores, write_scores
from .result import TrainingResult
from .run import INTERRUPTED_EXIT_CODE, Interrupts, Run
from .run_folder import RunFolders, checked_folders, new_run_id, require_no_metrics, run_id_of
from .saved_run import SavedRun, saved_on_error
from .tracking import MultiTracker, Tracker, trackers_of_run

logger = logging.getLogger(__name__)

# With fewer environments a turn costs more, and the episodes run one after another.
_FEWEST_ENVS = 16
_EVAL_EPISODES = 100


@explains_wrong_calls(positional=2)
def train(
    agent: Agent,
    env: EnvSource,
    *,
    episodes: int | None = None,
    num_envs: int | None = None,
    seed: int | None = None,
    on_update: Callable[[Stats], bool | None] | None = None,
    tracker: Tracker | None = None,
    group_size: int | None = None,
    turns: int | None = None,
    minutes: float | None = None,
    callbacks: Sequence[Callback] | Callback | None = None,
    judge: Judge | None = None,
    run_dir: str | Path | None = None,
    eval_episodes: int | None = None,
    track: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int = 10,
    keep_checkpoints: int = 3,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    handle_signals: bool = True,
    env_timeout: float | None = None,
    overlap: bool = False,
) -> TrainingResult:
    """Trains an agent for a number of episodes or turns, or for some time.

    With a critic and `context="turn"`, a batch also uses the turns so far of unfinished episodes, once one episode has
    ended; the critic's estimate replaces the rewards to come.

    With `run_dir` or `checkpoint_dir`, a run can be stopped at any moment and resumed. A resumed run computes, bit for
    bit on a CPU, what it would have computed if it had not been stopped at its last checkpoint. Unfinished episodes
    continue if an environment depends on its seed and its actions only; otherwise they start again, which is logged.
    An error of the environment or of learning saves the state before the step that failed.

    If several processes learn together (`accelerate launch`), each calls this with the same arguments and acts in
    `num_envs` environments of its own. Episodes, updates, turns and returns are counted over all of them. Callbacks and
    `on_update` are called in all processes, and each of them can end the training. Only the first process writes
    checkpoints, to trackers and to the terminal. An error in one process ends all; resume from the last checkpoint.

    Args:
        agent: The agent to train; switched to `train()`.
        env: An environment's id, an environment, a function that makes one, or a `SyncVectorEnv` or `AsyncVectorEnv`
            of any autoreset mode, wrapped or not. With `num_envs` > 1, an environment must have a spec to make others
            from. Environments made here are closed at the end; what was passed stays open.
        episodes: Number of episodes; unfinished ones are dropped. None: no limit. Of several budgets (`episodes`,
            `turns`, `minutes`), the first that is used up ends the training. A budget is that of this call, in addition
            to what a resumed run has used before (see `resume`).
        num_envs: Number of environments that are stepped together. None: 1 if the environment cannot be made several
            times, else up to 64 in whole groups. Unless groups are compared or steps overlap, only 16 of them act at
            first, and after each update as many as a batch holds episodes, at least 16. With more, a batch would hold
            few beginnings of episodes, and early turns would rarely be trained.
        seed: Base seed of the episodes' reset seeds; None draws one, from the agent's seed if it has one.
        on_update: Called with the statistics of each update, after callbacks and tracker. Returning False ends the
            training, as in callbacks.
        tracker: Receives the statistics of each update, with those that callbacks added and the minutes so far. Its
            errors are logged, unless it has an attribute `stops_on_error` that is True.
        group_size: Leave it out: the learner's `group_size` applies, and another number is rejected.
        turns: Number of turns over all environments, rounded up to whole steps. None: no limit.
        minutes: Training time. None: no limit. Rates then begin to fall (`cooldown`) by the clock, so that two runs of
            one seed differ from there on.
        callbacks: Called after steps, episodes and updates; see `Callback`.
        judge: Function that rewards each finished `PlayedEpisode` before it is learned from, such as a second model.
            It returns a number for the last turn, or a list with one for each turn, which are added to the rewards.
        run_dir: Folder of the run, new, empty or that of the run to resume: `config.json`, `metrics.jsonl`,
            `transcripts.jsonl`, `scores.json`, `checkpoints/` and, at the end, `report.html` with what it shows. None
            writes nothing.
        eval_episodes: Number of evaluation episodes before and after training, for the agent (its likeliest replies)
            and for a random policy; their time does not count as training time. None: 100 with `run_dir` and without a
            `ScoreCallback`, else 0, which evaluates nothing.
        track: With `run_dir`: other trackers, as for `default_tracker`: "tensorboard", "wandb", "mlflow", "csv".
        config: With `run_dir`: further settings to record in `config.json` and with the trackers, by name. Names of
            the library's own settings keep their values.
        checkpoint_dir: Folder of the checkpoints; None is `checkpoints` in `run_dir`, or no checkpoints without it.
        checkpoint_every: Number of updates between two checkpoints; one is also written before the first step. Each
            drops all caches, so observations that recur are processed again after it.
        keep_checkpoints: Number of newest checkpoints that are kept; the best is kept as well.
        resume: Whether to continue from the newest intact checkpoint; without one, training starts. Passing the
            interrupted call's budget again uses only what is left of it; another budget, or one after a finished call,
            counts from zero.
        allow_changes: With `resume`: names of what may differ from the checkpoint, as the error lists them:
            "learner.learning_rate" for an option, "learner" for all of them, "environment", "choices", "model". With
            another environment, another number of them, or a judge added or removed, unfinished episodes start again.
        handle_signals: Whether the first Ctrl-C or SIGTERM finishes the step, saves a checkpoint and logs how to
            resume, and only a second one stops immediately. Without a folder, the checkpoint is written below `runs/`.
            Without effect outside the main thread, because Python delivers signals only there.
        env_timeout: Seconds that a step or reset may take, also while episodes are replayed. Environments then run in
            worker processes. None sets no limit, and environments run in this process unless `overlap` is True.
        overlap: For slow environments: they run in worker processes, in two halves, and the agent acts in one half
            while the other steps. Episodes are the same; replies are drawn in another order.

    Returns:
        Returns and statistics.

    Raises:
        ConfigError: An argument is of the wrong type or out of range, `num_envs` is no multiple of the learner's
            `group_size`, or `env` cannot be made, or not several times.
        CheckpointError: There are checkpoints although `resume` is False, none of them can be read, or the newest is of
            another model, agent or environment, or of a run with other options.
        EnvironmentTimeoutError: The environment took longer than `env_timeout`.
        SystemExit: A signal ended the training, with status 130; in an interactive session a KeyboardInterrupt.
    """
    check_arguments(train, locals())
    require_positive(
        episodes=episodes,
        turns=turns,
        num_envs=num_envs,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
    )
    if config and run_dir is None:
        raise ConfigError("config= needs the run_dir that the settings are recorded in.")
    if eval_episodes is not None and eval_episodes < 0:
        raise ConfigError(f"eval_episodes={eval_episodes}. Pass a number of episodes, 0 for no evaluation, or None.")
    all_callbacks = Callbacks(callbacks)
    if eval_episodes is None:
        eval_episodes = _EVAL_EPISODES if run_dir is not None and not all_callbacks.score_the_agent else 0
    run = Run(agent, episodes, turns, minutes)
    seed = as_seed(seed)
    size = agent.learner.group_size
    if group_size not in (None, size):
        raise ConfigError(
            f"group_size={group_size}, but the group_size of the agent's learner is {size}. Leave "
            "it out here, and set it in the agent's learner=GRPOConfig(group_size=...)."
        )
    wanted_num_envs = num_envs
    adapts_num_envs = num_envs is None and size == 1 and not overlap
    num_envs = resolve_num_envs(env, num_envs, size)
    _check_environments(num_envs, size, env_timeout, overlap)
    folders = checked_folders(run_dir, checkpoint_dir, track, resume)
    agent.train()
    collector = collector_of(agent)
    ids = list(range(num_envs))
    # Whole groups in each half.
    half = num_envs // size // 2 * size
    part_sizes = [half, num_envs - half] if overlap else [num_envs]
    with (
        open_envs(env, part_sizes, env_timeout, overlap) as parts,
        own_conversations(agent, ids),
        run.paces_learner(),
        # A judge rewards turns only at the end of their episode.
        collector.using_unfinished_episodes(ids) if judge is None else nullcontext(),
        ExitStack() as run_files,
        Progress(episodes, share=lambda: run.progress) as progress,
        Interrupts(listens=handle_signals) as interrupts,
        # Exits first: if a run cannot be resumed, the agent has its own state again.
        ExitStack() as resuming,
    ):
        run.note = progress.note
        base_seed = collector.draw_seed() if seed is None else seed
        share = (distributed.rank(), distributed.world_size())
        play = Play(AgentPlayer(agent), parts, ids, base_seed, size, judge, share)

        def saved_run_in(folder: Path) -> SavedRun:
            options = {
                "num_envs": num_envs,
                "group_size": size,
                "seed": seed,
                "overlap": overlap,
                "environment": parts[0].identity,
                "system_prompt": agent.get_system_prompt(),
                "chat_template": str(agent.tokenizer.chat_template),
                "judge": judge is not None,
            }
            run_id = _run_id(folders.run_dir, tracker)
            return SavedRun(folder, keep_checkpoints, agent, play, options, allow_changes, run_id)

        comparison = Comparison(agent, env, eval_episodes, wanted_num_envs, judge, env_timeout, progress.note)
        pictures = Pictures(agent, env, folders.run_dir, env_timeout)
        saved_run = None if folders.checkpoint_dir is None else saved_run_in(folders.checkpoint_dir)
        saved_state = saved_run.read(resuming) if saved_run and resume else None
        loop = _Loop(
            agent=agent,
            run=run,
            play=play,
            callbacks=all_callbacks,
            comparison=comparison,
            progress=progress,
            interrupts=interrupts,
            folders=folders,
            saved_run_in=saved_run_in,
            saved_run=saved_run,
            on_update=on_update,
            adapts_num_envs=adapts_num_envs,
            user_settings=dict(config or {}),
        )
        # Files are written only now that no argument can be rejected any more.
        settings: dict[str, Any] = {"episodes": episodes, "turns": turns, "minutes": minutes, "num_envs": num_envs}
        settings["environment"] = parts[0].identity
        # Without a seed here, the learner's is recorded, which is the agent's.
        if seed is not None:
            settings["seed"] = seed
        loop.open_trackers(run_files, settings, track, tracker, is_new=saved_state is None)
        if saved_state is not None:
            loop.restore_counts(saved_state)
        with loop.callbacks_notified(saved_state):
            if saved_state is None:
                with run.paused(), interrupts.suspended():
                    comparison.evaluate_before()
                    pictures.draw_before()
                loop.begin_episodes()
            loop.warn_if_replies_may_fail()
            loop.write_scores()
            with saved_on_error(loop.save if saved_run else None, folders.checkpoint_dir):
                resuming.close()
                loop.run_steps(checkpoint_every, is_new=saved_state is None)
        loop.stop_if_interrupted()
        with run.paused(), interrupts.suspended():
            comparison.evaluate_after()
            pictures.draw_after()
        scores = loop.write_scores()
        run.finish()
        if run.is_finished:
            # Records the end, so that the next call has a budget of its own.
            loop.save()
    message = "" if run.updates else collector.why_no_update()
    if message:
        logger.warning(message)
    report = None
    if folders.run_dir is not None and distributed.is_main_process():
        report = _report(folders.run_dir)
    return TrainingResult(run.returns, run.updates, run.turns, message, run.successes, run.minutes, report, scores)


def _check_environments(num_envs: int, group_size: int, env_timeout: float | None, overlap: bool) -> None:
    """Rejects a number of environments that is not whole groups, or a time limit that is not positive.

    Raises:
        ConfigError: The arguments of `train` are such, or too few environments overlap.
    """
    if num_envs % group_size:
        raise ConfigError(
            f"num_envs={num_envs} does not divide into groups of {group_size} episodes that start alike. Pass a "
            f"multiple of {group_size}, or another group_size in the agent's learner=GRPOConfig(...)."
        )
    require_env_timeout(env_timeout)
    if overlap and num_envs < 2 * group_size:
        raise ConfigError(
            f"overlap=True needs two halves, and num_envs={num_envs} is one group of {group_size}. Pass "
            f"{2 * group_size} or more."
        )


@dataclass
class _Loop:
    """The steps of a training, and the objects that they work on.

    Attributes:
        saved_run_in: Function that returns the run's checkpoints in a folder.
        comparison: Evaluates the agent before and after the training.
        saved_run: The run's checkpoints; None without a folder for them.
        user_settings: The user's own settings to record.
        adapts_num_envs: Whether the number of environments that act follows the length of episodes.
    """

    agent: Agent
    run: Run
    play: Play
    callbacks: Callbacks
    comparison: Comparison
    progress: Progress
    interrupts: Interrupts
    folders: RunFolders
    saved_run_in: Callable[[Path], SavedRun]
    saved_run: SavedRun | None
    on_update: Callable[[Stats], bool | None] | None
    adapts_num_envs: bool
    user_settings: dict[str, Any]
    trackers: MultiTracker = field(default_factory=MultiTracker)
    _has_warned: bool = False

    def open_trackers(
        self,
        run_files: ExitStack,
        settings: Mapping[str, Any],
        track: Sequence[str],
        tracker: Tracker | None,
        is_new: bool,
    ) -> None:
        """Opens the trackers of the run's folder, beside the user's.

        Args:
            run_files: Closes them; the user's stays open.
            settings: Arguments of `train` to record in the folder.
            track: As for `train`.
            tracker: As for `train`.
            is_new: Whether the run begins.

        Raises:
            ConfigError: The folder holds the metrics of another run.
        """
        opened_trackers = []
        run_dir = self.folders.run_dir
        if run_dir is not None:
            if is_new:
                require_no_metrics(run_dir)
            learner = self.agent.learner.config
            model: Any = self.agent.model.pretrained_model
            config = {
                **self.user_settings,
                **learner.to_dict(),
                **settings,
                "agent": type(self.agent).__name__,
                "learner": type(learner).__name__,
                "model": model.config.name_or_path,
                "context": collector_of(self.agent).options["context"],
            }
            run_id = "" if self.saved_run is None else self.saved_run.run_id
            run_trackers = trackers_of_run(run_dir, config, agent=self.agent, track=track, run_id=run_id)
            opened_trackers.append(run_files.enter_context(closing(run_trackers)))
        passed_trackers = [tracker] if tracker is not None and distributed.is_main_process() else []
        self.trackers = MultiTracker(*opened_trackers, *passed_trackers)

    def begin_episodes(self) -> None:
        """Starts the first episodes of a new run."""
        if self.adapts_num_envs:
            self._limit_acting_envs(_FEWEST_ENVS)
        self.play.begin()

    def _limit_acting_envs(self, count: int) -> None:
        """Pauses all environments but the first `count`."""
        self.play.pause(np.arange(self.play.num_envs) >= count)

    def restore_counts(self, saved_state: dict[str, Any]) -> None:
        """Continues the counts and scores of a resumed run."""
        assert self.saved_run is not None
        assert self.saved_run.state_file is not None
        self.run.load_state_dict(saved_state)
        self.progress.resume(self.run.returns, len(self.run.updates))
        self.progress.note(
            f"resumed from {self.saved_run.state_file.parent} after {len(self.run.updates):,} updates, {self.run}; "
            f"{1 - self.run.progress:.0%} of the budget is left"
        )
        if self.folders.run_dir is not None:
            scores = read_scores(self.folders.run_dir / "scores.json")
            # It is evaluated again.
            scores.pop("after", None)
            self.comparison.scores = scores

    def warn_if_replies_may_fail(self) -> None:
        """Warns if a reply in free text may name no action, which would end the training."""
        hooks = collector_of(self.agent).actor.hooks
        if self.play.expects_free_text() and not (hooks.has_fallback or hooks.takes_any_reply):
            logger.warning(
                "Replies are free text; one that names no action will end the training. %s", hooks.no_action_advice()
            )

    @contextmanager
    def callbacks_notified(self, saved_state: Mapping[str, Any] | None) -> Iterator[None]:
        """Calls the callbacks when opened and, also after an exception, when closed.

        Args:
            saved_state: State of the loop that is resumed; None in a new run.

        Raises:
            CheckpointError: A callback cannot restore its state; trackers are unchanged.
        """
        if saved_state is not None:
            # Before the callbacks, which may log at the start.
            self.trackers.rewind(saved_state["tracker"])
        try:
            try:
                self.callbacks.on_training_start(self.run)
                self.callbacks.raise_error()
                if saved_state is not None:
                    self._load_callbacks(saved_state["callbacks"])
            except BaseException:
                self.trackers.undo_rewind()
                raise
            yield
        except BaseException:
            self.run.fail()
            self.callbacks.on_training_end(self.run)
            try:
                self.callbacks.raise_error()
            except Exception as error:  # the error that ended the training is the one to raise
                logger.error("A callback has failed as well: %r", error)
            raise
        self.callbacks.on_training_end(self.run)
        self.callbacks.raise_error()

    def _load_callbacks(self, state: dict[str, Any]) -> None:
        """Restores the callbacks' states; a CheckpointError names the file of the states."""
        self.callbacks.load_state_dict(state)
        try:
            self.callbacks.raise_error()
        except CheckpointError as error:
            assert self.saved_run is not None
            raise CheckpointError(f"{str(self.saved_run.state_file)!r}: {error}") from error

    def run_steps(self, checkpoint_every: int, is_new: bool) -> None:
        """Steps until the run is over.

        Args:
            checkpoint_every: Number of updates between two checkpoints.
            is_new: Whether the run begins.

        Raises:
            SystemExit: A signal arrived; in an interactive session a KeyboardInterrupt.
        """
        run = self.run
        is_over = any(distributed.gather_objects(run.is_over))
        if is_over:
            logger.warning("The interrupted call's budget is used up (%s).", run)
        if is_new:
            # A run that is killed before its next checkpoint resumes from here: later metrics are dropped, and the
            # callbacks' states are restored.
            self.save()
            self.callbacks.raise_error()
        while not is_over:
            result = self.play.step()
            self._take(result)
            is_due = bool(result.stats) and len(run.updates) % checkpoint_every == 0
            ends = distributed.gather_objects((run.is_over, self.interrupts.stops))
            is_over = any(over for over, _ in ends)
            is_interrupted = any(stops for _, stops in ends)
            if is_interrupted and self.saved_run is None:
                self.saved_run = self._saved_below_runs()
            if self.saved_run is not None and (is_due or is_over or is_interrupted):
                for pending in self.play.complete_steps():
                    self._take(pending)
                self.save()
                self.callbacks.raise_error()
            if is_interrupted and self.saved_run is not None:
                _stop_interrupted(run, self.folders.run_dir, self.saved_run.root)

    def _take(self, result: StepResult) -> None:
        """Counts a step, calls the callbacks, and logs an update."""
        result = result.over_all_processes()
        stats = result.stats
        counted = self.run.take(result.ended, stats, result.turns)
        learner_stats = dict(stats)
        answers = [self.callbacks.on_step(self.run)]
        for episode in counted:
            answers.append(self.callbacks.on_episode_end(self.run, episode))
        if stats:
            answers.append(self.callbacks.on_update(self.run, stats))
        if not all(answers):
            self.run.stop()
        self.progress.advance([episode.total_reward for episode in counted], stats, result.turns)
        if stats:
            if self.adapts_num_envs:
                self._limit_acting_envs(_envs_for_batch(self.agent.learner, learner_stats))
            self.trackers.log({**stats, "minutes": self.run.minutes}, len(self.run.returns))
            if self.on_update is not None:
                answer = self.on_update(stats)
                make_plain_(stats, learner_stats, "on_update")
                self._stop_if_false(answer)
        self.callbacks.raise_error()

    def _stop_if_false(self, answer: object) -> None:
        """Ends the run if `on_update` returned False; warns if it returned True, which once had that meaning."""
        if is_false(answer):
            logger.warning("on_update returned False, which ends the training (in earlier versions: True).")
            self.run.stop()
        elif answer is True and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "on_update returned True, which ended the training in earlier versions. Now False ends it, as in "
                "callbacks, and it goes on. Return False to end it, None to go on."
            )

    def write_scores(self) -> dict[str, Score]:
        """Writes the scores that are known to the trackers and into the run's folder, and returns them."""
        scores = self.callbacks.scores | self.comparison.scores
        if scores and distributed.is_main_process():
            self.trackers.log_scores(scores, len(self.run.returns))
            if self.folders.run_dir is not None:
                write_scores(self.folders.run_dir, scores)
        return scores

    def save(self) -> None:
        """Writes a checkpoint, if there is a folder for it."""
        if self.saved_run is not None:
            state = {
                **self.run.state_dict(),
                "tracker": self.trackers.position(),
                "callbacks": self.callbacks.state_dict(),
            }
            self.saved_run.write(state, self.run.turns, self.run.updates)

    def _saved_below_runs(self) -> SavedRun:
        """Returns the checkpoints of an interrupted run without a folder, the same in all processes."""
        name = f"{type(self.agent).__name__}-{time.strftime('%Y%m%d-%H%M%S')}"
        return self.saved_run_in(self.folders.runs / distributed.gather_objects(name)[0] / "checkpoints")

    def stop_if_interrupted(self) -> None:
        """Saves the run and ends the program if a signal arrived after the last step, as in a last evaluation."""
        if not any(distributed.gather_objects(self.interrupts.stops)):
            return
        if self.saved_run is None:
            self.saved_run = self._saved_below_runs()
            self.save()
        _stop_interrupted(self.run, self.folders.run_dir, self.saved_run.root)


def _report(run_dir: Path) -> Path | None:
    """Writes the report of a finished run; returns None, with a warning, if it cannot be written."""
    try:
        return write_report([run_dir], run_dir / "report.html")
    except (OSError, ConfigError) as error:
        logger.warning("The report of %s cannot be written: %s", run_dir, error)
        return None


def _run_id(run_dir: Path | None, tracker: Tracker | None) -> str:
    """Returns the id of the run that a folder or a tracker belongs to, or a new id."""
    folder_id = None if run_dir is None else run_id_of(run_dir)
    tracker_id = tracker.run_id if isinstance(tracker, MultiTracker) else ""
    return folder_id or tracker_id or new_run_id()


def _stop_interrupted(run: Run, run_dir: Path | None, checkpoints: Path) -> NoReturn:
    """Logs how to continue an interrupted run that has been saved, and ends the program or the notebook's cell."""
    folder = f"checkpoint_dir={str(checkpoints)!r}" if run_dir is None else f"run_dir={str(run_dir)!r}"
    script = "" if run_dir is None else f" (in a script with such options: --run-dir '{run_dir}' --resume)"
    logger.warning(
        "Stopped and saved after %d turns. To continue: the same train(...) with %s, resume=True%s.",
        run.turns,
        folder,
        script,
    )
    raise KeyboardInterrupt if _is_interactive() else SystemExit(INTERRUPTED_EXIT_CODE)


def _is_interactive() -> bool:
    """Whether this is a Python prompt, which SystemExit would end, or a notebook, which would only print a warning."""
    ipython = sys.modules.get("IPython")
    return hasattr(sys, "ps1") or (ipython is not None and ipython.get_ipython() is not None)


def _envs_for_batch(learner: Learner, stats: Stats) -> int:
    """Returns the number of episodes that fill a batch, per process, if they are as long as those of the last batch."""
    length = stats["turns"] / stats["episodes"]
    return max(_FEWEST_ENVS, math.ceil(learner.turns_wanted / length / distributed.world_size()))
