"""Base class of samplers that are servers: requests over HTTP, and replies as token ids with log-probabilities.

A server computes with another engine than the learner, so its log-probabilities differ by rounding. Its replies are
evaluated again before an update and get an importance weight (see `learners.rollout`), and `sampler_kl` in the
statistics measures the difference. Requests have no seed: rounding depends on what else a server computes at the time,
so that replies would not be repeatable, and vLLM on a CPU fails with one.
"""

from __future__ import annotations

import json
import math
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from http.client import HTTPException
from itertools import cycle
from typing import Any, ClassVar, NoReturn
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

import torch

from ...errors import ConfigError, SamplerError, excerpt
from ...models.registry import GenerationConfig
from ...models.value_head import AutoModelForCausalLMWithValueHead
from ..sampling import SampledText

# Each concurrent request has a thread.
_MOST_REQUESTS = 4096
# A day, in seconds.
_LONGEST_S = 86_400.0
# Log-probabilities below it stand for impossible tokens, which cannot have been sampled.
_LEAST_LOGPROB = -100.0

Call = tuple[str, str, dict[str, Any]]
"""Address of a server, path and body of a request."""


class RejectedError(SamplerError):
    """A server answered with an error; `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        """Creates the error."""
        super().__init__(message)
        self.status = status


class ServerSampler(ABC):
    """A sampler that sends one request per prompt, in turn to each server.

    Attributes:
        urls: Addresses of the servers.
    """

    activates_lora = False
    # The path of requests for replies.
    _path: ClassVar[str]

    def __init__(self, url: str | Sequence[str], timeout_s: float, max_requests: int, api_key: str | None) -> None:
        """Creates the sampler; the first reply connects.

        Args:
            url: Address of the server, such as "http://127.0.0.1:8000", or addresses of several servers of one model.
            timeout_s: Seconds without an answer after which a server has failed.
            max_requests: Maximum number of concurrent requests.
            api_key: API key, sent as a bearer token, or None.

        Raises:
            ConfigError: An argument is invalid.
        """
        urls = [url] if isinstance(url, str) else list(url)
        if not urls or not all(map(_is_address, urls)):
            # It may contain a password.
            shown = "..." if "@" in str(url) else excerpt(url)
            raise ConfigError(f"url={shown} is not the address of a server. Pass one like 'http://127.0.0.1:8000'.")
        if not 0 < timeout_s <= _LONGEST_S:
            raise ConfigError(f"timeout_s={excerpt(timeout_s)} is not between 0 and {_LONGEST_S:g} seconds.")
        if not 1 <= max_requests <= _MOST_REQUESTS:
            raise ConfigError(f"max_requests={excerpt(max_requests)} is not between 1 and {_MOST_REQUESTS}.")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
            raise ConfigError("api_key is empty, or has characters that a header cannot have. Pass None for no key.")
        # The paths of requests contain /v1, as the addresses of OpenAI's clients do.
        self.urls = [each.rstrip("/").removesuffix("/v1") for each in urls]
        self._openers = {each: _opener(each) for each in self.urls}
        self._timeout_s = timeout_s
        self._max_requests = max_requests
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # Identity of the weights that all servers have; None if that is not known.
        self._weights_id: str | None = None

    def set_weights(self, model: AutoModelForCausalLMWithValueHead, weights_id: str) -> None:
        """Sends the adapter to all servers, unless they have it; see `Sampler`.

        Raises:
            ConfigError: The model has no adapter, or one that a server cannot apply.
            SamplerError: A server failed, or the adapter cannot be written.
        """
        if weights_id == self._weights_id:
            return
        if not model.is_peft_model:
            raise ConfigError(
                f"{type(self).__name__} sends a LoRA adapter to its server, and all weights of this model are its own. "
                "Load the model with load_model_and_tokenizer(name), which adds a LoRA."
            )
        self._weights_id = None
        try:
            self._send_adapter(model)
        except OSError as error:
            raise SamplerError(
                f"The adapter cannot be written for the server: {error}. Look whether its folder exists and has room."
            ) from error
        self._weights_id = weights_id

    @abstractmethod
    def _send_adapter(self, model: AutoModelForCausalLMWithValueHead) -> None:
        """Makes all servers use the model's adapter."""

    @abstractmethod
    def _body(self, ids: Sequence[int], config: GenerationConfig, eos_ids: AbstractSet[int]) -> dict[str, Any]:
        """Returns the body of the request for one reply."""

    @abstractmethod
    def _tokens(self, answer: Any) -> tuple[list[int], list[float]]:
        """Returns the ids of a reply and their log-probabilities, from a server's answer."""

    def sample(
        self,
        prompts: Sequence[tuple[int, ...]],
        config: GenerationConfig,
        eos_ids: AbstractSet[int],
        rng: torch.Generator,
    ) -> list[SampledText]:
        """Writes one reply to each prompt; see `Sampler`.

        Raises:
            SamplerError: A server cannot be reached, does not answer in time, or answers with an error.
        """
        # Unknown until all have answered: a server that was restarted has lost the adapter.
        weights_id = self._weights_id
        self._weights_id = None
        self._check_servers(prompts[0], config, eos_ids)
        requests = [(url, self._path, self._body(ids, config, eos_ids)) for url, ids in zip(cycle(self.urls), prompts)]
        texts = []
        for (url, _, _), answer in zip(requests, self._post_all(requests), strict=True):
            try:
                written, logprobs = self._tokens(answer)
                texts.append(as_text(written, logprobs, config.max_new_tokens, eos_ids))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise self._unexpected(url, answer, error) from error
        self._weights_id = weights_id
        return texts

    def _check_servers(  # noqa: B027 (most servers need no check)
        self, ids: Sequence[int], config: GenerationConfig, eos_ids: AbstractSet[int]
    ) -> None:
        """Rejects servers whose settings do not suit the options of sampling; `ids` is a prompt to try."""

    def _unexpected(self, url: str, answer: Any, error: Exception) -> SamplerError:
        """The error for an answer that has not the expected content."""
        return SamplerError(
            f"{url} answered without the ids and log-probabilities of a reply ({type(error).__name__}: {error}): "
            f"{excerpt(answer)}. The documentation of {type(self).__name__} names the version and options it needs."
        )

    def _post_all(self, requests: Sequence[Call]) -> list[Any]:
        """Answers to several requests, `max_requests` at a time; after a failure, no further one is sent.

        Threads are daemons, so that Python can end while a server hangs.
        """
        todo: queue.SimpleQueue[tuple[int, Call]] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        for pair in enumerate(requests):
            todo.put(pair)

        def work() -> None:
            with suppress(queue.Empty):
                while True:
                    index, request = todo.get_nowait()
                    try:
                        done.put((index, self._post(*request)))
                    except BaseException as error:
                        done.put((index, error))

        for _ in range(min(len(requests), self._max_requests)):
            threading.Thread(target=work, daemon=True).start()
        answers: dict[int, Any] = {}
        try:
            while len(answers) < len(requests):
                index, answer = done.get()
                if isinstance(answer, BaseException):
                    raise answer
                answers[index] = answer
        finally:
            with suppress(queue.Empty):
                while True:
                    todo.get_nowait()
        return [answers[index] for index in range(len(requests))]

    def _post(self, url: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """Sends a POST request with a JSON body, or a GET request if `body` is None; returns the answer.

        Raises:
            SamplerError: The server cannot be reached, does not answer in time, or answers with an error.
        """
        data = None if body is None else json.dumps(body).encode()
        request = Request(url + path, data, self._headers)
        try:
            with self._openers[url].open(request, timeout=self._timeout_s) as answer:
                content = answer.read()
        except HTTPError as error:
            self._raise_rejected(request, path, error)
        except (OSError, HTTPException) as error:
            # A timeout while connecting is the reason of a URLError.
            reason = getattr(error, "reason", error)
            failure = f"cannot be reached ({reason or type(error).__name__})"
            if isinstance(reason, TimeoutError):
                failure = f"did not answer within {self._timeout_s:g} s"
            raise SamplerError(
                f"{request.full_url} {failure}. Look at the server's log and start it again; then act again, or "
                "continue the run with resume=True. If it is only slow, raise timeout_s."
            ) from error
        try:
            # vLLM answers with plain text when it has loaded an adapter.
            return json.loads(content) if content.lstrip()[:1] in (b"{", b"[") else content.decode(errors="replace")
        except ValueError as error:
            raise SamplerError(f"{request.full_url} answered with invalid JSON: {excerpt(content)}.") from error

    def _raise_rejected(self, request: Request, path: str, error: HTTPError) -> NoReturn:
        try:
            answer = error.read().decode(errors="replace")
        except (OSError, HTTPException):
            answer = ""
        raise RejectedError(
            error.code,
            f"{request.full_url} answered with status {error.code}: {answer[:500]!r}. {self._advice(path, error.code)}",
        ) from error

    def _advice(self, path: str, status: int) -> str:
        """Returns advice for an answer with this HTTP status."""
        return "Look at the server's log."


def _is_address(url: object) -> bool:
    if not isinstance(url, str) or not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        # A port that is not a number, or a bracket that is not closed.
        return False
    return is_server and not (parts.username or parts.query or parts.fragment)


def _opener(url: str) -> OpenerDirector:
    """Opens an address: through the environment's proxy, except for servers on this machine."""
    host = urlsplit(url).hostname or ""
    is_here = host in ("localhost", "::1") or host.startswith("127.")
    return build_opener(ProxyHandler({})) if is_here else build_opener()


def as_text(
    ids: Sequence[int], logprobs: Sequence[float], max_new_tokens: int, eos_ids: AbstractSet[int]
) -> SampledText:
    """A reply that ends where the built-in engine would end it, since servers know other tokens that end one.

    Args:
        ids: Sampled token ids.
        logprobs: The log-probability of each.
        max_new_tokens: Maximum length.
        eos_ids: All ids that end a reply.

    Raises:
        ValueError: The reply is empty, or an id or a log-probability is missing or invalid.

    >>> as_text([5, 2, 7], [-1.0, -0.5, -2.0], 8, {2})
    SampledText(ids=(5, 2), logprobs=(-1.0, -0.5), finish_reason='eos', value=None)
    """
    if not ids or len(ids) != len(logprobs):
        raise ValueError(f"expected a log-probability for each of at least one id, got {len(logprobs)} for {len(ids)}")
    if not all(type(token) is int for token in ids):
        raise ValueError("an id is not an integer")
    end = min(len(ids), max_new_tokens)
    for place, token in enumerate(ids[:end]):
        if token in eos_ids:
            end = place + 1
            break
    kept = [float(logprob) for logprob in logprobs[:end]]
    # Rounding makes the log-probability of a certain token slightly positive.
    if not all(_LEAST_LOGPROB <= logprob <= 1e-3 for logprob in kept):
        raise ValueError(f"log-probabilities are not those of sampled tokens: {excerpt(kept)}")
    logprobs_kept = tuple(min(logprob, 0.0) for logprob in kept)
    return SampledText(tuple(ids[:end]), logprobs_kept, "eos" if ids[end - 1] in eos_ids else "length")


def logprob_of(probability: float) -> float:
    """The log-probability of a sampled token, whose probability a server may have rounded to 0."""
    return math.log(probability) if probability > 0 else _LEAST_LOGPROB
