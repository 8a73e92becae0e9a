"""Plays episodes in many environments, step by step.

Each episode has its own reset seed, derived from the run's base seed and a counter, so that a run can be repeated and
another base seed plays other episodes. For learners that compare episodes with the same start, `group_size`
consecutive environments share these seeds. Each of them takes the next seed when its episode ends, without waiting for
the others.

The environments may be split into parts that are stepped separately: the agent acts in one part while the others step.

An environment can be paused: after its current episode it starts no other, and the agent does not act in it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from .. import distributed
from ..agent.text_interface import Hooks
from ..errors import CheckpointError
from ..learners.base import Stats
from ..options import shortened
from ..saving.checkpoints import describe_change
from .environments import EnvGroup
from .episodes import Judge, PlayedEpisode, judge_rewards
from .managed_env import Info
from .players import Player

logger = logging.getLogger(__name__)


class StepResult(NamedTuple):
    """Result of a step in one part of the environments.

    Attributes:
        turns: Number of actions taken.
        ended: The episodes that ended.
        stats: Statistics of an update; empty if none ran.
    """

    turns: int
    ended: list[PlayedEpisode]
    stats: Stats

    def over_all_processes(self) -> StepResult:
        """Returns the results of all processes that learn together as one; an update is the same in all of them."""
        turns, ended = zip(*distributed.gather_objects((self.turns, self.ended)), strict=True)
        return StepResult(sum(turns), list(chain(*ended)), self.stats)


class _Outcome(NamedTuple):
    """The values that an environment's step returned."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: Info


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step whose actions have been sent.

    Attributes:
        envs: The part of the environments that it is in.
        actions: The action in each environment that is not paused, by the environment's number.
        undo: Undoes the step's turns when it exits with an exception.
    """

    envs: EnvGroup
    actions: dict[int, Any]
    undo: ExitStack


class Play:
    """A player in its environments."""

    def __init__(
        self,
        player: Player,
        parts: Sequence[EnvGroup],
        ids: Sequence[Hashable],
        seed: int | None,
        group_size: int = 1,
        judge: Judge | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Prepares the first episodes; `begin` or `resume` starts them.

        Args:
            player: The agent or policy that acts.
            parts: The environments, in parts that are stepped separately.
            ids: The player's id of each environment.
            seed: Base seed of the episodes' reset seeds; None draws one.
            group_size: Number of consecutive environments that share reset seeds.
            judge: Rewards each episode after its end.
            share: (rank, number of processes). Together they play the same episodes as one process with all
                environments.
        """
        self._judge = judge
        self._player = player
        self._parts = parts
        self._ids = list(ids)
        self._base_seed: Any = np.random.SeedSequence(seed).entropy
        count = len(self._ids)
        self._rank, self._world_size = share
        self._group_size = group_size
        # Number of groups that this process plays at once.
        self._concurrent_groups = count // group_size
        # Number of the group that each environment's episode belongs to; episodes of one group share a reset seed.
        self._groups = self._first_groups(0)
        # Environments whose episode has ended; the next step resets them.
        self._needs_reset = np.zeros(count, dtype=bool)
        # Environments to pause once their episode has ended, and those that are paused.
        self._to_pause = np.zeros(count, dtype=bool)
        self._paused = np.zeros(count, dtype=bool)
        # Actions and rewards of each environment since its reset.
        self._actions: list[list[Any]] = [[] for _ in self._ids]
        self._rewards: list[list[float]] = [[] for _ in self._ids]
        self._observations: list[Any] = [None] * count
        self._infos: list[Info] = [{}] * count
        # Observation and info that each episode began with, if it cannot be replayed.
        self._initial: list[tuple[Any, Info]] = [(None, {})] * count
        # By a group's number: the text that its first finished episode began with, and how many have finished.
        self._group_starts: dict[int, tuple[str, int]] = {}
        self._has_warned = False
        # Pending steps, oldest first.
        self._pending: deque[_PendingStep] = deque()

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return len(self._ids)

    def _first_groups(self, first: int) -> Any:
        """Returns each environment's group number if the lowest over all processes is `first`."""
        return first + self._rank * self._concurrent_groups + np.arange(len(self._ids)) // self._group_size

    def begin(self) -> None:
        """Starts the first episodes."""
        self._paused = self._to_pause.copy()
        self._reset(np.ones(len(self._ids), dtype=bool), paused=self._paused)

    def pause(self, which: np.ndarray[Any, Any]) -> None:
        """Pauses these environments; other paused ones start their next episode.

        In each part at least one must go on. Environments that the caller made are never paused.

        Args:
            which: The environments to pause, bool (count,).
        """
        if self._parts[0].can_replay:
            self._to_pause[:] = which

    def step(self) -> StepResult:
        """Acts in every part without a pending step, then completes the oldest pending step.

        An update runs if this fills a batch. An error undoes all pending steps. An environment whose episode has ended
        is reset at the next step, so that an error in the reset does not undo this one.
        """
        with self._undone_on_error():
            busy = [pending.envs for pending in self._pending]
            for envs in self._parts:
                if envs not in busy:
                    self._act(envs)
            return self._complete_step()

    def complete_steps(self) -> Iterator[StepResult]:
        """Completes the pending steps one by one, without acting."""
        while self._pending:
            with self._undone_on_error():
                result = self._complete_step()
            yield result

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """While open, an exception undoes all pending steps."""
        try:
            yield
        except BaseException as error:
            # The latest first, since each restores the state before itself.
            while self._pending:
                self._pending.pop().undo.__exit__(type(error), error, error.__traceback__)
            raise

    def _act(self, envs: EnvGroup) -> None:
        """Starts new episodes in a part where one has ended, and sends the player's actions."""
        player = self._player
        rows = envs.rows
        in_part = np.zeros_like(self._needs_reset)
        in_part[rows] = True
        starting = in_part & (self._needs_reset | self._paused) & ~self._to_pause
        pausing = in_part & self._needs_reset & self._to_pause
        self._reset(starting | pausing, paused=pausing)
        self._needs_reset[rows] = False
        self._paused = (self._paused | pausing) & ~starting
        acting = np.flatnonzero(in_part & ~self._paused).tolist()
        ids = [self._ids[i] for i in acting]
        with ExitStack() as undo:
            undo.enter_context(player.undone_on_error(ids))
            observations = [self._observations[i] for i in acting]
            infos = [self._infos[i] for i in acting]
            actions = dict(zip(acting, player.act_batch(observations, ids, infos), strict=True))
            # A paused environment ignores its action.
            unused = actions[acting[0]]
            envs.send([actions.get(i, unused) for i in range(rows.start, rows.stop)])
            self._pending.append(_PendingStep(envs, actions, undo.pop_all()))

    def _complete_step(self) -> StepResult:
        """Completes the oldest pending step: assigns its rewards and ends its episodes."""
        player = self._player
        pending = self._pending[0]
        actions = pending.actions
        outcomes = self._outcomes(pending)
        player.assign_rewards([outcome.reward for outcome in outcomes.values()], [self._ids[i] for i in outcomes])
        done = [i for i, outcome in outcomes.items() if outcome.terminated or outcome.truncated]
        ended = [self._judged(self._played_episode(i, actions[i], outcomes[i]), pending.undo) for i in done]
        stats: Stats = {}
        if done or self._world_size > 1:
            groups: list[int | None] = [None] * len(ended)
            if self._group_size > 1:
                groups = [episode.seed for episode in ended]
            stats = player.terminate_episodes(
                [self._ids[i] for i in done],
                [not outcomes[i].terminated for i in done],
                [outcomes[i].observation for i in done],
                groups,
                [outcomes[i].info for i in done],
            )
        self._pending.popleft().undo.close()
        for i, outcome in outcomes.items():
            self._actions[i].append(actions[i])
            self._rewards[i].append(outcome.reward)
            self._observations[i] = outcome.observation
            self._infos[i] = outcome.info
        for i, episode in zip(done, ended, strict=True):
            self._compare_starts(int(self._groups[i]), episode)
            self._needs_reset[i] = True
            self._groups[i] += self._concurrent_groups * self._world_size
            self._actions[i].clear()
            self._rewards[i].clear()
        return StepResult(len(outcomes), ended, stats)

    def _outcomes(self, pending: _PendingStep) -> dict[int, _Outcome]:
        """Receives the outcome of each action of a step, by the environment's number."""
        rows = pending.envs.rows
        received = zip(range(rows.start, rows.stop), *pending.envs.receive(), strict=True)
        outcomes = {}
        for i, observation, reward, terminated, truncated, info in received:
            if i in pending.actions:
                outcomes[i] = _Outcome(observation, float(reward), terminated, truncated, info)
        return outcomes

    def _played_episode(self, index: int, action: Any, last: _Outcome) -> PlayedEpisode:
        """Returns the episode that ends with an action in the environment with this index."""
        conversation = self._player.conversation(self._ids[index])
        was_cut = not last.terminated
        return PlayedEpisode(
            copy=index,
            seed=self._reset_seed(index),
            actions=(*self._actions[index], action),
            rewards=(*self._rewards[index], last.reward),
            turns=tuple(conversation.turns) if conversation else (),
            messages=tuple(conversation.messages) if conversation else (),
            terminated=not was_cut,
            truncated=was_cut,
            info=last.info,
        )

    def _compare_starts(self, group: int, episode: PlayedEpisode) -> None:
        """Warns once if an episode began differently from another episode of its group."""
        start = next((message["content"] for message in episode.messages if message["role"] == "user"), None)
        if self._group_size == 1 or start is None:
            return
        first, finished = self._group_starts.pop(group, (start, 0))
        if start != first and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Two episodes with one reset seed began differently (%s), but are compared as if they began alike. "
                "Let the environment's reset(seed=...) seed all its random numbers: call super().reset(seed=seed) and "
                "draw from self.np_random. If that is impossible, use PPO (learner=PPOConfig()).",
                _excerpts_where_different(first, start),
            )
        if finished + 1 < self._group_size:
            self._group_starts[group] = (first, finished + 1)

    def _judged(self, episode: PlayedEpisode, undo: ExitStack) -> PlayedEpisode:
        """Returns an episode with the judge's rewards added.

        Args:
            episode: The finished episode.
            undo: Receives what takes these rewards back.
        """
        if self._judge is None:
            return episode
        added = judge_rewards(self._judge, episode)
        env_id = self._ids[episode.copy]
        conversation = self._player.conversation(env_id)
        if conversation is not None:
            undo.enter_context(conversation.rewards_undone_on_error())
            for turn, reward in enumerate(added):
                self._player.assign_rewards([reward], [env_id], [turn])
        return replace(episode, rewards=tuple(map(sum, zip(episode.rewards, added, strict=True))))

    def expects_free_text(self) -> bool:
        """Whether the player is an agent, and the first environment's observation offers no choices."""
        hooks = self._player.hooks
        return hooks is not None and hooks.choices(self._observations[0], self._infos[0]) is None

    @property
    def _hooks(self) -> Hooks:
        """The agent's methods; only agents have a state to save."""
        hooks = self._player.hooks
        assert hooks is not None
        return hooks

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of an agent's environments; no step may be pending."""
        has_no_episode = self._needs_reset | self._paused
        return {
            "base_seed": self._base_seed,
            "groups": self._groups.tolist(),
            "ranks": self._world_size,
            "next_group": 1 + max(distributed.gather_objects(int(self._groups.max()))),
            "actions": [self._parts[0].saved_actions(actions) for actions in self._actions],
            "texts": [None if skip else text for text, skip in zip(self._texts(), has_no_episode, strict=True)],
            "choices": self._choices_record(list(zip(self._observations, self._infos, strict=True))),
            "first": None if self._parts[0].can_replay else self._initial_record(),
            "to_pause": self._to_pause.tolist(),
        }

    def _initial_record(self) -> dict[str, Any]:
        """Returns the text and the choices that each episode under way began with."""
        return {
            "texts": [self._hooks.text(*initial) for initial in self._initial],
            "choices": self._choices_record(self._initial),
        }

    def check_actions(self, state: Mapping[str, Any], starts_again: bool) -> None:
        """Rejects saved actions that the environments cannot take.

        Args:
            state: A state from `state_dict`.
            starts_again: Whether all episodes start again, so that no action is replayed.

        Raises:
            CheckpointError: An action cannot be converted to the action space.
        """
        if starts_again:
            return
        space = self._parts[0].action_space
        for saved in state["actions"]:
            try:
                self._parts[0].actions_from(saved)
            except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
                raise CheckpointError(
                    f"The actions {shortened(saved)} cannot be converted to the action space {space}: {error}"
                ) from error

    def resume(self, state: Mapping[str, Any], starts_again: bool = False, may_change_choices: bool = False) -> None:
        """Restores the environments by replaying their actions; where that fails, the episode starts again.

        Args:
            state: A state from `state_dict`.
            starts_again: Whether all episodes start again, because these are other environments.
            may_change_choices: Whether the agent may offer other choices than before.

        Raises:
            CheckpointError: The agent offers other choices, and `may_change_choices` is False; or a saved action cannot
                be replayed.
        """
        self._base_seed = state["base_seed"]
        if starts_again or state["ranks"] != self._world_size:
            logger.warning("Other environments or another number of processes: the episodes under way start again.")
            self._groups = self._first_groups(state["next_group"])
            self.begin()
            if starts_again and not may_change_choices:
                self._require_choices(state, is_replayed=False)
            return
        self._groups[:] = state["groups"]
        self._actions = [self._parts[0].actions_from(actions) for actions in state["actions"]]
        can_replay = self._parts[0].can_replay
        replay = dict(enumerate(self._actions)) if can_replay else None
        self._to_pause[:] = state["to_pause"]
        self._paused = self._to_pause & np.array([text is None for text in state["texts"]])
        with _replay_errors_named(replay):
            self._reset(np.ones(len(self._ids), dtype=bool), replay, self._paused)
        changed = self._changed_by_replay(state["texts"])
        if not may_change_choices:
            self._require_choices(state, can_replay)
        # The conversations were saved with their rewards.
        for rewards, env_id in zip(self._rewards, self._ids, strict=True):
            conversation = self._player.conversation(env_id)
            rewards[:] = [turn.reward for turn in conversation.turns] if conversation else []
        if changed.any():
            self._start_again(changed)

    def _changed_by_replay(self, saved_texts: Sequence[str | None]) -> np.ndarray[Any, Any]:
        """Returns where a replayed episode differs from the saved one, or could not be replayed; bool (count,)."""
        if not self._parts[0].can_replay:
            return np.array([bool(actions) for actions in self._actions])
        pairs = zip(self._texts(), saved_texts, strict=True)
        return np.array([saved is not None and saved != text for text, saved in pairs])

    def _start_again(self, which: np.ndarray[Any, Any]) -> None:
        """Starts these environments' episodes again, bool (count,)."""
        logger.warning(
            "%d of %d unfinished episodes start again: their actions cannot be replayed, or replay led elsewhere.",
            which.sum(),
            len(which),
        )
        for i in np.flatnonzero(which).tolist():
            self._player.discard_episodes([self._ids[i]])
            self._actions[i].clear()
            self._rewards[i].clear()
        self._reset(which)

    def _reset(
        self,
        which: np.ndarray[Any, Any],
        replay: dict[int, list[Any]] | None = None,
        paused: np.ndarray[Any, Any] | None = None,
    ) -> None:
        """Starts new episodes in some environments.

        Args:
            which: The environments, bool (count,).
            replay: Actions to replay after the reset, by the environment's number.
            paused: Which of them are paused instead, bool (count,); None is none.
        """
        paused_numbers = [] if paused is None else np.flatnonzero(paused).tolist()
        for envs in self._parts:
            first = envs.rows.start
            in_part = which[envs.rows]
            if not in_part.any():
                continue
            seeds = [self._reset_seed(first + i) if is_reset else 0 for i, is_reset in enumerate(in_part)]
            mask = None if in_part.all() else in_part
            observations, infos = envs.reset(seeds, mask, replay, paused_numbers)
            for i in np.flatnonzero(in_part).tolist():
                self._observations[first + i] = observations[i]
                self._infos[first + i] = infos[i]
                if not envs.can_replay:
                    self._initial[first + i] = (observations[i], infos[i])

    def _texts(self) -> list[str]:
        """Returns each environment's observation as text."""
        observed = zip(self._observations, self._infos, strict=True)
        return [self._hooks.text(observation, info) for observation, info in observed]

    def _choices_record(self, observed: Sequence[tuple[Any, Info]]) -> dict[str, Any]:
        """Returns the distinct lists of choices, and each environment's index into them; None without an episode.

        Args:
            observed: Each environment's observation and info.
        """
        distinct: dict[tuple[str, ...] | None, int] = {}
        indices: list[int | None] = []
        for i, has_no_episode in enumerate(self._needs_reset | self._paused):
            if has_no_episode:
                indices.append(None)
                continue
            choices = self._hooks.choices(*observed[i])
            key = None if choices is None else tuple(choices)
            indices.append(distinct.setdefault(key, len(distinct)))
        lists = [None if choices is None else list(choices) for choices in distinct]
        return {"lists": lists, "indices": indices}

    def _require_choices(self, state: Mapping[str, Any], is_replayed: bool) -> None:
        """Rejects an agent that offers other choices, or free text instead, than when the state was saved.

        Args:
            state: A state from `state_dict`.
            is_replayed: Whether the episodes have been replayed. Otherwise the beginnings of episodes are compared,
                which have the same seeds.

        Raises:
            CheckpointError: The agent offers other choices.
        """
        # Environments that cannot replay are at the beginnings of their episodes.
        then = state if is_replayed or state["first"] is None else state["first"]
        saved = then["choices"]
        saved_texts = then["texts"]
        now = self._choices_record(list(zip(self._observations, self._infos, strict=True)))
        texts = self._texts()
        # With another number of environments, no positions correspond.
        if len(saved_texts) == len(texts):
            for i, (old, new) in enumerate(zip(saved["indices"], now["indices"], strict=True)):
                if old is not None and new is not None and texts[i] == saved_texts[i]:
                    _require_same_choices(saved["lists"][old], now["lists"][new])
        # Some agents offer choices for some observations only, so reject only if one side offers choices everywhere and
        # the other nowhere.
        were_free = {choices is None for choices in saved["lists"]}
        are_free = {choices is None for choices in now["lists"]}
        if were_free and are_free and not were_free & are_free:
            _require_same_choices(saved["lists"][0], now["lists"][0])

    def _reset_seed(self, index: int) -> int:
        """Returns the reset seed of an environment's episode, independent of those of other base seeds."""
        sequence = np.random.SeedSequence(self._base_seed, spawn_key=(int(self._groups[index]),))
        return int(sequence.generate_state(1)[0])


@contextmanager
def _replay_errors_named(replay: Mapping[int, Sequence[Any]] | None) -> Iterator[None]:
    """While open, reports an error of the replay as one of the checkpoint.

    Args:
        replay: The actions that are replayed; None for no replay.

    Raises:
        CheckpointError: An environment rejects a saved action.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError, OverflowError) as error:
        if replay is None or not any(replay.values()):
            raise
        raise CheckpointError(
            f"The saved actions of the episodes under way cannot be played again ({type(error).__name__}: {error}). "
            "The checkpoint is damaged, or of another environment."
        ) from error


def _excerpts_where_different(text: str, other: str) -> str:
    """Returns the passages of two texts around their first difference.

    >>> _excerpts_where_different("You see 4 and 5.", "You see 7.")
    "'You see 4 and 5.' and 'You see 7.'"
    """
    pairs = enumerate(zip(text, other, strict=False))
    position = next((index for index, (char, other_char) in pairs if char != other_char), 0)
    first = max(0, position - 20)
    passage = slice(first, first + 60)
    return f"{text[passage]!r} and {other[passage]!r}"


def _require_same_choices(saved: list[str] | None, now: list[str] | None) -> None:
    """Rejects an agent that offers other choices than its checkpoint; None is free text.

    Raises:
        CheckpointError: The choices differ.
    """
    if saved == now:
        return
    was = "free text" if saved is None else str(saved)
    is_now = "free text" if now is None else str(now)
    change = describe_change("choices", was, is_now)
    raise CheckpointError(
        f"The agent offers other choices than when the checkpoint was saved: {change}. "
        "Offer those that were saved, begin another run in another folder, or pass allow_changes=['choices']."
    )
