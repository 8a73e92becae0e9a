"""Observation spaces in words: what is observed as a list of named numbers and texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from ..errors import ConfigError

# More are no reading: a picture, say.
_MOST_PARTS = 64


def describe(observation: Any, space: spaces.Space[Any], names: Sequence[str] | None = None) -> str:
    """An observation in words, numbers rounded to three digits.

    Args:
        observation: An element of the space.
        space: One that `part_names` takes.
        names: Of its parts; None takes those of `part_names`.

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
    called = [name for name, _ in parts] if names is None else names
    return ", ".join(f"{name} = {text}" if name else text for name, (_, text) in zip(called, parts, strict=True))


def part_names(space: spaces.Space[Any]) -> list[str]:
    """What the parts of a space's observations are called: keys of a Dict, x1, x2 and so on elsewhere.

    Args:
        space: Discrete, MultiDiscrete, MultiBinary, Box, Text, or a Dict or Tuple of such. A single number or text
            needs no name and has an empty one.

    Raises:
        ConfigError: The space is another one, or has too many parts to be read.
    """
    names = [name for name, _ in _parts(space.sample(), space, "")]
    if len(names) > _MOST_PARTS:
        raise ConfigError(
            f"Observations of {len(names)} numbers are more than the {_MOST_PARTS} that can be read as words. Define "
            "an Agent whose format_observation() says what matters of them."
        )
    return names


def _parts(observation: Any, space: spaces.Space[Any], name: str) -> Iterator[tuple[str, str]]:
    """Names and texts of what an observation consists of."""
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _parts(observation[key], part, f"{name} {key}".lstrip())
    elif isinstance(space, spaces.Tuple):
        for number, (item, part) in enumerate(zip(observation, space.spaces, strict=True), 1):
            yield from _parts(item, part, f"{name} x{number}".lstrip())
    elif isinstance(space, spaces.Text):
        yield name, str(observation)
    elif isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)):
        numbers = np.ravel(observation).tolist()
        for number, value in enumerate(numbers, 1):
            yield name if len(numbers) == 1 else f"{name} x{number}".lstrip(), _rounded(value)
    else:
        raise ConfigError(
            f"Observations of {space} cannot be put into words. Define an Agent with a format_observation() of its own."
        )


def _rounded(value: float) -> str:
    """A number with three digits, as people write it; none of them beyond the fourth decimal place."""
    if isinstance(value, int):
        return str(int(value))
    # Adding nothing turns -0.0 into 0.0.
    return np.format_float_positional(round(value, 4) + 0.0, precision=3, fractional=False, trim="-")
