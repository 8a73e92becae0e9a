"""Parses actions from replies: from JSON objects first, then by the names of actions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

from ..errors import ActionParseError, ConfigError, excerpt

T = TypeVar("T")

# Parsing of a possible JSON object begins with this many characters, and doubles them if the object is longer.
WINDOW = 4096
# An error this close to the end of the window may come from a token that was cut there; "-Infinity" is the longest.
_LONGEST_TOKEN = 9
# Each object that is never closed is parsed to the end of the reply. To keep the time linear, the characters parsed in
# vain are limited to this many times the length of the reply.
MAX_WASTED_READS = 32
# A name does not match inside a longer word.
_BEFORE_NAME = r"(?<!\w)"
_AFTER_NAME = r"(?!\w)"
# A number does not match inside a longer number: 1 in -1, 1.5, 1e-1, 1'000 or 1 000, or 5 in .5.
_SPACES = r"[ \u00a0\u2009\u202f]"
_THOUSANDS = r"\d{3}(?!\d)"
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
    """Returns the action that a reply names, ignoring case.

    If the reply contains JSON objects with `json_key`, names are looked up in their values, else in the whole reply. A
    name must be a word of its own and not part of a longer name: in "go north" the name "north" does not count if
    "go north" is also a name. A reply that names several different actions is an error.

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
    values = [found[json_key] for found in json_objects(reply) if json_key in found]
    try:
        texts = set(map(_json_text, values)) or {reply}
    except (RecursionError, ValueError):
        # Deeply nested lists and numbers with thousands of digits cannot be written as text.
        texts = set()
    names: set[str] = set()
    for text in texts:
        names |= _names_in(text, actions)
    if not names:
        _fail(f"Reply {excerpt(reply)} names no action", list(actions))
    found_names = sorted(names)
    if not all_equal([actions[name] for name in found_names]):
        _fail(f"Reply {excerpt(reply)} names several actions ({excerpt(found_names)})", list(actions))
    return actions[found_names[0]]


def _json_text(value: Any) -> str:
    """Returns a string itself, and any other value in JSON: "null", for instance, where Python writes "None"."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def json_objects(reply: str) -> Iterator[dict[str, Any]]:
    """Yields the outermost JSON objects in a reply, in order, in linear time."""
    wasted = 0
    most_wasted = MAX_WASTED_READS * len(reply)
    start = reply.find("{")
    while start >= 0:
        size = WINDOW
        found, end = _parse_object(reply[start : start + size])
        while found is None and _may_be_cut(end, size, len(reply) - start) and wasted <= most_wasted:
            size *= 2
            found, end = _parse_object(reply[start : start + size])
        if found is None:
            wasted += size - WINDOW
            end = 1
        else:
            yield found
        start = reply.find("{", start + end)


def _parse_object(text: str) -> tuple[dict[str, Any] | None, int]:
    """Returns the JSON object at the beginning of a text and its length, or None and the length of the valid part."""
    try:
        return json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        # For a string without end, `pos` is the beginning of the string.
        is_unterminated = error.msg.startswith("Unterminated string")
        return None, len(text) if is_unterminated else error.pos
    except (RecursionError, ValueError):
        # Nested too deeply, or a number with too many digits; a longer window would not help.
        return None, 0


def _may_be_cut(valid: int, size: int, available: int) -> bool:
    """Whether the first `size` of `available` characters, valid up to `valid`, may end in the middle of an object."""
    return size < available and valid >= size - _LONGEST_TOKEN


def all_equal(actions: Sequence[Any]) -> bool:
    """Whether all actions, which may be arrays, have the type and the value of the first."""
    return all(_is_equal(actions[0], action) for action in actions[1:])


def _is_equal(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(_is_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_is_equal, left, right))
    for name in ("shape", "dtype"):
        if getattr(left, name, None) != getattr(right, name, None):
            return False
    try:
        equal = left == right
        return bool(equal.all() if hasattr(equal, "all") else equal)
    except Exception:  # `==` of a user's class may raise anything
        return False


def check_reply(reply: object) -> None:
    """Raises a `ConfigError` for a reply that is not a string."""
    if not isinstance(reply, str):
        raise ConfigError(f"reply must be a string, got {excerpt(reply)} ({type(reply).__name__}).")


def check_json_key(key: object, name: str) -> None:
    """Raises a `ConfigError` for a JSON key that is not a string; `name` is the argument's name."""
    if not isinstance(key, str):
        raise ConfigError(f"{name} must be a string, got {excerpt(key)} ({type(key).__name__}).")


def _check_actions(actions: object) -> None:
    is_usable = isinstance(actions, Mapping) and len(actions) > 0
    if not is_usable or not all(isinstance(name, str) and name for name in actions):  # type: ignore[attr-defined]
        raise ConfigError(
            f"actions must be a dictionary of actions by name, got {excerpt(actions)}. Pass at least one, such as "
            '{"stick": 0, "hit": 1}.'
        )


def _names_in(text: str, names: Mapping[str, Any]) -> set[str]:
    """Returns the names that a text contains, without those that occur only inside longer names."""
    found = []
    for name, pattern in _patterns(tuple(names)):
        for match in pattern.finditer(text):
            # At equal starts the longer match is sorted first.
            found.append((match.start(), -match.end(), name))
    kept = set()
    last = (-1, -1)
    for start, negative_end, name in sorted(found):
        end = -negative_end
        is_inside = end <= last[1] and (start, end) != last
        if not is_inside:
            kept.add(name)
            last = (start, end)
    return kept


@lru_cache(maxsize=32)
def _patterns(names: tuple[str, ...]) -> list[tuple[str, re.Pattern[str]]]:
    """Returns each name with its compiled pattern; cached, since the cache of `re` is small."""
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
