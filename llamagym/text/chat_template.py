"""Renders chat messages as token ids to append: the first prompt, then each message's delta.

A conversation is never rendered again. What a template puts between one reply and the next (the end of the assistant's
message, the user's message, the generation prompt) is found by rendering a conversation with the same system prompt and
taking what follows the last reply. So a template that rewrites earlier turns, as Qwen3's does with its thinking blocks,
still gives an append-only conversation: earlier turns stay as the model saw them. A template that shows the system
prompt in the last message only, as Mistral's does, shows it in each new message. Where the text after a reply depends
on that reply or on earlier turns, the template is rejected.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import ChatTemplateError, ConfigError, excerpt
from .plain_text import PlainText

# Plain words, which no template trims or escapes.
_SYSTEM, _USER, _REPLY = "probesystem", "probeuser", "probereply"
_OTHER_USER, _OTHER_REPLY = "otherprobe", "anotherandlongerreply"
# Templates that depend on the number of turns usually do so at small counts or small periods.
_EARLIER_TURNS = (*range(1, 9), 16, 32, 64)

Message = dict[str, str]


class ChatTemplate:
    """A tokenizer's chat template as a source of prompt ids.

    Raises:
        ChatTemplateError: The tokenizer has no template, it fails or drops messages, or what follows a reply depends on
            that reply or on earlier turns (only where `append_only`).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, append_only: bool = True) -> None:
        """Probe the template.

        Args:
            tokenizer: Its `chat_template` is used as it is.
            append_only: Whether conversations of several turns will be rendered, and so must be checked.
        """
        if tokenizer.chat_template is None:
            raise ChatTemplateError(
                f"Tokenizer {tokenizer.name_or_path!r} has no chat template. Load it with load_model_and_tokenizer(), "
                "which supplies a plain one for known models, or set tokenizer.chat_template."
            )
        self._tokenizer = tokenizer
        self._text = PlainText(tokenizer)
        self.has_system_role = self._probe_system_role()
        if _USER not in self._render(self._opening(_SYSTEM, _USER)):
            raise ChatTemplateError(
                f"The chat template of {tokenizer.name_or_path!r} drops the user's message, so no observation would "
                "reach the model. Set another tokenizer.chat_template."
            )
        if append_only:
            self._check_append_only()
        # The same texts recur, and rendering one takes longer than a lookup.
        self._encode = lru_cache(maxsize=4096)(self._text.encode)
        self._first = lru_cache(maxsize=4096)(self._first_uncached)
        self._next = lru_cache(maxsize=4096)(self._next_uncached)
        self._shared = lru_cache(maxsize=64)(self._shared_uncached)

    def first_prompt(self, system: str, user: str) -> list[int]:
        """Token ids of a new conversation, up to where the reply begins."""
        return list(self._first(system, user))

    def shared_length(self, system: str, first_prompt: list[int]) -> int:
        """How many leading ids of a first prompt all first prompts under this system prompt share; 0 if unknown."""
        shared = self._shared(system)
        return len(shared) if first_prompt[: len(shared)] == shared else 0

    def next_prompt(self, system: str, user: str, sampled_end: int | None) -> list[int]:
        """Token ids between a reply and the next one.

        Args:
            system: The conversation's system prompt.
            user: The next observation's text.
            sampled_end: The end-of-sequence id that closed the reply, which is then not repeated; None if the reply
                ended otherwise.
        """
        return list(self._next(system, user, sampled_end))

    def closing_id(self, end_ids: Collection[int]) -> int:
        """The id that ends a written reply: the template's, the tokenizer's end token, or else the model's first.

        Args:
            end_ids: Every id that ends a reply, at least one.
        """
        for closing in (self.closing_token(), self._tokenizer.eos_token_id):
            if closing is not None and closing in end_ids:
                return int(closing)
        return min(end_ids)

    def closing_token(self) -> int | None:
        """The id that the template puts after a reply; None if it puts none."""
        reply = {"role": "assistant", "content": _REPLY}
        _, found, after = self._render([*self._opening(_SYSTEM, _USER), reply]).rpartition(_REPLY)
        closing = self._encode_template(after.lstrip())[:1] if found else ()
        return closing[0] if closing else None

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without special tokens."""
        return list(self._encode(text))

    def _encode_template(self, text: str) -> tuple[int, ...]:
        """Token ids of what a template wrote, its control tokens included."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _first_uncached(self, system: str, user: str) -> tuple[int, ...]:
        return self._text.encode_rendered([system, user], lambda texts: self._render(self._opening(*texts)))

    def _next_uncached(self, system: str, user: str, sampled_end: int | None) -> tuple[int, ...]:
        def render(texts: Sequence[str]) -> str:
            text = self._delta(texts[0], texts[1])
            if sampled_end is None:
                return text
            return _after(str(self._tokenizer.convert_ids_to_tokens(sampled_end)), text)

        return self._text.encode_rendered([system, user], render)

    def _shared_uncached(self, system: str) -> list[int]:
        one, other = self.first_prompt(system, "a"), self.first_prompt(system, "0")
        # A tokenizer may know neither letter; then nothing shows where the prompts begin to differ.
        return one[: next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)]

    def _opening(self, system: str, user: str) -> list[Message]:
        if not system:
            return [{"role": "user", "content": user}]
        if self.has_system_role:
            return [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return [{"role": "user", "content": f"{system}\n\n{user}"}]

    def _render(self, messages: list[Message]) -> str:
        # Hybrid thinking models would spend the whole reply on thoughts; templates without the switch ignore it.
        try:
            rendered: Any = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        except Exception as error:  # a template is a program, and may fail in any way
            raise ChatTemplateError(
                f"The chat template of {self._tokenizer.name_or_path!r} cannot render a conversation: "
                f"{type(error).__name__}: {error} Set another tokenizer.chat_template."
            ) from error
        return rendered

    def _delta(
        self, system: str, user: str, first: str = _USER, earlier: Sequence[Message] = (), reply: str = _REPLY
    ) -> str:
        """Text that the template puts after a reply when the message `user` follows.

        Args:
            system: The system prompt.
            user: The message that follows the reply.
            first: The conversation's first message.
            earlier: Replies and messages between the first message and the last reply.
            reply: The last reply.
        """
        while reply in user or reply in system:
            reply += "x"
        messages = [
            *self._opening(system, first),
            *earlier,
            {"role": "assistant", "content": reply},
            {"role": "user", "content": user},
        ]
        _, *after = self._render(messages).split(reply)
        if len(after) != 1:
            what = "repeats" if after else "drops or changes"
            raise ChatTemplateError(
                f"The chat template of {self._tokenizer.name_or_path!r} {what} earlier replies, so a conversation "
                "cannot be appended to. Pass context='turn' to show one observation at a time, or set another "
                "tokenizer.chat_template."
            )
        return after[0]

    def _probe_system_role(self) -> bool:
        try:
            rendered = self._render([{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}])
        except ChatTemplateError:
            return False
        return _SYSTEM in rendered

    def _check_append_only(self) -> None:
        """Compares what follows a reply in conversations whose replies and earlier turns differ.

        Raises:
            ChatTemplateError: It differs.
        """
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
                f"The chat template of {self._tokenizer.name_or_path!r} is not append-only: what it puts after a reply "
                f"depends on {cause}. It renders {expected!r} and {received!r}. Pass context='turn' to show one "
                "observation at a time, or set another tokenizer.chat_template."
            )


def _after(end: str, text: str) -> str:
    """What follows a reply's end token in a template's text, which may, as in Llama-2's, put a space before it.

    >>> _after("</s>", " </s><s>[INST] and now?")
    '<s>[INST] and now?'
    >>> _after("</s>", " and now?")
    ' and now?'
    """
    closed = text.lstrip()
    return closed.removeprefix(end) if closed.startswith(end) else text


def invocation_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The last token before a reply, from which on an activated LoRA acts."""
    return ChatTemplate(tokenizer, append_only=False).first_prompt("", _USER)[-1:]


def end_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a reply: the tokenizer's and those of the model's generation defaults.

    Raises:
        ConfigError: Neither names an id that the model has.
    """
    named = _ids(model.generation_config, "eos_token_id") | _ids(tokenizer, "eos_token_id")
    known = len(model.get_input_embeddings().weight)
    found = sorted(token for token in named if 0 <= token < known)
    if not found:
        names = f"the ids {sorted(named)} are beyond its {known} tokens" if named else "both eos_token_id are None"
        raise ConfigError(
            "Neither the tokenizer nor the model's generation_config names an end token that the model has, so no "
            f"reply could end: {names}. Set tokenizer.eos_token to the token that ends a message in the model's chats."
        )
    return found


def check_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that is another model's, as far as ids show it.

    Raises:
        ConfigError: It knows more tokens than the model, takes what ends the model's replies for ordinary text, or
            agrees with the model on none of at least two special tokens that both define.
    """
    # What PEFT puts around embeddings has their weight alone.
    known = len(model.get_input_embeddings().weight)
    if len(tokenizer) > known:
        raise ConfigError(
            f"The tokenizer has {len(tokenizer)} tokens, the model only {known}. Pass the model's own tokenizer; "
            "if you have added tokens, call model.pretrained_model.resize_token_embeddings(len(tokenizer)) first."
        )
    roles = ("eos_token_id", "bos_token_id", "pad_token_id")
    # A configuration made by hand may keep its class's default ids, beyond its own vocabulary.
    theirs = {
        role: {one for one in _ids(model.config, role) | _ids(model.generation_config, role) if one < known}
        for role in roles
    }
    ours = {role: _ids(tokenizer, role) for role in roles}
    ends, controls = theirs["eos_token_id"], {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    # Who sets another end token often pads with it, which says nothing more.
    counted = roles[:2] if ours["pad_token_id"] == ours["eos_token_id"] else roles
    shared = [role for role in counted if theirs[role] and ours[role]]
    # Where the embeddings were resized to this tokenizer, it is the model's, whatever its special tokens are.
    disagrees = len(tokenizer) < known and len(shared) > 1 and not any(theirs[role] & ours[role] for role in shared)
    if disagrees or (ends and not ends & controls):
        raise ConfigError(
            f"The tokenizer seems to be another model's: its special tokens are {ours}, the model's {theirs}. Pass the "
            "model's own tokenizer. If you chose other special tokens on purpose, set their ids in "
            "model.pretrained_model.config and .generation_config too."
        )


def _ids(owner: Any, role: str) -> set[int]:
    """The ids that a configuration or a tokenizer names; none, one or several.

    Raises:
        ConfigError: One is not an int.
    """
    found = getattr(owner, role, None)
    several = found if isinstance(found, (list, tuple, set)) else [found]
    ids = {one for one in several if one is not None}
    if not all(isinstance(one, int) for one in ids):
        raise ConfigError(
            f"{role} of {type(owner).__name__} must be an int, a list of ints or None, got {excerpt(found)} "
            f"({type(found).__name__}). Set it to the ids of tokens."
        )
    return ids
