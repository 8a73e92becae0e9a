"""Action spaces in words: what a space's actions are called, and which of them a reply in free text means."""

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

# Each is scored at every turn.
_MOST_CHOICES = 1024
# Spaces whose actions `parse_action` reads, beside Dict and Tuple.
_READABLE = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box, spaces.Text)


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
            f"The actions of {excerpt(space)} cannot be listed. Let the agent reply in free text and read its replies "
            "with parse_action(response, space)."
        )
    count = math.prod(map(len, numbers))
    if count > _MOST_CHOICES:
        raise ConfigError(
            f"{excerpt(space)} has {excerpt(count)} actions, more than the {_MOST_CHOICES} that can be chosen from. "
            "Let the agent reply in free text and read its replies with parse_action(response, space)."
        )
    if names is None:
        words = [list(map(str, part)) for part in numbers]
    else:
        words = [_names_of(part) for part in _as_list(names)]
    if list(map(len, words)) != list(map(len, numbers)):
        raise ConfigError(
            f"{excerpt(names)} names {' x '.join(map(str, map(len, words)))} actions, but {excerpt(space)} has "
            f"{' x '.join(map(str, map(len, numbers)))}. Pass a name for each."
        )
    named = [" ".join(parts) for parts in product(*words)]
    if len(set(named)) < count:
        raise ConfigError(f"{excerpt(names)} names several actions of {excerpt(space)} alike. Pass distinct names.")
    if isinstance(space, spaces.Discrete):
        return dict(zip(named, numbers[0], strict=True))
    actions = (np.array(action, dtype=space.dtype).reshape(space.shape) for action in product(*numbers))
    return dict(zip(named, actions, strict=True))


def parse_action(reply: str, space: spaces.Space[Any], key: str = "action") -> Any:
    """Returns the action of a space that a reply in free text means.

    An action of a Dict space is a JSON object with the space's keys. For any other space the action is what JSON
    objects in the reply hold under `key`, or, where none has that key, the whole reply: a number, a list as JSON writes
    it, or text. A reply that means several different actions means none.

    Args:
        reply: The model's reply.
        space: Discrete, MultiDiscrete, MultiBinary, Box, Text, or a Dict or Tuple of such.
        key: Key of the action in a JSON object.

    Raises:
        ActionParseError: The reply means no action of the space, or several.
        ConfigError: An argument has the wrong type, or the space is another one.

    >>> parse_action('{"action": 2}', spaces.Discrete(3)), parse_action(" 3 ", spaces.Discrete(3, start=1))
    (2, 3)
    >>> parse_action('I do {"say": "hello", "to": 1}', spaces.Dict(say=spaces.Text(9), to=spaces.Discrete(2)))
    {'say': 'hello', 'to': 1}
    """
    check_reply(reply)
    _check_readable(space)
    check_json_key(key, "key")
    objects = list(json_objects(reply))
    if isinstance(space, spaces.Dict):
        said: list[Any] = objects
    else:
        said = [found[key] for found in objects if key in found] or [_read_whole(reply.strip(), space)]
    actions = [action for value in said if (action := _element(value, space)) is not None]
    if not actions:
        expected = "a JSON object" if isinstance(space, spaces.Dict) else f'an action, or a JSON object with "{key}"'
        raise ActionParseError(
            f"Reply {excerpt(reply)} means no action of {excerpt(space)}; expected {expected}. Say in the system "
            "prompt how to reply, and define fallback_action() for replies that still do not."
        )
    if not all_equal(actions):
        raise ActionParseError(
            f"Reply {excerpt(reply)} means several actions of {excerpt(space)}, {excerpt(actions)}. Say in the system "
            "prompt to reply with one, and define fallback_action() for replies that still do not."
        )
    return actions[0]


def _check_readable(space: object) -> None:
    """Rejects spaces whose actions replies in free text cannot mean.

    Raises:
        ConfigError: The space is one of them, or contains one.
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for part in space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces:
            _check_readable(part)
    elif not isinstance(space, _READABLE):
        names = ", ".join(kind.__name__ for kind in _READABLE)
        raise ConfigError(
            f"space must be one of gymnasium.spaces ({names}, or a Dict or Tuple of these), got {excerpt(space)} "
            f"({type(space).__name__}). Read replies for other spaces in extract_action()."
        )


def _read_whole(text: str, space: spaces.Space[Any]) -> Any:
    """A reply without a JSON object that holds the action: as JSON where it is valid, else as text."""
    if isinstance(space, spaces.Text):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _element(said: Any, space: spaces.Space[Any]) -> Any:
    """A value out of JSON as an element of a space; None if it is not one."""
    try:
        action = _as_action(said, space)
        return action if action is not None and space.contains(action) else None
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError):
        return None


def _as_action(said: Any, space: spaces.Space[Any]) -> Any:
    """A value out of JSON in the type of a space's elements; None or an error if there is no such value."""
    if isinstance(space, spaces.Dict):
        return {name: _as_action(said[name], part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(said, list):
            return None
        return tuple(_as_action(item, part) for item, part in zip(said, space.spaces, strict=True))
    if isinstance(space, spaces.Text):
        return said if isinstance(said, str) else None
    if isinstance(space, spaces.Discrete):
        # int() would take 1.7, True and "1_0" as well.
        return int(said) if isinstance(said, int) and not isinstance(said, bool) else None
    # As objects, since NumPy would make floats of large integers, and integers of True.
    numbers = np.array(said, dtype=object)
    assert space.dtype is not None
    has_fractions = space.dtype.kind == "f"
    if numbers.ndim == 0 and space.shape == (1,):
        numbers = numbers.reshape(1)
    kinds = (int, float) if has_fractions else (int,)
    if numbers.shape != space.shape or not all(type(number) in kinds for number in numbers.flat):
        return None
    if space.dtype.kind in "iu":
        # NumPy 1 warns, and turns numbers beyond the type's range into others.
        limits = np.iinfo(space.dtype)
        if not all(limits.min <= number <= limits.max for number in numbers.flat):
            return None
    with np.errstate(over="ignore"):
        action = numbers.astype(space.dtype)
    # JSON reads 1e999 as infinity.
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
