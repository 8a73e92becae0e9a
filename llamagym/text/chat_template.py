"""Renders chat messages as token ids to append: the first prompt, then the delta of each message.

Earlier turns are never rendered again. The delta between two replies (the end of the assistant's message, the user's
message, the generation prompt) is found by rendering a short conversation with the same system prompt and taking the
text after its reply. So a template that rewrites earlier turns, as Qwen3's does with its thinking blocks, still gives
an append-only conversation: earlier turns stay as the model saw them. A template that shows the system prompt in the
last message only, as Mistral's does, shows it in each new message. A template is rejected if its text after a reply
depends on that reply or on earlier turns.

Nothing in a text of users or environments becomes a control token. A tokenizer encodes the name of one, such as
`<|im_end|>`, as that token wherever it occurs, so an observation that contains it could close its own message and open
another. Here placeholders hide such names from the template and the tokenizer, and the names are then encoded as
ordinary text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import ChatTemplateError, ConfigError, excerpt

# Probe texts are plain words, which no template trims or escapes.
_SYSTEM = "probesystem"
_USER = "probeuser"
_REPLY = "probereply"
_OTHER_USER = "otherprobe"
_OTHER_REPLY = "anotherandlongerreply"
# Templates that depend on the number of turns usually do so at small counts or small periods.
_EARLIER_TURNS = (*range(1, 9), 16, 32, 64)

Message = dict[str, str]


class ChatTemplate:
    """Renders prompts as token ids with a tokenizer's chat template.

    Attributes:
        tokenizer: The tokenizer.
        has_system_role: Whether the template accepts messages with the role "system".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, append_only: bool = True) -> None:
        """Probes the template.

        Args:
            tokenizer: The tokenizer; its `chat_template` is used unchanged.
            append_only: Whether conversations of several turns will be rendered, which needs further checks.

        Raises:
            ChatTemplateError: The tokenizer has no template, the template fails or drops messages, or it is not
                append-only although `append_only` is set.
        """
        if tokenizer.chat_template is None:
            raise ChatTemplateError(
                f"Tokenizer {tokenizer.name_or_path!r} has no chat template. Load it with load_model_and_tokenizer(), "
                "which supplies a plain one for known models, or set tokenizer.chat_template."
            )
        self.tokenizer = tokenizer
        self._text = PlainText(tokenizer)
        self.has_system_role = self._probe_system_role()
        if _USER not in self.render(self.first_messages(_SYSTEM, _USER)):
            raise ChatTemplateError(
                f"The chat template of {tokenizer.name_or_path!r} drops the user's message, so no observation would "
                "reach the model. Set another tokenizer.chat_template."
            )
        if append_only:
            self._check_append_only()
        # The same texts recur, and a lookup is faster than rendering.
        self._cached_encode = lru_cache(maxsize=4096)(self._text.encode)
        self._cached_first_prompt = lru_cache(maxsize=4096)(self._render_first_prompt)
        self._cached_next_prompt = lru_cache(maxsize=4096)(self._render_next_prompt)
        self._cached_shared_prefix = lru_cache(maxsize=64)(self._shared_prefix)

    def first_prompt(self, system: str, user: str) -> list[int]:
        """Returns the token ids of a new conversation, up to the beginning of the reply."""
        return list(self._cached_first_prompt(system, user))

    def shared_length(self, system: str, first_prompt: list[int]) -> int:
        """Returns the number of leading ids that all first prompts with this system prompt share; 0 if unknown."""
        shared = self._cached_shared_prefix(system)
        return len(shared) if first_prompt[: len(shared)] == shared else 0

    def next_prompt(self, system: str, user: str, sampled_end: int | None) -> list[int]:
        """Returns the token ids between a reply and the next one.

        Args:
            system: The conversation's system prompt.
            user: The next observation's text.
            sampled_end: The end-of-sequence id that closed the reply and so is not repeated; None if the reply ended
                otherwise.
        """
        return list(self._cached_next_prompt(system, user, sampled_end))

    def closing_id(self, end_ids: Collection[int]) -> int:
        """Returns the id to close a reply with: the template's, the tokenizer's EOS id, or the lowest of `end_ids`.

        Args:
            end_ids: All ids that end a reply, at least one.
        """
        for closing in (self.closing_token(), self.tokenizer.eos_token_id):
            if closing is not None and closing in end_ids:
                return int(closing)
        return min(end_ids)

    def closing_token(self) -> int | None:
        """Returns the id that the template puts after a reply, or None."""
        reply = {"role": "assistant", "content": _REPLY}
        _, found, after = self.render([*self.first_messages(_SYSTEM, _USER), reply]).rpartition(_REPLY)
        if not found:
            return None
        # The template's own text contains control tokens, so it is not encoded as plain text.
        ids = self.tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"]
        return int(ids[0]) if ids else None

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of plain text, without special tokens."""
        return list(self._cached_encode(text))

    def _render_first_prompt(self, system: str, user: str) -> tuple[int, ...]:
        return self._text.encode_rendered([system, user], lambda texts: self.render(self.first_messages(*texts)))

    def _render_next_prompt(self, system: str, user: str, sampled_end: int | None) -> tuple[int, ...]:
        def render(texts: Sequence[str]) -> str:
            text = self._delta(texts[0], texts[1])
            if sampled_end is None:
                return text
            return remove_end_token(text, str(self.tokenizer.convert_ids_to_tokens(sampled_end)))

        return self._text.encode_rendered([system, user], render)

    def _shared_prefix(self, system: str) -> list[int]:
        """Returns the ids that first prompts with different observations have in common."""
        return common_prefix(self.first_prompt(system, "a"), self.first_prompt(system, "0"))

    def first_messages(self, system: str, user: str) -> list[Message]:
        """Returns the messages of a new conversation; without a system role, the user's includes the system prompt."""
        if not system:
            return [{"role": "user", "content": user}]
        if self.has_system_role:
            return [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return [{"role": "user", "content": f"{system}\n\n{user}"}]

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        """Returns the template's text for messages and the beginning of a reply.

        Args:
            messages: Chat messages in the format of transformers.
            tools: Descriptions of the tools that the reply may call.

        Raises:
            ChatTemplateError: The template fails.
        """
        # Hybrid thinking models would spend the whole reply on thinking; templates without the switch ignore it.
        try:
            rendered: Any = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
            )
        except Exception as error:  # a template is a program and may raise anything
            raise ChatTemplateError(
                f"The chat template of {self.tokenizer.name_or_path!r} cannot render a conversation: "
                f"{type(error).__name__}: {error} Set another tokenizer.chat_template."
            ) from error
        return rendered

    def _delta(
        self, system: str, user: str, first: str = _USER, earlier: Sequence[Message] = (), reply: str = _REPLY
    ) -> str:
        """Returns the text that the template puts after a reply when the message `user` follows.

        Args:
            system: The system prompt.
            user: The message after the reply.
            first: The conversation's first message.
            earlier: Replies and messages between the first message and the last reply.
            reply: The last reply.
        """
        while reply in user or reply in system:
            reply += "x"
        messages = [
            *self.first_messages(system, first),
            *earlier,
            {"role": "assistant", "content": reply},
            {"role": "user", "content": user},
        ]
        _, *after = self.render(messages).split(reply)
        if len(after) != 1:
            problem = "repeats" if after else "drops or changes"
            raise ChatTemplateError(
                f"The chat template of {self.tokenizer.name_or_path!r} {problem} earlier replies, so a conversation "
                "cannot be appended to. Pass context='turn' to show one observation at a time, or set another "
                "tokenizer.chat_template."
            )
        return after[0]

    def _probe_system_role(self) -> bool:
        try:
            rendered = self.render([{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}])
        except ChatTemplateError:
            return False
        return _SYSTEM in rendered

    def _check_append_only(self) -> None:
        """Raises a `ChatTemplateError` if the text after a reply depends on the reply or on earlier turns."""
        turn = [{"role": "assistant", "content": _OTHER_USER}, {"role": "user", "content": _OTHER_USER}]
        for system in (_SYSTEM, ""):
            expected = self._delta(system, _USER)
            self._require_same(expected, self._delta(system, _USER, reply=_OTHER_REPLY), "that reply")
            self._require_same(expected, self._delta(system, _USER, _OTHER_USER), "earlier turns")
            for count in _EARLIER_TURNS:
                received = self._delta(system, _USER, earlier=count * turn)
                self._require_same(expected, received, f"earlier turns, such as {count}")

    def _require_same(self, expected: str, received: str, cause: str) -> None:
        if received != expected:
            raise ChatTemplateError(
                f"The chat template of {self.tokenizer.name_or_path!r} is not append-only: its text after a reply "
                f"depends on {cause}. It renders {expected!r} and {received!r}. Pass context='turn' to show one "
                "observation at a time, or set another tokenizer.chat_template."
            )


def remove_end_token(text: str, end: str) -> str:
    """Removes a reply's end token from the beginning of a template's text.

    Some templates, such as Llama-2's, put a space before the token.

    >>> remove_end_token(" </s><s>[INST] and now?", "</s>")
    '<s>[INST] and now?'
    >>> remove_end_token(" and now?", "</s>")
    ' and now?'
    """
    stripped = text.lstrip()
    return stripped.removeprefix(end) if stripped.startswith(end) else text


def common_prefix(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Returns the ids that two prompts have in common, up to the observations in which they differ.

    Returns no ids if the prompts are equal: a tokenizer may know neither observation, and then the prompts do not show
    where it begins.
    """
    for index, (id_in_first, id_in_second) in enumerate(zip(first, second, strict=False)):
        if id_in_first != id_in_second:
            return list(first[:index])
    return []


def invocation_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the last token of the generation prompt, from which on an activated LoRA is active."""
    return ChatTemplate(tokenizer, append_only=False).first_prompt("", _USER)[-1:]


def end_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns all ids that end a reply, sorted: the tokenizer's and those of the model's generation config.

    Raises:
        ConfigError: Neither defines an id that the model has.
    """
    defined = _special_ids(model.generation_config, "eos_token_id") | _special_ids(tokenizer, "eos_token_id")
    vocab_size = len(model.get_input_embeddings().weight)
    found = sorted(token for token in defined if 0 <= token < vocab_size)
    if not found:
        problem = f"the ids {sorted(defined)} are beyond its {vocab_size} tokens" if defined else "none is set"
        raise ConfigError(
            "Neither the tokenizer nor the model's generation_config names an end token that the model has, so no "
            f"reply could end: {problem}. Set tokenizer.eos_token to the token that ends a message in the model's "
            "chats."
        )
    return found


def check_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Rejects a tokenizer of another model, as far as the ids show it.

    Raises:
        ConfigError: The tokenizer has more tokens than the model, encodes the model's EOS tokens as ordinary text, or
            defines at least two special tokens that the model defines too and agrees on none of them.
    """
    # PEFT's wrappers of embeddings have `weight`, but not `num_embeddings`.
    vocab_size = len(model.get_input_embeddings().weight)
    if len(tokenizer) > vocab_size:
        raise ConfigError(
            f"The tokenizer has {len(tokenizer)} tokens, the model only {vocab_size}. Pass the model's own tokenizer; "
            "if you have added tokens, call model.pretrained_model.resize_token_embeddings(len(tokenizer)) first."
        )
    roles = ["eos_token_id", "bos_token_id", "pad_token_id"]
    of_tokenizer = {role: _special_ids(tokenizer, role) for role in roles}
    of_model: dict[str, set[int]] = {}
    for role in roles:
        ids = _special_ids(model.config, role) | _special_ids(model.generation_config, role)
        # A hand-written config may keep its class's default ids, which lie beyond its own vocabulary.
        of_model[role] = {token for token in ids if token < vocab_size}
    # Users who set another EOS token often pad with it, so the padding id is no further evidence.
    if of_tokenizer["pad_token_id"] == of_tokenizer["eos_token_id"]:
        roles = roles[:2]
    shared = [role for role in roles if of_model[role] and of_tokenizer[role]]
    # Embeddings that were resized to this tokenizer show that it is the model's, whatever its special tokens are.
    was_resized = len(tokenizer) == vocab_size
    agrees = any(of_model[role] & of_tokenizer[role] for role in shared)
    disagrees = not was_resized and len(shared) > 1 and not agrees
    end_tokens = of_model["eos_token_id"]
    control_tokens = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    if disagrees or (end_tokens and not end_tokens & control_tokens):
        raise ConfigError(
            f"The tokenizer seems to be another model's: its special tokens are {of_tokenizer}, the model's "
            f"{of_model}. Pass the model's own tokenizer. If you chose other special tokens on purpose, set their ids "
            "in model.pretrained_model.config and .generation_config too."
        )


def _special_ids(owner: Any, role: str) -> set[int]:
    """Returns the ids, none to several, that a config or tokenizer defines for a special token."""
    found = getattr(owner, role, None)
    ids: set[Any] = set(found) if isinstance(found, (list, tuple, set)) else {found}
    ids.discard(None)
    if not all(isinstance(token, int) for token in ids):
        raise ConfigError(
            f"{role} of {type(owner).__name__} must be an int, a list of ints or None, got {excerpt(found)} "
            f"({type(found).__name__}). Set it to the ids of tokens."
        )
    return ids


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
