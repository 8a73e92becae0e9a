"""Episodes recorded from a client's complete histories, as the token ids that the model saw.

If a history continues a reply that was recorded, the call continues that reply's context: only the ids of the new
messages are appended. Any other history starts a context of its own, such as one that the program shortened, or that of
a second agent within the episode.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from ..errors import ChatTemplateError
from .chat_history import HistoryTemplate, history_keys
from .chat_template import Message
from .episode import Episode, Prompt, Reply, Segment, Turn
from .tool_calls import ChatMessage, Tool


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A history as the context that awaits a reply.

    Attributes:
        messages: The history.
        tools: The tools.
        segment: The context, with a pending prompt.
        new_messages: Number of messages at the end of the history that the prompt adds to the context.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool]
    segment: Segment
    new_messages: int

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the reply."""
        return self.segment.token_count


@dataclass
class HistoryEpisode:
    """An episode in progress.

    Attributes:
        turns: Its turns, in the order of their replies.
        messages: The system's message, then per turn a user message that joins the new messages, and the reply.
    """

    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    # The turns of each context, by the key of its history including the last reply.
    _contexts: dict[str, tuple[Turn, ...]] = field(default_factory=dict)

    def prepare(
        self, template: HistoryTemplate, messages: Sequence[ChatMessage], tools: Sequence[Tool], opening: str = ""
    ) -> PreparedCall:
        """Returns a history as a context that awaits a reply; the episode does not change.

        Args:
            template: Renders the messages.
            messages: The history.
            tools: Tools that the reply may call.
            opening: Fixed text that the reply begins with.

        Raises:
            ChatTemplateError: The template cannot render the messages.
        """
        opening_ids = template.opening_ids(opening) if opening else []
        opening_length = 1 + len(opening_ids)
        keys = history_keys(messages, tools)
        for index in range(len(messages) - 2, -1, -1):
            turns = self._contexts.get(keys[index])
            if turns is None:
                continue
            reply = turns[-1].reply
            sampled_end = reply.ids[-1] if reply.finish_reason == "eos" else None
            try:
                ids = template.continuation(messages, tools, index, sampled_end)
            except ChatTemplateError:
                # Some templates reject tool results without the call that they answer; the history is encoded again.
                break
            prompt = Prompt((*ids, *opening_ids), starts_context=False, opening_length=opening_length)
            return PreparedCall(messages, tools, Segment(turns, prompt), len(messages) - index - 1)
        ids = template.prompt(messages, tools)
        shared_length = template.shared_length(messages, tools, ids)
        prompt = Prompt((*ids, *opening_ids), True, shared_length=shared_length, opening_length=opening_length)
        return PreparedCall(messages, tools, Segment((), prompt), len(messages))

    def record(self, call: PreparedCall, reply: Reply, message: ChatMessage, text: str) -> None:
        """Appends a turn.

        Args:
            call: The history that the reply answers, prepared in this episode.
            reply: The reply.
            message: The reply as the client receives it.
            text: The reply as the model wrote it.
        """
        prompt = self._prompt_after_last_turn(call.segment)
        turn = Turn(prompt, reply)
        system_texts: list[str] = []
        other_texts: list[str] = []
        for new_message in call.messages[-call.new_messages :]:
            texts = system_texts if new_message["role"] == "system" else other_texts
            texts.append(new_message["content"])
        if not self.turns:
            self.messages.append({"role": "system", "content": "\n".join(system_texts)})
        self.messages.append({"role": "user", "content": "\n".join(other_texts)})
        self.messages.append({"role": "assistant", "content": text})
        self.turns.append(turn)
        key = history_keys([*call.messages, message], call.tools)[-1]
        self._contexts[key] = (turn,) if prompt.starts_context else (*call.segment.turns, turn)

    def _prompt_after_last_turn(self, segment: Segment) -> Prompt:
        """Returns a context's pending prompt as the episode's next one.

        If another context's turn came last, it starts a context again, with all ids before it.
        """
        prompt = segment.pending
        assert prompt is not None, "a prepared call awaits its reply"
        if prompt.starts_context or segment.turns[-1] is self.turns[-1]:
            return prompt
        ids: list[int] = []
        for turn in segment.turns:
            ids += turn.prompt.ids
            ids += turn.reply.ids
        shared_length = segment.turns[0].prompt.shared_length
        return replace(prompt, ids=(*ids, *prompt.ids), starts_context=True, shared_length=shared_length)

    def finished(self, truncated: bool, group: Hashable | None, final: PreparedCall | None = None) -> Episode:
        """Returns the episode, which has ended.

        Args:
            truncated: Whether it was cut off.
            group: Key of episodes with the same start.
            final: The history after the last turn of a truncated episode, from which a critic estimates the value.
        """
        final_prompt = None if final is None else self._prompt_after_last_turn(final.segment)
        return Episode(tuple(self.turns), not truncated, truncated, final_prompt, group)
