"""Requests of clients: the fields that are supported, and their checks.

The names and meanings are those of OpenAI's chat completions API. A field that would change the reply and is not
supported is rejected; one that only concerns OpenAI's service is ignored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, model_validator
from typing_extensions import Self

from ..errors import did_you_mean
from ..text.chat_history import chat_message
from ..text.tool_calls import ChatMessage, Tool

# Fields of OpenAI's API that do not change a reply of this server.
_IGNORED_FIELDS = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "seed",
        "service_tier",
        "store",
        "verbosity",
    )
)
# Fields that would change a reply, with the values at which they do not.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none",),
}
_MAX_REPLIES = 128
_MAX_STOPS = 16

Number = Annotated[StrictInt | StrictFloat, Field(allow_inf_nan=False)]


class _TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class _Function(BaseModel):
    """The function that a reply called."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class _Call(BaseModel):
    """A tool call of an earlier reply."""

    id: str = ""
    type: Literal["function"] = "function"
    function: _Function


class _Message(BaseModel):
    """A message of the history; further fields of replies, such as `refusal`, are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is required, except in assistant messages with tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message has tool_calls")
        return self


class _ToolFunction(BaseModel):
    """The description of a function."""

    model_config = ConfigDict(extra="allow")

    # A name may begin a reply, so it must hold no control tokens; this is also what OpenAI accepts.
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")


class _Tool(BaseModel):
    """The description of a tool."""

    type: Literal["function"]
    function: _ToolFunction


class _ChoiceFunction(BaseModel):
    name: str


class _ToolChoice(BaseModel):
    """The tool that a reply must call."""

    type: Literal["function"]
    function: _ChoiceFunction


class _StreamOptions(BaseModel):
    """Options of streamed replies."""

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False


class HistoryRequest(BaseModel):
    """A history of messages and the tools that a reply may call.

    Attributes:
        messages: The messages so far.
        tools: Descriptions of tools.
    """

    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        # JSON can contain lone surrogates, which UTF-8 cannot encode, and Python reads NaN.
        try:
            json.dumps([self.chat_messages(), self.chat_tools()], ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            raise ValueError("messages or tools contain a lone surrogate") from None
        except RecursionError:
            raise ValueError("messages or tools are nested too deeply") from None
        return self

    def chat_messages(self) -> list[ChatMessage]:
        """Returns the messages as chat templates expect them."""
        return [chat_message(message.model_dump()) for message in self.messages]

    def chat_tools(self) -> list[Tool]:
        """Returns the tools as chat templates expect them."""
        return [tool.model_dump() for tool in self.tools or ()]


class ChatRequest(HistoryRequest):
    """A request for one or several replies.

    Attributes:
        model: Ignored: the server has one model.
        n: Number of replies.
        max_tokens: Maximum tokens of a reply; None is the agent's.
        max_completion_tokens: Another name of `max_tokens`.
        temperature: Divisor of logits; 0 takes the most likely token. None is the agent's.
        top_p: Nucleus sampling; None is the agent's.
        stop: Texts that end a reply, which then does not contain them.
        stream: Whether to send replies as they grow.
        stream_options: Options of streamed replies.
        tool_choice: "none" hides the tools; "required" or a tool's name begins the reply with a call.
        logprobs: Whether to return the log-probability of each token.
        top_logprobs: Must be 0 or None.
        user: The episode that the call belongs to, unless the address or a header names it.
    """

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: Annotated[StrictInt, Field(ge=1, le=_MAX_REPLIES)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=_MAX_STOPS)] | None = None
    stream: StrictBool | None = None
    stream_options: _StreamOptions | None = None
    tool_choice: Literal["none", "auto", "required"] | _ToolChoice | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=0)] | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        fields = self.model_extra or {}
        for name, value in fields.items():
            if name in _IGNORED_FIELDS or value is None or value in _NEUTRAL_VALUES.get(name, ()):
                continue
            if name in _NEUTRAL_VALUES:
                raise ValueError(f"{name} is not supported by this server")
            known = [*type(self).model_fields, *_IGNORED_FIELDS, *_NEUTRAL_VALUES]
            raise ValueError(f"unknown field {name!r}. {did_you_mean(name, known)}")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice requires tools")
        if isinstance(self.tool_choice, _ToolChoice):
            names = [tool.function.name for tool in self.tools or ()]
            if self.tool_choice.function.name not in names:
                raise ValueError(f"tool_choice must be one of {names}, got {self.tool_choice.function.name!r}")
        return self

    @property
    def token_limit(self) -> int | None:
        """Maximum tokens of a reply, by either name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> list[str]:
        """Texts that end a reply."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def forced_tool(self) -> str | None:
        """Name of the tool that the reply must call; an empty string for any tool, None if no call is required."""
        if isinstance(self.tool_choice, _ToolChoice):
            return self.tool_choice.function.name
        return "" if self.tool_choice == "required" else None


class RewardRequest(BaseModel):
    """A reward for a turn of an episode.

    Attributes:
        reward: Added to the turn's reward.
        turn: Turn of the episode, from 0, or from the end by negative numbers; by default the last.
    """

    model_config = ConfigDict(extra="forbid")

    reward: Number
    turn: StrictInt = -1


class EndRequest(HistoryRequest):
    """The end of an episode.

    Attributes:
        messages: After a truncated episode, the history that the next call would have sent.
        reward: A last reward, for the last turn.
        truncated: Whether the episode was cut off rather than finished.
        group: For GRPO, equal for episodes with the same start, such as the number of the task.
    """

    model_config = ConfigDict(extra="forbid")

    messages: list[_Message] = Field(default_factory=list)
    reward: Number | None = None
    truncated: StrictBool = False
    group: StrictInt | str | None = None
