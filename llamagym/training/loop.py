"""Training: an agent, many copies of an environment, a progress bar, and checkpoints to resume from."""

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
from ..agent.agent import Agent
from ..agent.text_interface import no_action_advice
from ..errors import CheckpointError, ConfigError
from ..learners.base import Learner, Stats
from ..options import as_seed, check_arguments, explains_wrong_calls, require_positive, user_path
from ..saving.checkpoints import require_none
from ..saving.paths import user_folder
from .callbacks import Callback, Callbacks, is_false, make_plain_
from .environments import EnvSource, open_envs, resolve_num_envs
from .episodes import Judge, PlayedEpisode, success_rate
from .evaluation import own_conversations
from .interrupts import EXIT_CODE, Interrupts
from .play import Play, Taken
from .progress import Progress
from .report import write_report
from .run import Run
from .run_folder import new_run_id, require_run_folder, require_same_run, run_id_of
from .saved_run import SavedRun, saved_on_error
from .tracking import MultiTracker, Tracker, trackers_of_run

logger = logging.getLogger(__name__)

# Passes with fewer rows are slower, and episodes of one copy follow from one another.
_FEWEST_COPIES = 16


@dataclass(frozen=True)
class TrainingResult:
    """Result of `train`, including the part before a resume.

    Attributes:
        returns: Undiscounted return of each finished episode, in the order of their ends.
        updates: Statistics of each update.
        turns: Environment steps taken.
        message: Why no update ran; empty if one did.
        successes: Whether each episode succeeded; None where the environment does not say.
        minutes: Training time, without pauses.
        report: The HTML report in `run_dir`; None without a folder or an update.
        success_rate: Share of successful episodes among those with a known outcome; None if none is known.
    """

    returns: list[float]
    updates: list[Stats]
    turns: int
    message: str
    successes: list[bool | None] = field(default_factory=list)
    minutes: float = field(default=math.nan, compare=False)
    report: Path | None = field(default=None, compare=False)

    @property
    def success_rate(self) -> float | None:
        """The share of successes."""
        return success_rate(self.successes)


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
    log_with: Sequence[str] = (),
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int = 10,
    keep_checkpoints: int = 3,
    resume: bool = False,
    allow_changes: Sequence[str] = (),
    handle_signals: bool = True,
    env_timeout: float | None = None,
    overlap: bool = False,
) -> TrainingResult:
    """Let the agent act and learn for a number of episodes or turns, or for some time.

    With a critic, and where a turn's context holds nothing from before, a batch takes episodes under way too, once one
    has ended: the critic's estimate stands for their rest.

    With `run_dir` or `checkpoint_dir` a run can be stopped at any moment and resumed. A resumed run computes, bit for
    bit on a CPU, what it would have computed without the stop at its last checkpoint. Episodes under way continue where
    an environment depends on its seed and on actions alone; elsewhere they start again, which is logged. An error of
    the environment or of learning saves the state before the step that failed.

    Of several processes that learn together (`accelerate launch`), each calls this with the same arguments and acts in
    `num_envs` copies of its own; episodes, updates, turns and returns are counted over all of them. Callbacks and
    `on_update` are called in all, and any of them can end the training. The first alone writes: checkpoints, to a
    tracker, to the terminal. An error in one ends all, which go on from the last checkpoint.

    Args:
        agent: The agent to train; switched to `train()`.
        env: An environment's id, an environment, a function that makes one, or a `SyncVectorEnv` or `AsyncVectorEnv`
            of any autoreset mode, wrapped or not. With `num_envs` > 1 an environment must have a spec to be copied
            from. What is made here is closed at the end; what was passed stays open.
        episodes: Stop when this many have ended; unfinished ones are dropped. None: no limit. Of several budgets
            (`episodes`, `turns`, `minutes`) the one that is used up first ends the training. Budgets are those of this
            call, whatever a resumed run did before (see `resume`).
        num_envs: Number of environments that are stepped together. None: 1 for an environment that cannot be made
            several times, else up to 64 in whole groups. Unless groups are compared or steps overlap, 16 of them run at
            first, and after each update as many as a batch holds episodes, at least 16: with more, few episodes would
            start per batch, and early turns would hardly be trained on.
        seed: Base seed of the episodes' reset seeds; None draws one, from the agent's seed if it has one.
        on_update: Called with the statistics of each update, after callbacks and tracker; as with callbacks, returning
            False ends the training.
        tracker: Receives them with what callbacks added, and the minutes so far. An error of it is logged, and training
            goes on, unless it has an attribute `stops_on_error` that is True.
        group_size: Leave it out. The number of episodes that share a reset seed, in as many copies in a row, is the
            learner's `group_size`; another number here is rejected.
        turns: Stop at the step with which so many are taken, over all copies. None: no limit.
        minutes: Stop when so many are over. None: no limit. The clock then also says when rates begin to fall
            (`cooldown`): from there on two runs of one seed differ.
        callbacks: Told of steps, episodes and updates; see `Callback`.
        judge: Called with each episode that ends, before it is learned from (`PlayedEpisode` says what it sees). What
            it returns is added to the rewards: a number to the last turn's, or a list with one for each turn. A second
            model is such a function.
        run_dir: Folder of the run, new, empty or that of the run to resume: `config.json`, `metrics.jsonl`,
            `transcripts.jsonl`, `checkpoints/` and, at the end, `report.html`. None writes none of these.
        log_with: With `run_dir`: other trackers for the statistics, as for `default_tracker`.
        checkpoint_dir: Where checkpoints are written; None is `checkpoints` in `run_dir`, or nowhere without it.
        checkpoint_every: Updates between two checkpoints; one is also written before the first step. Each drops all
            caches, so observations that recur are processed again after it.
        keep_checkpoints: How many are kept: the newest, and the best beside them.
        resume: Whether to continue from the newest intact checkpoint; without any, training begins. The same budget as
            that of a call that was interrupted continues where it stood; any other, and that of a call that had used
            its own up, is granted in full.
        allow_changes: With `resume`: what may differ from the checkpoint, by the names that the error lists:
            "ppo_config_dict.learning_rate" for an option, "ppo_config_dict" for all of them, "environment", "choices",
            "model". In another environment, in another number of them, or if a judge is added or removed, the episodes
            under way start again.
        handle_signals: Whether the first Ctrl-C or SIGTERM finishes the step, saves a checkpoint and logs how to
            resume, and only a second one stops at once. Without a folder the checkpoint is written below `runs/`.
            Without effect outside the main thread, since Python delivers signals there only.
        env_timeout: Seconds that a step or reset may take, when episodes are played again too; copies then run in
            processes of their own. None sets no limit, and steps them in this one unless `overlap` says otherwise.
        overlap: For slow environments: copies run in processes of their own, in two halves, and the agent acts in one
            while the other steps. Episodes are the same; replies are drawn in another order.

    Returns:
        Returns and statistics.

    Raises:
        ConfigError: An argument is of the wrong type or out of range, `num_envs` is no multiple of the learner's
            `group_size`, or `env` cannot be made or copied.
        CheckpointError: There are checkpoints, and `resume` is False, none of them can be read, or the newest is of
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
    all_callbacks = Callbacks(callbacks)
    run = Run(agent, episodes, turns, minutes)
    seed = as_seed(seed)
    size = agent.learner.group_size
    if group_size not in (None, size):
        raise ConfigError(
            f"group_size={group_size}, but the agent's learner compares {size} episodes of each start (1: none). Leave "
            "it out here, and set it where the agent is made: algorithm='grpo', grpo_config_dict={'group_size': ...}."
        )
    finds_copies = num_envs is None and size == 1 and not overlap
    num_envs = resolve_num_envs(env, num_envs, size)
    if num_envs % size:
        raise ConfigError(
            f"num_envs={num_envs} does not divide into groups of {size} episodes that start alike. Pass a multiple of "
            f"{size}, or another group_size in the agent's grpo_config_dict."
        )
    if env_timeout is not None and not 0 < env_timeout < math.inf:
        raise ConfigError(f"env_timeout={env_timeout}. Pass a positive number of seconds, or None for no limit.")
    if overlap and num_envs < 2 * size:
        raise ConfigError(
            f"overlap=True needs two halves, and num_envs={num_envs} is one group of {size}. Pass {2 * size} or more."
        )
    # An environment may change the working directory.
    runs = user_path("runs")
    run_dir = None if run_dir is None else user_folder(run_dir, "run_dir")
    checkpoint_dir = None if checkpoint_dir is None else user_folder(checkpoint_dir, "checkpoint_dir")
    if log_with and run_dir is None:
        raise ConfigError(f"log_with={log_with!r} needs the run_dir that trackers write to.")
    if run_dir is not None and checkpoint_dir is None:
        checkpoint_dir = run_dir / "checkpoints"
    if resume and checkpoint_dir is None:
        raise ConfigError("resume=True needs the run_dir or checkpoint_dir of the run to continue.")
    if resume and run_dir is not None and checkpoint_dir is not None:
        require_run_folder(run_dir)
        require_same_run(run_dir, checkpoint_dir)
    if checkpoint_dir is not None and not resume:
        with distributed.main_process_first():
            require_none(checkpoint_dir)
    agent.train()
    ids, half = list(range(num_envs)), num_envs // size // 2 * size
    with (
        open_envs(env, [half, num_envs - half] if overlap else [num_envs], env_timeout, overlap) as parts,
        own_conversations(agent, ids),
        run.paces_learner(),
        # A judge rewards turns at the end of their episode.
        agent.cutting_episodes(ids) if judge is None else nullcontext(),
        ExitStack() as run_files,
        Progress(episodes, share=lambda: run.progress) as progress,
        Interrupts(listens=handle_signals) as interrupts,
        # Left first: where a run cannot be resumed, the agent has its own state again.
        ExitStack() as resuming,
    ):
        base_seed = agent.draw_seed() if seed is None else seed
        play = Play(agent, parts, ids, base_seed, size, judge, (distributed.rank(), distributed.count()))

        def run_saved_in(folder: Path) -> SavedRun:
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
            run_id = _run_id(run_dir, tracker)
            return SavedRun(folder, keep_checkpoints, agent, play, options, allow_changes, run_id)

        saved = None if checkpoint_dir is None else run_saved_in(checkpoint_dir)
        saved_state = saved.read(resuming) if saved and resume else None
        own_trackers = []
        if run_dir is not None:
            if saved_state is None:
                _require_no_metrics(run_dir)
            # Now that nothing can be wrong with the call: one that fails leaves no files.
            settings = {"episodes": episodes, "turns": turns, "minutes": minutes, "num_envs": num_envs, "seed": seed}
            run_id = "" if saved is None else saved.run_id
            run_trackers = _trackers_of_run(run_dir, agent, settings, log_with, run_id)
            own_trackers.append(run_files.enter_context(closing(run_trackers)))
        # What was passed is not closed here.
        passed_trackers = [tracker] if tracker is not None and distributed.is_main_process() else []
        trackers = MultiTracker(*own_trackers, *passed_trackers)
        if saved_state is None:
            if finds_copies:
                play.rest(np.arange(num_envs) >= _FEWEST_COPIES)
            play.begin()
        else:
            run.load_state_dict(saved_state)
            progress.resume(run.returns, len(run.updates))
            progress.note(f"resumed after {run}; {1 - run.progress:.0%} of the budget is left")
        if play.awaits_free_text() and not (agent.has_fallback or agent.takes_any_reply):
            logger.warning(
                "Replies are free text; one that names no action will end the training. %s", no_action_advice(agent)
            )

        has_warned = False

        def take(taken: Taken) -> None:
            nonlocal has_warned
            taken = taken.with_others()
            counted = run.take(taken.ended, taken.stats, taken.turns)
            own_stats = dict(taken.stats)
            _notify(all_callbacks, run, counted, taken.stats)
            progress.advance([episode.total_reward for episode in counted], taken.stats)
            if taken.stats:
                if finds_copies:
                    play.rest(np.arange(num_envs) >= _copies_for_batches(agent.learner, own_stats))
                trackers.log({**taken.stats, "minutes": run.minutes}, len(run.returns))
                if on_update is not None:
                    answer = on_update(taken.stats)
                    make_plain_(taken.stats, own_stats, "on_update")
                    if is_false(answer):
                        logger.warning("on_update returned False, which ends the training (in earlier versions: True).")
                        run.stop()
                    elif answer is True and not has_warned:
                        has_warned = True
                        logger.warning(
                            "on_update returned True, which ended the training in earlier versions. Now False ends it, "
                            "as in callbacks, and it goes on. Return False to end it, None to go on."
                        )
            all_callbacks.raise_error()

        def save() -> None:
            if saved is not None:
                state = {**run.state_dict(), "tracker": trackers.position(), "callbacks": all_callbacks.state_dict()}
                saved.write(state, run.turns, run.updates)

        with (
            _notified(all_callbacks, run, saved_state, saved.state_file if saved else None, trackers),
            saved_on_error(save if saved else None, checkpoint_dir),
        ):
            resuming.close()
            is_over = any(distributed.gather_objects(run.is_over))
            if is_over:
                logger.warning("Nothing is left of the budget of the call that was interrupted (%s).", run)
            if saved_state is None:
                # A run that is killed before its next checkpoint is resumed from here: what trackers wrote since is
                # dropped, and what callbacks prepared is not lost.
                save()
                all_callbacks.raise_error()
            while not is_over:
                taken = play.step()
                take(taken)
                is_due = bool(taken.stats) and len(run.updates) % checkpoint_every == 0
                is_over, stops = map(
                    any, zip(*distributed.gather_objects((run.is_over, interrupts.stops)), strict=True)
                )
                if stops and saved is None:
                    saved = run_saved_in(_folder_of_interrupted(runs, agent))
                if saved is not None and (is_due or is_over or stops):
                    for pending in play.end_steps():
                        take(pending)
                    save()
                    all_callbacks.raise_error()
                if stops and saved is not None:
                    _stop_interrupted(run, run_dir, saved.root)
        # An interrupt that came after the last step, such as during the last evaluation.
        if any(distributed.gather_objects(interrupts.stops)):
            if saved is None:
                saved = run_saved_in(_folder_of_interrupted(runs, agent))
                save()
            _stop_interrupted(run, run_dir, saved.root)
        run.finish()
        if run.is_finished:
            # A call that was stopped before this is continued, even if nothing but its end was missing.
            save()
    message = "" if run.updates else agent.why_no_update()
    if message:
        logger.warning(message)
    report = None
    if run_dir is not None and run.updates and distributed.is_main_process():
        report = _report(run_dir)
    return TrainingResult(run.returns, run.updates, run.turns, message, run.successes, run.minutes, report)


def _report(run_dir: Path) -> Path | None:
    """Write the report of a run that is over; without room for it, the run has a result all the same."""
    try:
        return write_report([run_dir], run_dir / "report.html")
    except (OSError, ConfigError) as error:
        logger.warning("The report of %s cannot be written: %s", run_dir, error)
        return None


def _require_no_metrics(run_dir: Path) -> None:
    """Reject the folder of another run, whose metrics would be mixed with those of this one.

    Raises:
        ConfigError: The folder holds metrics.
    """
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size > 0:
        raise ConfigError(
            f"run_dir={str(run_dir)!r} holds the metrics of a run, and no checkpoint to continue from. Pass another "
            "run_dir, or resume=True with the checkpoint_dir of that run."
        )


def _run_id(run_dir: Path | None, tracker: Tracker | None) -> str:
    """The id of the run that a folder or a tracker belongs to, or a new id."""
    own = None if run_dir is None else run_id_of(run_dir)
    passed = tracker.run_id if isinstance(tracker, MultiTracker) else ""
    return own or passed or new_run_id()


def _trackers_of_run(
    run_dir: Path, agent: Agent, settings: Mapping[str, Any], log_with: Sequence[str], run_id: str
) -> MultiTracker:
    """The trackers that write a run's folder."""
    config = {"agent": type(agent).__name__, **settings, **agent.learner.config.given()}
    return trackers_of_run(run_dir, config, agent=agent, log_with=log_with, run_id=run_id)


def _stop_interrupted(run: Run, run_dir: Path | None, checkpoints: Path) -> NoReturn:
    """Log how to continue an interrupted run that has been saved, and end the program or the cell."""
    folder = f"checkpoint_dir={str(checkpoints)!r}" if run_dir is None else f"run_dir={str(run_dir)!r}"
    script = "" if run_dir is None else f" (in a script with such options: --run-dir '{run_dir}' --resume)"
    logger.warning(
        "Stopped and saved after %d turns. To continue: the same train(...) with %s, resume=True%s.",
        run.turns,
        folder,
        script,
    )
    raise KeyboardInterrupt if _is_interactive() else SystemExit(EXIT_CODE)


def _folder_of_interrupted(runs: Path, agent: Agent) -> Path:
    """Where an interrupted run without a folder is saved, below `runs`: the same folder in all processes."""
    name = f"{type(agent).__name__}-{time.strftime('%Y%m%d-%H%M%S')}"
    return runs / distributed.gather_objects(name)[0] / "checkpoints"


def _is_interactive() -> bool:
    """Whether this is a Python prompt, which SystemExit would end, or a notebook, where it only prints a warning."""
    ipython = sys.modules.get("IPython")
    return hasattr(sys, "ps1") or (ipython is not None and ipython.get_ipython() is not None)


def _copies_for_batches(learner: Learner, stats: Stats) -> int:
    """As many copies as a batch holds episodes of the length of the last batch's, in each process its share."""
    length = stats["turns"] / stats["episodes"]
    return max(_FEWEST_COPIES, math.ceil(learner.turns_wanted / length / distributed.count()))


@contextmanager
def _notified(
    callbacks: Callbacks,
    run: Run,
    saved_state: Mapping[str, Any] | None,
    state_file: Path | None,
    trackers: MultiTracker,
) -> Iterator[None]:
    """Calls the callbacks at the start of the training and, whatever ends it, at its end.

    Args:
        callbacks: The callbacks.
        run: The run.
        saved_state: State of the loop that is resumed; None in a new run.
        state_file: The file that holds it, for errors.
        trackers: Trackers to rewind to that state.

    Raises:
        CheckpointError: A callback cannot take its state; trackers have what they had.
    """
    if saved_state is not None:
        # First, since callbacks may log at the start.
        trackers.rewind(saved_state["tracker"])
    try:
        try:
            callbacks.on_training_start(run)
            callbacks.raise_error()
            if saved_state is not None:
                _load_callbacks(callbacks, saved_state["callbacks"], state_file)
        except BaseException:
            trackers.undo_rewind()
            raise
        yield
    except BaseException:
        run.fail()
        callbacks.on_training_end(run)
        try:
            callbacks.raise_error()
        except Exception as error:  # the error that ended the training is the one to raise
            logger.error("A callback has failed, too: %r", error)
        raise
    callbacks.on_training_end(run)
    callbacks.raise_error()


def _load_callbacks(callbacks: Callbacks, state: dict[str, Any], state_file: Path | None) -> None:
    """Restores the callbacks' states; an error of a state names its file.

    Raises:
        CheckpointError: A callback cannot take its state.
    """
    callbacks.load_state_dict(state)
    try:
        callbacks.raise_error()
    except CheckpointError as error:
        raise CheckpointError(f"{str(state_file)!r}: {error}") from error


def _notify(callbacks: Callbacks, run: Run, ended: Sequence[PlayedEpisode], stats: Stats) -> None:
    """Call the callbacks after a step; all of them are called before one can end the training."""
    answers = [callbacks.on_step(run), *(callbacks.on_episode_end(run, episode) for episode in ended)]
    if stats:
        answers.append(callbacks.on_update(run, stats))
    if not all(answers):
        run.stop()
