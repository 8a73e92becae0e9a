"""A generic agent, built from an environment's spaces and the user's wording."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
from gymnasium import spaces

from ..agent.agent import Agent
from ..errors import ConfigError
from ..text.observations import describe, part_names
from ..text.spaces import name_actions, parse_action

# Longest list of actions spelled out in a system prompt.
_LISTED = 32


@dataclass(frozen=True)
class Wording:
    """What a user says about an environment; what is None follows from its spaces.

    Attributes:
        system_prompt: Opens every conversation.
        observation: What is said of an observation, with `{observation}` where its parts go.
        observation_names: Names of these parts.
        actions: Names of the actions, as `name_actions` takes them.
    """

    system_prompt: str | None = None
    observation: str | None = None
    observation_names: list[str] | None = None
    actions: list[Any] | None = None


class GenericAgent(Agent):
    """Reads observations as named numbers and texts, and chooses among the actions where they can be listed.

    `generic_agent` makes the class for an environment.
    """

    response_prefix = ""
    system_prompt: ClassVar[str]
    template: ClassVar[str]
    observation_space: ClassVar[spaces.Space[Any]]
    observation_names: ClassVar[list[str]]
    action_space: ClassVar[spaces.Space[Any]]
    actions: ClassVar[dict[str, Any] | None]
    """By name; None where they cannot be listed."""
    fallback: ClassVar[Any]
    """Taken after a reply in free text that names no action."""

    def get_system_prompt(self) -> str:
        """What the user says, or the environment's name and how to reply."""
        return self.system_prompt

    def format_observation(self, observation: Any) -> str:
        """Its parts with their names."""
        said = describe(observation, self.observation_space, self.observation_names)
        return self.template.replace("{observation}", said)

    def get_action_choices(self, observation: Any) -> list[str] | None:
        """The actions' names, if they can be listed."""
        return None if self.actions is None else list(self.actions)

    def extract_action(self, response: str) -> Any:
        """The action of this name, or what free text means."""
        if self.actions is None:
            return parse_action(response, self.action_space)
        return self.actions[response.removeprefix(self.response_prefix)]

    def fallback_action(self, observation: Any) -> Any:
        """One and the same action."""
        return self.fallback


def generic_agent(env: gymnasium.Env[Any, Any], wording: Wording) -> type[GenericAgent]:
    """The class of an agent for an environment.

    Args:
        env: The environment.
        wording: What the user says about it.

    Raises:
        ConfigError: Its observations cannot be put into words, or the wording does not fit its spaces.
    """
    observed, acted = env.observation_space, env.action_space
    names = part_names(observed)
    if wording.observation_names is not None and len(wording.observation_names) != len(names):
        raise ConfigError(
            f"observation_names has {len(wording.observation_names)} names, but an observation of {observed} has "
            f"{len(names)} parts. Pass a name for each."
        )
    try:
        actions = name_actions(acted, wording.actions)
    except ConfigError:
        if wording.actions is not None:
            raise
        actions = None
    name = "an environment" if env.spec is None else env.spec.id
    default = f"You act in {name}. Each message tells you what you observe. {_how_to_reply(acted, actions)}"
    members = {
        "system_prompt": default if wording.system_prompt is None else wording.system_prompt,
        "template": wording.observation or ("{observation}" if names == [""] and _is_text(observed) else _OBSERVED),
        "observation_space": observed,
        "observation_names": names if wording.observation_names is None else wording.observation_names,
        "action_space": acted,
        "actions": actions,
        "fallback": _any_action(acted),
        "__doc__": f"Acts in {name}.",
        "__module__": __name__,
    }
    return type("GenericAgent", (GenericAgent,), members)


_OBSERVED = "Observation: {observation}"


def _is_text(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Text)


def default_context(env: gymnasium.Env[Any, Any]) -> str:
    """What the model is shown: the "episode" where observations are text, as in a conversation, else the "turn"."""
    return "episode" if _is_text(env.observation_space) else "turn"


def _how_to_reply(space: spaces.Space[Any], actions: dict[str, Any] | None) -> str:
    if actions is not None:
        return f"Answer with one of: {', '.join(actions)}." if len(actions) <= _LISTED else "Answer with an action."
    if isinstance(space, spaces.Text):
        return "Answer with what you want to say."
    if isinstance(space, spaces.Dict):
        return f"Answer with a JSON object that has the keys {', '.join(space.spaces)}; the action space is {space}."
    return f'Answer with an action of {space} as JSON, or with a JSON object that holds it under "action".'


def _any_action(space: spaces.Space[Any]) -> Any:
    """An action, the same one whenever it is asked for."""
    space.seed(0)
    return space.sample()
