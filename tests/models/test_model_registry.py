"""The registry: its contents, its rules, and that LoRA finds its modules in every family's real architecture."""

from __future__ import annotations

import logging
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, GPTNeoXConfig, LlamaConfig, PhiConfig

from llamagym.errors import ConfigError
from llamagym.models import registry
from llamagym.models.registry import (
    FAMILIES,
    PLAIN_CHAT_TEMPLATE,
    ModelEntry,
    entries,
    lookup,
    lookup_by_architecture,
    lora_config,
    register,
)
from tests.helpers.tiny import tiny_base_model, tiny_config, tiny_tokenizer


@pytest.fixture
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the table that the test may change."""
    monkeypatch.setattr(registry, "ENTRIES_BY_KEY", dict(registry.ENTRIES_BY_KEY))


def test_registry_contains_the_documented_models() -> None:
    assert {entry.hub_id: entry.family for entry in entries()} == {
        "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm",
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "llama",
        "microsoft/phi-2": "phi",
        "microsoft/phi-3-mini-4k-instruct": "phi3",
        "HuggingFaceTB/SmolLM-1.7B-Instruct": "smollm",
        "Qwen/Qwen2-1.5B-Instruct": "qwen2",
        "Qwen/Qwen2.5-0.5B-Instruct": "qwen2",
    }
    assert FAMILIES == ("llama", "phi", "phi3", "smollm", "qwen2", "qwen3", "gemma")


def test_lookup_ignores_case_and_finds_both_names_of_the_embedded_model() -> None:
    assert lookup("smollm2-135M") is lookup("huggingfacetb/SmolLM2-135M-instruct")
    assert lookup("microsoft/Phi-3-mini-4k-instruct") is not None
    assert lookup("no/such-model") is None


def test_parameter_counts_follow_from_the_published_sizes() -> None:
    """Counted by hand: embeddings, then per layer attention, MLP and norms."""
    # TinyLlama: 32,000 tokens, width 2048, 22 layers, key-value width 256, MLP 5632, separate output layer.
    per_layer = 2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 5632 + 2 * 2048
    tinyllama = lookup("TinyLlama/TinyLlama-1.1B-Chat-v1.0")
    assert tinyllama is not None
    assert tinyllama.parameter_count == 2 * 32000 * 2048 + 22 * per_layer + 2048
    # phi-2: 51,200 tokens, width 2560, 32 layers, MLP 10240, biases everywhere, one LayerNorm a layer.
    per_layer = 4 * (2560 * 2560 + 2560) + 2 * 2560 * 10240 + 10240 + 2560 + 2 * 2560
    phi2 = lookup("microsoft/phi-2")
    assert phi2 is not None
    assert phi2.parameter_count == 2 * 51200 * 2560 + 51200 + 32 * per_layer + 2 * 2560


def test_memory_estimate() -> None:
    entry = ModelEntry("m", None, "llama", parameter_count=2**30)
    assert entry.memory_gib(torch.float32) == 4.0
    assert entry.memory_gib(torch.float16) == 2.0
    assert entry.memory_gib(quantization="8bit") == 1.0
    assert entry.memory_gib(quantization="4bit") == 0.5625
    with pytest.raises(ConfigError, match="Did you mean '8bit'"):
        entry.memory_gib(quantization="8bits")
    with pytest.raises(ConfigError, match="no parameter_count"):
        replace(entry, parameter_count=None).memory_gib()


def test_entries_are_frozen_and_checked() -> None:
    entry = entries()[0]
    with pytest.raises(FrozenInstanceError):
        entry.lora_r = 8  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"fraction in \(0, 1\]"):
        replace(entry, lora_layer_fraction=40)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx2": True, "avx512_f": True}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True, "avx512_bf16": False}, torch.bfloat16),
        ({"avx512_bf16": True, "avx512_fp16": True, "cpu_name": "AMD EPYC"}, torch.bfloat16),
        ({"avx512_bf16": True, "avx512_fp16": True, "cpu_name": "Intel Xeon"}, torch.float32),
        ({"amx_bf16": True, "avx512_bf16": True, "avx512_fp16": True, "cpu_name": "Intel Xeon"}, torch.bfloat16),
        ({"architecture": "aarch64", "arm_bf16": True}, torch.float32),
    ],
)
def test_cpu_dtype_is_bf16_only_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool | str], expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert entries()[0].dtype_for("cpu") == expected
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert entries()[0].dtype_for("cpu") == torch.float32


def test_cuda_and_mps_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = lookup("Qwen/Qwen2.5-0.5B-Instruct"), lookup("microsoft/phi-2")
    assert small is not None
    assert large is not None
    unsafe = replace(large, fp16_safe=False)
    assert [entry.dtype_for("mps") for entry in (small, large, unsafe)] == [torch.float32, torch.float16, torch.float32]
    native = SimpleNamespace(value=True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native.value)
    assert large.dtype_for("cuda:0") == torch.bfloat16
    native.value = False
    assert [entry.dtype_for("cuda:0") for entry in (large, unsafe)] == [torch.float16, torch.float32]


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_attaches_to_the_named_modules_of_the_last_layers(family: str) -> None:
    base = tiny_base_model(family)
    entry = lookup_by_architecture(base.config)
    assert entry.family == family
    model = get_peft_model(base, lora_config(entry, base.config))
    names = {
        "phi": ("self_attn.q_proj", "self_attn.dense", "mlp.fc2"),
        "phi3": ("self_attn.o_proj", "mlp.down_proj"),
    }.get(family, ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"))
    # Half of 4 layers.
    expected = {
        f"base_model.model.model.layers.{layer}.{name}.lora_{matrix}.default.weight"
        for layer in (2, 3)
        for name in names
        for matrix in "AB"
    }
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == expected


@pytest.mark.parametrize("config_class", [Gemma2Config, Gemma3TextConfig])
def test_later_gemmas_have_the_modules_of_the_family(config_class: type) -> None:
    config = config_class(vocab_size=64, hidden_size=16, num_hidden_layers=5, num_attention_heads=2, head_dim=8)
    with torch.device("meta"):
        names = {name for name, _ in AutoModelForCausalLM.from_config(config).named_modules()}
    entry = lookup_by_architecture(config)
    assert entry.family == "gemma"
    assert {f"model.layers.4.{part}" for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")} <= names
    assert entry.lora_target_modules == ("q_proj", "o_proj", "down_proj")


def test_default_lora_of_the_embedded_model_is_the_last_half_of_its_layers() -> None:
    entry = lookup("smollm2-135m")
    assert entry is not None
    config = lora_config(entry, LlamaConfig(num_hidden_layers=30))
    assert config.layers_to_transform == list(range(15, 30))
    assert (config.r, config.lora_alpha, config.lora_dropout, config.task_type) == (16, 32, 0.0, "CAUSAL_LM")


def test_family_fallback_warns_and_counts_parameters(caplog: pytest.LogCaptureFixture) -> None:
    config = PhiConfig(vocab_size=100, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    config.name_or_path = "someone/phi-tune"
    with caplog.at_level(logging.WARNING, logger="llamagym.models.registry"):
        entry = lookup_by_architecture(config)
    assert "someone/phi-tune" in caplog.text
    assert "family 'phi'" in caplog.text
    assert (entry.name, entry.family) == ("someone/phi-tune", "phi")
    per_layer = 4 * (8 * 8 + 8) + (8 * 16 + 16) + (16 * 8 + 8) + 2 * 8
    assert entry.parameter_count == 2 * 100 * 8 + 100 + 2 * per_layer + 2 * 8


def test_unknown_architecture_gets_lora_on_every_linear_layer(caplog: pytest.LogCaptureFixture) -> None:
    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    with caplog.at_level(logging.WARNING, logger="llamagym.models.registry"):
        entry = lookup_by_architecture(config)
    assert "unknown architecture 'gpt_neox'" in caplog.text
    assert "register()" in caplog.text
    model = get_peft_model(AutoModelForCausalLM.from_config(config), lora_config(entry, config))
    adapted = {
        name.split(".lora_A")[0][len("base_model.model.") :] for name, _ in model.named_parameters() if "lora_A" in name
    }
    linear = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    assert adapted == {f"gpt_neox.layers.{layer}.{name}" for layer in (0, 1) for name in linear}


def test_register_adds_and_never_overwrites_silently(own_table: None) -> None:
    entry = ModelEntry("mine", "me/mine", "llama", aliases=("my-model",))
    register(entry)
    assert lookup("ME/mine") is lookup("my-model") is entry
    newer = replace(entry, lora_r=4, aliases=())
    with pytest.raises(ConfigError, match="replace=True"):
        register(newer)
    with pytest.raises(ConfigError, match="smollm2-135m"):
        register(ModelEntry("thief", "HuggingFaceTB/SmolLM2-135M-Instruct", "llama"), replace=True)
    register(newer, replace=True)
    assert lookup("mine") is newer
    assert lookup("my-model") is None


def test_plain_template_renders_and_appends() -> None:
    tokenizer = tiny_tokenizer("phi")
    assert tokenizer.chat_template == PLAIN_CHAT_TEMPLATE
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hit?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "Be brief.\n\nInstruct: Hit?\nOutput:\n"
    reply = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "no"}], tokenize=False)
    assert reply == prompt + "no<|endoftext|>\n"


def test_families_are_recognized_by_architecture() -> None:
    """Guards the helper that other tests build on: seven families, six architectures."""
    types = {family: tiny_config(family).model_type for family in FAMILIES}
    assert types == {family: "llama" if family == "smollm" else family for family in FAMILIES}
