"""Refuses what a loop or a user's methods pass that is of another kind than was asked for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError, EpisodeError, excerpt
from ..options import as_number

# Integers up to this size, and no others, can be saved and read again.
_LARGEST_KEY = 2**63 - 1


def listed(items: Iterable[Any], what: str) -> list[Any]:
    """Items of a list, an array or another collection; `what` names them in an error.

    Raises:
        EpisodeError: They are a single item, a text, or named by keys.
    """
    try:
        if not isinstance(items, (str, bytes, Mapping)):
            return list(iter(items))
    except TypeError:
        # No collection, or an array of no dimension.
        pass
    raise EpisodeError(f"{what} came as {excerpt(items)}. Pass a list, with one item for each environment.")


def environment_ids(items: Sequence[Any], env_ids: Iterable[Hashable] | None, what: str) -> list[Hashable]:
    """The environments that `items` belong to, 0, 1, 2, ... by default; `what` names the items in an error."""
    if env_ids is None:
        return list(range(len(items)))
    ids = plain_keys(listed(env_ids, "env_ids"), "environment id")
    if len(ids) != len(items) or len(set(ids)) != len(ids):
        raise EpisodeError(
            f"{len(items)} {what} came for environments {excerpt(ids)}. Pass one for each of distinct environments."
        )
    return ids


def plain_keys(keys: Iterable[Any], what: str) -> list[Hashable]:
    """Returns ids or groups as values of Python's own types, which can be saved; `what` names them in an error.

    Args:
        keys: Numbers, strings and None, also those of NumPy, and tuples of such.
        what: Name of one of them.

    Raises:
        EpisodeError: One is something else, NaN, or an integer of more than 64 bits.
    """
    return [_plain_key(key, what) for key in keys]


def _plain_key(key: Any, what: str) -> Hashable:
    if isinstance(key, tuple):
        return tuple(plain_keys(key, what))
    if isinstance(key, (np.integer, np.floating)):
        key = key.item()
    is_number = isinstance(key, (int, float)) and abs(key) <= _LARGEST_KEY
    if key is None or is_number or isinstance(key, str):
        return key
    raise EpisodeError(
        f"The {what} {excerpt(key)} ({type(key).__name__}) cannot be saved. Pass a number, a string, or a tuple of such"
        " with numbers that are finite and have at most 64 bits."
    )


def one_each(given: Iterable[Any] | None, otherwise: Any, env_ids: Sequence[Hashable], what: str) -> list[Any]:
    """One item for each environment, `otherwise` if none are given; `what` names them in an error."""
    items = [otherwise] * len(env_ids) if given is None else listed(given, what)
    if len(items) != len(env_ids):
        raise EpisodeError(f"{what} has {len(items)} items for {len(env_ids)} environments. Pass one for each.")
    return items


def informed(infos: Iterable[Any] | None, env_ids: Sequence[Hashable]) -> list[Any]:
    """Each environment's info, None where there is none.

    Raises:
        EpisodeError: One is no dictionary, or they are not one for each.
    """
    items = one_each(infos, None, env_ids, "infos")
    for info in items:
        if not (info is None or isinstance(info, Mapping)):
            raise EpisodeError(
                f"infos holds {excerpt(info)}. Pass a dictionary for each environment, as env.step() returns."
            )
    return items


def check_flags(flags: Sequence[Any], what: str) -> None:
    """Refuse what is neither true nor false, and would count as true.

    Raises:
        EpisodeError: One is no truth value of Python, NumPy or PyTorch.
    """
    for flag in flags:
        if as_number(flag) not in (0.0, 1.0):
            raise EpisodeError(f"{what} holds {excerpt(flag)}. Pass True or False, as env.step() returns them.")


def check_text(text: object, source: str) -> None:
    """Refuse what no tokenizer reads; `source` says in an error where it came from.

    Raises:
        ConfigError: It is no string, or holds half of a surrogate pair.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{source} gave {excerpt(text)}, a {type(text).__name__}. Expected a string, '' for no text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{source} gave {excerpt(text)}, which is no valid Unicode text ({error.reason}). Repair it: "
            'text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").'
        ) from error
