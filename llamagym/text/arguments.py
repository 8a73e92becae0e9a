"""Checks arguments that a loop passes to an agent, and values that a user's methods return."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError, EpisodeError, excerpt
from ..options import as_number

# Checkpoints store integers in 64 bits.
_LARGEST_KEY = 2**63 - 1


def as_list(items: Iterable[Any], name: str) -> list[Any]:
    """Returns the items of an iterable; raises an `EpisodeError` for strings, mappings and other values."""
    try:
        if not isinstance(items, (str, bytes, Mapping)):
            return list(iter(items))
    except TypeError:
        # Not iterable, or an array without dimensions.
        pass
    raise EpisodeError(f"{name} came as {excerpt(items)}. Pass a list, with one item for each environment.")


def environment_ids(items: Sequence[Any], env_ids: Iterable[Hashable] | None, name: str) -> list[Hashable]:
    """Returns the ids of the environments that `items` belong to, by default 0, 1, 2, ...

    Raises:
        EpisodeError: The ids are not distinct, or not one per item.
    """
    if env_ids is None:
        return list(range(len(items)))
    ids = plain_keys(as_list(env_ids, "env_ids"), "environment id")
    if len(ids) != len(items) or len(set(ids)) != len(ids):
        raise EpisodeError(
            f"{len(items)} {name} came for environments {excerpt(ids)}. Pass one for each of distinct environments."
        )
    return ids


def plain_keys(keys: Iterable[Any], name: str) -> list[Hashable]:
    """Returns ids or groups as built-in Python values, which can be saved.

    Args:
        keys: Numbers, strings and None, also those of NumPy, and tuples of such.
        name: Name of a key, for errors.

    Raises:
        EpisodeError: A key has another type, is NaN, or is an integer of more than 64 bits.
    """
    return [_plain_key(key, name) for key in keys]


def _plain_key(key: Any, name: str) -> Hashable:
    if isinstance(key, tuple):
        return tuple(plain_keys(key, name))
    if isinstance(key, (np.integer, np.floating)):
        key = key.item()
    is_number = isinstance(key, (int, float)) and abs(key) <= _LARGEST_KEY
    if key is None or is_number or isinstance(key, str):
        return key
    raise EpisodeError(
        f"The {name} {excerpt(key)} ({type(key).__name__}) cannot be saved. Pass a number, a string, or a tuple of such"
        " with numbers that are finite and have at most 64 bits."
    )


def per_env(items: Iterable[Any] | None, default: Any, env_ids: Sequence[Hashable], name: str) -> list[Any]:
    """Returns one item per environment, `default` for each if `items` is None; raises an `EpisodeError` otherwise."""
    if items is None:
        return [default] * len(env_ids)
    items = as_list(items, name)
    if len(items) != len(env_ids):
        raise EpisodeError(f"{name} has {len(items)} items for {len(env_ids)} environments. Pass one for each.")
    return items


def as_infos(infos: Iterable[Any] | None, env_ids: Sequence[Hashable]) -> list[Any]:
    """Returns one info dictionary or None per environment; raises an `EpisodeError` for other values."""
    items = per_env(infos, None, env_ids, "infos")
    for info in items:
        if not (info is None or isinstance(info, Mapping)):
            raise EpisodeError(
                f"infos holds {excerpt(info)}. Pass a dictionary for each environment, as env.step() returns."
            )
    return items


def check_flags(flags: Sequence[Any], name: str) -> None:
    """Raises an `EpisodeError` for a value that is not a boolean, which Python would treat as true."""
    for flag in flags:
        if as_number(flag) not in (0.0, 1.0):
            raise EpisodeError(f"{name} holds {excerpt(flag)}. Pass True or False, as env.step() returns them.")


def check_text(text: object, source: str) -> None:
    """Raises a `ConfigError` for a value from `source` that is not a string or has half of a surrogate pair."""
    if not isinstance(text, str):
        raise ConfigError(f"{source} gave {excerpt(text)} ({type(text).__name__}). Expected a string, '' for no text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{source} gave {excerpt(text)}, which is not valid Unicode text ({error.reason}). Repair it: "
            'text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").'
        ) from error
