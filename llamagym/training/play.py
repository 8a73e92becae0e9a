"""Plays episodes in all copies of an environment, step by step.

Every episode starts from a reset seed of its own, derived from the run's and counted in one order, so that a run can be
repeated and another seed plays other episodes. For learners that compare episodes of one start, `group_size` copies in
a row share these seeds: each copy takes the next one of its row when its episode ends, whether the others have ended or
not.

Copies may come in parts. Then the agent acts in one part while the others step.

A copy can be told to rest: once its episode has ended it begins no other, and nothing is done in it.
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
from ..agent.agent import Agent
from ..agent.text_interface import no_action_advice
from ..errors import ActionParseError, CheckpointError
from ..learners.base import Stats
from ..options import shortened
from ..saving.checkpoints import difference
from .environments import EnvGroup
from .episodes import Judge, PlayedEpisode, judge_rewards
from .infos import Info
from .policies import PolicyPlayer

logger = logging.getLogger(__name__)


class Taken(NamedTuple):
    """A step of a part of the copies.

    Attributes:
        turns: Actions that it took.
        ended: The episodes that it ended.
        stats: Statistics of an update; empty if there was none.
    """

    turns: int
    ended: list[PlayedEpisode]
    stats: Stats

    def with_others(self) -> Taken:
        """The steps of all processes that learn together, which have had the same update."""
        turns, ended = zip(*distributed.gather_objects((self.turns, self.ended)), strict=True)
        return Taken(sum(turns), list(chain(*ended)), self.stats)


class _Outcome(NamedTuple):
    """What came of an action in a copy."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: Info


@dataclass(frozen=True, slots=True)
class _Pending:
    """A part of the copies in the middle of a step: each copy's action, and what takes its turns back."""

    copies: EnvGroup
    actions: dict[int, Any]
    undo: ExitStack


class Play:
    """An agent in copies of an environment."""

    def __init__(
        self,
        agent: Agent | PolicyPlayer,
        parts: Sequence[EnvGroup],
        ids: Sequence[Hashable],
        seed: int | None,
        group_size: int = 1,
        judge: Judge | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Prepare the first episodes.

        Args:
            agent: Who acts.
            parts: Where: copies of an environment, in parts that are stepped apart.
            ids: The agent's names for the copies.
            seed: Of the episodes' reset seeds; None draws one.
            group_size: How many copies in a row share their seeds.
            judge: Rewards episodes once they have ended.
            share: (rank, number of processes). Together they play the same episodes as one process with all
                environments.
        """
        self._judge = judge
        self._agent, self._parts, self._ids = agent, parts, list(ids)
        self._entropy: Any = np.random.SeedSequence(seed).entropy
        count = len(self._ids)
        self._rank, self._ranks = share
        self._group_size, self._rows = group_size, count // group_size
        # The number of the group that each copy is in; a row's next group is as much further on as there are rows.
        self._groups = self._groups_from(0)
        # Copies whose episode has ended, until the next step resets them.
        self._over = np.zeros(count, dtype=bool)
        # Copies that are to rest, and those that do, since their episode has ended.
        self._told_to_rest, self._at_rest = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        # What was done and earned in each copy since its reset.
        self._actions: list[list[Any]] = [[] for _ in self._ids]
        self._rewards: list[list[float]] = [[] for _ in self._ids]
        self._observations: list[Any] = [None] * count
        self._infos: list[Info] = [{}] * count
        # How each episode began, where it cannot be played again.
        self._firsts: list[tuple[Any, Info]] = [(None, {})] * count
        # By the number of a group: how its first episode to end began, and how many have ended.
        self._starts: dict[int, tuple[str, int]] = {}
        self._has_warned = False
        # Parts in the middle of a step, the one that began first in front.
        self._pending: deque[_Pending] = deque()

    def _groups_from(self, first: int) -> Any:
        """The groups of all copies where those of all processes begin with a number."""
        return first + self._rank * self._rows + np.arange(len(self._ids)) // self._group_size

    def begin(self) -> None:
        """Start the first episodes."""
        self._at_rest = self._told_to_rest.copy()
        self._reset(np.ones(len(self._ids), dtype=bool), rests=self._at_rest)

    def rest(self, which: np.ndarray[Any, Any]) -> None:
        """Pauses these environments; other paused ones start their next episode.

        In each part one must go on. Environments that the caller made are never paused.

        Args:
            which: The environments to pause, bool (count,).
        """
        if self._parts[0].can_replay:
            self._told_to_rest[:] = which

    def step(self) -> Taken:
        """Act in every part that is not in the middle of a step, then end the step that began first.

        An update runs if that fills a batch. An error takes back all that is under way. A copy whose episode has ended
        is reset at the next step: should that fail, this one has been taken.
        """
        with self._taken_back_on_error():
            busy = [pending.copies for pending in self._pending]
            for copies in self._parts:
                if copies not in busy:
                    self._act(copies)
            return self._end_step()

    def end_steps(self) -> Iterator[Taken]:
        """End the steps under way one by one, without acting."""
        while self._pending:
            with self._taken_back_on_error():
                taken = self._end_step()
            yield taken

    @contextmanager
    def _taken_back_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # The latest first, since each knows what there was before it.
            while self._pending:
                self._pending.pop().undo.__exit__(type(error), error, error.__traceback__)
            raise

    def _act(self, copies: EnvGroup) -> None:
        """Act in a part, where an episode has ended in a new one; the part is in the middle of a step then."""
        agent, rows = self._agent, copies.rows
        waiting, here = self._over | self._at_rest, np.zeros_like(self._over)
        here[rows] = True
        begins, rests = here & waiting & ~self._told_to_rest, here & self._over & self._told_to_rest
        self._reset(begins | rests, rests=rests)
        self._over[rows] = False
        self._at_rest = (self._at_rest | rests) & ~begins
        acting = np.flatnonzero(here & ~self._at_rest).tolist()
        ids = [self._ids[i] for i in acting]
        with ExitStack() as undo:
            undo.enter_context(agent.undone_on_error(ids))
            observations, infos = [self._observations[i] for i in acting], [self._infos[i] for i in acting]
            actions = dict(zip(acting, agent.act_batch(observations, ids, infos), strict=True))
            if isinstance(agent, Agent) and any(action is None for action in actions.values()):
                raise ActionParseError(f"A reply names no action. {no_action_advice(agent)}")
            # A copy at rest does nothing, whatever it is sent.
            copies.send([actions.get(i, actions[acting[0]]) for i in range(rows.start, rows.stop)])
            self._pending.append(_Pending(copies, actions, undo.pop_all()))

    def _end_step(self) -> Taken:
        """End the step that began first."""
        agent, pending = self._agent, self._pending[0]
        copies, actions = pending.copies, pending.actions
        numbers = range(copies.rows.start, copies.rows.stop)
        # By the copy's number, of all that do not rest.
        outcomes = {
            i: _Outcome(seen, float(reward), terminated, truncated, info)
            for i, seen, reward, terminated, truncated, info in zip(numbers, *copies.receive(), strict=True)
            if i in actions
        }
        agent.assign_rewards([outcome.reward for outcome in outcomes.values()], [self._ids[i] for i in outcomes])
        done = [i for i, outcome in outcomes.items() if outcome.terminated or outcome.truncated]
        cut = [not outcomes[i].terminated for i in done]
        ended = [self._judged(self._played(i, actions[i], outcomes[i]), pending.undo) for i in done]
        stats: Stats = {}
        if done or self._ranks > 1:
            groups = [episode.seed if self._group_size > 1 else None for episode in ended]
            finals, infos = [outcomes[i].observation for i in done], [outcomes[i].info for i in done]
            ids = [self._ids[i] for i in done]
            stats = agent.terminate_episodes(ids, cut, finals, groups=groups, final_infos=infos)
        self._pending.popleft().undo.close()
        for i, outcome in outcomes.items():
            self._actions[i].append(actions[i])
            self._rewards[i].append(outcome.reward)
            self._observations[i], self._infos[i] = outcome.observation, outcome.info
        for i, episode in zip(done, ended, strict=True):
            self._compare_starts(int(self._groups[i]), episode)
            self._over[i] = True
            self._groups[i] += self._rows * self._ranks
            self._actions[i].clear()
            self._rewards[i].clear()
        return Taken(len(outcomes), ended, stats)

    def _played(self, copy: int, action: Any, last: _Outcome) -> PlayedEpisode:
        """The episode that ends with an action."""
        conversation = self._agent.conversation(self._ids[copy])
        was_cut = not last.terminated
        return PlayedEpisode(
            copy,
            self._seed(copy),
            (*self._actions[copy], action),
            (*self._rewards[copy], last.reward),
            tuple(conversation.turns) if conversation else (),
            tuple(conversation.messages) if conversation else (),
            not was_cut,
            was_cut,
            last.info,
        )

    def _compare_starts(self, group: int, episode: PlayedEpisode) -> None:
        """Warn, once, if an episode began otherwise than another one that had the same reset seed."""
        start = next((message["content"] for message in episode.messages if message["role"] == "user"), None)
        if self._group_size == 1 or start is None:
            return
        first, ended = self._starts.pop(group, (start, 0))
        if start != first and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Two episodes with one reset seed began differently (%s), but are compared as if they began alike. "
                "Let the environment's reset(seed=...) seed all its random numbers: call super().reset(seed=seed) and "
                "draw from self.np_random. If that is impossible, use algorithm='ppo'.",
                _difference(first, start),
            )
        if ended + 1 < self._group_size:
            self._starts[group] = first, ended + 1

    def _judged(self, episode: PlayedEpisode, undone: ExitStack) -> PlayedEpisode:
        """An episode with what the judge gives its turns added to its rewards; an error to come takes that back."""
        if self._judge is None:
            return episode
        given, env_id = judge_rewards(self._judge, episode), self._ids[episode.copy]
        if conversation := self._agent.conversation(env_id):
            undone.enter_context(conversation.rewards_undone_on_error())
            for turn, reward in enumerate(given):
                self._agent.assign_rewards([reward], [env_id], [turn])
        return replace(episode, rewards=tuple(map(sum, zip(episode.rewards, given, strict=True))))

    def awaits_free_text(self) -> bool:
        """Whether the first copy's observation offers no choices."""
        return isinstance(self._agent, Agent) and (
            self._agent.choices_for(self._observations[0], self._infos[0]) is None
        )

    def state_dict(self) -> dict[str, Any]:
        """Where every copy stands, of which none is in the middle of a step; of an agent only."""
        return {
            "entropy": self._entropy,
            "groups": self._groups.tolist(),
            "ranks": self._ranks,
            "next_group": 1 + max(distributed.gather_objects(int(self._groups.max()))),
            "actions": [self._parts[0].saved_actions(actions) for actions in self._actions],
            # Of an episode that has yet to begin nothing was seen.
            "texts": [
                None if over else text for text, over in zip(self._texts(), self._over | self._at_rest, strict=True)
            ],
            "choices": self._choices_record(list(zip(self._observations, self._infos, strict=True))),
            "first": None if self._parts[0].can_replay else self._first_record(),
            "told_to_rest": self._told_to_rest.tolist(),
        }

    def _first_record(self) -> dict[str, Any]:
        """What the episodes under way showed first, and the choices offered there."""
        assert isinstance(self._agent, Agent)
        return {
            "texts": [self._agent.text_of(*first) for first in self._firsts],
            "choices": self._choices_record(self._firsts),
        }

    def check_actions(self, state: Mapping[str, Any], starts_again: bool) -> None:
        """Rejects saved actions that the environments cannot take.

        Args:
            state: What `state_dict` returned.
            starts_again: Whether all episodes start again, so that no action is taken.

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
        """Bring the environments back to where they stood; where that fails, an episode starts again, which is logged.

        Args:
            state: What `state_dict` returned.
            starts_again: Whether all episodes start again, since these are other environments.
            may_change_choices: Whether the agent may offer other choices than before.

        Raises:
            CheckpointError: The agent offers other choices, and `may_change_choices` is False.
        """
        self._entropy = state["entropy"]
        if starts_again or state["ranks"] != self._ranks:
            logger.warning("Other environments or another number of processes: the episodes under way start again.")
            self._groups = self._groups_from(state["next_group"])
            self.begin()
            if starts_again and not may_change_choices:
                self._require_choices(state, is_replayed=False)
            return
        self._groups[:] = state["groups"]
        self._actions = [self._parts[0].actions_from(actions) for actions in state["actions"]]
        can_replay = self._parts[0].can_replay
        replay = dict(enumerate(self._actions)) if can_replay else None
        self._told_to_rest[:] = state["told_to_rest"]
        self._at_rest = self._told_to_rest & np.array([text is None for text in state["texts"]])
        with _named_if_damaged(replay):
            self._reset(np.ones(len(self._ids), dtype=bool), replay, self._at_rest)
        if can_replay:
            changed = np.array(
                [then not in (now, None) for now, then in zip(self._texts(), state["texts"], strict=True)]
            )
        else:
            changed = np.array([bool(actions) for actions in self._actions])
        if not may_change_choices:
            self._require_choices(state, can_replay)
        # What was earned stands in the conversations, which were saved.
        for rewards, env_id in zip(self._rewards, self._ids, strict=True):
            conversation = self._agent.conversation(env_id)
            rewards[:] = [turn.reward for turn in conversation.turns] if conversation else []
        if not changed.any():
            return
        logger.warning(
            "%d of %d episodes under way begin again: played again from their seeds, they lead elsewhere.",
            changed.sum(),
            len(changed),
        )
        for i in np.flatnonzero(changed).tolist():
            self._agent.discard_episodes([self._ids[i]])
            self._actions[i].clear()
            self._rewards[i].clear()
        self._reset(changed)

    def _reset(
        self,
        which: np.ndarray[Any, Any],
        replay: dict[int, list[Any]] | None = None,
        rests: np.ndarray[Any, Any] | None = None,
    ) -> None:
        """Begin new episodes in some copies, bool (count,), and play actions again there; or let them rest."""
        at_rest = [] if rests is None else np.flatnonzero(rests).tolist()
        for copies in self._parts:
            mine = which[copies.rows]
            if mine.any():
                seeds = [self._seed(copies.rows.start + i) if is_reset else 0 for i, is_reset in enumerate(mine)]
                observations, infos = copies.reset(seeds, None if mine.all() else mine, replay, at_rest)
                for i in np.flatnonzero(mine).tolist():
                    self._observations[copies.rows.start + i] = observations[i]
                    self._infos[copies.rows.start + i] = infos[i]
                    if not copies.can_replay:
                        self._firsts[copies.rows.start + i] = (observations[i], infos[i])

    def _texts(self) -> list[str]:
        """What each copy shows, in words."""
        assert isinstance(self._agent, Agent)
        return [self._agent.text_of(*seen) for seen in zip(self._observations, self._infos, strict=True)]

    def _choices_record(self, seen: Sequence[tuple[Any, Info]]) -> dict[str, Any]:
        """The choices that each environment's observation offers: distinct lists, and the index of each one's list.

        Args:
            seen: Each environment's observation and info.
        """
        assert isinstance(self._agent, Agent)
        distinct: dict[tuple[str, ...] | None, int] = {}
        indices: list[int | None] = []
        for i, is_paused in enumerate(self._over | self._at_rest):
            if is_paused:
                indices.append(None)
                continue
            choices = self._agent.choices_for(*seen[i])
            key = None if choices is None else tuple(choices)
            indices.append(distinct.setdefault(key, len(distinct)))
        lists = [None if choices is None else list(choices) for choices in distinct]
        return {"lists": lists, "indices": indices}

    def _require_choices(self, state: Mapping[str, Any], is_replayed: bool) -> None:
        """Reject an agent that offers other choices, or free text instead, than when the state was saved.

        Args:
            state: What `state_dict` returned.
            is_replayed: Whether the environments have been brought back to where they stood. Otherwise the beginnings
                of episodes are compared, which have the same seeds.

        Raises:
            CheckpointError: The agent offers other choices.
        """
        # Environments that cannot be played again are at the beginnings of their episodes.
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

    def _seed(self, copy: int) -> int:
        """The reset seed of a copy's episode; those of different runs have nothing to do with each other."""
        sequence = np.random.SeedSequence(self._entropy, spawn_key=(int(self._groups[copy]),))
        return int(sequence.generate_state(1)[0])


@contextmanager
def _named_if_damaged(replay: Mapping[int, Sequence[Any]] | None) -> Iterator[None]:
    """While open, actions that an environment cannot take are an error of the checkpoint that has them.

    Raises:
        CheckpointError: An environment cannot play the saved actions again.
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


def _difference(one: str, other: str) -> str:
    """Where two texts part.

    >>> _difference("You see 4 and 5.", "You see 7.")
    "'You see 4 and 5.' and 'You see 7.'"
    """
    same = next((place for place, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), 0)
    first = max(0, same - 20)
    return " and ".join(repr(text[first : first + 60]) for text in (one, other))


def _require_same_choices(saved: list[str] | None, now: list[str] | None) -> None:
    """Reject an agent that offers other choices than those of its checkpoint; None is free text.

    Raises:
        CheckpointError: It does.
    """
    if saved == now:
        return
    was, is_now = ("free text" if choices is None else str(choices) for choices in (saved, now))
    raise CheckpointError(
        f"The agent offers other choices than when the checkpoint was saved: {difference('choices', was, is_now)}. "
        "Offer those that were saved, begin another run in another folder, or pass allow_changes=['choices']."
    )
