"""What a user defines: how an observation reads as text, and which action a reply names."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ..errors import ConfigError

logger = logging.getLogger(__name__)

# Methods of LlamaGym's Agent that this library never calls, and what does their work here.
_NEVER_CALLED = {
    "llm": "Replies come from agent.policy; sampling is set by generate_config_dict.",
    "format_episode_for_ppo": "Turns keep the token ids that were sampled; rewards go to the turns that earned them.",
    "train_batch": "A learner updates the weights: agent.learner, chosen by algorithm=.",
}


# Methods that are given what the environment says as info where they have a parameter of that name.
_MAY_TAKE_INFO = ("format_observation", "get_action_choices", "fallback_action")


class TextInterface(ABC):
    """An environment as a conversation; three methods must be defined, two may be.

    `format_observation`, `get_action_choices` and `fallback_action` may have a further parameter `info`: it is given
    the environment's, or an empty dictionary where a loop passes none.
    """

    _has_warned = False
    _informed: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Note which methods take `info`, and refuse those that LlamaGym called and this library does not.

        Raises:
            ConfigError: The class defines one.
        """
        super().__init_subclass__(**kwargs)
        for name in _NEVER_CALLED.keys() & vars(cls).keys():
            raise ConfigError(
                f"{cls.__name__} defines {name}(), which LlamaGym called and this library does not. "
                f"{_NEVER_CALLED[name]} Remove it, or rename it if it is a helper of your own."
            )
        cls._informed = frozenset(name for name in _MAY_TAKE_INFO if takes_info(getattr(cls, name)))

    @abstractmethod
    def get_system_prompt(self) -> str:
        """What every conversation opens with; empty for no system prompt."""

    @abstractmethod
    def format_observation(self, observation: Any) -> str:
        """An observation as text."""

    @abstractmethod
    def extract_action(self, response: str) -> Any:
        """The action that a reply names.

        Raises:
            ActionParseError: It names none; a ValueError other than ConfigError, or returning None, says the same.
        """

    def get_action_choices(self, observation: Any) -> list[str] | None:
        """The replies allowed for this observation, or None for free text."""
        return None

    def fallback_action(self, observation: Any) -> Any:
        """What to do when a reply names no action; None unless defined."""
        return None

    def text_of(self, observation: Any, info: Mapping[str, Any] | None = None) -> str:
        """An observation as text, by `format_observation`."""
        return self.format_observation(observation, **self._told("format_observation", info))

    @property
    def has_fallback(self) -> bool:
        """Whether the class says what to do when a reply names no action."""
        return type(self).fallback_action is not TextInterface.fallback_action

    @property
    def takes_any_reply(self) -> bool:
        """Whether even an empty reply names an action."""
        try:
            return self.extract_action("") is not None
        except Exception:  # whatever the user's code makes of it
            return False

    def _told(self, method: str, info: Mapping[str, Any] | None) -> dict[str, Any]:
        return {"info": {} if info is None else info} if method in self._informed else {}

    def _extract(self, text: str) -> Any:
        try:
            return self.extract_action(text)
        except ConfigError:
            # A mistake in the call, such as a space that parse_action cannot read: no reply would name an action.
            raise
        except ValueError as problem:
            logger.debug("invalid reply: %s", problem)
            return None

    def _fallback(self, observation: Any, text: str, info: Mapping[str, Any] | None) -> Any:
        action = self.fallback_action(observation, **self._told("fallback_action", info))
        if action is None and not self._has_warned:
            self._has_warned = True
            logger.warning("Reply %r names no action, so the action is None. %s", text, no_action_advice(self))
        return action


def takes_info(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter `info`."""
    try:
        return "info" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        # Some functions that are written in C do not say.
        return False


def no_action_advice(interface: TextInterface) -> str:
    """What to do about replies that name no action."""
    return (
        f"{type(interface).__name__} does not say what to do then: define fallback_action(observation), or restrict "
        "replies with get_action_choices(observation)."
    )
