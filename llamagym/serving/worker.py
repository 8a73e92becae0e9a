"""The thread that uses the model: writes replies to many calls at once, records turns and learns from episodes.

All work is done in the order in which it arrived. Calls that wait together are answered together. During an update
calls wait.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from ..agent.collector import Collector
from ..errors import ContextLengthError, EpisodeError, LlamaGymError, SamplerError, excerpt
from ..learners.base import Stats
from ..learners.checks import check_reward
from ..models.registry import GenerationConfig
from ..options import as_number
from ..policy.evaluation import numbered
from ..policy.sampling import SampledText
from ..text.chat_history import HistoryTemplate
from ..text.episode import Reply
from ..text.history_episode import HistoryEpisode, PreparedCall
from ..text.tool_calls import ChatMessage, Tool, ToolCall, read_calls
from .reply_text import ReplyText

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Calls that arrive within this time of each other are answered together.
_GATHER_S = 0.005
# Further waiting ends after this time, since a call may always be arriving.
_LONGEST_GATHER_S = 0.05
# More open episodes than this are probably forgotten ones.
_MOST_EPISODES = 10_000


class ServerClosedError(LlamaGymError, RuntimeError):
    """The server is shutting down."""


class UnknownEpisodeError(EpisodeError):
    """No call was recorded under an episode's id."""


@dataclass(frozen=True, slots=True)
class Completion:
    """An answered call.

    Attributes:
        message: The reply as a chat message.
        finish_reason: Why it ended, by OpenAI's names.
        reply: The reply as token ids.
        prompt_length: Number of tokens before the reply.
        turn: Number of the turn in its episode; None if it was not recorded.
    """

    message: ChatMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    reply: Reply
    prompt_length: int
    turn: int | None


@dataclass(eq=False)
class Call:
    """A call of a client.

    Attributes:
        messages: The history.
        tools: Tools that the reply may call.
        opening: Fixed text that the reply begins with.
        token_limit: Maximum tokens of the reply; None is the agent's, or what is left of the context.
        temperature: Divisor of logits; 0 takes the most likely token, None is the agent's.
        top_p: Nucleus sampling; None is the agent's.
        stops: Texts that end the reply.
        episode_id: Episode to record it under; None if it is not recorded.
        send: Receives pieces of the reply's content, in the worker's thread; None if it is not streamed.
        completion: The answer, or the error.
        is_cancelled: Set when the client has gone: then the call is neither answered nor recorded.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    opening: str = ""
    token_limit: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stops: Sequence[str] = ()
    episode_id: str | None = None
    send: Callable[[str], None] | None = None
    completion: Future[Completion] = field(default_factory=Future)
    is_cancelled: bool = False


@dataclass(eq=False)
class _Task:
    """Other work on the model or the episodes."""

    function: Callable[[], Any]
    result: Future[Any]


@dataclass(frozen=True, slots=True)
class _Writing:
    """A call whose reply is being written."""

    call: Call
    prepared: PreparedCall
    text: ReplyText
    token_limit: int


class Worker:
    """Answers calls and keeps episodes, in one thread.

    Attributes:
        template: Renders histories.
    """

    def __init__(self, collector: Collector, on_update: Callable[[Stats], None] | None = None) -> None:
        """Creates a worker that has not started.

        Args:
            collector: The agent's collector.
            on_update: Called with the statistics of each update.
        """
        self._collector = collector
        self._actor = collector.actor
        self._policy = collector.actor.policy
        self._on_update = on_update
        self.template = HistoryTemplate(self._actor.chat_template)
        self._episodes: dict[str, HistoryEpisode] = {}
        self._queue: deque[Call | _Task] = deque()
        self._arrived = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="llamagym-serving", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Finishes the work that runs, rejects the work that waits, and ends the thread."""
        with self._arrived:
            self._is_closed = True
            waiting = list(self._queue)
            self._queue.clear()
            self._arrived.notify()
        for job in waiting:
            _future_of(job).set_exception(ServerClosedError("The server is shutting down."))
        self._thread.join()

    @property
    def is_learning(self) -> bool:
        """Whether calls are recorded."""
        return self._actor.is_learning

    def token_text(self, token: int) -> str:
        """Returns the text of a token; names of control tokens are shown."""
        return str(self._actor.tokenizer.decode([token]))

    def submit(self, call: Call) -> None:
        """Queues a call; its `completion` receives the answer."""
        self._put(call)

    def assign_reward(self, episode_id: str, reward: float, turn: int = -1) -> Future[None]:
        """Queues a reward; see `EpisodeError` for what makes it fail."""
        return self._do(lambda: self._assign_reward(episode_id, reward, turn))

    def end(
        self,
        episode_id: str,
        reward: float | None,
        truncated: bool,
        group: Hashable | None,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
    ) -> Future[Stats]:
        """Queues the end of an episode, after which the agent learns if a batch is full.

        Args:
            episode_id: The episode.
            reward: Added to the last turn's reward; None for no reward.
            truncated: Whether the episode was cut off.
            group: For GRPO, equal for episodes that began alike.
            messages: After truncation, the history that the next call would have sent; may be empty without a critic.
            tools: The tools of that call.

        Returns:
            Statistics of the update, empty if none ran.
        """
        return self._do(lambda: self._end(episode_id, reward, truncated, group, messages, tools))

    def discard(self, episode_id: str) -> Future[None]:
        """Queues the removal of an episode that will not be learned from."""

        def remove() -> None:
            self._episode(episode_id)
            del self._episodes[episode_id]

        return self._do(remove)

    def _do(self, function: Callable[[], Result]) -> Future[Result]:
        task = _Task(function, Future())
        self._put(task)
        return task.result

    def _put(self, job: Call | _Task) -> None:
        with self._arrived:
            if self._is_closed:
                raise ServerClosedError("The server is shutting down.")
            # From now on the future cannot be cancelled, so that it can be given its result.
            _future_of(job).set_running_or_notify_cancel()
            self._queue.append(job)
            self._arrived.notify()

    def _run(self) -> None:
        while True:
            jobs = self._next_jobs()
            if not jobs:
                return
            if isinstance(jobs[0], _Task):
                _settle(jobs[0])
            else:
                self._answer([job for job in jobs if isinstance(job, Call)])

    def _next_jobs(self) -> list[Call | _Task]:
        """Waits for work; returns a task, or the calls before the next task. Returns nothing when closed."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._queue or self._is_closed)
            if not self._queue:
                return []
            if isinstance(self._queue[0], _Task):
                return [self._queue.popleft()]
            deadline = time.monotonic() + _LONGEST_GATHER_S
            while True:
                waiting = len(self._queue)
                self._arrived.wait_for(lambda: len(self._queue) > waiting or self._is_closed, _GATHER_S)  # noqa: B023
                if len(self._queue) == waiting or time.monotonic() > deadline:
                    break
            calls: list[Call | _Task] = []
            while self._queue and isinstance(self._queue[0], Call):
                calls.append(self._queue.popleft())
            return calls

    def _answer(self, calls: Sequence[Call]) -> None:
        """Writes and records the replies to calls."""
        batches: dict[tuple[float, float, bool], list[_Writing]] = {}
        for call in calls:
            if call.is_cancelled:
                continue
            try:
                writing = self._prepare(call)
            except Exception as error:  # a chat template is a program and may raise anything
                call.completion.set_exception(error)
                continue
            batches.setdefault(self._sampling_of(call), []).append(writing)
        for (temperature, top_p, greedy), batch in batches.items():
            config = replace(
                self._policy.generation,
                max_new_tokens=max(writing.token_limit for writing in batch),
                temperature=temperature,
                top_p=top_p,
                top_k=0 if self.is_learning else self._policy.generation.top_k,
                do_sample=not greedy,
            )
            try:
                self._write(batch, config)
            except Exception as error:
                logger.exception("replies to %d calls failed", len(batch))
                for writing in batch:
                    if not writing.call.completion.done():
                        writing.call.completion.set_exception(error)

    def _prepare(self, call: Call) -> _Writing:
        """Renders a call's history, and finds out how long its reply may be."""
        episode = HistoryEpisode()
        if call.episode_id is not None:
            episode = self._episodes.get(call.episode_id, episode)
        prepared = episode.prepare(self.template, call.messages, call.tools, call.opening)
        room = self._policy.max_length - prepared.prompt_length
        token_limit = call.token_limit
        if token_limit is None:
            token_limit = max(1, min(self._policy.generation.max_new_tokens, room))
        if token_limit > room:
            raise ContextLengthError(
                f"The messages take {prepared.prompt_length} tokens, and the reply may take {token_limit}. The model's "
                f"context length is {self._policy.max_length}. Send fewer messages or a lower max_tokens."
            )
        # A reply that must call a tool has no text before the call.
        send = None if call.opening else call.send
        text = ReplyText(self._actor.decode, token_limit, call.stops, send, bool(call.tools))
        return _Writing(call, prepared, text, token_limit)

    def _sampling_of(self, call: Call) -> tuple[float, float, bool]:
        """Returns temperature, top_p and whether the most likely tokens are taken.

        While learning, replies are sampled as the agent's options say: they must come from the policy that learns.
        """
        generation = self._policy.generation
        if self.is_learning:
            return generation.temperature, 1.0, not generation.do_sample
        top_p = generation.top_p if call.top_p is None else call.top_p
        if call.temperature is None:
            return generation.temperature, top_p, self._actor.is_greedy or not generation.do_sample
        if call.temperature == 0:
            return generation.temperature, top_p, True
        return call.temperature, top_p, False

    def _write(self, batch: Sequence[_Writing], config: GenerationConfig) -> None:
        policy = self._policy
        started = time.perf_counter()
        forwarded = policy.tokens_forwarded

        def watcher(writing: _Writing) -> Callable[[tuple[int, ...]], int | None]:
            return lambda ids: 0 if writing.call.is_cancelled else writing.text(ids)

        contexts = numbered([writing.prepared.segment for writing in batch])
        with policy.lock, policy.acting(self.is_learning), policy.trees.cached():
            version = policy.weights_version
            texts = policy.write(policy.trees.of(contexts), config, self.is_learning, list(map(watcher, batch)))
        if self.is_learning:
            self._actor.acting_s += time.perf_counter() - started
            self._actor.acted_tokens += policy.tokens_forwarded - forwarded
        for writing, text in zip(batch, texts, strict=True):
            if not writing.call.is_cancelled:
                self._finish(writing, text, version)

    def _finish(self, writing: _Writing, text: SampledText, version: int) -> None:
        """Records a reply and answers its call."""
        call = writing.call
        reply = Reply(text.ids, text.logprobs, text.value, text.finish_reason, None, version)
        written = call.opening + writing.text.text
        content, calls = read_calls(written) if call.tools else (written, [])
        message: ChatMessage = {"role": "assistant", "content": content}
        finish_reason: Literal["stop", "length", "tool_calls"] = "stop"
        if text.finish_reason != "eos" and writing.text.finish_reason == "length":
            finish_reason = "length"
        if calls:
            finish_reason = "tool_calls"
            message["tool_calls"] = [_chat_call(tool_call) for tool_call in calls]
        turn = None
        if call.episode_id is not None and self.is_learning:
            episode = self._open_episode(call.episode_id)
            turn = len(episode.turns)
            episode.record(writing.prepared, reply, message, written)
        if call.opening and call.send is not None:
            call.send(content)
        else:
            writing.text.finish(content)
        call.completion.set_result(Completion(message, finish_reason, reply, writing.prepared.prompt_length, turn))

    def _open_episode(self, episode_id: str) -> HistoryEpisode:
        """Returns an episode to record a turn in; opens it if needed."""
        if episode_id not in self._episodes:
            if len(self._episodes) >= _MOST_EPISODES:
                oldest = next(iter(self._episodes))
                del self._episodes[oldest]
                logger.warning(
                    "%d episodes are open, so the oldest, %r, is dropped. End each episode with POST .../end, or "
                    "DELETE it.",
                    _MOST_EPISODES,
                    oldest,
                )
            self._episodes[episode_id] = HistoryEpisode()
        return self._episodes[episode_id]

    def _episode(self, episode_id: str) -> HistoryEpisode:
        """Returns an open episode.

        Raises:
            UnknownEpisodeError: No open episode has this id.
        """
        if episode_id not in self._episodes:
            problem = "has no recorded call, or has ended" if self.is_learning else "has no recorded call"
            advice = "" if self.is_learning else " The agent is in evaluation mode, in which calls are not recorded."
            raise UnknownEpisodeError(f"Episode {excerpt(episode_id)} {problem}.{advice}")
        return self._episodes[episode_id]

    def _assign_reward(self, episode_id: str, reward: float, turn: int) -> None:
        turns = self._episode(episode_id).turns
        check_reward(reward, turn, turns, 0, f"episode {excerpt(episode_id)}")
        turns[turn].reward += as_number(reward)

    def _end(
        self,
        episode_id: str,
        reward: float | None,
        truncated: bool,
        group: Hashable | None,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
    ) -> Stats:
        episode = self._episode(episode_id)
        final = None
        if truncated and self._collector.learner.has_critic:
            if not messages:
                raise EpisodeError(
                    f"Episode {excerpt(episode_id)} was truncated, and the critic estimates its remaining return from "
                    "the messages after its last turn. Send them: the history that the next call would have sent."
                )
            final = episode.prepare(self.template, messages, tools)
        before = episode.turns[-1].reward
        if reward is not None:
            self._assign_reward(episode_id, reward, -1)
        try:
            with self._policy.lock:
                stats = self._collector.learn_from([episode.finished(truncated, group, final)], [episode.messages])
        except BaseException:
            episode.turns[-1].reward = before
            raise
        del self._episodes[episode_id]
        if stats and self._on_update is not None:
            try:
                self._on_update(stats)
            except Exception:
                # The episode has ended and the update has run, so the client must not see an error.
                logger.exception("on_update failed")
        return stats


def _settle(task: _Task) -> None:
    """Does a task, and stores its result or its error."""
    try:
        result = task.function()
    except Exception as error:
        if not isinstance(error, LlamaGymError) or isinstance(error, SamplerError):
            logger.exception("a task of the server failed")
        task.result.set_exception(error)
    else:
        task.result.set_result(result)


def _future_of(job: Call | _Task) -> Future[Any]:
    return job.completion if isinstance(job, Call) else job.result


def _chat_call(call: ToolCall) -> dict[str, Any]:
    """Returns a tool call as chat messages hold it, with an id."""
    # Mistral's template demands nine letters and digits.
    call_id = secrets.token_hex(5)[:9]
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
