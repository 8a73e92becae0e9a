"""Names the actions of Gymnasium spaces, and parses actions of a space from free text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from gymnasium import spaces

from ..errors import ActionParseError, ConfigError, excerpt
from .arguments import check_text
from .parsing import all_equal, check_json_key, check_reply, json_objects

# Every choice is scored at every turn.
_MAX_CHOICES = 1024
# Spaces whose actions `parse_action` parses, beside Dict and Tuple.
_PARSABLE = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box, spaces.Text)


def name_actions(space: spaces.Space[Any], names: Sequence[Any] | None = None) -> dict[str, Any]:
    """Returns the actions of a space by name, in the space's order.

    `get_action_choices` can return the names, and `extract_action` can look up a reply among them:

        ACTIONS = name_actions(env.action_space, ["left", "down", "right", "up"])

        def get_action_choices(self, observation):
            return list(ACTIONS)

        def extract_action(self, response):
            return ACTIONS[response]

    Args:
        space: Discrete, MultiDiscrete or MultiBinary.
        names: A name for each action of a Discrete space; for the other spaces a list of names for each part, which
            are joined by spaces. None uses the actions' numbers.

    Raises:
        ConfigError: The space has another type or too many actions, or the names do not fit it.

    >>> name_actions(spaces.Discrete(3, start=1))
    {'1': 1, '2': 2, '3': 3}
    >>> list(name_actions(spaces.MultiDiscrete([2, 2]), [["walk", "run"], ["up", "down"]]))
    ['walk up', 'walk down', 'run up', 'run down']
    """
    if isinstance(space, spaces.Discrete):
        numbers: list[range] = [range(int(space.start), int(space.start + space.n))]
        names = None if names is None else [names]
    elif isinstance(space, spaces.MultiDiscrete):
        starts = np.ravel(space.start).tolist()
        sizes = np.ravel(space.nvec).tolist()
        numbers = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    elif isinstance(space, spaces.MultiBinary):
        numbers = [range(2)] * math.prod(space.shape)
    else:
        raise ConfigError(
            f"The actions of {excerpt(space)} cannot be listed. Let the agent reply in free text and read its replies "
            "with parse_action(response, space)."
        )
    count = math.prod(map(len, numbers))
    if count > _MAX_CHOICES:
        raise ConfigError(
            f"{excerpt(space)} has {excerpt(count)} actions, more than the {_MAX_CHOICES} that can be chosen from. "
            "Let the agent reply in free text and read its replies with parse_action(response, space)."
        )
    if names is None:
        part_names = [list(map(str, part)) for part in numbers]
    else:
        part_names = [_names_of(part) for part in _as_list(names)]
    received = list(map(len, part_names))
    expected = list(map(len, numbers))
    if received != expected:
        raise ConfigError(
            f"{excerpt(names)} names {_product(received)} actions, but {excerpt(space)} has {_product(expected)}. Pass "
            "a name for each."
        )
    joined_names = list(map(" ".join, product(*part_names)))
    if len(set(joined_names)) < count:
        raise ConfigError(f"{excerpt(names)} names several actions of {excerpt(space)} alike. Pass distinct names.")
    if isinstance(space, spaces.Discrete):
        return dict(zip(joined_names, numbers[0], strict=True))
    actions = (np.array(action, dtype=space.dtype).reshape(space.shape) for action in product(*numbers))
    return dict(zip(joined_names, actions, strict=True))


def _product(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))


def parse_action(reply: str, space: spaces.Space[Any], key: str = "action") -> Any:
    """Returns the action of a space that a reply in free text names.

    An action of a Dict space is a JSON object with the space's keys. For any other space the action is the value of
    `key` in a JSON object of the reply or, if no object has that key, the whole reply: a number, a list in JSON, or
    text. A reply that names several different actions is an error.

    Args:
        reply: The model's reply.
        space: Discrete, MultiDiscrete, MultiBinary, Box, Text, or a Dict or Tuple of such.
        key: Key of the action in a JSON object.

    Raises:
        ActionParseError: The reply names no action of the space, or several.
        ConfigError: An argument has the wrong type, or the space cannot be parsed.

    >>> parse_action('{"action": 2}', spaces.Discrete(3)), parse_action(" 3 ", spaces.Discrete(3, start=1))
    (2, 3)
    >>> parse_action('I do {"say": "hello", "to": 1}', spaces.Dict(say=spaces.Text(9), to=spaces.Discrete(2)))
    {'say': 'hello', 'to': 1}
    """
    check_reply(reply)
    _check_parsable(space)
    check_json_key(key, "key")
    objects = list(json_objects(reply))
    if isinstance(space, spaces.Dict):
        expected = "a JSON object"
        values: list[Any] = objects
    else:
        expected = f'an action, or a JSON object with "{key}"'
        values = [found[key] for found in objects if key in found]
        values = values or [_parse_whole(reply.strip(), space)]
    elements = [_to_element(value, space) for value in values]
    actions = [action for action in elements if action is not None]
    if not actions:
        raise ActionParseError(
            f"Reply {excerpt(reply)} names no action of {excerpt(space)}; expected {expected}. Say in the system "
            "prompt how to reply, and define fallback_action() for replies that still do not."
        )
    if not all_equal(actions):
        raise ActionParseError(
            f"Reply {excerpt(reply)} names several actions of {excerpt(space)}, {excerpt(actions)}. Say in the system "
            "prompt to reply with one, and define fallback_action() for replies that still do not."
        )
    return actions[0]


def _check_parsable(space: object) -> None:
    """Raises a `ConfigError` for a space whose actions cannot be parsed from free text."""
    if isinstance(space, spaces.Dict):
        for part in space.spaces.values():
            _check_parsable(part)
    elif isinstance(space, spaces.Tuple):
        for part in space.spaces:
            _check_parsable(part)
    elif not isinstance(space, _PARSABLE):
        names = ", ".join(space_class.__name__ for space_class in _PARSABLE)
        raise ConfigError(
            f"space must be one of gymnasium.spaces ({names}, or a Dict or Tuple of these), got {excerpt(space)} "
            f"({type(space).__name__}). Read replies for other spaces in extract_action()."
        )


def _parse_whole(text: str, space: spaces.Space[Any]) -> Any:
    """Parses a whole reply as JSON; returns it unchanged if it is not valid JSON or the space is Text."""
    if isinstance(space, spaces.Text):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _to_element(value: Any, space: spaces.Space[Any]) -> Any:
    """Converts a value from JSON to an element of a space; None if it is not one."""
    try:
        action = _convert(value, space)
        return action if action is not None and space.contains(action) else None
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError):
        return None


def _convert(value: Any, space: spaces.Space[Any]) -> Any:
    """Converts a value from JSON to the type of a space's elements; returns None or raises if that is impossible."""
    if isinstance(space, spaces.Dict):
        return {name: _convert(value[name], part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, list):
            return None
        return tuple(_convert(item, part) for item, part in zip(value, space.spaces, strict=True))
    if isinstance(space, spaces.Text):
        return value if isinstance(value, str) else None
    if isinstance(space, spaces.Discrete):
        # int() would also accept 1.7, True and "1_0".
        return int(value) if isinstance(value, int) and not isinstance(value, bool) else None
    # As objects, since NumPy would convert large integers to floats, and True to an integer.
    numbers = np.array(value, dtype=object)
    assert space.dtype is not None
    has_fractions = space.dtype.kind == "f"
    if numbers.ndim == 0 and space.shape == (1,):
        numbers = numbers.reshape(1)
    allowed_types = (int, float) if has_fractions else (int,)
    if numbers.shape != space.shape or not all(type(number) in allowed_types for number in numbers.flat):
        return None
    if space.dtype.kind in "iu":
        # NumPy 1 only warns about numbers beyond the dtype's range, and wraps them.
        limits = np.iinfo(space.dtype)
        if not all(limits.min <= number <= limits.max for number in numbers.flat):
            return None
    with np.errstate(over="ignore"):
        action = numbers.astype(space.dtype)
    # Python's JSON parser reads 1e999 as infinity.
    is_exact = np.isfinite(action).all() if has_fractions else (action == numbers).all()
    return action if is_exact else None


def _as_list(names: object) -> list[Any]:
    if isinstance(names, (str, Mapping)) or not isinstance(names, Iterable):
        raise ConfigError(
            f"The names of actions came as {excerpt(names)}. Pass a list of strings for each part of the space."
        )
    return list(names)


def _names_of(part: object) -> list[str]:
    words = _as_list(part)
    if not all(isinstance(word, str) and word for word in words):
        raise ConfigError(f"The names of actions came as {excerpt(words)}. Pass strings that are not empty.")
    for word in words:
        check_text(word, "names")
    return words
