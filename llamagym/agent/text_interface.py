"""The methods that a user's agent defines, how the library calls them, and the action masks that exclude choices."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from numbers import Integral
from typing import Any

import numpy as np

from ..errors import ConfigError

logger = logging.getLogger(__name__)

# Methods of LlamaGym's Agent that this library never calls, and where to do their work instead.
_NEVER_CALLED = {
    "llm": "Replies come from agent.policy; sampling is set by generate_config_dict.",
    "format_episode_for_ppo": "Turns keep the sampled token ids; rewards go to the turns that earned them.",
    "train_batch": "A learner updates the weights: agent.learner, chosen by learner=.",
}
# Equivalents of methods of Stable-Baselines3 and TRL.
EQUIVALENTS = {
    "learn": "Train with llamagym.train(agent, env, minutes=10), or episodes= or turns=.",
    "predict": "Act with agent.act(observation), after agent.eval() for the likeliest action.",
    "set_env": "The environment is an argument: llamagym.train(agent, env, ...), llamagym.evaluate(agent, env, ...).",
    "get_env": "The environment is an argument: llamagym.train(agent, env, ...), llamagym.evaluate(agent, env, ...).",
    "generate": "Act with agent.act(observation); agent.policy.model has the model.",
    "step": "Learn from an episode with agent.terminate_episode(), or by TRL's step with llamagym.PPOTrainer.",
}
# Methods that receive the environment's info if they have a parameter of that name.
_MAY_TAKE_INFO = ("format_observation", "get_action_choices", "fallback_action")


class TextInterface(ABC):
    """An environment as a conversation: three methods must be defined, two may be.

    `format_observation`, `get_action_choices` and `fallback_action` may have a further parameter `info`. It receives
    the environment's info, or an empty dictionary if a loop passes none.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Rejects methods that LlamaGym called and this library does not.

        Raises:
            ConfigError: The class defines one.
        """
        super().__init_subclass__(**kwargs)
        for name in _NEVER_CALLED.keys() & vars(cls).keys():
            raise ConfigError(
                f"{cls.__name__} defines {name}(), which LlamaGym called and this library does not. "
                f"{_NEVER_CALLED[name]} Remove it, or rename it if it is a helper of your own."
            )

    @abstractmethod
    def get_system_prompt(self) -> str:
        """Returns the first message of every conversation; an empty string for no system prompt."""

    @abstractmethod
    def format_observation(self, observation: Any) -> str:
        """Returns an observation as text."""

    @abstractmethod
    def extract_action(self, response: str) -> Any:
        """Returns the action that a reply names.

        Raises:
            ActionParseError: The reply names no action. Any ValueError other than ConfigError, or returning None, has
                the same meaning.
        """

    def get_action_choices(self, observation: Any) -> list[str] | None:
        """Returns the replies allowed for this observation, or None for free text."""
        return None

    def fallback_action(self, observation: Any) -> Any:
        """Returns the action to take when a reply names none; None unless defined."""
        return None


class Hooks:
    """Calls the methods of a user's `TextInterface`: adds `info` where it is a parameter, and handles invalid replies.

    Attributes:
        response_prefix: Fixed text that every reply begins with.
    """

    def __init__(self, interface: TextInterface, response_prefix: str) -> None:
        """Creates the hooks of an interface."""
        self.response_prefix = response_prefix
        self._interface = interface
        self._masks = ActionMasks(self._action_of_choice)
        self._has_warned = False
        cls = type(interface)
        self._take_info = frozenset(name for name in _MAY_TAKE_INFO if takes_info(getattr(cls, name)))

    @property
    def has_fallback(self) -> bool:
        """Whether the class defines `fallback_action`."""
        return type(self._interface).fallback_action is not TextInterface.fallback_action

    @property
    def takes_any_reply(self) -> bool:
        """Whether even an empty reply names an action."""
        try:
            return self._interface.extract_action("") is not None
        except Exception:  # the user's method may raise anything for an unusual reply
            return False

    def system_prompt(self) -> str:
        """Returns the system prompt."""
        return self._interface.get_system_prompt()

    def text(self, observation: Any, info: Mapping[str, Any] | None = None) -> str:
        """Returns an observation as text."""
        return self._interface.format_observation(observation, **self._info_argument("format_observation", info))

    def choices(self, observation: Any, info: Mapping[str, Any] | None = None) -> list[str] | None:
        """Returns the allowed replies, without those that `info["action_mask"]` excludes; None for free text.

        Raises:
            ConfigError: The mask excludes all choices.
        """
        offered = self._interface.get_action_choices(observation, **self._info_argument("get_action_choices", info))
        mask = None if info is None else info.get("action_mask")
        if offered is None or mask is None:
            return offered
        return self._masks.possible(offered, mask)

    def action(self, reply: str) -> Any:
        """Returns the action that a reply, with its prefix, names; None if it names none.

        Raises:
            ConfigError: The user's `extract_action` is mistaken, such as by passing a space that `parse_action` cannot
                read: then no reply would name an action.
        """
        try:
            return self._interface.extract_action(reply)
        except ConfigError:
            raise
        except ValueError as problem:
            logger.debug("invalid reply: %s", problem)
            return None

    def _action_of_choice(self, choice: str) -> Any:
        return self.action(self.response_prefix + choice)

    def fallback(self, observation: Any, reply: str, info: Mapping[str, Any] | None) -> Any:
        """Returns the action to take after a reply that names none; warns once if the class defines no fallback."""
        action = self._interface.fallback_action(observation, **self._info_argument("fallback_action", info))
        if action is None and not self._has_warned:
            self._has_warned = True
            logger.warning("Reply %r names no action, so the action is None. %s", reply, self.no_action_advice())
        return action

    def no_action_advice(self) -> str:
        """Returns what to do about replies that name no action."""
        return (
            f"{type(self._interface).__name__} has no fallback: define fallback_action(observation), or restrict "
            "replies with get_action_choices(observation)."
        )

    def _info_argument(self, method: str, info: Mapping[str, Any] | None) -> dict[str, Any]:
        if method not in self._take_info:
            return {}
        return {"info": {} if info is None else info}


def takes_info(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter `info`."""
    try:
        return "info" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        # Some functions written in C have no signature.
        return False


# Beyond this many distinct lists, choices are not static; the cached orders are dropped.
_MOST_ORDERS = 256


class ActionMasks:
    """Reads masks as Gymnasium's spaces define them: 1 where an action is possible.

    A mask has one entry for each action of a Discrete space, or is a tuple with a mask for each part of a MultiDiscrete
    space. It applies if as many choices are offered as it has entries. Choices that name consecutive integers may stand
    in any order; all others must stand in the order of their actions. A mask of another size is ignored, because then
    the user's `get_action_choices` has already filtered the choices.
    """

    def __init__(self, action_of: Callable[[str], Any]) -> None:
        """Creates a reader of masks.

        Args:
            action_of: Function from a choice to its action.
        """
        self._action_of = action_of
        self._orders: dict[tuple[str, ...], list[int]] = {}

    def possible(self, choices: Sequence[str], mask: Any) -> list[str]:
        """Returns the choices that a mask allows.

        Raises:
            ConfigError: The mask excludes all of them.
        """
        flags = _flatten(mask)
        if len(flags) != len(choices):
            return list(choices)
        order = self._order(tuple(choices))
        allowed = [choice for choice, index in zip(choices, order, strict=True) if flags[index]]
        if not allowed:
            raise ConfigError(
                f'info["action_mask"] rules out all choices, {list(choices)}. A state in which nothing can be done '
                "should end the episode; otherwise correct the mask."
            )
        return allowed

    def _order(self, choices: tuple[str, ...]) -> list[int]:
        """Returns the index of each choice's entry in a mask."""
        if choices not in self._orders:
            if len(self._orders) == _MOST_ORDERS:
                self._orders.clear()
            self._orders[choices] = self._computed_order(choices)
        return self._orders[choices]

    def _computed_order(self, choices: tuple[str, ...]) -> list[int]:
        in_order = list(range(len(choices)))
        actions = [self._action_of(choice) for choice in choices]
        if not all(isinstance(action, Integral) for action in actions):
            return in_order
        first = min(actions)
        shifted = [int(action - first) for action in actions]
        return shifted if sorted(shifted) == in_order else in_order


def _flatten(mask: Any) -> np.ndarray:
    """Returns a mask as flags, bool (actions,).

    A mask of several parts becomes one flag for each combination; the last part changes fastest.
    """
    if isinstance(mask, (tuple, list)) and mask and all(np.ndim(part) == 1 for part in mask):
        mask = reduce(np.multiply.outer, [np.asarray(part) for part in mask])
    return np.asarray(mask).astype(bool).ravel()
