"""Plays episodes in all copies of an environment, step by step.

Every episode starts from a reset seed of its own, derived from the run's and counted in one order, so that a run can be
repeated and another seed plays other episodes. For learners that compare episodes of one start, `group_size` copies in
a row share these seeds: each copy takes the next one of its row when its episode ends, whether the others have ended or
not.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ..agent import Agent
from ..conversation.interface import no_action_advice
from ..errors import ActionParseError
from ..learners import ranks
from ..learners.base import Stats
from .environments import Copies

logger = logging.getLogger(__name__)


class Play:
    """An agent in copies of an environment."""

    def __init__(
        self,
        agent: Agent,
        copies: Copies,
        ids: Sequence[Hashable],
        seed: int | None,
        group_size: int = 1,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Prepare the first episodes.

        Args:
            agent: Who acts.
            copies: Where.
            ids: The agent's names for the copies.
            seed: Of the episodes' reset seeds; None draws one.
            group_size: How many copies in a row share their seeds.
            share: Which of how many processes this is: together they play what one does with as many copies.
        """
        self._agent, self._copies, self._ids = agent, copies, list(ids)
        self._entropy: Any = np.random.SeedSequence(seed).entropy
        self._rank, self._ranks = share
        self._group_size, self._rows = group_size, copies.count // group_size
        # The number of the group that each copy is in; a row's next group is as much further on as there are rows.
        self._groups = self._groups_from(0)
        self._totals = np.zeros(copies.count)
        # Copies whose episode has ended, until the next step resets them.
        self._over = np.zeros(copies.count, dtype=bool)
        # What was done in each copy since its reset.
        self._actions: list[list[Any]] = [[] for _ in self._ids]
        self._observations: list[Any] = []

    def _groups_from(self, first: int) -> Any:
        """The groups of all copies where those of all processes begin with a number."""
        return first + self._rank * self._rows + np.arange(self._copies.count) // self._group_size

    def begin(self) -> None:
        """Start the first episodes."""
        self._observations = self._copies.reset(self._seeds())

    def step(self) -> tuple[list[tuple[int, float]], Stats]:
        """One step in every copy, and an update if that fills a batch; an error takes the step back.

        A copy whose episode has ended is reset at the next step: should that fail, this one has been taken.

        Returns:
            (copy, return) of the episodes that ended, and the statistics of an update.
        """
        agent, ids, seeds = self._agent, self._ids, self._seeds()
        if self._over.any():
            self._observations = self._copies.reset(seeds, self._over)
            self._over[:] = False
        with agent.undone_on_error(ids):
            actions = agent.act_batch(self._observations, ids)
            if any(action is None for action in actions):
                raise ActionParseError(f"A reply names no action. {no_action_advice(agent)}")
            observations, rewards, terminated, truncated = self._copies.step(actions)
            agent.assign_rewards(rewards.tolist(), ids)
            over = terminated | truncated
            done = np.flatnonzero(over).tolist()
            stats: Stats = {}
            if done or self._ranks > 1:
                cut = [bool(truncated[i] and not terminated[i]) for i in done]
                groups = [seeds[i] if self._group_size > 1 else None for i in done]
                finals = [observations[i] for i in done]
                stats = agent.terminate_episodes([ids[i] for i in done], cut, finals, groups=groups)
        self._totals += rewards
        ended = [(i, float(self._totals[i])) for i in done]
        for i, action in enumerate(actions):
            self._actions[i].append(action)
        self._observations, self._over = observations, over
        self._totals[done] = 0.0
        self._groups[done] += self._rows * self._ranks
        for i in done:
            self._actions[i].clear()
        return ended, stats

    def state_dict(self) -> dict[str, Any]:
        """Where every copy stands."""
        return {
            "entropy": self._entropy,
            "groups": self._groups.tolist(),
            "ranks": self._ranks,
            "next_group": 1 + max(ranks.gather(int(self._groups.max()))),
            "totals": self._totals.tolist(),
            "actions": [self._copies.saved_actions(actions) for actions in self._actions],
            # Of an episode that has yet to begin nothing was seen.
            "texts": [
                None if over else self._agent.format_observation(observation)
                for observation, over in zip(self._observations, self._over, strict=True)
            ],
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Bring the copies back to where they stood; where that fails, an episode begins anew, and that is said."""
        self._entropy = state["entropy"]
        if state.get("ranks", 1) != self._ranks:
            logger.warning("Another number of processes goes on, so the episodes under way begin anew.")
            self._groups = self._groups_from(state["next_group"])
            self.begin()
            return
        self._groups[:], self._totals[:] = state["groups"], state["totals"]
        self._actions = [self._copies.actions_from(actions) for actions in state["actions"]]
        self._observations = self._copies.reset(self._seeds(), replay=dict(enumerate(self._actions)))
        texts = [self._agent.format_observation(observation) for observation in self._observations]
        changed = np.array([then not in (now, None) for now, then in zip(texts, state["texts"], strict=True)])
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
        self._totals[changed] = 0.0
        self._observations = self._copies.reset(self._seeds(), changed)

    def _seeds(self) -> list[int]:
        """The reset seed of each copy's episode; those of different runs have nothing to do with each other."""
        sequences = (np.random.SeedSequence(self._entropy, spawn_key=(number,)) for number in self._groups.tolist())
        return [int(sequence.generate_state(1)[0]) for sequence in sequences]
