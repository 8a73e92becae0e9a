"""Renders chat messages as token ids to append: the first prompt, then each message's delta.

A conversation is never rendered anew. What a template puts between one reply and the next (the end of the assistant's
message, the user's message, the generation prompt) is found by rendering a probe conversation and taking what follows
the last reply. So a template that rewrites earlier turns, as Qwen3's does with its thinking blocks, still gives an
append-only conversation: earlier turns stay as the model saw them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ..errors import ChatTemplateError, ConfigError
from .plain_text import PlainText

# Plain words, which no template trims or escapes.
_SYSTEM, _USER, _REPLY = "probesystem", "probeuser", "probereply"

Message = dict[str, str]


class ChatTemplate:
    """A tokenizer's chat template as a source of prompt ids.

    Raises:
        ChatTemplateError: The tokenizer has no template, or what follows a reply depends on earlier turns (only where
            `append_only`).
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

    def next_prompt(self, user: str, sampled_end: int | None) -> list[int]:
        """Token ids between a reply and the next one.

        Args:
            user: The next observation's text.
            sampled_end: The end-of-sequence id that closed the reply, which is then not repeated; None if the reply
                ended otherwise.
        """
        return list(self._next(user, sampled_end))

    def closing_id(self, end_ids: Collection[int]) -> int:
        """The id that ends a written reply: the template's, or else the tokenizer's end token.

        Args:
            end_ids: Every id that ends a reply.
        """
        closing = self.closing_token()
        return closing if closing in end_ids and closing is not None else int(self._tokenizer.eos_token_id)

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

    def _next_uncached(self, user: str, sampled_end: int | None) -> tuple[int, ...]:
        def render(texts: Sequence[str]) -> str:
            text = self._delta([], texts[0])
            if sampled_end is None:
                return text
            return _after(str(self._tokenizer.convert_ids_to_tokens(sampled_end)), text)

        return self._text.encode_rendered([user], render)

    def _shared_uncached(self, system: str) -> list[int]:
        one, other = self.first_prompt(system, "a"), self.first_prompt(system, "0")
        return one[: next(index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)]

    def _opening(self, system: str, user: str) -> list[Message]:
        if not system:
            return [{"role": "user", "content": user}]
        if self.has_system_role:
            return [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return [{"role": "user", "content": f"{system}\n\n{user}"}]

    def _render(self, messages: list[Message]) -> str:
        # Hybrid thinking models would spend the whole reply on thoughts; templates without the switch ignore it.
        rendered: Any = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return rendered

    def _delta(self, earlier: list[Message], user: str) -> str:
        """What the template puts after a reply when `user` is said next."""
        reply = _REPLY
        while reply in user:
            reply += "x"
        messages = [
            *self._opening(_SYSTEM, _USER),
            *earlier,
            {"role": "assistant", "content": reply},
            {"role": "user", "content": user},
        ]
        _, found, after = self._render(messages).rpartition(reply)
        if not found:
            raise ChatTemplateError(
                f"The chat template of {self._tokenizer.name_or_path!r} drops earlier replies, so a conversation "
                "cannot be appended to. Pass context='turn' to show one observation at a time, or set another "
                "tokenizer.chat_template."
            )
        return after

    def _probe_system_role(self) -> bool:
        try:
            rendered = self._render([{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}])
        except TemplateError:
            return False
        return _SYSTEM in rendered

    def _check_append_only(self) -> None:
        short = self._delta([], _USER)
        earlier = [{"role": "assistant", "content": _USER}, {"role": "user", "content": _USER}]
        long = self._delta(earlier, _USER)
        if short != long:
            raise ChatTemplateError(
                f"The chat template of {self._tokenizer.name_or_path!r} is not append-only: after a first reply it "
                f"renders {short!r}, after a second {long!r}. Pass context='turn' to show one observation at a time, "
                "or set another tokenizer.chat_template."
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
    """Every id that ends a reply: the tokenizer's and those of the model's generation defaults."""
    return sorted(_ids(model.generation_config, "eos_token_id") | _ids(tokenizer, "eos_token_id"))


def check_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that is another model's, as far as ids show it.

    Raises:
        ConfigError: It knows more tokens than the model, takes what ends the model's replies for ordinary text, or
            agrees with the model on none of at least two special tokens that both define.
    """
    known = model.get_input_embeddings().num_embeddings
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
    """The ids that a configuration or a tokenizer names; none, one or several."""
    found = getattr(owner, role, None)
    return {one for one in (found if isinstance(found, list) else [found]) if one is not None}
