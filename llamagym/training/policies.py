"""What plays beside an agent: any function of an observation, and chance."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import gymnasium
import numpy as np

from ..agent.text_interface import takes_info
from ..errors import ActionParseError, ConfigError, did_you_mean
from ..learners.base import Stats
from ..text.episode import Conversation

Policy = Callable[..., Any] | Literal["random"]
"""An action for an observation, and for its info where there is a parameter `info`; or evenly random actions."""


class RandomPolicy:
    """Draws evenly from an action space, among the actions that `info["action_mask"]` allows where it is given."""

    def __init__(self, space: gymnasium.Space[Any], seed: int | None) -> None:
        """Draw from a copy of a space, with a seed of its own."""
        self._space = copy.deepcopy(space)
        self._space.seed(seed)

    def __call__(self, observation: Any, info: Mapping[str, Any]) -> Any:
        """An action."""
        mask = info.get("action_mask")
        if mask is None:
            return self._space.sample()
        if isinstance(mask, tuple):
            return self._space.sample(mask=tuple(np.asarray(part, dtype=np.int8) for part in mask))
        return self._space.sample(mask=np.asarray(mask, dtype=np.int8))


class PolicyPlayer:
    """A policy that is no agent, as `Play` needs it: it says nothing and learns nothing."""

    def __init__(self, policy: Policy, space: gymnasium.Space[Any], seed: int | None) -> None:
        """Let a policy act in environments with an action space; `seed` is that of random actions.

        Raises:
            ConfigError: It is a word that names none.
        """
        if isinstance(policy, str):
            if policy != "random":
                raise ConfigError(f"agent={policy!r}. {did_you_mean(policy, ['random'])}")
            policy = RandomPolicy(space, seed)
        self._policy: Callable[..., Any] = policy
        self._is_informed = takes_info(policy)

    def act_batch(
        self, observations: Sequence[Any], env_ids: Sequence[Hashable], infos: Sequence[Mapping[str, Any]]
    ) -> list[Any]:
        """An action for each observation.

        Raises:
            ActionParseError: The policy gives none.
        """
        actions = [
            self._policy(observation, info=info) if self._is_informed else self._policy(observation)
            for observation, info in zip(observations, infos, strict=True)
        ]
        if any(action is None for action in actions):
            raise ActionParseError(f"The policy {self._policy!r} returned None. Return an action of the environment.")
        return actions

    def assign_rewards(self, *given: Any) -> None:
        """Learn nothing."""

    def terminate_episodes(self, *given: Any, **options: Any) -> Stats:
        """Learn nothing."""
        return {}

    def discard_episodes(self, env_ids: Sequence[Hashable]) -> None:
        """There are none."""

    def undone_on_error(self, env_ids: Sequence[Hashable]) -> AbstractContextManager[None]:
        """There is nothing to undo."""
        return nullcontext()

    def conversation(self, env_id: Hashable) -> Conversation | None:
        """There is none."""
        return None
