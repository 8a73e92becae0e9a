"""From a reply's text to an action: JSON first, then patterns, then a typed failure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from ..errors import ActionParseError

T = TypeVar("T")


def find_json(reply: str) -> dict[str, Any] | None:
    """The first JSON object in a reply, or None.

    >>> find_json('Sure: {"action": "hit"} because...')
    {'action': 'hit'}
    """
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", reply):
        try:
            found, _ = decoder.raw_decode(reply, match.start())
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict):
            return found
    return None


def parse_choice(reply: str, actions: Mapping[str, T], json_key: str = "action") -> T:
    """The action that a reply names, in any case of letters.

    A JSON object's `json_key` counts first; otherwise the one admissible word that stands in the reply as a word of
    its own. A reply that names several different actions names none.

    Args:
        reply: What the model said.
        actions: Action by the words that name it.
        json_key: Where a JSON reply names its action.

    Raises:
        ActionParseError: If no single action is named.

    >>> parse_choice("I'd Hit.", {"stick": 0, "hit": 1})
    1
    """
    named = find_json(reply)
    text = str(named[json_key]) if named is not None and json_key in named else reply
    found = {
        word: action
        for word, action in actions.items()
        if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, flags=re.IGNORECASE)
    }
    # "go north" also holds the word "north": the longer name says more.
    longest = [w for w in found if not any(w != other and w.lower() in other.lower() for other in found)]
    if len({repr(found[word]) for word in longest}) == 1:
        return found[longest[0]]
    problem = f"names several actions ({sorted(longest)})" if longest else "names no action"
    raise ActionParseError(
        f"Reply {reply!r} {problem}; expected one of {sorted(actions)}. Ask for one of these words in the system "
        "prompt, handle the reply in extract_action(), or restrict replies with get_action_choices()."
    )
