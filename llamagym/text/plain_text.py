"""Encodes what users and environments say as text: nothing in it becomes a control token.

A tokenizer takes the names of its control tokens, such as `<|im_end|>`, for the tokens wherever it reads them. An
observation that holds one could close its own message and open another. Here such names are hidden from the template
and the tokenizer behind marks, and then encoded letter by letter as anything else is.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

# Private use: no text has a meaning for these, and no template changes them.
_BEGIN, _END = "\ue000", "\ue001"


class PlainText:
    """A tokenizer that reads some texts as text alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Find the names of its control tokens."""
        self._tokenizer = tokenizer
        self._ids = set(tokenizer.added_tokens_decoder)
        names = sorted((str(token) for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        # Where there is none, nothing matches.
        self._names = re.compile("|".join(map(re.escape, names)) if names else "(?!)")

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text."""
        return self.encode_rendered([text], lambda texts: texts[0])

    def encode_rendered(self, texts: Sequence[str], render: Callable[[Sequence[str]], str]) -> tuple[int, ...]:
        """Token ids of what `render` makes of texts; control tokens are those that it adds alone."""
        if not any(self._names.search(text) for text in texts):
            return self._encode(render(texts))
        # Texts may contain these characters, so take a number that no text has between them. A random one is not in
        # what a template joins of several texts either.
        mark = f"{_BEGIN}{secrets.randbits(128)}{_END}"
        found: list[str] = []

        def hide(match: re.Match[str]) -> str:
            found.append(match[0])
            return f"{mark}{len(found) - 1}{_END}"

        # Pieces of the rendered text and, at odd places, which name stood between them.
        pieces = re.split(f"{mark}([0-9]+){_END}", render([self._names.sub(hide, text) for text in texts]))
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            ids += self._spelt(found[int(piece)]) if place % 2 else self._encode(piece)
        return tuple(ids)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _spelt(self, name: str) -> tuple[int, ...]:
        """Token ids of a control token's name as text."""
        whole = tuple(self._tokenizer(name, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        if self._ids.isdisjoint(whole):
            return whole
        # Not every token that has a name is a special one to the tokenizer.
        return tuple(token for letter in name for token in self._encode(letter))
