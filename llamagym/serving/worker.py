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
# Limit of gathering under a steady stream of calls.
_MAX_GATHER_S = 0.05
# More open episodes than this were probably never ended.
_MAX_EPISODES = 10_000
# A lower temperature of a call takes the most likely token; logits divided by it would overflow.
_MIN_TEMPERATURE = 0.01


class ServerClosedError(LlamaGymError, RuntimeError):
    """The server is shutting down."""


class UnknownEpisodeError(EpisodeError):
    """No open episode has this id."""


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
        token_limit: Maximum tokens of the reply. None: the agent's limit, capped by the remaining context.
        temperature: Divisor of logits; 0 takes the most likely token, None is the agent's.
        top_p: Nucleus sampling; None is the agent's.
        stops: Texts that end the reply.
        episode_id: Episode to record it under; None if it is not recorded.
        send: Receives pieces of the reply's content, in the worker's thread; None if it is not streamed.
        completion: The answer, or the error.
        is_cancelled: Whether the client has disconnected; then the call is neither answered nor recorded.
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
    """A reward, or the end or deletion of an episode."""

    function: Callable[[], Any]
    result: Future[Any]


@dataclass(frozen=True, slots=True)
class _Writing:
    """A call whose reply is being written."""

    call: Call
    prepared: PreparedCall
    text: ReplyText
    token_limit: int
    is_recorded: bool


@dataclass(frozen=True, slots=True)
class _Sampling:
    """Options of sampling that the calls of a batch share.

    Attributes:
        is_learning: Whether replies will be learned from.
        temperature: Divisor of logits.
        top_p: Nucleus sampling.
        greedy: Whether the most likely tokens are taken.
        token_limit: Maximum tokens of a reply; None if it may differ between calls.
    """

    is_learning: bool
    temperature: float
    top_p: float
    greedy: bool
    token_limit: int | None


class Worker:
    """Answers calls and stores episodes, in one thread.

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
        self._reject_waiting()
        self._thread.join()

    def _reject_waiting(self) -> None:
        """Closes the queue."""
        with self._arrived:
            self._is_closed = True
            waiting = list(self._queue)
            self._queue.clear()
            self._arrived.notify()
        for job in waiting:
            _future_of(job).set_exception(ServerClosedError("The server is shutting down."))

    @property
    def is_learning(self) -> bool:
        """Whether calls are recorded."""
        return self._actor.is_learning

    def token_text(self, token: int) -> str:
        """Returns the text of a token, control tokens included."""
        return str(self._actor.tokenizer.decode([token]))

    def submit_task(self, function: Callable[[], Result]) -> Future[Result]:
        """Queues a call of `assign_reward`, `end` or `discard`, which must run in the worker's thread."""
        task = _Task(function, Future())
        self.submit(task)
        return task.result

    def submit(self, job: Call | _Task) -> None:
        """Queues a call, whose `completion` receives the answer, or a task.

        Raises:
            ServerClosedError: The worker is closed.
        """
        with self._arrived:
            if self._is_closed:
                raise ServerClosedError("The server is shutting down.")
            # From now on the future cannot be cancelled, so that it can be given its result.
            _future_of(job).set_running_or_notify_cancel()
            self._queue.append(job)
            self._arrived.notify()

    def _run(self) -> None:
        try:
            while True:
                jobs = self._next_jobs()
                if not jobs:
                    return
                if isinstance(jobs[0], _Task):
                    _settle(jobs[0])
                else:
                    self._answer([job for job in jobs if isinstance(job, Call)])
        finally:
            # Without this thread, further work would wait forever.
            self._reject_waiting()

    def _next_jobs(self) -> list[Call | _Task]:
        """Waits for work; returns a task, or the calls before the next task. Returns nothing when closed."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._queue or self._is_closed)
            if not self._queue:
                return []
            if isinstance(self._queue[0], _Task):
                return [self._queue.popleft()]
            deadline = time.monotonic() + _MAX_GATHER_S
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
        batches: dict[_Sampling, list[_Writing]] = {}
        # The mode may change at any time, and is the same for all of these calls.
        is_learning = self.is_learning
        for call in calls:
            if call.is_cancelled:
                continue
            try:
                writing = self._prepare(call, is_learning)
                batches.setdefault(self._sampling_of(writing, is_learning), []).append(writing)
            except Exception as error:  # a chat template is a program and may raise anything
                call.completion.set_exception(error)
        for sampling, batch in batches.items():
            try:
                texts, version = self._write(batch, sampling)
            except BaseException as error:
                logger.exception("replies to %d calls failed", len(batch))
                for writing in batch:
                    writing.call.completion.set_exception(error)
                continue
            for writing, text in zip(batch, texts, strict=True):
                self._finish(writing, text, version)

    def _prepare(self, call: Call, is_learning: bool) -> _Writing:
        """Renders a call's history and limits its reply's length."""
        episode = HistoryEpisode()
        if call.episode_id is not None:
            episode = self._episodes.get(call.episode_id, episode)
        prepared = episode.prepare(self.template, call.messages, call.tools, call.opening)
        max_length = self._policy.max_length
        room = max_length - prepared.prompt_length
        token_limit = call.token_limit
        if token_limit is None:
            token_limit = max(1, min(self._policy.generation.max_new_tokens, room))
        if token_limit > room:
            raise ContextLengthError(
                f"The messages have {prepared.prompt_length} tokens, and a reply of up to {token_limit} follows. The "
                f"model's context length is {max_length} tokens. Send fewer messages, or a lower max_tokens."
            )
        # A reply that must call a tool has no text before the call.
        send = None if call.opening else call.send
        text = ReplyText(self._actor.decode, token_limit, call.stops, send, bool(call.tools))
        return _Writing(call, prepared, text, token_limit, is_learning and call.episode_id is not None)

    def _sampling_of(self, writing: _Writing, is_learning: bool) -> _Sampling:
        """Returns the options with which a call's reply is sampled.

        While learning, replies are sampled as the agent's options say: they must come from the policy that learns.
        """
        call = writing.call
        generation = self._policy.generation
        temperature = generation.temperature
        top_p = 1.0
        greedy = not generation.do_sample
        if not is_learning:
            top_p = generation.top_p if call.top_p is None else call.top_p
            greedy |= self._actor.is_greedy
            if call.temperature is not None:
                greedy = call.temperature < _MIN_TEMPERATURE
                temperature = temperature if greedy else call.temperature
        # A sampler writes every reply to its end, and may have no room for a longer one.
        token_limit = None if self._policy.sampler is None else writing.token_limit
        return _Sampling(is_learning, temperature, top_p, greedy, token_limit)

    def _write(self, batch: Sequence[_Writing], sampling: _Sampling) -> tuple[list[SampledText], int]:
        """Returns the replies to a batch of calls, and the version of the weights that wrote them."""
        policy = self._policy
        is_learning = sampling.is_learning
        config = replace(
            policy.generation,
            max_new_tokens=max(writing.token_limit for writing in batch),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=0 if is_learning else policy.generation.top_k,
            do_sample=not sampling.greedy,
        )
        started = time.perf_counter()
        forwarded = policy.tokens_forwarded

        def watcher(writing: _Writing) -> Callable[[tuple[int, ...]], int | None]:
            return lambda ids: 0 if writing.call.is_cancelled else writing.text(ids)

        contexts = numbered([writing.prepared.segment for writing in batch])
        with policy.lock, policy.acting(is_learning), policy.trees.cached():
            version = policy.weights_version
            texts = policy.write(policy.trees.of(contexts), config, is_learning, list(map(watcher, batch)))
        if is_learning:
            self._actor.acting_s += time.perf_counter() - started
            self._actor.acted_tokens += policy.tokens_forwarded - forwarded
        return texts, version

    def _finish(self, writing: _Writing, text: SampledText, version: int) -> None:
        """Records a reply and answers its call, unless its client has disconnected."""
        call = writing.call
        if call.is_cancelled:
            return
        try:
            completion = self._completion(writing, text, version)
            content = str(completion.message["content"])
            if call.opening and call.send is not None:
                call.send(content)
            else:
                writing.text.finish(content)
        except Exception as error:
            logger.exception("a reply could not be recorded")
            call.completion.set_exception(error)
        else:
            call.completion.set_result(completion)

    def _completion(self, writing: _Writing, text: SampledText, version: int) -> Completion:
        """Returns a reply as the answer to its call, and records it."""
        call = writing.call
        reply = Reply(text.ids, text.logprobs, text.value, text.finish_reason, None, version)
        written = call.opening + writing.text.text
        content = written
        calls: list[ToolCall] = []
        if call.tools:
            content, calls = read_calls(written)
        message: ChatMessage = {"role": "assistant", "content": content}
        finish_reason: Literal["stop", "length", "tool_calls"] = "stop"
        if text.finish_reason != "eos" and writing.text.finish_reason == "length":
            finish_reason = "length"
        if calls:
            finish_reason = "tool_calls"
            message["tool_calls"] = [_chat_call(tool_call) for tool_call in calls]
        turn = None
        if writing.is_recorded and call.episode_id is not None:
            episode = self._open_episode(call.episode_id)
            turn = len(episode.turns)
            episode.record(writing.prepared, reply, message, written)
        return Completion(message, finish_reason, reply, writing.prepared.prompt_length, turn)

    def _open_episode(self, episode_id: str) -> HistoryEpisode:
        """Returns an episode to record a turn in; opens it if needed."""
        # The episode that was used last comes last.
        episode = self._episodes.pop(episode_id, None) or HistoryEpisode()
        if len(self._episodes) >= _MAX_EPISODES:
            unused = next(iter(self._episodes))
            del self._episodes[unused]
            logger.warning(
                "%d episodes are open, so %r, which no call has used for longest, is deleted. End each episode.",
                _MAX_EPISODES,
                unused,
            )
        self._episodes[episode_id] = episode
        return episode

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

    def assign_reward(self, episode_id: str, reward: float, turn: int = -1) -> None:
        """Adds a reward to a turn of an open episode.

        Raises:
            EpisodeError: The episode, the turn or the reward is invalid.
        """
        turns = self._episode(episode_id).turns
        check_reward(reward, turn, turns, 0, f"episode {excerpt(episode_id)}")
        turns[turn].reward += as_number(reward)

    def discard(self, episode_id: str) -> None:
        """Deletes an open episode."""
        self._episode(episode_id)
        del self._episodes[episode_id]

    def end(
        self,
        episode_id: str,
        reward: float | None,
        truncated: bool,
        group: Hashable | None,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
    ) -> Stats:
        """Ends an episode; the agent learns if that fills a batch. After an error the episode is still open.

        Args:
            episode_id: The episode.
            reward: Added to the last turn's reward; None for no reward.
            truncated: Whether the episode was cut off.
            group: For GRPO, equal for episodes with the same start.
            messages: After truncation, the history that the next call would have sent; may be empty without a critic.
            tools: The tools of that call.

        Returns:
            Statistics of the update, empty if none ran.
        """
        episode = self._episode(episode_id)
        if not self.is_learning:
            # As at the end of an environment's episode in evaluation mode.
            del self._episodes[episode_id]
            return {}
        final = None
        if truncated and self._collector.learner.has_critic:
            if not messages:
                raise EpisodeError(
                    f"Episode {excerpt(episode_id)} was truncated, and the critic estimates its remaining return from "
                    "the messages after its last turn. Send them: the history that the next call would have sent."
                )
            final = episode.prepare(self.template, messages, tools)
            if final.prompt_length > self._policy.max_length:
                raise ContextLengthError(
                    f"The messages after the last turn have {final.prompt_length} tokens, and the model's context "
                    f"length is {self._policy.max_length}. Send fewer of them."
                )
        before = episode.turns[-1].reward
        if reward is not None:
            self.assign_reward(episode_id, reward)
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
            except BaseException:
                # The episode has ended and the update has run, so the client must not see an error.
                logger.exception("on_update failed")
        return stats


def _settle(task: _Task) -> None:
    """Runs a task, and stores its result or its error."""
    try:
        result = task.function()
    except BaseException as error:
        if not isinstance(error, LlamaGymError) or isinstance(error, SamplerError):
            logger.exception("a reward or the end of an episode failed")
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
