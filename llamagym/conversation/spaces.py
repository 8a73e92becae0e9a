"""Action spaces in words: what a space's actions are called, and which of them a reply in free text means."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
from gymnasium import spaces

from ..errors import ActionParseError, ConfigError
from .parsing import find_json

# Each is scored at every turn.
_MOST_CHOICES = 1024


def name_actions(space: spaces.Space[Any], names: Sequence[Any] | None = None) -> dict[str, Any]:
    """The actions of a space by the words that name them, in the space's order.

    Its keys are what `get_action_choices` returns, and what a reply is looked up in:

        ACTIONS = name_actions(env.action_space, ["left", "down", "right", "up"])

        def get_action_choices(self, observation):
            return list(ACTIONS)

        def extract_action(self, response):
            return ACTIONS[response]

    Args:
        space: Discrete, MultiDiscrete or MultiBinary.
        names: A name for each action of a Discrete space; for the others a list of names for each part, which are
            joined by spaces. None names them by their numbers.

    Raises:
        ConfigError: The space is another one or too large, or the names do not fit it.

    >>> name_actions(spaces.Discrete(3, start=1))
    {'1': 1, '2': 2, '3': 3}
    >>> list(name_actions(spaces.MultiDiscrete([2, 2]), [["walk", "run"], ["up", "down"]]))
    ['walk up', 'walk down', 'run up', 'run down']
    """
    if isinstance(space, spaces.Discrete):
        numbers: list[range] = [range(int(space.start), int(space.start + space.n))]
        names = None if names is None else [names]
    elif isinstance(space, spaces.MultiDiscrete):
        starts, sizes = np.ravel(space.start).tolist(), np.ravel(space.nvec).tolist()
        numbers = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    elif isinstance(space, spaces.MultiBinary):
        numbers = [range(2)] * math.prod(space.shape)
    else:
        raise ConfigError(
            f"The actions of {space} cannot be listed. Let the agent reply in free text and read its replies with "
            "parse_action(response, space)."
        )
    count = math.prod(map(len, numbers))
    if count > _MOST_CHOICES:
        raise ConfigError(
            f"{space} has {count} actions, more than the {_MOST_CHOICES} that can be chosen from. Let the agent reply "
            "in free text and read its replies with parse_action(response, space)."
        )
    words = [list(map(str, part)) for part in numbers] if names is None else [_listed(part) for part in names]
    if list(map(len, words)) != list(map(len, numbers)):
        raise ConfigError(
            f"{names} names {' x '.join(map(str, map(len, words)))} actions, but {space} has "
            f"{' x '.join(map(str, map(len, numbers)))}. Pass a name for each."
        )
    named = [" ".join(parts) for parts in product(*words)]
    if len(set(named)) < count:
        raise ConfigError(f"{names} names several actions of {space} alike. Pass distinct names.")
    if isinstance(space, spaces.Discrete):
        return dict(zip(named, numbers[0], strict=True))
    actions = (np.array(action, dtype=space.dtype).reshape(space.shape) for action in product(*numbers))
    return dict(zip(named, actions, strict=True))


def parse_action(reply: str, space: spaces.Space[Any], key: str = "action") -> Any:
    """The action of a space that a reply in free text means.

    A Dict space is read from a JSON object with the space's keys. Of any other space the action is what a JSON object
    holds under `key`, else the whole reply: a number, a list as JSON writes it, or text.

    Args:
        reply: What the model said.
        space: Discrete, MultiDiscrete, MultiBinary, Box, Text, or a Dict or Tuple of such.
        key: Where a JSON reply names its action.

    Raises:
        ActionParseError: The reply means no action of the space.

    >>> parse_action('{"action": 2}', spaces.Discrete(3)), parse_action(" 3 ", spaces.Discrete(3, start=1))
    (2, 3)
    >>> parse_action('I do {"say": "hello", "to": 1}', spaces.Dict(say=spaces.Text(9), to=spaces.Discrete(2)))
    {'say': 'hello', 'to': 1}
    """
    found = find_json(reply)
    if isinstance(space, spaces.Dict):
        said: Any = found
    elif found is not None and key in found:
        said = found[key]
    else:
        said = reply.strip()
        if not isinstance(space, spaces.Text):
            with suppress(json.JSONDecodeError):
                said = json.loads(said)
    try:
        action = _as_action(said, space)
    except (TypeError, ValueError, KeyError, OverflowError):
        action = None
    if action is None or not space.contains(action):
        expected = "a JSON object" if isinstance(space, spaces.Dict) else f'an action, or a JSON object with "{key}"'
        raise ActionParseError(
            f"Reply {reply!r} means no action of {space}; expected {expected}. Say in the system prompt how to reply, "
            "and define fallback_action() for replies that still do not."
        )
    return action


def _as_action(said: Any, space: spaces.Space[Any]) -> Any:
    """What JSON holds as an element of a space, if it is one."""
    if isinstance(space, spaces.Dict):
        return {name: _as_action(said[name], part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_as_action(item, part) for item, part in zip(said, space.spaces, strict=True))
    if isinstance(space, spaces.Text):
        return said if isinstance(said, str) else None
    if isinstance(space, spaces.Discrete):
        # int() would take 1.7, True and "1_0" as well.
        return int(said) if isinstance(said, int) and not isinstance(said, bool) else None
    numbers, has_fractions = np.array(said), space.dtype is not None and space.dtype.kind == "f"
    if numbers.ndim == 0 and space.shape == (1,):
        numbers = numbers.reshape(1)
    if numbers.dtype.kind not in ("if" if has_fractions else "i") or numbers.shape != space.shape:
        return None
    action = numbers.astype(space.dtype)
    # Whole numbers beyond the type's range would come out as others.
    return action if has_fractions or (action == numbers).all() else None


def _listed(names: Any) -> list[str]:
    if isinstance(names, (str, Mapping)) or not isinstance(names, Iterable):
        raise ConfigError(f"The names of actions came as {names!r}. Pass a list of strings for each part of the space.")
    words = list(names)
    if not all(isinstance(word, str) for word in words):
        raise ConfigError(f"The names of actions came as {words!r}. Pass strings.")
    return words
