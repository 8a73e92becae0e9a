"""What all servers that sample have in common: requests over HTTP, and replies as token ids with log-probabilities.

A server computes with another engine than the learner, so its log-probabilities differ by rounding. Its replies are
evaluated again before an update and get an importance weight (see `learners.rollout`), and `sampler_kl` in the
statistics measures the difference. Requests have no seed: rounding depends on what else a server computes at the time,
so that replies would not be repeatable, and vLLM on a CPU fails with one.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from itertools import cycle
from typing import Any, NoReturn
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch

from ..errors import ConfigError, SamplerError, excerpt
from ..models.registry import GenerationConfig
from ..models.value_head import AutoModelForCausalLMWithValueHead
from ..policy.sampling import SampledText

# Each request at the same time has a thread.
_MOST_REQUESTS = 4096
# A day, in seconds.
_LONGEST_S = 86_400.0
# The smallest positive float32: a server that rounds a sampled token's probability to 0 means a smaller one.
_SMALLEST = 1.2e-38


class ServerSampler(ABC):
    """A sampler that sends each prompt as a request of its own to one of several equal servers.

    Attributes:
        urls: Addresses of the servers.
    """

    activates_lora = False

    def __init__(self, url: str | Sequence[str], timeout_s: float, max_requests: int, api_key: str | None) -> None:
        """Does not connect yet.

        Args:
            url: Address of the server, such as "http://127.0.0.1:8000", or addresses of several servers of the same
                model, which share the requests.
            timeout_s: Seconds after which a server that does not answer has failed.
            max_requests: Maximum of requests at the same time.
            api_key: Sent as a bearer token; None for none.

        Raises:
            ConfigError: An address or a number is invalid.
        """
        self.urls = [url] if isinstance(url, str) else list(url)
        if not self.urls or not all(map(_is_address, self.urls)):
            raise ConfigError(
                f"url={excerpt(url)} is not the address of a server. Pass one like 'http://127.0.0.1:8000'."
            )
        if not 0 < timeout_s <= _LONGEST_S:
            raise ConfigError(f"timeout_s={excerpt(timeout_s)} is not between 0 and {_LONGEST_S:g} seconds.")
        if not 1 <= max_requests <= _MOST_REQUESTS:
            raise ConfigError(f"max_requests={excerpt(max_requests)} is not between 1 and {_MOST_REQUESTS}.")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
            raise ConfigError("api_key is empty, or has characters that a header cannot have. Pass None for no key.")
        self._timeout_s = timeout_s
        self._max_requests = max_requests
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # The version of the weights that the servers have; None before the first.
        self._version: int | None = None

    def set_weights(self, model: AutoModelForCausalLMWithValueHead, version: int) -> None:
        """Sends the adapter to all servers, unless they have this version; see `Sampler`.

        Raises:
            ConfigError: The model has no adapter, or one that a server cannot apply.
            SamplerError: A server failed.
        """
        if version == self._version:
            return
        if not model.is_peft_model:
            raise ConfigError(
                f"{type(self).__name__} sends a LoRA adapter to its server, and all weights of this model are its own. "
                "Load the model with load_model_and_tokenizer(name), which adds a LoRA."
            )
        # Until all servers have the new adapter, none counts as up to date.
        self._version = None
        self._send_adapter(model)
        self._version = version

    @abstractmethod
    def _send_adapter(self, model: AutoModelForCausalLMWithValueHead) -> None:
        """Makes all servers use the model's adapter."""

    @abstractmethod
    def _request(
        self, ids: Sequence[int], config: GenerationConfig, eos_ids: AbstractSet[int]
    ) -> tuple[str, dict[str, Any]]:
        """The path and the body of the request for one reply."""

    @abstractmethod
    def _tokens(self, answer: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        """The ids of a reply and their log-probabilities, from a server's answer."""

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
        requests = []
        for url, ids in zip(cycle(self.urls), prompts):
            requests.append((url, *self._request(ids, config, eos_ids)))
        # After a failure the servers may have lost the adapter, so that it is sent again.
        version = self._version
        self._version = None
        texts = []
        for (url, *_), answer in zip(requests, self._post_all(requests), strict=True):
            try:
                written, logprobs = self._tokens(answer)
                texts.append(as_text(written, logprobs, config.max_new_tokens, eos_ids))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise SamplerError(
                    f"{url} answered without the ids and log-probabilities of a reply ({type(error).__name__}: {error}"
                    f"): {excerpt(answer)}. Start a version of the server that this class names."
                ) from error
        self._version = version
        return texts

    def _post_all(self, requests: Sequence[tuple[str, str, dict[str, Any]]]) -> list[Any]:
        """Answers to several requests, at most `max_requests` at a time; after a failure, none is begun."""
        pool = ThreadPoolExecutor(min(len(requests), self._max_requests))
        try:
            return list(pool.map(lambda request: self._post(*request), requests))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _post(self, url: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """A server's answer to a POST request with JSON, or to a GET request without a body.

        Raises:
            SamplerError: The server cannot be reached, does not answer in time, or answers with an error.
        """
        data = None if body is None else json.dumps(body).encode()
        request = Request(url.rstrip("/") + path, data, self._headers)
        try:
            with urlopen(request, timeout=self._timeout_s) as answer:
                content = answer.read()
        except HTTPError as error:
            self._raise_rejected(request, error)
        except (OSError, HTTPException) as error:
            # A connection that could not be made in time is wrapped once more.
            reason = getattr(error, "reason", error)
            failure = f"cannot be reached ({reason or type(error).__name__})"
            if isinstance(reason, TimeoutError):
                failure = f"did not answer within {self._timeout_s:g} s"
            raise SamplerError(
                f"{request.full_url} {failure}. Look at the server's log, start it again, and continue the run with "
                "resume. If it is only slow, raise timeout_s."
            ) from error
        try:
            # vLLM answers with plain text when it has loaded an adapter.
            return json.loads(content) if content.lstrip()[:1] in (b"{", b"[") else content.decode(errors="replace")
        except ValueError as error:
            raise SamplerError(f"{request.full_url} answered with no JSON: {excerpt(content)}.") from error

    def _raise_rejected(self, request: Request, error: HTTPError) -> NoReturn:
        try:
            answer = error.read().decode(errors="replace")
        except (OSError, HTTPException):
            answer = ""
        raise SamplerError(
            f"{request.full_url} answered with status {error.code}: {answer[:500]!r}. {self._advice(error.code)}"
        ) from error

    def _advice(self, status: int) -> str:
        """What to do about an answer with this HTTP status."""
        return "Look at the server's log."


def _is_address(url: object) -> bool:
    if not isinstance(url, str):
        return False
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        # A port that is not a number, or a bracket that is not closed.
        return False


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
        ValueError: There is no token, or a log-probability is missing or is none.

    >>> as_text([5, 2, 7], [-1.0, -0.5, -2.0], 8, {2})
    SampledText(ids=(5, 2), logprobs=(-1.0, -0.5), finish_reason='eos', value=None)
    """
    if not ids or len(ids) != len(logprobs):
        raise ValueError(f"expected a log-probability for each of at least one id, got {len(logprobs)} for {len(ids)}")
    if not all(isinstance(token, int) for token in ids):
        raise ValueError("an id is not an integer")
    end = min(len(ids), max_new_tokens)
    for place, token in enumerate(ids[:end]):
        if token in eos_ids:
            end = place + 1
            break
    kept = tuple(float(logprob) for logprob in logprobs[:end])
    if not all(math.isfinite(logprob) and logprob <= 1e-3 for logprob in kept):
        raise ValueError(f"log-probabilities are not finite or above 0: {excerpt(kept)}")
    return SampledText(tuple(ids[:end]), kept, "eos" if ids[end - 1] in eos_ids else "length")


def logprob_of(probability: float) -> float:
    """The log-probability of a sampled token, whose probability a server may have rounded to 0."""
    return math.log(max(probability, _SMALLEST))
