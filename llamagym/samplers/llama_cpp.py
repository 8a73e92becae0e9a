"""llama.cpp as a sampler."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from ..errors import ConfigError, SamplerError
from ..models.gguf_adapter import GGUF_ADAPTER, GGUF_MODEL, GGUF_PRESET, write_gguf_adapter
from ..models.registry import GenerationConfig
from ..models.value_head import AutoModelForCausalLMWithValueHead
from ..options import check_arguments, explains_wrong_calls, user_path
from .server import ServerSampler, logprob_of

# Seconds between two questions whether a server has loaded the adapter.
_POLL_S = 0.02


class LlamaCppSampler(ServerSampler):
    """Samples replies in free text by llama.cpp's `llama-server`, plain or activated LoRA.

    `agent.save_gguf(folder)` writes the folder that the server runs, with the base as `base.gguf`:

        cd folder && llama-server --models-preset server.ini --port 8080

    After each update the adapter in the folder is replaced, and the server loads base and adapter again.
    """

    activates_lora = True

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
        """Does not connect yet.

        Args:
            url: Address of the server, such as "http://127.0.0.1:8080", or addresses of several that run the same
                folder, which share the requests.
            folder: The folder that the servers run, from `agent.save_gguf`.
            timeout_s: Seconds after which a server that does not answer, or does not load an adapter, has failed.
            max_requests: Maximum of requests at the same time; llama-server answers as many at once as its `--parallel`
                says.
            api_key: The servers' key; None for none.

        Raises:
            ConfigError: An argument is invalid, or the folder is not one that `agent.save_gguf` wrote.
        """
        check_arguments(LlamaCppSampler.__init__, locals())
        super().__init__(url, timeout_s, max_requests, api_key)
        self._folder = user_path(folder, "folder")
        if not (self._folder / GGUF_PRESET).is_file():
            raise ConfigError(
                f"{str(self._folder)!r} has no {GGUF_PRESET}. Write the folder with agent.save_gguf(folder), and start "
                f"the server in it: llama-server --models-preset {GGUF_PRESET}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> LlamaCppSampler:
        """Rejects copies: the server has one adapter.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "An agent whose replies come from llama-server cannot be copied, since the server has one adapter. Save "
            "the agent and load it without the sampler."
        )

    def _send_adapter(self, model: AutoModelForCausalLMWithValueHead) -> None:
        handle, scratch = tempfile.mkstemp(dir=self._folder, suffix=".gguf")
        os.close(handle)
        try:
            write_gguf_adapter(model, Path(scratch))
            os.replace(scratch, self._folder / GGUF_ADAPTER)
        except BaseException:
            os.unlink(scratch)
            raise
        for url in self.urls:
            if self._status(url) != "unloaded":
                self._post(url, "/models/unload", {"model": GGUF_MODEL})
                self._wait_until(url, "unloaded")
            self._post(url, "/models/load", {"model": GGUF_MODEL})
        for url in self.urls:
            self._wait_until(url, "loaded")

    def _status(self, url: str) -> str:
        """Whether a server has loaded the model: "unloaded", "loading", "loaded" or another word of its own."""
        answer = self._post(url, "/models", None)
        try:
            models = {model["id"]: model for model in answer["data"]}
            model = models[GGUF_MODEL]
            if model["status"].get("failed"):
                raise SamplerError(
                    f"{url} could not load the adapter in {str(self._folder)!r}. Look at the server's log."
                )
            return str(model["status"]["value"])
        except (KeyError, TypeError, AttributeError) as error:
            raise SamplerError(
                f"{url} does not serve the model {GGUF_MODEL!r} by a preset. Start it in {str(self._folder)!r}: "
                f"llama-server --models-preset {GGUF_PRESET}"
            ) from error

    def _wait_until(self, url: str, status: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while self._status(url) != status:
            if time.monotonic() > deadline:
                raise SamplerError(
                    f"{url} has not {status} its model within {self._timeout_s:g} s. Look at the server's log, or "
                    "raise timeout_s."
                )
            time.sleep(_POLL_S)

    def _request(
        self, ids: Sequence[int], config: GenerationConfig, eos_ids: AbstractSet[int]
    ) -> tuple[str, dict[str, Any]]:
        return "/completion", {
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

    def _tokens(self, answer: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        logprobs = [logprob_of(token["prob"]) for token in answer["completion_probabilities"]]
        return answer["tokens"], logprobs

    def _advice(self, status: int) -> str:
        return "Look at the server's log; a context may be longer than its --ctx-size, divided by --parallel."
