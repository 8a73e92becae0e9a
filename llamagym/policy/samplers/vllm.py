"""vLLM as a sampler."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ...errors import ConfigError, SamplerError
from ...models.lora import is_activated
from ...models.registry import GenerationConfig
from ...models.value_head import AutoModelForCausalLMWithValueHead
from ...options import check_arguments, explains_wrong_calls, user_path
from ...saving.file_operations import delete_folder
from .server import RejectedError, ServerSampler


class VLLMSampler(ServerSampler):
    """Samples replies in free text by vLLM servers of the base model, which may run on other machines.

    Start each server (tried with vLLM 0.32) with

        VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve BASE --enable-lora --max-lora-rank 32 \
            --logprobs-mode processed_logprobs

    where BASE is the model that the agent trains. After each update the adapter is written to a folder and loaded by
    every server under a new name, since vLLM keeps cached activations by name; then the old one is unloaded. Each
    agent, and each of several processes, has an adapter of its own (`--max-loras`); the last one stays loaded. vLLM has
    no activated LoRA: the agent converts a fresh one to a plain one.
    """

    _path = "/v1/completions"

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
        """Creates the sampler; the first reply connects.

        Args:
            url: Address of the server, such as "http://127.0.0.1:8000", or addresses of several, which share the
                requests.
            folder: Folder for adapters that all servers can read under this path. None: a temporary folder, for servers
                of the same user on this machine.
            timeout_s: Seconds without an answer after which a server has failed.
            max_requests: Maximum number of concurrent requests.
            api_key: The servers' API key, or None.

        Raises:
            ConfigError: An argument is invalid.
        """
        check_arguments(VLLMSampler.__init__, locals())
        super().__init__(url, timeout_s, max_requests, api_key)
        # None until the first adapter is written to a temporary folder.
        self._folder = None if folder is None else user_path(folder, "folder")
        self._is_temporary = folder is None
        # The name by which all servers know the adapter, which is also its folder's; None before the first.
        self._adapter: str | None = None
        self._has_checked_logprobs = False

    def __deepcopy__(self, memo: dict[int, Any]) -> VLLMSampler:
        """A sampler of the same servers with adapters of its own."""
        folder = None if self._is_temporary else self._folder
        copied = VLLMSampler(self.urls, folder, timeout_s=self._timeout_s, max_requests=self._max_requests)
        copied._headers = dict(self._headers)
        return copied

    def _send_adapter(self, model: AutoModelForCausalLMWithValueHead) -> None:
        if is_activated(model.pretrained_model):
            raise ConfigError("vLLM cannot apply an activated LoRA. Set agent.sampler, which converts a fresh one.")
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="llamagym-"))
            # At the latest when Python ends.
            weakref.finalize(self, _delete, self._folder, os.getpid())
        name = f"llamagym-{uuid.uuid4().hex}"
        path = self._folder / name
        holders: list[str] = []
        try:
            path.mkdir(parents=True)
            model.write_files(path)
            for url in self.urls:
                self._post(url, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
                holders.append(url)
        except BaseException:
            with suppress(SamplerError):
                self._unload(holders, name)
            shutil.rmtree(path, ignore_errors=True)
            raise
        old = self._adapter
        self._adapter = name
        self._has_checked_logprobs = False
        if old is not None:
            self._unload(self.urls, old)
            delete_folder(self._folder / old)

    def _unload(self, urls: Sequence[str], name: str) -> None:
        for url in urls:
            try:
                self._post(url, "/v1/unload_lora_adapter", {"lora_name": name})
            except RejectedError as error:
                # A server that was restarted has forgotten it.
                if error.status != HTTPStatus.NOT_FOUND:
                    raise

    def _check_servers(self, ids: Sequence[int], config: GenerationConfig, eos_ids: AbstractSet[int]) -> None:
        """Rejects servers that report log-probabilities before the temperature: importance weights would be wrong.

        At half the temperature, the log-probabilities of two tokens are twice as far apart.
        """
        if not config.do_sample or config.temperature == 1.0 or self._has_checked_logprobs:
            return
        for url in self.urls:
            gaps = []
            for temperature in (1.0, 0.5):
                probe = replace(config, temperature=temperature, top_p=1.0, top_k=0)
                body = self._body(ids, probe, eos_ids) | {"max_tokens": 1, "logprobs": 2}
                answer = self._post(url, self._path, body)
                try:
                    (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
                    best, second, *_ = sorted(top.values(), reverse=True)
                    gaps.append(float(best - second))
                except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                    raise self._unexpected(url, answer, error) from error
            if gaps[1] < 1.5 * gaps[0]:
                raise SamplerError(
                    f"{url} reports log-probabilities before the temperature, and temperature={config.temperature}. "
                    "Start it with --logprobs-mode processed_logprobs, or pass temperature 1."
                )
        self._has_checked_logprobs = True

    def _body(self, ids: Sequence[int], config: GenerationConfig, eos_ids: AbstractSet[int]) -> dict[str, Any]:
        return {
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

    def _tokens(self, answer: Any) -> tuple[list[int], list[float]]:
        (choice,) = answer["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def _advice(self, path: str, status: int) -> str:
        if path == self._path and status == HTTPStatus.NOT_FOUND:
            return (
                "The server has no such adapter, since it was restarted. Act again, or continue the run with "
                "resume=True; the adapter is sent again."
            )
        if status == HTTPStatus.NOT_FOUND:
            return "Start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."
        return "Look at the server's log; an adapter may have a larger rank than --max-lora-rank."


def _delete(folder: Path, process_id: int) -> None:
    """Deletes a folder in the process that made it; a forked one leaves it alone."""
    if os.getpid() == process_id:
        shutil.rmtree(folder, ignore_errors=True)
