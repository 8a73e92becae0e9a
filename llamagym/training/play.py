"""Plays episodes in all copies of an environment, step by step.

Every episode starts from a reset seed of its own, derived from the run's and counted in one order, so that a run can be
repeated and another seed plays other episodes. For learners that compare episodes of one start, `group_size` copies in
a row share these seeds: each copy takes the next one of its row when its episode ends, whether the others have ended or
not.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from ..agent import Agent
from ..conversation.interface import no_action_advice
from ..errors import ActionParseError
from ..learners.base import Stats
from .environments import Copies
from .infos import Info
from .played import Judge, PlayedEpisode, verdict
from .policies import PolicyPlayer

logger = logging.getLogger(__name__)


class Play:
    """An agent in copies of an environment."""

    def __init__(
        self,
        agent: Agent | PolicyPlayer,
        copies: Copies,
        ids: Sequence[Hashable],
        seed: int | None,
        group_size: int = 1,
        judge: Judge | None = None,
    ) -> None:
        """Prepare the first episodes.

        Args:
            agent: Who acts.
            copies: Where.
            ids: The agent's names for the copies.
            seed: Of the episodes' reset seeds; None draws one.
            group_size: How many copies in a row share their seeds.
            judge: Rewards episodes once they have ended.
        """
        self._judge = judge
        self._agent, self._copies, self._ids = agent, copies, list(ids)
        self._entropy: Any = np.random.SeedSequence(seed).entropy
        self._group_size, self._rows = group_size, copies.count // group_size
        # The number of the group that each copy is in; a row's next group is `rows` further on.
        self._groups = np.arange(copies.count) // group_size
        # Copies whose episode has ended, until the next step resets them.
        self._over = np.zeros(copies.count, dtype=bool)
        # What was done and earned in each copy since its reset.
        self._actions: list[list[Any]] = [[] for _ in self._ids]
        self._rewards: list[list[float]] = [[] for _ in self._ids]
        self._observations: list[Any] = []
        self._infos: list[Info] = []

    def begin(self) -> None:
        """Start the first episodes."""
        self._observations, self._infos = self._copies.reset(self._seeds())

    def step(self) -> tuple[list[PlayedEpisode], Stats]:
        """One step in every copy, and an update if that fills a batch; an error takes the step back.

        A copy whose episode has ended is reset at the next step: should that fail, this one has been taken.

        Returns:
            The episodes that ended, and the statistics of an update.
        """
        agent, ids, seeds = self._agent, self._ids, self._seeds()
        if self._over.any():
            self._reset(self._over)
            self._over[:] = False
        with ExitStack() as undone:
            undone.enter_context(agent.undone_on_error(ids))
            actions = agent.act_batch(self._observations, ids, self._infos)
            if isinstance(agent, Agent) and any(action is None for action in actions):
                raise ActionParseError(f"A reply names no action. {no_action_advice(agent)}")
            observations, rewards, terminated, truncated, infos = self._copies.step(actions)
            agent.assign_rewards(rewards.tolist(), ids)
            over = terminated | truncated
            done = np.flatnonzero(over).tolist()
            cut = [bool(truncated[i] and not terminated[i]) for i in done]
            ended = [
                self._judged(self._played(i, actions[i], float(rewards[i]), seeds[i], was_cut, infos[i]), undone)
                for i, was_cut in zip(done, cut, strict=True)
            ]
            stats: Stats = {}
            if done:
                groups = [seeds[i] if self._group_size > 1 else None for i in done]
                finals, said = [observations[i] for i in done], [infos[i] for i in done]
                stats = agent.terminate_episodes([ids[i] for i in done], cut, finals, groups=groups, final_infos=said)
        for i, (action, reward) in enumerate(zip(actions, rewards.tolist(), strict=True)):
            self._actions[i].append(action)
            self._rewards[i].append(reward)
        self._observations, self._infos, self._over = observations, infos, over
        self._groups[done] += self._rows
        for i in done:
            self._actions[i].clear()
            self._rewards[i].clear()
        return ended, stats

    def _played(
        self, copy: int, action: Any, reward: float, seed: int, was_cut: bool, info: Mapping[str, Any]
    ) -> PlayedEpisode:
        """The episode that ends with an action."""
        conversation = self._agent.conversation(self._ids[copy])
        return PlayedEpisode(
            copy,
            seed,
            (*self._actions[copy], action),
            (*self._rewards[copy], reward),
            tuple(conversation.turns) if conversation else (),
            tuple(conversation.messages) if conversation else (),
            not was_cut,
            was_cut,
            info,
        )

    def _judged(self, episode: PlayedEpisode, undone: ExitStack) -> PlayedEpisode:
        """An episode with what the judge gives its turns added to its rewards; an error to come takes that back."""
        if self._judge is None:
            return episode
        given, env_id = verdict(self._judge, episode), self._ids[episode.copy]
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
        """Where every copy stands; of an agent only."""
        return {
            "entropy": self._entropy,
            "groups": self._groups.tolist(),
            "actions": [self._copies.saved_actions(actions) for actions in self._actions],
            # Of an episode that has yet to begin nothing was seen.
            "texts": [None if over else text for text, over in zip(self._texts(), self._over, strict=True)],
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Bring the copies back to where they stood; where that fails, an episode begins anew, and that is said."""
        self._entropy = state["entropy"]
        self._groups[:] = state["groups"]
        self._actions = [self._copies.actions_from(actions) for actions in state["actions"]]
        replay = dict(enumerate(self._actions)) if self._copies.can_replay else None
        self._observations, self._infos = self._copies.reset(self._seeds(), replay=replay)
        if self._copies.can_replay:
            changed = np.array(
                [then not in (now, None) for now, then in zip(self._texts(), state["texts"], strict=True)]
            )
        else:
            changed = np.array([bool(actions) for actions in self._actions])
        # What was earned stands in the conversations, which were saved.
        for rewards, env_id in zip(self._rewards, self._ids, strict=True):
            conversation = self._agent.conversation(env_id)
            rewards[:] = [turn.reward for turn in conversation.turns] if conversation else []
        if not changed.any():
            return
        logger.warning(
            "%d of %d episodes under way begin anew: played again from their seeds, they lead elsewhere.",
            changed.sum(),
            len(changed),
        )
        for i in np.flatnonzero(changed).tolist():
            self._agent.discard_episodes([self._ids[i]])
            self._actions[i].clear()
            self._rewards[i].clear()
        self._reset(changed)

    def _reset(self, which: np.ndarray[Any, Any]) -> None:
        self._observations, infos = self._copies.reset(self._seeds(), which)
        for i in np.flatnonzero(which).tolist():
            self._infos[i] = infos[i]

    def _texts(self) -> list[str]:
        """What each copy shows, in words."""
        assert isinstance(self._agent, Agent)
        return [self._agent.text_of(*seen) for seen in zip(self._observations, self._infos, strict=True)]

    def _seeds(self) -> list[int]:
        """The reset seed of each copy's episode; those of different runs have nothing to do with each other."""
        sequences = (np.random.SeedSequence(self._entropy, spawn_key=(number,)) for number in self._groups.tolist())
        return [int(sequence.generate_state(1)[0]) for sequence in sequences]
