"""Tool calls as text: how a prompt describes tools, and how a reply's calls are read.

Chat templates of models that were trained to call tools render tools, calls and results themselves. For all others,
`without_tools` writes them into ordinary messages, in the format of Hermes and Qwen: a call is a JSON object between
`<tool_call>` and `</tool_call>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ChatMessage = dict[str, Any]
"""A message in the format of transformers: role, content, and the tool calls of a reply."""
Tool = dict[str, Any]
"""The description of a tool in the format of OpenAI and transformers, `{"type": "function", "function": ...}`."""

_CALL_BEGIN = "<tool_call>"
_CALL_END = "</tool_call>"
_RESULT_BEGIN = "<tool_response>"
_RESULT_END = "</tool_response>"
# How models mark a call: Hermes, Qwen and SmolLM; Mistral. Llama writes the JSON object alone; so does Mistral, if its
# mark is a special token, which decoding removes.
CALL_MARKS = (_CALL_BEGIN, "[TOOL_CALLS]")
_BETWEEN_CALLS = re.compile(r"(?:\s|<tool_call>|</tool_call>|\[TOOL_CALLS\]|[\[\],;])*")
# Keys that models use for a call's arguments.
_ARGUMENTS = ("arguments", "parameters")
CALL_OPENING = f'{_CALL_BEGIN}\n{{"name": "'
"""Beginning of a call, up to the tool's name."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        name: Name of the tool.
        arguments: Its arguments by name.
    """

    name: str
    arguments: dict[str, Any]

    def text(self) -> str:
        """Returns the call as a reply contains it."""
        call = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"{_CALL_BEGIN}\n{call}\n{_CALL_END}"


def tools_prompt(tools: Sequence[Tool]) -> str:
    """Returns the description of tools for a system prompt."""
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return f'Tools:\n{described}\nCall a tool like this:\n{CALL_OPENING}tool", "arguments": {{"x": 1}}}}\n{_CALL_END}'


def without_tools(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[ChatMessage]:
    """Returns messages that hold tools, calls and results as text, with the roles system, user and assistant only.

    Consecutive messages of the system or the user, such as results of several calls, become one, since some templates
    demand that roles alternate. The description of the tools follows the system prompt.
    """
    plain: list[ChatMessage] = []
    for message in messages:
        role = message["role"]
        text = message["content"]
        if role == "tool":
            role = "user"
            text = f"{_RESULT_BEGIN}\n{text}\n{_RESULT_END}"
        calls = [ToolCall(**call["function"]).text() for call in message.get("tool_calls", ())]
        text = "\n".join(filter(None, [text, *calls]))
        if plain and role == plain[-1]["role"] and role != "assistant":
            plain[-1] = {"role": role, "content": f"{plain[-1]['content']}\n{text}"}
        else:
            plain.append({"role": role, "content": text})
    if tools:
        system = plain.pop(0)["content"] if plain and plain[0]["role"] == "system" else ""
        described = "\n\n".join(filter(None, [system, tools_prompt(tools)]))
        plain.insert(0, {"role": "system", "content": described})
    return plain


def read_calls(reply: str) -> tuple[str, list[ToolCall]]:
    """Splits a reply into its text and its tool calls.

    If one of the calls is malformed, there are no calls: all of the reply is text.

    >>> read_calls('Let me see. <tool_call>{"name": "find", "arguments": {"name": "Anna"}}</tool_call>')
    ('Let me see.', [ToolCall(name='find', arguments={'name': 'Anna'})])
    >>> read_calls("No call.")
    ('No call.', [])
    """
    starts = [reply.find(mark) for mark in CALL_MARKS if mark in reply]
    if not starts and not reply.lstrip().startswith(("{", "[{")):
        return reply, []
    start = min(starts, default=0)
    position = start
    calls: list[ToolCall] = []
    while True:
        position = _BETWEEN_CALLS.match(reply, position).end()  # type: ignore[union-attr]  # it matches nothing, too
        rest = reply[position:]
        if not rest.startswith("{"):
            break
        try:
            value, length = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return reply, []
        call = _call_from(value)
        if call is None:
            return reply, []
        calls.append(call)
        position += length
    if not calls or any(mark in rest for mark in CALL_MARKS):
        return reply, []
    return " ".join(filter(None, [reply[:start].rstrip(), rest.strip()])), calls


def _call_from(value: Any) -> ToolCall | None:
    """Returns the call that a JSON value describes; None if it is not a call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments: Any = {}
    for key in _ARGUMENTS:
        arguments = value.get(key, arguments)
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        # Python reads NaN, infinities and lone surrogates, which a client could not read.
        json.dumps([value["name"], arguments], allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return ToolCall(value["name"], arguments) if isinstance(arguments, dict) else None
