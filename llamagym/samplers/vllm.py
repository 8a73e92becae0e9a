"""vLLM as a sampler."""

from __future__ import annotations

import shutil
import tempfile
import uuid
import weakref
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import SamplerError
from ..models.registry import GenerationConfig
from ..models.value_head import AutoModelForCausalLMWithValueHead
from ..options import check_arguments, explains_wrong_calls, user_path
from ..policy.sampling import SampledText
from ..saving.file_operations import delete_folder
from .server import ServerSampler


class VLLMSampler(ServerSampler):
    """Samples replies in free text by vLLM servers of the base model, which may run on other machines.

    Start each server with

        VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve BASE --enable-lora --max-lora-rank 64 \
            --logprobs-mode processed_logprobs

    where BASE is the model that the agent trains. After each update the adapter is written to a folder and loaded by
    every server under a new name, since vLLM keeps cached activations by name; then the old one is unloaded. vLLM has
    no activated LoRA: an agent makes a fresh one a plain one.
    """

    @explains_wrong_calls(positional=3)
    def __init__(
        self,
        url: str | Sequence[str],
        folder: str | Path | None = None,
        *,
        timeout_s: float = 120.0,
        max_requests: int = 256,
        api_key: str | None = None,
    ) -> None:
        """Does not connect yet.

        Args:
            url: Address of the server, such as "http://127.0.0.1:8000", or addresses of several, which share the
                requests.
            folder: Folder for adapters that all servers can read under this path. None: a temporary folder, for servers
                on this machine.
            timeout_s: Seconds after which a server that does not answer has failed.
            max_requests: Maximum of requests at the same time.
            api_key: The servers' key; None for none.

        Raises:
            ConfigError: An argument is invalid.
        """
        check_arguments(VLLMSampler.__init__, locals())
        super().__init__(url, timeout_s, max_requests, api_key)
        self._is_temporary = folder is None
        if folder is None:
            folder = tempfile.mkdtemp(prefix="llamagym-")
            # At the latest when Python ends.
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._folder = user_path(folder, "folder").absolute()
        # The name that the servers know the adapter by, and its folder; None before the first.
        self._adapter: str | None = None
        # Adapters that some server may still hold.
        self._old_adapters: list[str] = []
        # Whether the log-probabilities are known to depend on the temperature.
        self._is_processed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> VLLMSampler:
        """A sampler of the same servers with adapters of its own."""
        folder = None if self._is_temporary else self._folder
        copied = VLLMSampler(self.urls, folder, timeout_s=self._timeout_s, max_requests=self._max_requests)
        copied._headers = dict(self._headers)
        return copied

    def _send_adapter(self, model: AutoModelForCausalLMWithValueHead) -> None:
        name = f"llamagym-{uuid.uuid4().hex}"
        path = self._folder / name
        path.mkdir(parents=True)
        model.write_files(path)
        if self._adapter is not None:
            self._old_adapters.append(self._adapter)
        self._adapter = name
        for url in self.urls:
            self._post(url, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        for old in self._old_adapters:
            for url in self.urls:
                self._unload(url, old)
            delete_folder(self._folder / old)
        self._old_adapters.clear()

    def _unload(self, url: str, name: str) -> None:
        try:
            self._post(url, "/v1/unload_lora_adapter", {"lora_name": name})
        except SamplerError as error:
            # A server that was restarted has forgotten it.
            if "status 404" not in str(error):
                raise

    def sample(
        self,
        prompts: Sequence[tuple[int, ...]],
        config: GenerationConfig,
        eos_ids: AbstractSet[int],
        rng: torch.Generator,
    ) -> list[SampledText]:
        """Writes one reply to each prompt; see `Sampler`."""
        if config.do_sample and config.temperature != 1.0 and not self._is_processed:
            self._require_processed(prompts[0], config, eos_ids)
        return super().sample(prompts, config, eos_ids, rng)

    def _require_processed(self, ids: Sequence[int], config: GenerationConfig, eos_ids: AbstractSet[int]) -> None:
        """Rejects servers whose log-probabilities ignore the temperature: importance weights would be wrong.

        At half the temperature, the log-probabilities of two tokens are twice as far apart.
        """
        for url in self.urls:
            gaps = []
            for temperature in (1.0, 0.5):
                path, body = self._request(ids, replace(config, temperature=temperature), eos_ids)
                answer = self._post(url, path, body | {"max_tokens": 1, "logprobs": 2})
                (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
                best, second, *_ = sorted(top.values(), reverse=True)
                gaps.append(best - second)
            if gaps[1] < 1.5 * gaps[0]:
                raise SamplerError(
                    f"{url} reports log-probabilities before the temperature, and temperature={config.temperature}. "
                    "Start it with --logprobs-mode processed_logprobs, or pass temperature 1."
                )
        self._is_processed = True

    def _request(
        self, ids: Sequence[int], config: GenerationConfig, eos_ids: AbstractSet[int]
    ) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", {
            "model": self._adapter,
            "prompt": list(ids),
            "max_tokens": config.max_new_tokens,
            "stop_token_ids": sorted(eos_ids),
            # Replies end at our own ids only, which `stop_token_ids` lists.
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 0,
            # All that the model's own generation_config.json may set otherwise.
            "temperature": config.temperature if config.do_sample else 0.0,
            "top_p": config.top_p,
            "top_k": config.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }

    def _tokens(self, answer: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        (choice,) = answer["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def _advice(self, status: int) -> str:
        if status == 404:
            return (
                "The server has no such adapter: it was restarted, or serves without --enable-lora or "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True. Continue the run with resume, which sends the adapter again."
            )
        return "Look at the server's log; an adapter may have a larger rank than --max-lora-rank."
