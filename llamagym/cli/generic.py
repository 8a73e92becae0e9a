"""A generic agent, defined by an environment's spaces and the user's wording."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
from gymnasium import spaces

from ..agent.agent import Agent
from ..errors import ConfigError
from ..text.observations import describe, part_names
from ..text.spaces import name_actions, parse_action

# A system prompt lists up to this many actions.
_MAX_LISTED_ACTIONS = 32


@dataclass(frozen=True)
class Wording:
    """A user's description of an environment; None means a default from the spaces.

    Attributes:
        system_prompt: System prompt of every conversation.
        observation: Template of an observation's text, with the placeholder `{observation}`.
        observation_names: Names of the observation's parts.
        actions: Names of the actions, as for `name_actions`.
    """

    system_prompt: str | None = None
    observation: str | None = None
    observation_names: list[str] | None = None
    actions: list[Any] | None = None


class GenericAgent(Agent):
    """Describes observations as named numbers and texts, and offers the actions as choices if they can be listed.

    `generic_agent` creates a subclass for an environment.
    """

    response_prefix = ""
    system_prompt: ClassVar[str]
    template: ClassVar[str]
    observation_space: ClassVar[spaces.Space[Any]]
    observation_names: ClassVar[list[str]]
    action_space: ClassVar[spaces.Space[Any]]
    actions: ClassVar[dict[str, Any] | None]
    """Actions by name; None if they cannot be listed."""
    fallback: ClassVar[Any]
    """Action after a reply in free text that names no action."""

    def get_system_prompt(self) -> str:
        """Returns the user's system prompt, or one with the environment's name and the format of replies."""
        return self.system_prompt

    def format_observation(self, observation: Any) -> str:
        """Describes the observation's parts with their names."""
        description = describe(observation, self.observation_space, self.observation_names)
        return self.template.replace("{observation}", description)

    def get_action_choices(self, observation: Any) -> list[str] | None:
        """Returns the names of the actions; None if they cannot be listed."""
        return None if self.actions is None else list(self.actions)

    def extract_action(self, response: str) -> Any:
        """Returns the action with this name, or parses free text."""
        if self.actions is None:
            return parse_action(response, self.action_space)
        return self.actions[response.removeprefix(self.response_prefix)]

    def fallback_action(self, observation: Any) -> Any:
        """Returns the same action every time."""
        return self.fallback


def generic_agent(env: gymnasium.Env[Any, Any], wording: Wording) -> type[GenericAgent]:
    """Creates a class of agents for an environment.

    Args:
        env: The environment.
        wording: The user's description of it.

    Raises:
        ConfigError: Observations cannot be described in words, or the wording does not fit the spaces.
    """
    observation_space = env.observation_space
    action_space = env.action_space
    observation_names = part_names(observation_space)
    if wording.observation_names is not None:
        if len(wording.observation_names) != len(observation_names):
            raise ConfigError(
                f"observation_names has {len(wording.observation_names)} names, but an observation of "
                f"{observation_space} has {len(observation_names)} parts. Pass a name for each."
            )
        observation_names = wording.observation_names
    try:
        actions = name_actions(action_space, wording.actions)
    except ConfigError:
        if wording.actions is not None:
            raise
        actions = None
    env_name = "an environment" if env.spec is None else env.spec.id
    system_prompt = wording.system_prompt
    if system_prompt is None:
        reply_format = _reply_format(action_space, actions)
        system_prompt = f"You act in {env_name}. Each message tells you what you observe. {reply_format}"
    default_template = "{observation}" if _is_text(observation_space) else "Observation: {observation}"
    members = {
        "system_prompt": system_prompt,
        "template": wording.observation or default_template,
        "observation_space": observation_space,
        "observation_names": observation_names,
        "action_space": action_space,
        "actions": actions,
        "fallback": _any_action(action_space),
        "__doc__": f"Acts in {env_name}.",
        "__module__": __name__,
    }
    return type("GenericAgent", (GenericAgent,), members)


def _is_text(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Text)


def default_context(env: gymnasium.Env[Any, Any]) -> str:
    """Returns the default of `context`: "episode" if observations are text, else "turn"."""
    return "episode" if _is_text(env.observation_space) else "turn"


def _reply_format(space: spaces.Space[Any], actions: dict[str, Any] | None) -> str:
    """Returns a sentence for the system prompt that explains the format of replies."""
    if actions is not None:
        if len(actions) > _MAX_LISTED_ACTIONS:
            return "Answer with an action."
        return f"Answer with one of: {', '.join(actions)}."
    if isinstance(space, spaces.Text):
        return "Answer with what you want to say."
    if isinstance(space, spaces.Dict):
        return f"Answer with a JSON object that has the keys {', '.join(space.spaces)}; the action space is {space}."
    return f'Answer with an action of {space} as JSON, or with a JSON object that holds it under "action".'


def _any_action(space: spaces.Space[Any]) -> Any:
    """Returns an action of a space, the same one at every call."""
    space.seed(0)
    return space.sample()
