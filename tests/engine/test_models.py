"""Models of other architectures act and learn as plain transformers has them, or are rejected by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig

from llamagym import AutoModelForCausalLMWithValueHead, ModelLoadError
from llamagym.text.chat_template import invocation_tokens
from scripts import check_models
from tests.helpers.agents import WordAgent, actor_of
from tests.helpers.plain import compare
from tests.helpers.tiny import tiny_tokenizer

# Log-probabilities of tiny models in float32, as in test_invariants.py.
TOLERANCE = 2e-4


def tiny(name: str, **options: Any) -> Any:
    """A tiny random model of a config class's name."""
    tokenizer = tiny_tokenizer("llama")
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = getattr(transformers, name)(**{**sizes, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.eval()


def agent_on(model: Any, activated: bool = False, targets: Any = "all-linear", **options: Any) -> WordAgent:
    """An agent on a model with a random LoRA."""
    tokenizer = tiny_tokenizer("llama")
    lora = LoraConfig(
        r=4,
        target_modules=targets,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        alora_invocation_tokens=invocation_tokens(tokenizer) if activated else None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wrapped = AutoModelForCausalLMWithValueHead.from_pretrained(model, lora)
    return WordAgent(wrapped, tokenizer, None, {"max_new_tokens": 6}, seed=0, **options)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 4.0, 8.0, 16.0]}


def longrope(original: int, name: str = "Phi3Config") -> Any:
    rope = {**LONGROPE, "original_max_position_embeddings": original, "rope_theta": 1e4}
    return tiny(name, rope_parameters=rope, original_max_position_embeddings=original)


@pytest.mark.parametrize("activated", [False, True])
def test_a_context_ends_where_position_encodings_begin_to_depend_on_its_length(activated: bool):
    agent = agent_on(longrope(128), activated)
    assert agent.policy.max_length == 128
    # Conversations grow beyond it, so that the oldest turns are dropped.
    difference = compare(agent, steps=4)
    assert any(turn.prompt.starts_context for turn in actor_of(agent).conversation(0).turns[1:])
    assert difference.largest < TOLERANCE


def test_positions_that_are_recomputed_are_no_change_of_the_weights():
    agent = agent_on(longrope(512))
    before = agent.policy.weights_version
    agent.act("x")
    assert agent.policy.weights_version == before


def test_padding_beyond_the_context_changes_nothing():
    agent = agent_on(longrope(128), context="turn")
    # One context is long and known, the other is short, and longer than what is new of the first.
    agent.act_batch(["x" * 50], [0])
    agent.assign_rewards([0.0], [0])
    assert compare(agent, steps=2).largest < TOLERANCE


def test_dynamic_positions_stay_as_they_are_within_the_context():
    model = tiny("LlamaConfig", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
                 max_position_embeddings=160)  # fmt: skip
    agent = agent_on(model)
    assert agent.policy.max_length == 160
    assert compare(agent, steps=4).largest < TOLERANCE


WINDOWED = {
    "MistralConfig": {"sliding_window": 16},
    "Phi3Config": {"sliding_window": 16},
    "Gemma2Config": {"sliding_window": 16, "query_pre_attn_scalar": 8},
    "Gemma3TextConfig": {"sliding_window": 16, "query_pre_attn_scalar": 8, "num_hidden_layers": 7},
    "Cohere2Config": {"sliding_window": 16},
    "Qwen3Config": {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2},
    "Starcoder2Config": {"sliding_window": 16},
    "GptOssConfig": {"sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Olmo3Config": {"sliding_window": 16},
}


@pytest.mark.long
@pytest.mark.parametrize("name", WINDOWED)
def test_sliding_windows_are_those_of_the_model(name: str):
    agent = agent_on(tiny(name, **WINDOWED[name]))
    assert compare(agent).largest < TOLERANCE


@pytest.mark.parametrize("name", ["CohereConfig", "GraniteConfig"])
def test_scaled_logits_are_those_of_the_model(name: str):
    options = {"CohereConfig": {"logit_scale": 0.25}, "GraniteConfig": {"logits_scaling": 4.0}}
    agent = agent_on(tiny(name, **options[name]))
    assert compare(agent).largest < TOLERANCE


@pytest.mark.long
def test_layers_without_gradients_in_the_middle_of_a_pass_that_has_them():
    # Its layers run several times, and only the last times are trained.
    agent = agent_on(tiny("HrmTextConfig"))
    assert compare(agent).largest < TOLERANCE


def test_rejects_a_window_that_layers_apply_by_the_columns_of_their_cache():
    """Such a layer takes padding and branches for other distances."""
    model = tiny("GPTNeoConfig", attention_types=[[["local"], 4]], num_layers=4, num_heads=4, window_size=160)
    with pytest.raises(ModelLoadError, match=r"GPTNeoForCausalLM.*window_size=160"):
        agent_on(model)


def test_rejects_a_window_that_a_short_probe_cannot_show(monkeypatch):
    """A layer that copied its window when it was made may do anything beyond it."""
    model = tiny("MistralConfig", sliding_window=None)
    model.config.sliding_window = 300
    usual = type(model.model).forward

    def ignores(self: Any, *args: Any, **kwargs: Any) -> Any:
        window, self.config.sliding_window = self.config.sliding_window, None
        try:
            return usual(self, *args, **kwargs)
        finally:
            self.config.sliding_window = window

    monkeypatch.setattr(type(model.model), "forward", ignores)
    with pytest.raises(ModelLoadError, match=r"MistralForCausalLM.*sliding_window=300"):
        agent_on(model)


def test_a_context_ends_where_a_chunk_of_attention_does():
    model = tiny("Llama4TextConfig", attention_chunk_size=160, num_local_experts=2, intermediate_size_mlp=64)
    # Its routers return more than a tensor, which PEFT's LoRA does not expect.
    agent = agent_on(model, targets=["q_proj", "o_proj"])
    assert agent.policy.max_length == 160
    assert compare(agent, steps=4).largest < TOLERANCE


REJECTED = {
    "MambaConfig": {},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "RwkvConfig": {},
    "BertConfig": {},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"] * 2},
    "BloomConfig": {"n_head": 4, "n_layer": 2},
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejects_what_is_no_plain_decoder_by_its_class(name: str):
    model = tiny(name, **REJECTED[name])
    with pytest.raises(ModelLoadError, match=type(model).__name__):
        agent_on(model)


def test_rejects_a_model_without_a_language_modeling_head():
    config = tiny("LlamaConfig").config
    for kind in (transformers.AutoModel, transformers.AutoModelForSequenceClassification):
        model = kind.from_config(config)
        with pytest.raises(ModelLoadError, match=f"{type(model).__name__}.*language-modeling head"):
            AutoModelForCausalLMWithValueHead.from_pretrained(model)


def test_errors_inside_a_model_name_its_class(monkeypatch):
    model = tiny("LlamaConfig")

    def fails(*_: Any, **__: Any) -> None:
        raise KeyError("chunked_attention")

    monkeypatch.setattr(type(model.model), "forward", fails)
    with pytest.raises(ModelLoadError, match=r"LlamaForCausalLM.*KeyError.*chunked_attention"):
        agent_on(model)


@pytest.mark.long
def test_the_comparison_of_architectures_tells_what_is_equal_from_what_is_rejected():
    assert check_models.check("mistral")["result"] == "equal"
    found = check_models.check("bert")
    assert found["result"] == "rejected"
    assert "BertLMHeadModel" in found["plain"]["reason"]


def test_published_architectures_are_equal_or_rejected():
    found = json.loads((check_models.ROOT / "scripts" / "results" / "models.json").read_text(encoding="utf-8"))
    results = {name: part["result"] for name, part in found["architectures"].items()}
    assert set(results.values()) <= {"equal", "rejected", "not built"}
    # Of the versions that the file names, every one.
    assert sorted(results) == sorted(found["all"])
    not_built = [name for name, result in results.items() if result == "not built"]
    assert len(not_built) < 10
