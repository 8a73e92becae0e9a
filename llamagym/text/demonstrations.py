"""Demonstrations: a file of conversations, read as the episodes that acting would have recorded.

Each line is a JSON object {"messages": [...]} whose messages are an optional system prompt, then observations ("user")
and replies ("assistant") in turn. They become turns through `Conversation`, as in acting, so a model that learns from
them reads the very token ids that it will read when it acts.
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

_WANTED = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


def demonstrations_folder() -> Path:
    """The folder of the demonstrations that come with the library; `scripts/make_demos.py` writes them.

    pyproject.toml installs the repository's `sft_data/` as `llamagym/sft_data/`. An editable install, and a clone that
    is not installed, run from the repository, where the folder lies beside the package.
    """
    package = Path(__file__).resolve().parents[1]
    installed = package / "sft_data"
    return installed if installed.is_dir() else package.parent / "sft_data"


def demonstrations_path(name: str) -> Path:
    """Returns the path of demonstrations that come with the library, for `Agent.sft_from_jsonl`.

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
    path: str | Path | None, begin: Callable[[], Conversation], prefix: str, end: int
) -> list[Episode]:
    """Read a file of demonstrations; one episode a line, its rewards 0.

    Args:
        path: The file, UTF-8; empty lines are skipped. None is an error, for agents that name no file.
        begin: Makes an empty conversation, which gives the template and the system prompt.
        prefix: Fixed text that every reply begins with; demonstrated replies may hold it or leave it out.
        end: Token id that closes each reply.

    Raises:
        ConfigError: The file cannot be read or holds no demonstration, a line is none, or its system prompt is
            another than the agent's: in what it never reads when it acts, the model would learn nothing of use.
        ContextLengthError: A turn does not fit the model.
    """
    if path is None:
        raise ConfigError(
            "no demonstrations are named. Set your agent's class attribute demonstrations to a JSONL file, or pass its "
            "path to sft_from_jsonl()."
        )
    try:
        lines = user_path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the demonstrations {str(path)!r}: {error}. Pass the path of a JSONL file of {_WANTED}."
        ) from error
    episodes = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        episodes.append(_episode(_messages(line, where), begin(), prefix, end, where))
    if not episodes:
        raise ConfigError(f"the demonstrations {str(path)!r} are empty. Write one {_WANTED} a line.")
    return episodes


def _messages(line: str, where: str) -> list[Message]:
    """A line's messages, checked for shape."""
    try:
        messages = json.loads(line)["messages"]
        said = [(message["role"], message["content"]) for message in messages]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where} is no conversation ({type(error).__name__}: {error}). Expected {_WANTED}."
        ) from error
    roles = [role for role, _ in said]
    dialogue = roles[1:] if roles[:1] == ["system"] else roles
    if not dialogue or len(dialogue) % 2 or dialogue != ["user", "assistant"] * (len(dialogue) // 2):
        raise ConfigError(
            f"{where} has the roles {roles}. Expected at most one 'system', then 'user' and 'assistant' in turn, "
            "'assistant' last."
        )
    if not all(isinstance(content, str) and content for _, content in said):
        raise ConfigError(f"{where} holds a message without text. Make every content a string that is not empty.")
    for _, content in said:
        check_text(content, where)
    return messages


def _episode(messages: list[Message], conversation: Conversation, prefix: str, end: int, where: str) -> Episode:
    if messages[0]["role"] == "system":
        given, wanted = messages.pop(0)["content"], conversation.system_prompt
        if given != wanted:
            raise ConfigError(
                f"{where} opens with the system prompt {given!r}, but the agent's is {wanted!r}. Write the "
                "demonstrations with the agent's, or leave theirs out to take it."
            )
    for user, assistant in zip(messages[::2], messages[1::2], strict=True):
        reply = (*conversation.template.encode(assistant["content"].removeprefix(prefix)), end)
        length = conversation.observe(user["content"], prefix).token_count + len(reply)
        if conversation.max_length is not None and length > conversation.max_length:
            raise ContextLengthError(
                f"{where} needs {length} tokens, more than the model's {conversation.max_length}. Shorten it."
            )
        # Nothing was sampled: these log-probabilities are never compared with.
        conversation.answer(Reply(reply, (0.0,) * len(reply), 0.0, "eos", None, 0), assistant["content"])
    return Episode(tuple(conversation.turns), terminated=True, truncated=False)
