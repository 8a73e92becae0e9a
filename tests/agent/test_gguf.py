"""An agent's adapter as GGUF adds to the base's GGUF file what the LoRA adds to the model."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from peft import LoraConfig

from llamagym import ConfigError, load_model_and_tokenizer
from llamagym.models.gguf_adapter import write_gguf_adapter
from llamagym.models.value_head import AutoModelForCausalLMWithValueHead
from tests.helpers.agents import ChoiceAgent, WordAgent, make_agent
from tests.helpers.tiny import FAMILIES, tiny_base_model, tiny_model


def tensors_of(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def array_of(tensor):
    """A tensor's numbers, with the dimensions in PyTorch's order."""
    return gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(tensor.shape)[::-1])


def test_weights_of_base_and_adapter_are_in_one_order(tmp_path):
    """llama.cpp reads both files: rows of queries and keys have another order there than in transformers."""
    options = LoraConfig(
        r=4, lora_alpha=12, target_modules=["q_proj", "k_proj", "down_proj"], layers_to_transform=[1, 29]
    )
    model, tokenizer, device = load_model_and_tokenizer("smollm2-135m", "cpu", "float32", peft_config=options)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    WordAgent(model, tokenizer, device).save_gguf(tmp_path / "agent")
    base = tensors_of(tmp_path / "agent" / "base.gguf")
    adapter = tensors_of(tmp_path / "agent" / "adapter.gguf")
    layers = dict(model.pretrained_model.get_base_model().named_modules())
    parts = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "ffn_down": "mlp.down_proj"}
    assert len(adapter) == 2 * 2 * len(parts)
    for number in (1, 29):
        for part, name in parts.items():
            layer = layers[f"model.layers.{number}.{name}"]
            weight = layer.base_layer.weight.detach().numpy()
            stored = array_of(base[f"blk.{number}.{part}.weight"])
            # The row of the model's weight that each stored row is: rows are far apart, and rounding is small.
            rows = np.array([np.abs(weight - row).sum(1).argmin() for row in stored])
            assert sorted(rows) == list(range(len(weight)))
            delta = (layer.get_delta_weight("default")).detach().numpy()
            down = array_of(adapter[f"blk.{number}.{part}.weight.lora_a"])
            up = array_of(adapter[f"blk.{number}.{part}.weight.lora_b"])
            assert up @ down == pytest.approx(delta[rows], abs=1e-5)
            assert (rows == np.arange(len(rows))).all() == (part == "ffn_down")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("activated", [True, False])
def test_every_family_s_adapter_is_written(family, activated, tmp_path):
    model = tiny_model(family, activated=activated)
    write_gguf_adapter(model, tmp_path / "adapter.gguf")
    reader = gguf.GGUFReader(tmp_path / "adapter.gguf")
    adapted = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert len(reader.tensors) == 2 * len(adapted)
    architectures = {"smollm": "llama", "phi": "phi2"}
    assert reader.fields["general.architecture"].contents() == architectures.get(family, family)
    assert reader.fields["general.type"].contents() == "adapter"
    assert reader.fields["adapter.type"].contents() == "lora"
    tokens = reader.fields.get("adapter.alora.invocation_tokens")
    expected = model.pretrained_model.active_peft_config.alora_invocation_tokens if activated else None
    assert (None if tokens is None else list(tokens.contents())) == expected


@pytest.mark.parametrize("kind", [WordAgent, ChoiceAgent])
def test_the_readme_shows_how_to_serve_it(kind, tmp_path):
    agent = make_agent(kind, response_prefix="![Action](x): ", generate={"do_sample": False})
    agent.save_gguf(tmp_path / "agent")
    text = (tmp_path / "agent" / "README.md").read_text()
    assert "llama-server -m base.gguf --lora adapter.gguf" in text
    assert "Say something." in text
    # As code, not as markup.
    assert '```json\n"![Action](x): "\n```' in text
    assert "the most likely ones" in text
    assert "None" not in text
    assert ("grammar" in text) == (kind is ChoiceAgent)
    # A tiny random model is not the embedded one.
    assert "not included" in text
    assert not (tmp_path / "agent" / "base.gguf").exists()
    agent.save_gguf(tmp_path / "agent")


def test_rejects_adapters_that_gguf_cannot_hold(tmp_path):
    path = tmp_path / "adapter.gguf"
    with pytest.raises(ConfigError, match="no adapter"):
        write_gguf_adapter(AutoModelForCausalLMWithValueHead(tiny_base_model("llama")), path)
    for options in ({"use_dora": True}, {"lora_bias": True}):
        lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
        # Its projections have a bias, which LoRA's bias needs.
        model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_base_model("phi"), lora)
        with pytest.raises(ConfigError, match=r"q_proj.* cannot be written"):
            write_gguf_adapter(model, path)
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", modules_to_save=["lm_head"])
    with pytest.raises(ConfigError, match="modules_to_save"):
        write_gguf_adapter(AutoModelForCausalLMWithValueHead.from_pretrained(tiny_base_model("llama"), lora), path)
    lora = LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_base_model("llama"), lora)
    model.pretrained_model.get_base_model().config.tie_word_embeddings = True
    with pytest.raises(ConfigError, match="embedding"):
        write_gguf_adapter(model, path)
    model = tiny_model("llama")
    model.pretrained_model.get_base_model().config.model_type = "gpt2"
    with pytest.raises(ConfigError, match="gpt2"):
        write_gguf_adapter(model, path)
    assert not path.exists()


def test_rejects_a_prefix_with_invocation_tokens(tmp_path):
    agent = make_agent(WordAgent)
    tokens = agent.model.pretrained_model.active_peft_config.alora_invocation_tokens
    invocation = agent.tokenizer.decode(tokens)
    with pytest.raises(ConfigError, match="response_prefix"):
        make_agent(WordAgent, response_prefix=f"a{invocation}b").save_gguf(tmp_path / "agent")
    make_agent(WordAgent, response_prefix=f"a{invocation}b", activated=False).save_gguf(tmp_path / "agent")
