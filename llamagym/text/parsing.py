"""Reads actions out of replies: JSON objects first, then the names of actions, else an error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

from ..errors import ActionParseError, ConfigError, excerpt

T = TypeVar("T")

# Characters that are parsed at first of what may be a JSON object; more if it is longer. An error near the end may come
# from a token that was cut there, "-Infinity" at the longest.
_WINDOW, _LONGEST_TOKEN = 4096, 9
# Objects that are never closed are read to the end of the reply, each from its own beginning. So that time stays linear
# such reads are bounded by this many times the length of the reply.
_MOST_READS = 32
# A name is not found inside a longer word.
_BEFORE_NAME, _AFTER_NAME = r"(?<!\w)", r"(?!\w)"
# A number is not found inside a longer number: 1 in -1, 1.5, 1e-1, 1'000 or 1 000, or 5 in .5.
_SPACES, _THOUSANDS = r"[ \u00a0\u2009\u202f]", r"\d{3}(?!\d)"
_BEFORE_NUMBER = (
    r"(?<!\w)(?<!\d[.,'\u2019])(?<!(?<![\w.])\.)(?<!(?<!\w)[-\u2212])(?<!\d[eE][-+\u2212])"
    rf"(?<!\d{_SPACES}(?={_THOUSANDS}))"
)
_AFTER_NUMBER = rf"(?!\w)(?![.,'\u2019]\d)(?!{_SPACES}{_THOUSANDS})"


def find_json(reply: str) -> dict[str, Any] | None:
    """Returns the first JSON object in a reply, or None.

    Args:
        reply: The model's reply.

    Raises:
        ConfigError: The reply is not a string.

    >>> find_json('Sure: {"action": "hit"} because...')
    {'action': 'hit'}
    """
    check_reply(reply)
    return next(json_objects(reply), None)


def parse_choice(reply: str, actions: Mapping[str, T], json_key: str = "action") -> T:
    """Returns the action that a reply names, in upper or lower case.

    JSON objects that have `json_key` count first, with what they hold there; without any, the whole reply counts. A
    name counts where it stands as a word of its own, and not as a part of a longer name: in "go north" the name "north"
    does not count if "go north" is a name too. A reply that names several different actions names none.

    Args:
        reply: The model's reply.
        actions: Actions by name.
        json_key: Key of the action in a JSON object.

    Raises:
        ActionParseError: The reply names no action, or several.
        ConfigError: An argument has the wrong type, or `actions` is empty.

    >>> parse_choice("I'd Hit.", {"stick": 0, "hit": 1})
    1
    """
    check_reply(reply)
    _check_actions(actions)
    check_json_key(json_key, "json_key")
    said = [found[json_key] for found in json_objects(reply) if json_key in found]
    try:
        # As JSON spells them: Python's None for null would be a name that the reply does not hold.
        spelled = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in said]
        texts = list(dict.fromkeys(spelled)) or [reply]
    except (RecursionError, ValueError):
        # Deeply nested lists and numbers with thousands of digits have no text.
        texts = []
    named = sorted({name for text in texts for name in _named_in(text, actions)})
    if not named:
        _fail(f"Reply {excerpt(reply)} names no action", list(actions))
    if not all_equal([actions[name] for name in named]):
        _fail(f"Reply {excerpt(reply)} names several actions ({excerpt(named)})", list(actions))
    return actions[named[0]]


def json_objects(reply: str) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects in a reply, in order; not those inside of other ones. Takes linear time."""
    wasted = 0
    start = reply.find("{")
    while start >= 0:
        size = _WINDOW
        found, end = _parse_object(reply[start : start + size])
        while found is None and _may_be_cut(end, size, len(reply) - start) and wasted <= _MOST_READS * len(reply):
            size *= 2
            found, end = _parse_object(reply[start : start + size])
        if found is None:
            wasted += size - _WINDOW
            end = 1
        else:
            yield found
        start = reply.find("{", start + end)


def _parse_object(text: str) -> tuple[dict[str, Any] | None, int]:
    """The JSON object that a text begins with and its length, or None and how far the text is valid."""
    try:
        return json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        # The error of a string that does not end is at its beginning.
        return None, len(text) if error.msg.startswith("Unterminated string") else error.pos
    except (RecursionError, ValueError):
        # It is nested too deeply, or holds a number of more digits than Python reads; more text does not change that.
        return None, 0


def _may_be_cut(valid: int, size: int, available: int) -> bool:
    """Whether the first `size` of `available` characters may end in the middle of an object."""
    return size < available and valid >= size - _LONGEST_TOKEN


def all_equal(actions: Sequence[Any]) -> bool:
    """Whether actions of any type, arrays among them, are equal to the first, in type and value."""
    return all(_is_equal(actions[0], action) for action in actions[1:])


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    for name in ("shape", "dtype"):
        if getattr(one, name, None) != getattr(other, name, None):
            return False
    try:
        same = one == other
        return bool(same.all() if hasattr(same, "all") else same)
    except Exception:  # whatever a user's class raises
        return False


def check_reply(reply: object) -> None:
    """Rejects what is not a reply.

    Raises:
        ConfigError: It is not a string.
    """
    if not isinstance(reply, str):
        raise ConfigError(f"reply must be a string, got {excerpt(reply)} ({type(reply).__name__}).")


def check_json_key(key: object, name: str) -> None:
    """Rejects what is not a key of a JSON object; `name` is the argument's name.

    Raises:
        ConfigError: It is not a string.
    """
    if not isinstance(key, str):
        raise ConfigError(f"{name} must be a string, got {excerpt(key)} ({type(key).__name__}).")


def _check_actions(actions: object) -> None:
    is_usable = isinstance(actions, Mapping) and len(actions) > 0
    if not is_usable or not all(isinstance(name, str) and name for name in actions):  # type: ignore[attr-defined]
        raise ConfigError(
            f"actions must be a dictionary of actions by name, got {excerpt(actions)}. Pass at least one, such as "
            '{"stick": 0, "hit": 1}.'
        )


def _named_in(text: str, names: Mapping[str, Any]) -> set[str]:
    """The names that a text holds, without those that occur inside longer names only."""
    found = []
    for name, pattern in _patterns(tuple(names)):
        for match in pattern.finditer(text):
            found.append((match.start(), -match.end(), name))
    kept = set()
    last_start, last_end = -1, -1
    for start, negative_end, name in sorted(found):
        end = -negative_end
        is_inside = end <= last_end and (start, end) != (last_start, last_end)
        if not is_inside:
            kept.add(name)
            last_start, last_end = start, end
    return kept


@lru_cache(maxsize=32)
def _patterns(names: tuple[str, ...]) -> list[tuple[str, re.Pattern[str]]]:
    """The names with what finds each in a text; `re` itself remembers few patterns."""
    patterns = []
    for name in names:
        before = _BEFORE_NUMBER if name[0].isdecimal() else _BEFORE_NAME
        after = _AFTER_NUMBER if name[-1].isdecimal() else _AFTER_NAME
        patterns.append((name, re.compile(before + re.escape(name) + after, flags=re.IGNORECASE)))
    return patterns


def _fail(problem: str, names: list[str]) -> NoReturn:
    raise ActionParseError(
        f"{problem}; expected one of {excerpt(sorted(names))}. Ask for one of these words in the system prompt, handle "
        "the reply in extract_action(), or restrict replies with get_action_choices()."
    )
