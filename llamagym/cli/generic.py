"""A generic agent built from an environment's spaces and the user's wording, and observations in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from ..agent.agent import Agent
from ..errors import ConfigError
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


# Observations of more parts, such as images, are unreadable as words.
_MAX_PARTS = 64


def describe(observation: Any, space: spaces.Space[Any], names: Sequence[str] | None = None) -> str:
    """Describes an observation in words, with numbers rounded to three digits.

    Args:
        observation: An element of the space.
        space: A space that `part_names` accepts.
        names: Names of the parts; None for those of `part_names`.

    >>> describe(np.array([0.123456, -20.0]), spaces.Box(-99, 99, (2,)))
    'x1 = 0.123, x2 = -20'
    >>> describe((14, 10, 0), spaces.Tuple([spaces.Discrete(32)] * 3), ["sum", "dealer", "ace"])
    'sum = 14, dealer = 10, ace = 0'
    >>> describe({"room": "kitchen", "hour": 3}, spaces.Dict(room=spaces.Text(9), hour=spaces.Discrete(24)))
    'room = kitchen, hour = 3'
    >>> describe("You see a door.", spaces.Text(99))
    'You see a door.'
    """
    parts = list(_parts(observation, space, ""))
    if names is not None:
        parts = [(name, text) for name, (_, text) in zip(names, parts, strict=True)]
    descriptions = []
    for name, text in parts:
        descriptions.append(f"{name} = {text}" if name else text)
    return ", ".join(descriptions)


def part_names(space: spaces.Space[Any]) -> list[str]:
    """Returns default names of the parts of a space's observations: keys of a Dict, else x1, x2 and so on.

    Args:
        space: Discrete, MultiDiscrete, MultiBinary, Box, Text, or a Dict or Tuple of such. The name of a single number
            or text is empty.

    Raises:
        ConfigError: The space has another type, or too many parts.
    """
    names = [name for name, _ in _parts(space.sample(), space, "")]
    if len(names) > _MAX_PARTS:
        raise ConfigError(
            f"Observations have {len(names)} numbers, more than the {_MAX_PARTS} that can be described in words. "
            "Define an Agent whose format_observation() selects what matters."
        )
    return names


def _parts(observation: Any, space: spaces.Space[Any], name: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each part of an observation."""
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _parts(observation[key], part, f"{name} {key}".lstrip())
    elif isinstance(space, spaces.Tuple):
        for number, (item, part) in enumerate(zip(observation, space.spaces, strict=True), 1):
            yield from _parts(item, part, f"{name} x{number}".lstrip())
    elif isinstance(space, spaces.Text):
        yield name, str(observation)
    elif isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)):
        values = np.ravel(observation).tolist()
        if len(values) == 1:
            yield name, _format_number(values[0])
            return
        for number, value in enumerate(values, 1):
            yield f"{name} x{number}".lstrip(), _format_number(value)
    else:
        raise ConfigError(
            f"Observations of {space} cannot be described in words. Define an Agent with its own format_observation()."
        )


def _format_number(value: float) -> str:
    """Formats a number with three significant digits and at most four decimal places."""
    if isinstance(value, int):
        return str(int(value))
    # Adding 0.0 turns -0.0 into 0.0.
    return np.format_float_positional(round(value, 4) + 0.0, precision=3, fractional=False, trim="-")
