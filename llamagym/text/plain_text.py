"""Encodes text of users and environments so that nothing in it becomes a control token.

A tokenizer encodes the name of a control token, such as `<|im_end|>`, as that token wherever it occurs. So an
observation that contains one could close its own message and open another. Here placeholders hide such names from the
template and the tokenizer, and the names are then encoded as ordinary text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

# Characters for private use, which have no meaning in text and which no template changes.
_BEGIN = "\ue000"
_END = "\ue001"


class PlainText:
    """Encodes texts without producing control tokens from them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Collects the names of the tokenizer's control tokens."""
        self._tokenizer = tokenizer
        self._control_ids = set(tokenizer.added_tokens_decoder)
        names = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        # The longest first, since some names contain others.
        names.sort(key=len, reverse=True)
        never_matches = "(?!)"
        self._control_names = re.compile("|".join(map(re.escape, names)) or never_matches)

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of a text."""
        return self.encode_rendered([text], lambda texts: texts[0])

    def encode_rendered(self, texts: Sequence[str], render: Callable[[Sequence[str]], str]) -> tuple[int, ...]:
        """Returns the token ids of `render(texts)`; only `render` itself can add control tokens."""
        if not any(self._control_names.search(text) for text in texts):
            return self._encode(render(texts))
        # A text may contain the characters for private use, but not this random number between them.
        mark = f"{_BEGIN}{secrets.randbits(128)}{_END}"
        hidden_names: list[str] = []

        def hide(match: re.Match[str]) -> str:
            hidden_names.append(match[0])
            return f"{mark}{len(hidden_names) - 1}{_END}"

        rendered = render([self._control_names.sub(hide, text) for text in texts])
        # Text at even positions, numbers of hidden names at odd ones.
        pieces = re.split(f"{mark}([0-9]+){_END}", rendered)
        ids: list[int] = []
        for position, piece in enumerate(pieces):
            if position % 2:
                ids += self._encode_name(hidden_names[int(piece)])
            else:
                ids += self._encode(piece)
        return tuple(ids)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode_name(self, name: str) -> tuple[int, ...]:
        """Returns the token ids of a control token's name as ordinary text."""
        ids = tuple(self._tokenizer(name, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        if self._control_ids.isdisjoint(ids):
            return ids
        # `split_special_tokens` does not split added tokens that are not marked as special.
        return tuple(token for letter in name for token in self._encode(letter))
