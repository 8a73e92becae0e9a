"""Reads demonstrations, a file of conversations, as the episodes that acting would have recorded.

Each line is a JSON object {"messages": [...]} whose messages are an optional system prompt, then alternately
observations ("user") and replies ("assistant"). `Conversation` turns them into token ids as it does while acting, so
the model is trained on the same ids that it reads when it acts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ..errors import ConfigError, ContextLengthError, excerpt
from ..options import user_path
from .arguments import check_text
from .chat_template import Message
from .episode import Conversation, Episode, Reply

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
    episodes = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        location = f"{path}, line {number}"
        messages = _parse_messages(line, location)
        episodes.append(_to_episode(messages, new_conversation(), prefix, end_id, location))
    if not episodes:
        raise ConfigError(f"the demonstrations {str(path)!r} are empty. Write one {_EXPECTED} a line.")
    return episodes


def _parse_messages(line: str, location: str) -> list[Message]:
    """Returns the messages of a line after checking roles and contents."""
    try:
        messages = json.loads(line)["messages"]
        roles = [message["role"] for message in messages]
        contents = [message["content"] for message in messages]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{location} is not a conversation ({type(error).__name__}: {error}). Expected {_EXPECTED}."
        ) from error
    dialogue = roles[1:] if roles[:1] == ["system"] else roles
    if not dialogue or len(dialogue) % 2 or dialogue != ["user", "assistant"] * (len(dialogue) // 2):
        raise ConfigError(
            f"{location} has the roles {roles}. Expected at most one 'system', then 'user' and 'assistant' in turn, "
            "'assistant' last."
        )
    for content in contents:
        if not isinstance(content, str) or not content:
            raise ConfigError(
                f"{location} holds a message without text. Make every content a string that is not empty."
            )
    for content in contents:
        check_text(content, location)
    return messages


def _to_episode(
    messages: list[Message], conversation: Conversation, prefix: str, end_id: int, location: str
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
        if conversation.max_length is not None and length > conversation.max_length:
            raise ContextLengthError(
                f"{location} needs {length} tokens, more than the model's {conversation.max_length}. Shorten it."
            )
        # Nothing was sampled, and supervised learning does not read these log-probabilities.
        reply = Reply(ids, (0.0,) * len(ids), 0.0, "eos", None, 0)
        conversation.answer(reply, assistant["content"])
    return Episode(tuple(conversation.turns), terminated=True, truncated=False)
