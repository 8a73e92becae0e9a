"""llama.cpp as a sampler."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ... import distributed
from ...errors import ConfigError, SamplerError
from ...models.gguf_adapter import GGUF_ADAPTER, GGUF_MODEL, GGUF_PRESET, write_gguf_adapter
from ...models.registry import GenerationConfig
from ...models.value_head import AutoModelForCausalLMWithValueHead
from ...options import check_arguments, explains_wrong_calls, user_path
from ...saving.file_operations import keep_mode
from .server import ServerSampler, logprob_of

logger = logging.getLogger(__name__)

# Seconds between two questions for a server's status.
_POLL_S = 0.02


class _Status(NamedTuple):
    """A server's report on its model.

    Attributes:
        value: "unloaded", "loading" or "loaded", among others.
        has_failed: Whether the last attempt to load it failed, as long as it is unloaded.
    """

    value: str
    has_failed: bool


class LlamaCppSampler(ServerSampler):
    """Samples replies in free text by llama.cpp's `llama-server`, plain or activated LoRA.

    `agent.save_gguf(folder)` writes the folder that the server runs, with the base as `base.gguf`:

        cd folder && llama-server --models-preset server.ini --port 8080

    After each update the adapter in the folder is replaced, and the server loads base and adapter again. After another
    `save_gguf` to the folder, start the server again. The server has one adapter, so one agent can use it at a time.
    """

    activates_lora = True
    _path = "/completion"

    @explains_wrong_calls(positional=3)
    def __init__(
        self,
        url: str | Sequence[str],
        folder: str | Path,
        *,
        timeout_s: float = 120.0,
        max_requests: int = 64,
        api_key: str | None = None,
    ) -> None:
        """Creates the sampler; the first reply connects.

        Args:
            url: Address of the server, such as "http://127.0.0.1:8080", or addresses of several that run the same
                folder, which share the requests.
            folder: The folder that the servers run, from `agent.save_gguf`.
            timeout_s: Seconds without an answer, or for loading an adapter, after which a server has failed.
            max_requests: Maximum number of concurrent requests; llama-server computes `--parallel` of them at a time.
            api_key: The servers' API key, or None.

        Raises:
            ConfigError: An argument is invalid, or the folder is not one that `agent.save_gguf` wrote.
        """
        check_arguments(LlamaCppSampler.__init__, locals())
        super().__init__(url, timeout_s, max_requests, api_key)
        self._folder = user_path(folder, "folder")
        if not (self._folder / GGUF_PRESET).is_file():
            raise ConfigError(
                f"folder: {str(self._folder)!r} has no {GGUF_PRESET}. Write it with agent.save_gguf(folder), and start "
                f"the server in it: llama-server --models-preset {GGUF_PRESET}"
            )
        # Number and time of the file that this sampler wrote last; another one is another agent's.
        self._written: tuple[int, int] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: a server has a single adapter, so that a copied agent samples with the built-in engine."""
        logger.info("the copy of the agent samples with the built-in engine, since llama-server has a single adapter")

    def set_weights(self, model: AutoModelForCausalLMWithValueHead, weights_id: str) -> None:
        """Replaces the adapter in the folder and has all servers load it, unless they have it; see `Sampler`.

        Raises:
            ConfigError: The model has no adapter that GGUF can hold, or several processes learn together.
            SamplerError: A server failed, or the adapter cannot be written.
        """
        if distributed.world_size() > 1:
            raise ConfigError(
                "Several processes learn together, and a llama-server has a single adapter. Use a VLLMSampler, or one "
                "process."
            )
        if self._written != self._file_state():
            self._weights_id = None
        super().set_weights(model, weights_id)

    def _file_state(self) -> tuple[int, int] | None:
        with suppress(OSError):
            status = os.stat(self._folder / GGUF_ADAPTER)
            return status.st_ino, status.st_mtime_ns
        return None

    def _send_adapter(self, model: AutoModelForCausalLMWithValueHead) -> None:
        adapter = self._folder / GGUF_ADAPTER
        scratch = self._folder / f".llamagym-{uuid.uuid4().hex}.gguf"
        try:
            write_gguf_adapter(model, scratch)
            keep_mode(adapter, scratch)
            scratch.replace(adapter)
        finally:
            scratch.unlink(missing_ok=True)
        for url in self.urls:
            if self._status(url).value != "unloaded":
                self._post(url, "/models/unload", {"model": GGUF_MODEL})
                self._wait_until(url, "unloaded")
            self._post(url, "/models/load", {"model": GGUF_MODEL})
        for url in self.urls:
            self._wait_until(url, "loaded")
        self._written = self._file_state()

    def _status(self, url: str) -> _Status:
        """Returns a server's report on the model."""
        answer = self._post(url, "/models", None)
        try:
            (status,) = (model["status"] for model in answer["data"] if model["id"] == GGUF_MODEL)
            return _Status(status["value"], bool(status.get("failed")))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SamplerError(
                f"{url} does not serve the model {GGUF_MODEL!r} by a preset. Start it in {str(self._folder)!r}: "
                f"llama-server --models-preset {GGUF_PRESET}"
            ) from error

    def _wait_until(self, url: str, wanted: str) -> None:
        """Waits until a server reports a status."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            status = self._status(url)
            if status.value == wanted:
                return
            if status.has_failed and wanted == "loaded":
                raise SamplerError(
                    f"{url} could not load the adapter in {str(self._folder)!r}. Look at the server's log; if the "
                    "folder was written again by save_gguf, start the server again."
                )
            if time.monotonic() > deadline:
                raise SamplerError(
                    f"{url} did not reach the status {wanted!r} within {self._timeout_s:g} s. Look at the server's "
                    "log, or raise timeout_s."
                )
            time.sleep(_POLL_S)

    def _body(self, ids: Sequence[int], config: GenerationConfig, eos_ids: AbstractSet[int]) -> dict[str, Any]:
        return {
            "model": GGUF_MODEL,
            "prompt": list(ids),
            "n_predict": config.max_new_tokens,
            "return_tokens": True,
            # The probability of each sampled token under softmax(logits / temperature).
            "n_probs": 1,
            "post_sampling_probs": True,
            "samplers": ["top_k", "top_p", "temperature"] if config.top_k or config.top_p < 1.0 else ["temperature"],
            "temperature": config.temperature if config.do_sample else 0.0,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "cache_prompt": True,
        }

    def _tokens(self, answer: Any) -> tuple[list[int], list[float]]:
        logprobs = [logprob_of(token["prob"]) for token in answer["completion_probabilities"]]
        return answer["tokens"], logprobs

    def _advice(self, path: str, status: int) -> str:
        if path == self._path:
            return "Look at the server's log; a context may be longer than its --ctx-size, divided by --parallel."
        return "Look at the server's log."
