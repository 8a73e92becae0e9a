"""Players: agents, functions of an observation, and random actions behind one interface."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import gymnasium
import numpy as np

from ..agent.agent import Agent, collector_of
from ..agent.text_interface import Hooks, takes_info
from ..errors import ActionParseError, ConfigError, did_you_mean
from ..learners.base import Stats
from ..text.episode import Conversation

Policy = Callable[..., Any] | Literal["random"]
"""A function from an observation (and the info, if it has a parameter `info`) to an action; or random actions."""


class Player(Protocol):
    """Acts in environments, and may learn from the rewards.

    Attributes:
        hooks: The methods of an agent that format observations and offer choices; None for other policies.
    """

    hooks: Hooks | None

    def act_batch(
        self, observations: Sequence[Any], env_ids: Sequence[Hashable], infos: Sequence[Mapping[str, Any]]
    ) -> list[Any]:
        """Returns one action per observation.

        Raises:
            ActionParseError: The player has no action for an observation.
        """

    def assign_rewards(
        self, rewards: Sequence[float], env_ids: Sequence[Hashable], turns: Sequence[int] | None = None
    ) -> None:
        """Adds each environment's reward to one of its turns, by default the last."""

    def terminate_episodes(
        self,
        env_ids: Sequence[Hashable],
        truncated: Sequence[bool],
        final_observations: Sequence[Any],
        groups: Sequence[Hashable | None],
        final_infos: Sequence[Mapping[str, Any]],
    ) -> Stats:
        """Ends episodes; returns the statistics of an update, empty if none ran."""

    def discard_episodes(self, env_ids: Sequence[Hashable]) -> None:
        """Drops unfinished episodes."""

    def undone_on_error(self, env_ids: Sequence[Hashable]) -> AbstractContextManager[None]:
        """While open, an exception undoes the turns of these environments."""

    def conversation(self, env_id: Hashable) -> Conversation | None:
        """Returns the current conversation of an environment; None for a policy without conversations."""


class AgentPlayer:
    """An agent as a `Player`; it calls the agent's own methods, which a subclass may override."""

    def __init__(self, agent: Agent) -> None:
        """Wraps an agent."""
        self._agent = agent
        self._actor = collector_of(agent).actor
        self.hooks: Hooks | None = self._actor.hooks

    def act_batch(
        self, observations: Sequence[Any], env_ids: Sequence[Hashable], infos: Sequence[Mapping[str, Any]]
    ) -> list[Any]:
        """Returns one action per observation.

        Raises:
            ActionParseError: A reply names no action, and the agent defines no fallback.
        """
        actions = list(self._agent.act_batch(observations, env_ids, infos))
        if any(action is None for action in actions):
            raise ActionParseError(f"A reply names no action. {self._actor.hooks.no_action_advice()}")
        return actions

    def assign_rewards(
        self, rewards: Sequence[float], env_ids: Sequence[Hashable], turns: Sequence[int] | None = None
    ) -> None:
        """Adds each environment's reward to one of its turns, by default the last."""
        self._agent.assign_rewards(rewards, env_ids, turns)

    def terminate_episodes(
        self,
        env_ids: Sequence[Hashable],
        truncated: Sequence[bool],
        final_observations: Sequence[Any],
        groups: Sequence[Hashable | None],
        final_infos: Sequence[Mapping[str, Any]],
    ) -> Stats:
        """Ends episodes; returns the statistics of an update, empty if none ran."""
        return self._agent.terminate_episodes(
            env_ids, truncated, final_observations, groups=groups, final_infos=final_infos
        )

    def discard_episodes(self, env_ids: Sequence[Hashable]) -> None:
        """Drops unfinished episodes."""
        self._actor.discard_episodes(env_ids)

    def undone_on_error(self, env_ids: Sequence[Hashable]) -> AbstractContextManager[None]:
        """While open, an exception undoes the turns of these environments."""
        return self._actor.undone_on_error(env_ids)

    def conversation(self, env_id: Hashable) -> Conversation:
        """Returns the current conversation of an environment."""
        return self._actor.conversation(env_id)


class RandomPolicy:
    """Draws uniformly from an action space, among the actions that `info["action_mask"]` allows if it is given."""

    def __init__(self, space: gymnasium.Space[Any], seed: int | None) -> None:
        """Copies a space and seeds the copy."""
        self._space = copy.deepcopy(space)
        self._space.seed(seed)

    def __call__(self, observation: Any, info: Mapping[str, Any]) -> Any:
        """Returns an action."""
        mask = info.get("action_mask")
        if mask is None:
            return self._space.sample()
        if isinstance(mask, tuple):
            return self._space.sample(mask=tuple(np.asarray(part, dtype=np.int8) for part in mask))
        return self._space.sample(mask=np.asarray(mask, dtype=np.int8))


class PolicyPlayer:
    """A policy that is not an agent as a `Player`: it has no conversations and does not learn."""

    hooks: Hooks | None = None

    def __init__(self, policy: Policy, space: gymnasium.Space[Any], seed: int | None) -> None:
        """Wraps a policy.

        Args:
            policy: The policy.
            space: Action space of the environments.
            seed: Seed of random actions.

        Raises:
            ConfigError: The policy is a string other than "random".
        """
        if isinstance(policy, str):
            if policy != "random":
                raise ConfigError(f"agent={policy!r}. {did_you_mean(policy, ['random'])}")
            policy = RandomPolicy(space, seed)
        self._policy: Callable[..., Any] = policy
        self._takes_info = takes_info(policy)

    def act_batch(
        self, observations: Sequence[Any], env_ids: Sequence[Hashable], infos: Sequence[Mapping[str, Any]]
    ) -> list[Any]:
        """Returns one action per observation.

        Raises:
            ActionParseError: The policy returns None.
        """
        actions = []
        for observation, info in zip(observations, infos, strict=True):
            action = self._policy(observation, info=info) if self._takes_info else self._policy(observation)
            if action is None:
                raise ActionParseError(
                    f"The policy {self._policy!r} returned None. Return an action of the environment."
                )
            actions.append(action)
        return actions

    def assign_rewards(self, *args: Any) -> None:
        """Does nothing."""

    def terminate_episodes(self, *args: Any, **kwargs: Any) -> Stats:
        """Does nothing."""
        return {}

    def discard_episodes(self, env_ids: Sequence[Hashable]) -> None:
        """Does nothing."""

    def undone_on_error(self, env_ids: Sequence[Hashable]) -> AbstractContextManager[None]:
        """Returns a context in which there is nothing to undo."""
        return nullcontext()

    def conversation(self, env_id: Hashable) -> Conversation | None:
        """Returns None."""
        return None
