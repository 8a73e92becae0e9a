"""The text of a reply while it is written: what can be sent already, and where the reply must end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from ..text.tool_calls import CALL_MARKS

# A decoder writes this character for the first bytes of a character whose last ones are still to come.
_INCOMPLETE = "\ufffd"


class ReplyText:
    """Follows a reply as a watcher of sampling.

    Attributes:
        text: The text so far, up to a stop text.
        finish_reason: Reason for ending the reply: a stop text, or the client's limit of tokens; None while it
            continues.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        token_limit: int,
        stops: Sequence[str] = (),
        send: Callable[[str], None] | None = None,
        may_call_tools: bool = False,
    ) -> None:
        """Starts with an empty reply.

        Args:
            decode: Returns the text of token ids.
            token_limit: Maximum number of tokens.
            stops: Texts that end the reply.
            send: Receives pieces of the text that later tokens cannot change; None if nobody waits for them.
            may_call_tools: Whether tool calls, which are sent complete, may follow the text.
        """
        self.text = ""
        self.finish_reason: Literal["stop", "length"] | None = None
        self._decode = decode
        self._token_limit = token_limit
        self._stops = tuple(stops)
        self._send = send
        self._may_call_tools = may_call_tools
        self._seen_tokens = 0
        self._sent = ""

    def __call__(self, ids: tuple[int, ...]) -> int | None:
        """Reads the tokens so far; returns how many to keep if the reply must end, else None."""
        kept = None
        if self._stops:
            kept = self._first_stop(ids)
        if kept is None:
            self.text = self._decode(list(ids[: self._token_limit]))
            if len(ids) >= self._token_limit:
                self.finish_reason = "length"
                kept = self._token_limit
        self._seen_tokens = len(ids)
        if self._send is not None:
            self._send_certain()
        return kept

    def _first_stop(self, ids: tuple[int, ...]) -> int | None:
        """Looks for the first stop text; returns the number of tokens that it takes, or None."""
        for count in range(self._seen_tokens + 1, min(len(ids), self._token_limit) + 1):
            text = self._decode(list(ids[:count]))
            positions = [text.find(stop) for stop in self._stops if stop in text]
            if positions:
                self.text = text[: min(positions)]
                self.finish_reason = "stop"
                return count
        return None

    def _send_certain(self) -> None:
        """Sends the text before a possible stop text or tool call."""
        text = self.text
        if self.finish_reason is None:
            text = text.rstrip(_INCOMPLETE)
            text = text[: len(text) - self._uncertain_length(text)]
        if self._may_call_tools:
            if text.lstrip()[:1] in ("{", "["):
                return
            for mark in CALL_MARKS:
                text = text.split(mark)[0]
            # The content of a reply ends before the white space in front of its calls.
            text = text.rstrip()
        self._send_up_to(text)

    def _uncertain_length(self, text: str) -> int:
        """Returns the number of characters at the end with which a stop text or a call's mark may begin."""
        marks = [*self._stops, *(CALL_MARKS if self._may_call_tools else ())]
        for length in range(min(len(text), max(map(len, marks), default=0)), 0, -1):
            if any(mark.startswith(text[-length:]) for mark in marks):
                return length
        return 0

    def _send_up_to(self, text: str) -> None:
        if self._send is not None and len(text) > len(self._sent) and text.startswith(self._sent):
            piece = text[len(self._sent) :]
            self._sent = text
            self._send(piece)

    def finish(self, content: str) -> None:
        """Sends the rest of the reply's content after its last token."""
        self._send_up_to(content)
