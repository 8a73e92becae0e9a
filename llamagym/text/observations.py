"""Describes observations of Gymnasium spaces in words, as a list of named numbers and texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from ..errors import ConfigError

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
    return ", ".join(f"{name} = {text}" if name else text for name, text in parts)


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
