"""Prompts, replies, turns and episodes as token ids, and the conversation that records them.

Token ids are only ever appended. The prompts and replies of a context, concatenated, are exactly the ids that the model
saw and sampled; nothing is decoded and encoded again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import ConfigError, EpisodeError
from .arguments import check_text
from .chat_template import ChatTemplate, Message

# One in this many of the visible turns is dropped once a conversation no longer fits.
_DROP_ONE_IN = 4

Context = Literal["episode", "turn"] | int
"""What a prompt shows before the current observation: the whole episode, nothing, or a number of turns."""
FinishReason = Literal["eos", "length", "choice", "stop"]
"""End-of-sequence token, maximum length, the end of a choice, or a stop text of a client."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens that a turn adds before the reply.

    Attributes:
        ids: New token ids: the whole context if `starts_context`, else those after the previous reply.
        starts_context: Whether the model sees nothing before this prompt.
        choices: Token ids of each admissible reply, or None for free text.
        shared_length: Number of leading ids that all contexts with the same system prompt share.
        opening_length: Number of trailing ids for which an activated LoRA is active: the last token of the generation
            prompt and those of a response prefix.
        replies_shown: Distinct replies of the visible turns, without end-of-sequence token, and the count of each;
            empty for free text.
    """

    ids: tuple[int, ...]
    starts_context: bool
    choices: tuple[tuple[int, ...], ...] | None = None
    shared_length: int = 0
    opening_length: int = 1
    replies_shown: tuple[tuple[tuple[int, ...], int], ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """A sampled reply with its log-probabilities and value estimate.

    Attributes:
        ids: Sampled token ids, with an end-of-sequence token only if it was sampled.
        logprobs: Log-probability of each decision: one per token of free text, a single one for a choice.
        value: The critic's estimate at the last prompt token, in reward units; None if a sampler wrote the reply, which
            has no critic and rounds differently.
        finish_reason: Reason why the reply ended.
        choice_index: Index of the reply among the prompt's choices, or None for free text.
        weights_version: Version of the weights that sampled the reply.
        choice_logprobs: Log-probability of each of the prompt's choices; empty for free text.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    value: float | None
    finish_reason: FinishReason
    choice_index: int | None
    weights_version: int
    choice_logprobs: tuple[float, ...] = field(default=(), compare=False, repr=False)


@dataclass(slots=True)
class Turn:
    """One step of an episode: a prompt, the reply and its reward.

    Attributes:
        prompt: The prompt.
        reply: The reply.
        reward: The environment's reward, raw.
        penalty: Penalty for a reply that named no action; 0 or negative, kept apart from the reward.
        valid: Whether the reply named an action.
    """

    prompt: Prompt
    reply: Reply
    reward: float = 0.0
    penalty: float = 0.0
    valid: bool = True

    @property
    def decision_count(self) -> int:
        """Number of decisions: one per token of free text, one for a choice among several, 0 for a single choice."""
        if self.prompt.choices is not None and len(self.prompt.choices) == 1:
            return 0
        return len(self.reply.logprobs)


@dataclass(frozen=True, slots=True)
class Segment:
    """Turns that share one context, and possibly a prompt that awaits its reply.

    Attributes:
        turns: The turns in order.
        pending: The prompt that awaits its reply.
        first_row: Row of the first turn in a batch's tensors; the other turns follow.
        rank: Rank of the process that played it.
    """

    turns: tuple[Turn, ...]
    pending: Prompt | None = None
    first_row: int = 0
    rank: int = 0

    @property
    def rows(self) -> range:
        """The turns' rows in a batch's tensors."""
        return range(self.first_row, self.first_row + len(self.turns))

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts in order, the pending one last."""
        prompts = tuple(turn.prompt for turn in self.turns)
        return prompts if self.pending is None else (*prompts, self.pending)

    @property
    def token_count(self) -> int:
        """Number of tokens of all prompts and replies."""
        prompt_tokens = sum(len(prompt.ids) for prompt in self.prompts)
        return prompt_tokens + sum(len(turn.reply.ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode to learn from: a finished one, or the turns so far of an unfinished one.

    Attributes:
        turns: The turns to learn from in order, at least one.
        terminated: Whether the environment reached a final state.
        truncated: Whether the episode was cut off. An unfinished episode is neither terminated nor truncated.
        final_prompt: The prompt after the last turn, at which a critic estimates the value of the remaining episode;
            None after termination and without a critic.
        group: Key that is equal for episodes with the same start. None: all such episodes form one group, which is
            right if every episode starts in the same state, or in one drawn from the same distribution.
        rank: Rank of the process that played it.
        earlier: The turns before `turns`, which earlier updates learned from.
    """

    turns: tuple[Turn, ...]
    terminated: bool
    truncated: bool
    final_prompt: Prompt | None = None
    group: Hashable | None = None
    rank: int = 0
    earlier: tuple[Turn, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether the episode has ended."""
        return self.terminated or self.truncated

    @property
    def all_turns(self) -> tuple[Turn, ...]:
        """All turns of the episode, including those that earlier updates learned from."""
        return self.earlier + self.turns

    @property
    def total_reward(self) -> float:
        """Undiscounted sum of the environment's rewards (penalties not included)."""
        return sum(turn.reward for turn in self.all_turns)

    def final_segment(self) -> Segment | None:
        """Returns the context that ends with the final prompt; None without a final prompt."""
        if self.final_prompt is None:
            return None
        if self.final_prompt.starts_context:
            return Segment((), self.final_prompt)
        return Segment(tuple(_split_contexts(self.all_turns)[-1]), self.final_prompt)


def segments_of(episodes: Iterable[Episode]) -> list[Segment]:
    """Splits the episodes of a batch wherever a turn starts a new context; rows follow the order of turns."""
    segments: list[Segment] = []
    row = 0
    for episode in episodes:
        for turns in _split_contexts(episode.turns):
            segments.append(Segment(tuple(turns), first_row=row, rank=episode.rank))
            row += len(turns)
    return segments


def rows_of(segments: Iterable[Segment]) -> list[int]:
    """Returns the rows of all turns of the segments, in order."""
    return [row for segment in segments for row in segment.rows]


def from_process(rank: int, episode: Episode, versions: Mapping[int, int]) -> Episode:
    """Returns an episode of process `rank` with this process's versions of the weights, as `map_weights_versions`."""
    return replace(episode, turns=tuple(map_weights_versions(episode.turns, versions)), rank=rank)


def map_weights_versions(turns: Sequence[Turn], versions: Mapping[int, int]) -> list[Turn]:
    """Returns turns with other versions of the weights, given by old version; -1 for weights that no longer exist."""
    mapped = []
    for turn in turns:
        version = versions.get(turn.reply.weights_version, -1)
        mapped.append(replace(turn, reply=replace(turn.reply, weights_version=version)))
    return mapped


def commonest_reply(episodes: Sequence[Episode]) -> float:
    """Returns the share of the most frequent reply among turns with more than one possible reply; NaN without any."""
    replies: Counter[tuple[int, ...]] = Counter()
    for episode in episodes:
        replies.update(turn.reply.ids for turn in episode.turns if turn.decision_count)
    return max(replies.values()) / replies.total() if replies else math.nan


def _split_contexts(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Splits turns wherever one starts a new context."""
    groups: list[list[Turn]] = []
    for turn in turns:
        if turn.prompt.starts_context or not groups:
            groups.append([])
        groups[-1].append(turn)
    return groups


@dataclass
class Conversation:
    """An episode in progress, as chat messages and as token ids.

    If a prompt and its reply would exceed `max_length`, the oldest quarter of the visible turns is dropped, at least
    one turn and as many more as necessary, and a new context begins with the remaining turns.

    Attributes:
        template: Renders prompts.
        system_prompt: System prompt of every context.
        context: What the model sees before the current observation: the whole "episode", nothing ("turn"), or this many
            turns.
        max_length: The model's context length in tokens; None for no limit.
        reply_length: Tokens reserved for a reply in free text; for choices, the longest choice is reserved.
        turns: Finished turns.
        first_shown: Index of the first turn that the current context contains.
        learned_turns: Number of leading turns that updates have learned from.
        messages: The conversation as chat messages, system prompt first.
        pending: The prompt that awaits a reply.
        learns: Whether all replies were sampled in train mode.
        awaits_reward: Whether the last reply was sampled in train mode and has no reward yet.
    """

    template: ChatTemplate
    system_prompt: str
    context: Context = "episode"
    max_length: int | None = None
    reply_length: int = 0
    turns: list[Turn] = field(default_factory=list)
    first_shown: int = 0
    learned_turns: int = 0
    messages: list[Message] = field(default_factory=list)
    pending: Prompt | None = None
    learns: bool = True
    awaits_reward: bool = False

    def __post_init__(self) -> None:
        """Adds the system prompt."""
        check_text(self.system_prompt, "get_system_prompt()")
        if self.system_prompt:
            self.messages.append({"role": "system", "content": self.system_prompt})

    def observe(self, text: str, prefix: str = "", choices: Sequence[str] | None = None) -> Segment:
        """Appends an observation and returns the context that awaits a reply.

        Args:
            text: The observation as text.
            prefix: Fixed text at the beginning of the reply.
            choices: Admissible replies, or None for free text.

        Raises:
            EpisodeError: The previous observation has no reply yet.
            ConfigError: The text or the choices are invalid.
        """
        if self.pending is not None:
            raise EpisodeError(
                f"Observation {text!r} arrived while an earlier one still awaits its reply. Call act() once per "
                "environment step."
            )
        check_text(text, "format_observation()")
        prefix_ids = self.template.encode(prefix)
        choice_ids: tuple[tuple[int, ...], ...] | None = None
        reply_length = self.reply_length
        if choices is not None:
            choice_ids = self._encode_choices(choices)
            reply_length = max(map(len, choice_ids))
        max_prompt_length = math.inf if self.max_length is None else self.max_length - reply_length
        shown_before = len(self.turns) - self.first_shown
        visible_turns = min(shown_before, self._max_visible_turns)
        starts_context = visible_turns == 0 or visible_turns < shown_before
        if starts_context:
            ids = self._shortened_context(visible_turns, text, prefix_ids)
            length = len(ids)
        else:
            ids = self._next_prompt(text, prefix_ids)
            length = self.current_segment().token_count + len(ids)
        if visible_turns and length > max_prompt_length:
            starts_context = True
            # Dropping only as many turns as necessary would start a new context, and so a prefill, at every turn.
            visible_turns -= max(1, visible_turns // _DROP_ONE_IN)
            ids = self._shortened_context(visible_turns, text, prefix_ids)
            while visible_turns and len(ids) > max_prompt_length:
                visible_turns -= 1
                ids = self._shortened_context(visible_turns, text, prefix_ids)
        self.first_shown = len(self.turns) - visible_turns
        shared_length = self.template.shared_length(self.system_prompt, ids) if starts_context else 0
        replies_shown = () if choice_ids is None else self._count_visible_replies()
        opening_length = 1 + len(prefix_ids)
        self.pending = Prompt(tuple(ids), starts_context, choice_ids, shared_length, opening_length, replies_shown)
        self.messages.append({"role": "user", "content": text})
        return self.current_segment()

    @property
    def _max_visible_turns(self) -> int:
        """Maximum number of turns that a prompt shows before the current observation."""
        if isinstance(self.context, int):
            return self.context
        return 0 if self.context == "turn" else len(self.turns)

    def _encode_choices(self, choices: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        _check_choices(choices, choices)
        choice_ids = tuple(tuple(self.template.encode(choice)) for choice in choices)
        # Different strings may have equal ids, or none.
        _check_choices(choice_ids, choices)
        return choice_ids

    def _count_visible_replies(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Returns the distinct replies of visible turns, without end-of-sequence token, and the count of each."""
        counts: Counter[tuple[int, ...]] = Counter()
        for turn in self.turns[self.first_shown :]:
            reply = turn.reply
            counts[reply.ids[:-1] if reply.finish_reason == "eos" else reply.ids] += 1
        return tuple(counts.items())

    def _first_prompt(self, text: str, prefix_ids: list[int]) -> list[int]:
        return [*self.template.first_prompt(self.system_prompt, text), *prefix_ids]

    def _next_prompt(self, text: str, prefix_ids: list[int], after_turn: int = -1) -> list[int]:
        """Returns the ids that a new observation adds after a turn, by default the last one."""
        reply = self.turns[after_turn].reply
        sampled_end = reply.ids[-1] if reply.finish_reason == "eos" else None
        return [*self.template.next_prompt(self.system_prompt, text, sampled_end), *prefix_ids]

    def _shortened_context(self, visible_turns: int, text: str, prefix_ids: list[int]) -> list[int]:
        """Returns the ids of a new context: the last `visible_turns` turns, then the new observation."""
        if not visible_turns:
            return self._first_prompt(text, prefix_ids)
        start = len(self.turns) - visible_turns
        observations = [message["content"] for message in self.messages if message["role"] == "user"]
        ids: list[int] = []
        for index in range(start, len(self.turns)):
            turn = self.turns[index]
            prompt = turn.prompt
            turn_prefix_ids = list(prompt.ids[len(prompt.ids) - prompt.opening_length + 1 :])
            if index == start:
                ids += self._first_prompt(observations[index], turn_prefix_ids)
            elif prompt.starts_context:
                # The ids of this prompt also contain the turns before it.
                ids += self._next_prompt(observations[index], turn_prefix_ids, index - 1)
            else:
                ids += prompt.ids
            ids += turn.reply.ids
        return ids + self._next_prompt(text, prefix_ids)

    def current_segment(self) -> Segment:
        """Returns the current context: the pending prompt and the turns that it follows."""
        if self.pending is not None and self.pending.starts_context:
            return Segment((), self.pending)
        groups = _split_contexts(self.turns)
        return Segment(tuple(groups[-1]) if groups else (), self.pending)

    def answer(self, reply: Reply, text: str) -> Turn:
        """Appends the reply to the pending prompt; `text` is the reply as text, including its prefix."""
        assert self.pending is not None, "a reply needs a prompt"
        turn = Turn(self.pending, reply)
        self.turns.append(turn)
        self.messages.append({"role": "assistant", "content": text})
        self.pending = None
        return turn

    def finished(self, truncated: bool, group: Hashable | None) -> Episode:
        """Returns the episode, which has ended; a pending prompt becomes its final prompt."""
        first = self.learned_turns
        return Episode(
            tuple(self.turns[first:]),
            terminated=not truncated,
            truncated=truncated,
            final_prompt=self.pending,
            group=group,
            earlier=tuple(self.turns[:first]),
        )

    def under_way(self) -> Episode:
        """Returns the turns to learn from before the episode ends: all but the last, which bootstraps the value."""
        first = self.learned_turns
        return Episode(
            tuple(self.turns[first:-1]),
            terminated=False,
            truncated=False,
            final_prompt=self.turns[-1].prompt,
            earlier=tuple(self.turns[:first]),
        )

    def reward(self, reward: float, turn: int = -1) -> None:
        """Adds to the reward of a turn, by default the last one."""
        self.turns[turn].reward += reward
        if turn in (-1, len(self.turns) - 1):
            self.awaits_reward = False

    @contextmanager
    def rewards_undone_on_error(self) -> Iterator[None]:
        """While open, an exception restores the rewards of the existing turns."""
        before = [turn.reward for turn in self.turns]
        try:
            yield
        except BaseException:
            for turn, reward in zip(self.turns, before, strict=False):
                turn.reward = reward
            raise

    def savepoint(self) -> Callable[[], None]:
        """Returns a function that undoes all observations and replies after this call.

        A closure is used because a context manager per conversation takes 6 % of a step of 64 environments.
        """
        turn_count = len(self.turns)
        message_count = len(self.messages)
        first_shown = self.first_shown
        pending = self.pending
        learns = self.learns
        awaits_reward = self.awaits_reward

        def roll_back() -> None:
            del self.turns[turn_count:], self.messages[message_count:]
            self.first_shown = first_shown
            self.pending = pending
            self.learns = learns
            self.awaits_reward = awaits_reward

        return roll_back


def _check_choices(choices: Sequence[Sequence[Any]], returned: Any) -> None:
    """Raises a `ConfigError` for choices, as strings or ids, that are empty or repeated, or not a list of strings."""
    is_list = isinstance(returned, (list, tuple)) and all(isinstance(choice, str) for choice in returned)
    if not is_list or not choices or not all(choices) or len(set(choices)) != len(choices):
        raise ConfigError(
            f"get_action_choices() returned {returned!r}. Return a list of distinct, non-empty strings, which the "
            "tokenizer tells apart, or None for free text."
        )
    for choice in returned:
        check_text(choice, "get_action_choices()")
