"""Renders histories of chat messages as token ids: any roles, and tools.

`ChatTemplate` renders conversations with environments. A client of `serving` sends the whole history with each call. If
it continues a recorded reply, `HistoryTemplate.continuation` returns only the ids after this reply, so that the reply
stays as it was sampled.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..errors import ChatTemplateError, excerpt
from .chat_template import ChatTemplate, PlainText, common_prefix, remove_end_token
from .tool_calls import CALL_OPENING, ChatMessage, Tool, without_tools

_ROLES = ("system", "user", "assistant", "tool")
# Probe texts are plain words, which no template trims or escapes.
_TOOL = "probetool"
_RESULT = "proberesult"
_PARAMETER = "probeparameter"
_PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "A probe.",
            "parameters": {"type": "object", "properties": {_PARAMETER: {"type": "string", "description": "A word."}}},
        },
    }
]
# Mistral's template demands ids of nine letters and digits.
_CALL_ID = "probecall"
_PROBE_CALL = {"id": _CALL_ID, "type": "function", "function": {"name": _TOOL, "arguments": {_PARAMETER: "x"}}}
_QUESTION: ChatMessage = {"role": "user", "content": "probeuser"}
_CALLING_REPLY: ChatMessage = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}


def chat_message(message: Mapping[str, Any]) -> ChatMessage:
    """Returns a message in the format of OpenAI's API as chat templates expect it.

    Contents in parts become one text, and the arguments of calls become objects.

    Raises:
        KeyError: A field is missing.
        TypeError: A field has the wrong type.
        ValueError: The role is unknown or has no calls, or a part of the content is not text.
    """
    role = "system" if message["role"] == "developer" else message["role"]
    if role not in _ROLES:
        raise ValueError(f"role {role!r} is not one of {list(_ROLES)}")
    content = message.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        content = "\n".join(map(_text_of_part, content))
    if not isinstance(content, str):
        raise TypeError(f"content is {excerpt(content)}, which is neither text nor a list of parts")
    converted: ChatMessage = {"role": role, "content": content}
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise ValueError(f"a message of the role {role!r} has tool_calls")
    if calls:
        converted["tool_calls"] = [_call_from(call) for call in calls]
    if role == "tool":
        converted["tool_call_id"] = str(message.get("tool_call_id") or "")
    return converted


def _text_of_part(part: Mapping[str, Any]) -> str:
    if part.get("type", "text") != "text" or not isinstance(part["text"], str):
        raise ValueError(f"a part of the content is of type {part.get('type')!r}, and only text is supported")
    return str(part["text"])


def _call_from(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call in the format of OpenAI's API, whose arguments are JSON text, as chat templates expect it."""
    function = call["function"]
    if not isinstance(function["name"], str):
        raise TypeError(f"a call names the function {function['name']!r}, which is not a string")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            # A program may send back a call that was malformed.
            arguments = {"arguments": arguments}
    if not isinstance(arguments, dict):
        arguments = {"arguments": arguments}
    call_id = str(call.get("id") or "")
    return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def history_keys(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[str]:
    """Returns one key per prefix of a history, equal for equal prefixes and tools.

    Ids of calls and surrounding white space, which clients change, are ignored.
    """
    digest = hashlib.sha256(_canonical(list(tools)))
    keys = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        digest.update(_canonical([message["role"], message["content"].strip(), calls]))
        keys.append(digest.hexdigest())
    return keys


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


class HistoryTemplate:
    """Renders histories with a tokenizer's chat template.

    Attributes:
        renders_tools: Whether the template renders tools, calls and results. Otherwise they become text.
        call_opening: Text that a reply which calls a tool begins with, up to the tool's name.
    """

    def __init__(self, template: ChatTemplate) -> None:
        """Probes the template with a tool."""
        self._tokenizer = template.tokenizer
        self._template = template
        self._text = PlainText(template.tokenizer)
        self.renders_tools = self._probe_tools()
        self.call_opening = self._probe_call_opening()
        # Histories of one program have few distinct system prompts and tools, and long ones.
        self._cached_shared_prefix = lru_cache(maxsize=64)(self._shared_prefix)

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
        """Returns the token ids of a history, up to the beginning of the reply.

        Raises:
            ChatTemplateError: The template cannot render the messages.
        """
        return list(self._encode(messages, tools, self._render))

    def shared_length(self, messages: Sequence[ChatMessage], tools: Sequence[Tool], prompt: list[int]) -> int:
        """Returns the length of the prefix that all prompts with these system messages and tools share."""
        count = 0
        while count < len(messages) and messages[count]["role"] == "system":
            count += 1
        shared = self._cached_shared_prefix(json.dumps(messages[:count]), json.dumps(list(tools)))
        return len(shared) if prompt[: len(shared)] == shared else 0

    def continuation(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        reply: int,
        sampled_end: int | None,
    ) -> list[int]:
        """Returns the token ids between a reply and the next one.

        Args:
            messages: The history.
            tools: Descriptions of tools.
            reply: Index of the reply's message.
            sampled_end: The end-of-sequence id that closed the reply and so is not repeated; None if the reply ended
                otherwise.

        Raises:
            ChatTemplateError: The template cannot render the messages, or not as a continuation.
        """
        mark = f"reply{secrets.token_hex(8)}"
        marked = [*messages[:reply], {"role": "assistant", "content": mark}, *messages[reply + 1 :]]

        def after_reply(replaced: list[ChatMessage], replaced_tools: list[Tool]) -> str:
            _, *after = self._render(replaced, replaced_tools).split(mark)
            if len(after) != 1:
                raise ChatTemplateError("The chat template drops or repeats a reply.")
            if sampled_end is None:
                return after[0]
            return remove_end_token(after[0], str(self._tokenizer.convert_ids_to_tokens(sampled_end)))

        return list(self._encode(marked, tools, after_reply))

    def reply_ids(self, messages: Sequence[ChatMessage], tools: Sequence[Tool], reply: int, end_id: int) -> list[int]:
        """Returns the token ids of a reply of a history, with its tool calls, as the model would write it.

        Args:
            messages: The history.
            tools: Descriptions of tools.
            reply: Index of the reply's message.
            end_id: Token id that the template puts after a reply; not returned.
        """
        end = str(self._tokenizer.convert_ids_to_tokens(end_id))

        def last_reply(shown: list[ChatMessage], shown_tools: list[Tool]) -> str:
            plain = str(without_tools(shown[-1:], [])[0]["content"])
            if not self.renders_tools or not shown[-1].get("tool_calls"):
                return plain
            prompt = self._render(shown[:-1], shown_tools)
            rendered = self._render(shown, shown_tools)
            if not rendered.startswith(prompt):
                # Some templates begin a reply of the history in another way than the next one.
                return plain
            text, found, _ = rendered[len(prompt) :].partition(end)
            return text if found else plain

        return list(self._encode(messages[: reply + 1], tools, last_reply))

    def opening_ids(self, opening: str) -> list[int]:
        """Returns the token ids of a fixed beginning of a reply, which may contain control tokens of the template."""
        return list(self._tokenizer(opening, add_special_tokens=False)["input_ids"])

    def _encode(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        render: Callable[[list[ChatMessage], list[Tool]], str],
    ) -> tuple[int, ...]:
        """Returns the ids of what `render` returns; texts of messages and tools produce no control tokens."""
        history = [list(messages), list(tools)]
        texts: list[str] = []

        def collect(text: str) -> str:
            texts.append(text)
            return text

        _map_texts(history, collect)

        def render_replaced(replaced: Sequence[str]) -> str:
            in_order = iter(replaced)
            return render(*_map_texts(history, lambda _: next(in_order)))

        return self._text.encode_rendered(texts, render_replaced)

    def _render(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> str:
        if self.renders_tools:
            return self._template.render(messages, tools)
        plain = without_tools(messages, tools)
        if plain and plain[0]["role"] == "system" and not self._template.has_system_role:
            # The user's first message includes the system prompt.
            system, *rest = plain
            if rest and rest[0]["role"] == "user":
                rest[0] = {"role": "user", "content": f"{system['content']}\n\n{rest[0]['content']}"}
                return self._template.render(rest)
            return self._template.render([{"role": "user", "content": system["content"]}, *rest])
        return self._template.render(plain)

    def _shared_prefix(self, system: str, tools: str) -> list[int]:
        """Returns the ids that all prompts with some system messages and tools, both as JSON, share."""
        system_messages = json.loads(system)
        first = self.prompt([*system_messages, {"role": "user", "content": "a"}], json.loads(tools))
        second = self.prompt([*system_messages, {"role": "user", "content": "0"}], json.loads(tools))
        return common_prefix(first, second)

    def _probe_tools(self) -> bool:
        history = [_QUESTION, _CALLING_REPLY, {"role": "tool", "tool_call_id": _CALL_ID, "content": _RESULT}]
        try:
            rendered = self._template.render(history, _PROBE_TOOLS)
        except ChatTemplateError:
            return False
        # The parameter appears in the description of the tool and in the call.
        return rendered.count(_PARAMETER) >= 2 and _RESULT in rendered

    def _probe_call_opening(self) -> str:
        if not self.renders_tools:
            return CALL_OPENING
        prompt = self._template.render([_QUESTION], _PROBE_TOOLS)
        following = {"role": "tool", "tool_call_id": _CALL_ID, "content": _RESULT}
        rendered = self._template.render([_QUESTION, _CALLING_REPLY, following], _PROBE_TOOLS)
        opening, found, _ = rendered[len(prompt) :].partition(_TOOL)
        return opening if found and rendered.startswith(prompt) else CALL_OPENING


def _map_texts(value: Any, function: Callable[[str], str]) -> Any:
    """Returns a JSON value with each text and each key of an object replaced, always in the same order."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, list):
        return [_map_texts(entry, function) for entry in value]
    if isinstance(value, dict):
        return {function(key): _map_texts(entry, function) for key, entry in value.items()}
    return value
