"""Reads demonstrations, a file of conversations, as the episodes that acting would have recorded.

Each line is a JSON object {"messages": [...]} whose messages are an optional system prompt, then alternately
observations ("user") and replies ("assistant"). `Conversation` turns them into token ids as it does while acting, so
the model is trained on the same ids that it reads when it acts.

Lines with "tools", which may be an empty list, are in OpenAI's format for fine-tuning: the histories of a program that
calls a served agent, with messages of any roles and tool calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import NoneType

from ..errors import ChatTemplateError, ConfigError, ContextLengthError, excerpt
from ..options import user_path
from .arguments import check_text
from .chat_history import HistoryTemplate, chat_message
from .episode import Conversation, Episode, Reply
from .history_episode import HistoryEpisode
from .tool_calls import ChatMessage, Tool

_EXPECTED = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


def demonstrations_folder() -> Path:
    """Returns the folder of the library's own demonstrations, which `scripts/make_demos.py` writes.

    pyproject.toml installs the repository's `sft_data/` as `llamagym/sft_data/`. In an editable install or a clone the
    folder lies beside the package.
    """
    package = Path(__file__).resolve().parents[1]
    installed = package / "sft_data"
    return installed if installed.is_dir() else package.parent / "sft_data"


def demonstrations_path(name: str) -> Path:
    """Returns the path of demonstrations included in the library, for `Agent.sft_from_jsonl`.

    Args:
        name: `demo_blackjack` shows a strategy with some noise; `format_blackjack`, `format_frozenlake` and so on show
            the format of replies and nothing else.

    Raises:
        ConfigError: The name is unknown; the message lists the available ones.

    >>> demonstrations_path("format_blackjack").name
    'format_blackjack.jsonl'
    """
    folder = demonstrations_folder()
    names = sorted(path.stem for path in folder.glob("*.jsonl"))
    if name not in names:
        raise ConfigError(f"No demonstrations named {excerpt(name)} in {str(folder)!r}. Pass one of {names}.")
    return folder / f"{name}.jsonl"


def read_demonstrations(
    path: str | Path | None, new_conversation: Callable[[], Conversation], prefix: str, end_id: int
) -> list[Episode]:
    """Reads a file of demonstrations: one episode per line, all rewards 0.

    Args:
        path: The file, UTF-8; empty lines are skipped. None is rejected.
        new_conversation: Creates an empty conversation with the agent's template and system prompt.
        prefix: Fixed text at the beginning of every reply; demonstrated replies may include or omit it.
        end_id: Token id that closes each reply.

    Raises:
        ConfigError: The file cannot be read or is empty, a line is not a conversation, or its system prompt differs
            from the agent's, so that the model would be trained on prompts it never reads when it acts.
        ContextLengthError: A turn does not fit the model.
    """
    if path is None:
        raise ConfigError(
            "no demonstrations file is set. Set your agent's class attribute demonstrations to a JSONL file, or pass "
            "its path to sft_from_jsonl()."
        )
    try:
        lines = user_path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the demonstrations {str(path)!r}: {error}. Pass the path of a JSONL file of {_EXPECTED}."
        ) from error
    template = HistoryTemplate(new_conversation().template)
    episodes = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        location = f"{path}, line {number}"
        conversation = new_conversation()
        messages, tools = _parse(line, location)
        if tools is None:
            _check_dialogue(messages, location)
            episodes.append(_to_episode(messages, conversation, prefix, end_id, location))
        else:
            episodes.append(_history_to_episode(messages, tools, template, conversation, end_id, location))
    if not episodes:
        raise ConfigError(f"the demonstrations {str(path)!r} are empty. Write one {_EXPECTED} a line.")
    return episodes


def _parse(line: str, location: str) -> tuple[list[ChatMessage], list[Tool] | None]:
    """Returns the messages and the tools of a line, the latter None if it has none; checks their types."""
    try:
        content = json.loads(line)
        tools = content.get("tools")
        if not isinstance(tools, (list, NoneType)):
            raise TypeError(f"tools are {excerpt(tools)}, which is not a list")
        read = [chat_message(message) for message in content["messages"]]
        names = [tool["function"]["name"] for tool in tools or ()]
        # Python reads NaN and lone surrogates.
        json.dumps([read, tools], allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{location} is not a conversation ({type(error).__name__}: {error}). Expected {_EXPECTED}."
        ) from error
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{location} has tools named {excerpt(names)}. Every name must be a string.")
    for message in read:
        if not message["content"] and not message.get("tool_calls") and message["role"] != "tool":
            raise ConfigError(
                f"{location} holds a message without text. Make every content a string that is not empty."
            )
        check_text(message["content"], location)
    return read, tools


def _check_dialogue(messages: list[ChatMessage], location: str) -> None:
    """Rejects messages other than observations and replies in turn, after an optional system prompt."""
    roles = [message["role"] for message in messages]
    dialogue = roles[1:] if roles[:1] == ["system"] else roles
    if not dialogue or len(dialogue) % 2 or dialogue != ["user", "assistant"] * (len(dialogue) // 2):
        raise ConfigError(
            f"{location} has the roles {roles}. Expected at most one 'system', then 'user' and 'assistant' in turn, "
            "'assistant' last."
        )


def _to_episode(
    messages: list[ChatMessage], conversation: Conversation, prefix: str, end_id: int, location: str
) -> Episode:
    """Encodes messages as an episode."""
    if messages[0]["role"] == "system":
        system_prompt = messages.pop(0)["content"]
        if system_prompt != conversation.system_prompt:
            raise ConfigError(
                f"{location} opens with the system prompt {system_prompt!r}, but the agent's is "
                f"{conversation.system_prompt!r}. Write the demonstrations with the agent's, or leave it out."
            )
    for user, assistant in zip(messages[::2], messages[1::2], strict=True):
        ids = (*conversation.template.encode(assistant["content"].removeprefix(prefix)), end_id)
        length = conversation.observe(user["content"], prefix).token_count + len(ids)
        _check_length(length, conversation.max_length, location)
        conversation.answer(_demonstrated(ids), assistant["content"])
    return Episode(tuple(conversation.turns), terminated=True, truncated=False)


def _history_to_episode(
    messages: list[ChatMessage],
    tools: list[Tool],
    template: HistoryTemplate,
    conversation: Conversation,
    end_id: int,
    location: str,
) -> Episode:
    """Encodes a program's history as an episode with one turn per reply."""
    episode = HistoryEpisode()
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if index == 0 or messages[index - 1]["role"] == "assistant":
            raise ConfigError(f"{location} has a reply to no message. Put one of the user or of a tool before it.")
        try:
            ids = (*template.reply_ids(messages, tools, index, end_id), end_id)
            call = episode.prepare(template, messages[:index], tools)
        except ChatTemplateError as error:
            raise ConfigError(f"{location} cannot be rendered: {error}") from error
        _check_length(call.prompt_length + len(ids), conversation.max_length, location)
        episode.record(call, _demonstrated(ids), message, message["content"])
    if not episode.turns:
        raise ConfigError(f"{location} has no reply. Add a message with the role 'assistant'.")
    return episode.finished(truncated=False, group=None)


def _check_length(length: int, max_length: int | None, location: str) -> None:
    if max_length is not None and length > max_length:
        raise ContextLengthError(f"{location} needs {length} tokens, more than the model's {max_length}. Shorten it.")


def _demonstrated(ids: tuple[int, ...]) -> Reply:
    """Returns a reply that was not sampled; supervised learning does not read its log-probabilities."""
    return Reply(ids, (0.0,) * len(ids), 0.0, "eos", None, 0)
