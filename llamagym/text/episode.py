"""Prompts, replies, turns and episodes as token ids, and the conversation that they grow in.

Token ids are only ever appended. The prompts and replies of a context, concatenated, are exactly what the model saw
and sampled; nothing is decoded and encoded again.
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

# Of the turns shown one in so many is dropped where a conversation no longer fits.
_DROPPED = 4

Context = Literal["episode", "turn"]
FinishReason = Literal["eos", "length", "choice"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a turn adds before the reply.

    Attributes:
        ids: New token ids: the whole context if `starts_context`, else what follows the previous reply.
        starts_context: Whether the model sees nothing from before this prompt.
        choices: Token ids of each admissible reply, or None for free text.
        shared_length: How many leading ids every context with the same system prompt begins with.
        opening_length: How many trailing ids open the reply, from where an activated LoRA acts: the last one of the
            generation prompt and those of a response prefix.
        replies_shown: Replies of the turns that the model sees, without an end-of-sequence token, and how often each
            was given; empty for free text.
    """

    ids: tuple[int, ...]
    starts_context: bool
    choices: tuple[tuple[int, ...], ...] | None = None
    shared_length: int = 0
    opening_length: int = 1
    replies_shown: tuple[tuple[tuple[int, ...], int], ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy sampled, and what it knew at that moment.

    Attributes:
        ids: Sampled token ids; an end-of-sequence token is there only if it was sampled.
        logprobs: Log-probability of each decision: one per token of free text, a single one for a choice.
        value: The critic's estimate at the last prompt token, in reward units.
        finish_reason: Why the reply ended.
        choice_index: Which of the prompt's choices was taken, or None for free text.
        weights_version: Number of the weights' state that said it.
        choice_logprobs: Log-probability of each of the prompt's choices; empty for free text.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    value: float
    finish_reason: FinishReason
    choice_index: int | None
    weights_version: int
    choice_logprobs: tuple[float, ...] = field(default=(), compare=False, repr=False)


@dataclass(slots=True)
class Turn:
    """One step of an episode: a prompt, the reply, and what came of it.

    Attributes:
        prompt: What the model read.
        reply: What it said.
        reward: The environment's reward, raw.
        penalty: Added for a reply that named no action; 0 or negative, kept apart from the reward.
        valid: Whether the reply named an action.
    """

    prompt: Prompt
    reply: Reply
    reward: float = 0.0
    penalty: float = 0.0
    valid: bool = True

    @property
    def decision_count(self) -> int:
        """Number of decisions: one per token of free text, one for a choice among several, none for a single choice."""
        if self.prompt.choices is not None and len(self.prompt.choices) == 1:
            return 0
        return len(self.reply.logprobs)


@dataclass(frozen=True, slots=True)
class Segment:
    """Turns that share one context, and possibly a prompt that awaits its reply.

    Attributes:
        turns: The turns in order.
        pending: The prompt that awaits its reply.
        first_row: The first turn's row in a batch's tensors; those of the other turns follow.
        rank: The process that played it.
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
        """Tokens of all prompts and replies."""
        return sum(len(prompt.ids) for prompt in self.prompts) + sum(len(turn.reply.ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode to learn from: a finished one, or what there is so far of one under way.

    Attributes:
        turns: Its turns in order, at least one; without those that were learned from while it was under way.
        terminated: Whether the environment reached a final state.
        truncated: Whether it was cut off. One under way is neither.
        final_prompt: The prompt after the last turn, from which a critic values what was cut off; None after
            termination, and where no critic learns.
        group: Episodes that began alike share it. None: all such episodes form one group, which is right where every
            episode starts in the same state, or in one drawn from the same distribution.
        rank: Which of several processes played it.
        earlier: The turns before them, from which earlier updates learned.
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
        """Whether it has ended."""
        return self.terminated or self.truncated

    @property
    def all_turns(self) -> tuple[Turn, ...]:
        """The turns, the earlier ones first."""
        return self.earlier + self.turns

    @property
    def total_reward(self) -> float:
        """Undiscounted sum of the environment's rewards (penalties not included)."""
        return sum(turn.reward for turn in self.all_turns)

    def final_segment(self) -> Segment | None:
        """The context that ends with the final prompt; None without one."""
        if self.final_prompt is None:
            return None
        shown = [] if self.final_prompt.starts_context else _split_contexts(self.all_turns)[-1]
        return Segment(tuple(shown), self.final_prompt)


def segments_of(episodes: Iterable[Episode]) -> list[Segment]:
    """The episodes of a batch, cut wherever a turn starts a new context; rows follow the order of turns."""
    segments: list[Segment] = []
    row = 0
    for episode in episodes:
        for turns in _split_contexts(episode.turns):
            segments.append(Segment(tuple(turns), first_row=row, rank=episode.rank))
            row += len(turns)
    return segments


def rows_of(segments: Iterable[Segment]) -> list[int]:
    """The rows of all turns of some segments, in order."""
    return [row for segment in segments for row in segment.rows]


def played_by(rank: int, episode: Episode, versions: Mapping[int, int]) -> Episode:
    """An episode that a process played, for one with other numbers for the states of its weights (`renumbered`)."""
    return replace(episode, turns=tuple(renumbered(episode.turns, versions)), rank=rank)


def renumbered(turns: Sequence[Turn], versions: Mapping[int, int]) -> list[Turn]:
    """Turns by other numbers for the states of the weights, given for some; the weights of the rest are gone."""
    return [
        replace(turn, reply=replace(turn.reply, weights_version=versions.get(turn.reply.weights_version, -1)))
        for turn in turns
    ]


def commonest_reply(episodes: Sequence[Episode]) -> float:
    """Share of the commonest reply among the turns that had another possibility; NaN if there are none."""
    turns = [turn for episode in episodes for turn in episode.turns if turn.decision_count]
    replies = Counter(turn.reply.ids for turn in turns)
    return max(replies.values()) / replies.total() if replies else math.nan


def _split_contexts(turns: Sequence[Turn]) -> list[list[Turn]]:
    groups: list[list[Turn]] = []
    for turn in turns:
        if turn.prompt.starts_context or not groups:
            groups.append([])
        groups[-1].append(turn)
    return groups


@dataclass
class Conversation:
    """One episode in the making: messages for people, token ids for the model.

    Attributes:
        template: Renders prompts.
        system_prompt: Opens every context.
        context: Whether the model sees the whole episode or only the current observation.
        max_length: Tokens that the model can hold; None is no limit. Where a prompt and its reply would not fit, the
            oldest quarter of the turns shown is dropped, at least one turn, and as many more as need be: a new context
            begins with the rest.
        reply_length: Tokens kept free for a reply in free text; for choices, those of the longest are.
        turns: Finished turns.
        first_shown: Number of the first turn that the current context shows.
        learned_turns: How many of them have been learned from.
        messages: The same as chat messages, system prompt first.
        pending: The prompt that awaits a reply.
        learns: Whether all replies were sampled to learn from.
        awaits_reward: Whether the last of them was, and has not been rewarded yet.
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
        """Begin with the system prompt."""
        check_text(self.system_prompt, "get_system_prompt()")
        if self.system_prompt:
            self.messages.append({"role": "system", "content": self.system_prompt})

    def observe(self, text: str, prefix: str = "", choices: Sequence[str] | None = None) -> Segment:
        """Append an observation and return the context that the model must answer.

        Args:
            text: The observation as text.
            prefix: Fixed text the reply begins with.
            choices: Admissible replies, or None for free text.
        """
        if self.pending is not None:
            raise EpisodeError(
                f"Observation {text!r} arrived while an earlier one still awaits its reply. Call act() once per "
                "environment step."
            )
        check_text(text, "format_observation()")
        if choices is not None:
            _check_choices(choices, choices)
        opening = self.template.encode(prefix)
        encoded = None if choices is None else tuple(tuple(self.template.encode(choice)) for choice in choices)
        if encoded is not None:
            _check_choices(encoded, choices)
        reply_length = self.reply_length if encoded is None else max(map(len, encoded))
        room = math.inf if self.max_length is None else self.max_length - reply_length
        shown = 0 if self.context == "turn" else len(self.turns) - self.first_shown
        starts_context = shown == 0
        ids = self._opened(text, opening) if starts_context else self._continued(text, opening)
        if shown and self.current_segment().token_count + len(ids) > room:
            starts_context = True
            # To drop no more than need be would drop a turn each time, and all the others would be read again for it.
            shown -= max(1, shown // _DROPPED)
            ids = self._reopened(shown, text, opening)
            while shown and len(ids) > room:
                shown -= 1
                ids = self._reopened(shown, text, opening)
        self.first_shown = len(self.turns) - shown
        shared = self.template.shared_length(self.system_prompt, ids) if starts_context else 0
        replies = () if encoded is None else self._replies_shown()
        self.pending = Prompt(tuple(ids), starts_context, encoded, shared, 1 + len(opening), replies)
        self.messages.append({"role": "user", "content": text})
        return self.current_segment()

    def _replies_shown(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Replies of the turns that are shown, without an end-of-sequence token, and how often each was given."""
        replies = (turn.reply for turn in self.turns[self.first_shown :])
        counts = Counter(reply.ids[:-1] if reply.finish_reason == "eos" else reply.ids for reply in replies)
        return tuple(counts.items())

    def _opened(self, text: str, opening: list[int]) -> list[int]:
        return [*self.template.first_prompt(self.system_prompt, text), *opening]

    def _continued(self, text: str, opening: list[int], turn: int = -1) -> list[int]:
        """What a new observation adds after a turn, by default the last one."""
        last = self.turns[turn].reply
        sampled_end = last.ids[-1] if last.finish_reason == "eos" else None
        return [*self.template.next_prompt(self.system_prompt, text, sampled_end), *opening]

    def _reopened(self, shown: int, text: str, opening: list[int]) -> list[int]:
        """A new context's ids: the last `shown` turns, then the new observation."""
        if not shown:
            return self._opened(text, opening)
        start = len(self.turns) - shown
        observations = [message["content"] for message in self.messages if message["role"] == "user"]
        ids: list[int] = []
        for index in range(start, len(self.turns)):
            prompt = self.turns[index].prompt
            reply = self.turns[index].reply
            its_opening = list(prompt.ids[len(prompt.ids) - prompt.opening_length + 1 :])
            if index == start:
                ids += self._opened(observations[index], its_opening)
            elif prompt.starts_context:
                # Its ids hold the turns before it, too.
                ids += self._continued(observations[index], its_opening, index - 1)
            else:
                ids += prompt.ids
            ids += reply.ids
        return ids + self._continued(text, opening)

    def current_segment(self) -> Segment:
        """The turns that the pending prompt, or the last turn, shares its context with."""
        if self.pending is not None and self.pending.starts_context:
            return Segment((), self.pending)
        groups = _split_contexts(self.turns)
        return Segment(tuple(groups[-1]) if groups else (), self.pending)

    def answer(self, reply: Reply, text: str) -> Turn:
        """Append the reply to the pending prompt; `text` is the reply as text, its prefix included."""
        assert self.pending is not None, "a reply needs a prompt"
        turn = Turn(self.pending, reply)
        self.turns.append(turn)
        self.messages.append({"role": "assistant", "content": text})
        self.pending = None
        return turn

    def finished(self, truncated: bool, group: Hashable | None) -> Episode:
        """The episode that has ended here; a pending prompt is the one after the last turn."""
        first = self.learned_turns
        earlier = tuple(self.turns[:first])
        return Episode(tuple(self.turns[first:]), not truncated, truncated, self.pending, group, earlier=earlier)

    def under_way(self) -> Episode:
        """The turns to learn from before the episode ends: all but the last, at whose prompt the rest is valued."""
        first = self.learned_turns
        return Episode(
            tuple(self.turns[first:-1]),
            terminated=False,
            truncated=False,
            final_prompt=self.turns[-1].prompt,
            earlier=tuple(self.turns[:first]),
        )

    def reward(self, reward: float, turn: int = -1) -> None:
        """Add to a turn's reward, by default the last one's."""
        self.turns[turn].reward += reward
        if turn in (-1, len(self.turns) - 1):
            self.awaits_reward = False

    @contextmanager
    def rewards_undone_on_error(self) -> Iterator[None]:
        """While open, an exception takes back what turns that were taken before are rewarded with."""
        before = [turn.reward for turn in self.turns]
        try:
            yield
        except BaseException:
            for turn, reward in zip(self.turns, before, strict=False):
                turn.reward = reward
            raise

    def savepoint(self) -> Callable[[], None]:
        """A function that takes back all that is observed and answered after this, as if it had never been.

        A closure, not a context manager: entering one per conversation took 6 % of a step of 64 environments.
        """
        turns = len(self.turns)
        messages = len(self.messages)
        first_shown = self.first_shown
        flags = self.pending, self.learns, self.awaits_reward

        def roll_back() -> None:
            del self.turns[turns:], self.messages[messages:]
            self.first_shown = first_shown
            self.pending, self.learns, self.awaits_reward = flags

        return roll_back


def _check_choices(choices: Sequence[Sequence[Any]], offered: Any) -> None:
    """Refuse what is no list of strings, and strings or token ids that are empty or come twice."""
    is_list = isinstance(offered, (list, tuple)) and all(isinstance(choice, str) for choice in offered)
    if not is_list or not choices or not all(choices) or len(set(choices)) != len(choices):
        raise ConfigError(
            f"get_action_choices() returned {offered!r}. Return a list of distinct, non-empty strings, which the "
            "tokenizer tells apart, or None for free text."
        )
    for choice in offered:
        check_text(choice, "get_action_choices()")
