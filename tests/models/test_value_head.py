"""The value head: its arithmetic, and that every kind of checkpoint gives back the same model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig, PeftConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from llamagym.errors import CheckpointError, ModelLoadError
from llamagym.models.registry import FAMILIES
from llamagym.models.value_head import AutoModelForCausalLMWithValueHead, ValueHead
from tests.helpers.tiny import tiny_base_model, tiny_config, tiny_model, tiny_tokenizer

IDS = torch.tensor([[72, 101, 108, 108, 111], [1, 2, 3, 4, 5]])


def randomize(model: AutoModelForCausalLMWithValueHead, seed: int = 7) -> AutoModelForCausalLMWithValueHead:
    """Fill value head, its constants and LoRA's matrices with numbers, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.startswith("v_head.") or "lora_" in name:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)
    return model


@torch.no_grad()
def outputs(model: AutoModelForCausalLMWithValueHead) -> tuple[Tensor, Tensor]:
    logits, _, values = model(IDS)
    return logits, values


def assert_same_outputs(left: AutoModelForCausalLMWithValueHead, right: AutoModelForCausalLMWithValueHead) -> None:
    for expected, received in zip(outputs(left), outputs(right), strict=True):
        torch.testing.assert_close(received, expected, rtol=0, atol=0)


@pytest.mark.numerical
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_gives_the_model_s_logits_its_loss_and_values_of_the_last_hidden_state(family: str) -> None:
    model = AutoModelForCausalLMWithValueHead(tiny_base_model(family))
    base: Any = tiny_base_model(family)
    with torch.no_grad():
        assert model(IDS)[2].abs().max() == 0.0  # zero at the start
        randomize(model)
        logits, loss, values = model(IDS, labels=IDS)
        expected_logits = base(input_ids=IDS).logits
        hidden = base.model(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(logits, expected_logits)
    # Mean negative log-probability of each next token, one by one.
    terms = [-expected_logits[b, t].log_softmax(-1)[IDS[b, t + 1]] for b in range(2) for t in range(4)]
    torch.testing.assert_close(loss, torch.stack(terms).mean())
    weight, bias = model.v_head.summary.weight[0].tolist(), model.v_head.summary.bias.item()
    mean, std = model.v_head.feature_mean.tolist(), model.v_head.feature_std.tolist()
    by_hand = [
        [bias + sum(w * (h - m) / s for w, h, m, s in zip(weight, token, mean, std, strict=True)) for token in row]
        for row in hidden.tolist()
    ]
    torch.testing.assert_close(values, torch.tensor(by_hand), rtol=1e-4, atol=1e-4)


def test_logits_and_values_are_float32_over_a_bfloat16_model() -> None:
    model = AutoModelForCausalLMWithValueHead(tiny_base_model("llama").to(torch.bfloat16))
    logits, _, values = model(IDS)
    assert (logits.dtype, values.dtype, model.v_head.summary.weight.dtype) == (torch.float32,) * 3


def test_standardize_by_hand() -> None:
    head = ValueHead(3)
    # Second feature: mean 4, deviations -2, 0, 2: variance (4 + 0 + 4) / 2 = 4. First and third are constant.
    head.standardize_(torch.tensor([[1.0, 2.0, -5.0], [1.0, 4.0, -5.0], [1.0, 6.0, -5.0]]))
    assert head.feature_mean.tolist() == [1.0, 4.0, -5.0]
    # Root mean square of the deviations (0, 2, 0) is sqrt(4 / 3); a hundredth of it is the floor.
    floor = (4 / 3) ** 0.5 / 100
    torch.testing.assert_close(head.feature_std, torch.tensor([floor, 2.0, floor]))
    with torch.no_grad():
        head.summary.weight.copy_(torch.tensor([[0.0, 3.0, 0.0]]))
        head.summary.bias.fill_(0.5)
    assert head(torch.tensor([[1.0, 8.0, -5.0]])).tolist() == [[6.5]]  # 3 * (8 - 4) / 2 + 0.5


def test_standardize_accepts_constant_features_and_rejects_invalid_ones() -> None:
    head = ValueHead(2)
    head.standardize_(torch.full((4, 2), 3.0))
    assert head.feature_std.tolist() == [1.0, 1.0]
    head.standardize_(torch.tensor([[5.0, 7.0]]))
    assert head.feature_mean.tolist() == [5.0, 7.0]
    assert head.feature_std.tolist() == [1.0, 1.0]
    for bad, message in [
        (torch.zeros(0, 2), "M >= 1"),
        (torch.zeros(4, 3), r"\(M, 2\)"),
        (torch.tensor([[0.0, 1.0], [float("nan"), 0.0]]), "NaN"),
    ]:
        with pytest.raises(ValueError, match=message):
            head.standardize_(bad)


def test_only_adapter_and_value_head_get_gradients() -> None:
    model = randomize(tiny_model("smollm"))
    logits, _, values = model(IDS)
    (logits.logsumexp(-1).mean() + values.square().mean()).backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {n for n, p in model.named_parameters() if p.requires_grad}
    assert {"v_head.summary.weight", "v_head.summary.bias"} < with_gradient
    assert all("lora_" in name or name.startswith("v_head.summary.") for name in with_gradient)


def test_generate_and_properties_delegate() -> None:
    model = tiny_model("qwen2")
    prompt = IDS[:1]
    reply = model.generate(input_ids=prompt, max_new_tokens=3, do_sample=False, eos_token_id=None)
    expected = prompt
    for _ in range(3):
        expected = torch.cat([expected, model(expected)[0][:, -1:].argmax(-1)], dim=1)
    assert reply.tolist() == expected.tolist()
    assert model.is_peft_model
    assert not AutoModelForCausalLMWithValueHead(tiny_base_model("phi")).is_peft_model
    assert model.config.model_type == "qwen2"
    assert model.device == torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "smollm"])  # separate and tied output layer
def test_full_model_round_trip(family: str, tmp_path: Path) -> None:
    model = randomize(AutoModelForCausalLMWithValueHead(tiny_base_model(family)))
    model.save_pretrained(tmp_path)
    assert sorted(load_file(tmp_path / "value_head.safetensors")) == [
        "v_head.feature_mean",
        "v_head.feature_std",
        "v_head.summary.bias",
        "v_head.summary.weight",
    ]
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert not loaded.is_peft_model
    assert not loaded.training
    assert_same_outputs(model, loaded)


def test_adapter_round_trip_loads_its_base_and_stays_trainable(tmp_path: Path) -> None:
    tiny_base_model("phi3").save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["qkv_proj"], layers_to_transform=[3], task_type="CAUSAL_LM")
    model = randomize(AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "base", lora))
    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")
    assert_same_outputs(model, loaded)
    trainable = {name for name, parameter in loaded.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ModelLoadError, match="pass base_model"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")
    for base in (tmp_path / "moved", tiny_base_model("phi3")):
        loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter", base_model=base)
        assert_same_outputs(model, loaded)


def test_loads_an_adapter_that_was_saved_without_a_task(tmp_path: Path) -> None:
    tiny_base_model("llama").save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    model = randomize(AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "base", lora))
    model.save_pretrained(tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (saved["task_type"], saved["auto_mapping"]) == ("CAUSAL_LM", None)
    assert lora.task_type is None
    assert_same_outputs(model, AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter"))
    # PEFT alone writes the base's class.
    pretrained: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora)
    model = randomize(AutoModelForCausalLMWithValueHead(pretrained))
    model.save_pretrained(tmp_path / "plain")
    assert json.loads((tmp_path / "plain" / "adapter_config.json").read_text())["auto_mapping"]
    assert_same_outputs(model, AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "plain"))


def test_saving_an_adapter_does_not_ask_the_hub(tmp_path: Path) -> None:
    """The suite turns warnings into errors, and PEFT warns when its check on the hub fails."""
    model = tiny_model("llama")
    pretrained: Any = model.pretrained_model
    pretrained.active_peft_config.base_model_name_or_path = "no-such-user/no-such-model"
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == "no-such-user/no-such-model"


def trl_state(model: AutoModelForCausalLMWithValueHead) -> dict[str, Tensor]:
    """A state dict with TRL's keys: the model's own (without those of an adapter), and the head's below `v_head`."""
    state = {} if model.is_peft_model else dict(model.pretrained_model.state_dict())
    state["v_head.summary.weight"] = model.v_head.summary.weight.detach()
    state["v_head.summary.bias"] = model.v_head.summary.bias.detach()
    return {key: value.clone() for key, value in state.items()}


def write_bin(folder: Path, state: dict[str, Tensor]) -> None:
    torch.save(state, folder / "pytorch_model.bin")


def write_old_bin(folder: Path, state: dict[str, Tensor]) -> None:
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def write_safetensors(folder: Path, state: dict[str, Tensor]) -> None:
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def write_shards(folder: Path, state: dict[str, Tensor]) -> None:
    shards = {"one.bin": {}, "two.bin": {}}  # type: dict[str, dict[str, Tensor]]
    for position, (key, value) in enumerate(state.items()):
        shards["one.bin" if position % 2 else "two.bin"][key] = value
    for name, shard in shards.items():
        torch.save(shard, folder / name)
    weight_map = {key: name for name, shard in shards.items() for key in shard}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("write", [write_bin, write_old_bin, write_safetensors, write_shards])
def test_trl_full_checkpoint(write: Callable[[Path, dict[str, Tensor]], None], tmp_path: Path) -> None:
    model = randomize(AutoModelForCausalLMWithValueHead(tiny_base_model("llama")))
    model.v_head.feature_mean.zero_()
    model.v_head.feature_std.fill_(1.0)
    model.config.save_pretrained(tmp_path)
    write(tmp_path, trl_state(model))
    assert_same_outputs(model, AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path))


def test_trl_adapter_checkpoint(tmp_path: Path) -> None:
    model = randomize(tiny_model("gemma"))
    model.v_head.feature_mean.zero_()
    model.v_head.feature_std.fill_(1.0)
    model.save_pretrained(tmp_path)
    for ours in ("value_head.safetensors", "manifest.json"):
        (tmp_path / ours).unlink()
    write_bin(tmp_path, trl_state(model))
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, base_model=tiny_base_model("gemma"))
    assert loaded.v_head.summary.weight.abs().sum() > 0
    assert_same_outputs(model, loaded)


def test_rejects_a_value_head_of_another_width(tmp_path: Path) -> None:
    model = AutoModelForCausalLMWithValueHead(tiny_base_model("llama"))
    model.save_pretrained(tmp_path)
    wrong = {"v_head.summary.weight": torch.zeros(1, 16), "v_head.summary.bias": torch.zeros(1)}
    save_file(wrong, tmp_path / "value_head.safetensors")
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ModelLoadError, match=r"\(1, 16\).*32 features"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)


def test_rejects_missing_weights(tmp_path: Path) -> None:
    base = tiny_base_model("llama")
    base.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)


def test_options_are_passed_to_transformers(tmp_path: Path) -> None:
    tiny_base_model("llama").save_pretrained(tmp_path)
    for options in ({"num_hidden_layers": 2}, {"vocab_size": 300, "ignore_mismatched_sizes": True}):
        loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, **options)
        for name, value in options.items():
            assert getattr(loaded.config, name, value) == value
        torch.manual_seed(0)
        expected: Any = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        kept = {name for name, weight in expected.state_dict().items() if 300 not in weight.shape}
        state = loaded.pretrained_model.state_dict()
        assert all(torch.equal(state[name], expected.state_dict()[name]) for name in kept)
    with pytest.raises(ModelLoadError, match="of other shapes"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, vocab_size=300)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ModelLoadError, match="weights of layers"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, dtype=torch.float32)


def test_advice_fits_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_base_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"unexpected keyword argument 'bogus_option'\)\. Drop that option\.$"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, bogus_option=2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError) as raised:
        AutoModelForCausalLMWithValueHead.from_pretrained("no-such-user/no-such-model")
    assert "no-such-user/no-such-model" in str(raised.value)
    assert "fits the weights" not in str(raised.value)


def test_checks_only_indexes_of_the_loaded_folder(tmp_path: Path) -> None:
    tiny_base_model("llama").save_pretrained(tmp_path)
    tiny_base_model("llama").save_pretrained(tmp_path / "backup")
    (tmp_path / "backup" / "model.safetensors.index.json").write_text("")
    AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"backup/model.safetensors.index.json' cannot be read"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, subfolder="backup")


@pytest.mark.parametrize("file", ["model.safetensors", "value_head.safetensors"])
def test_rejects_a_saved_model_with_a_damaged_file(tmp_path: Path, file: str) -> None:
    AutoModelForCausalLMWithValueHead(tiny_base_model("llama")).save_pretrained(tmp_path)
    content = bytearray((tmp_path / file).read_bytes())
    content[-20] ^= 1
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"is damaged: '{file}'"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)


def test_loads_a_saved_model_with_an_edited_configuration(tmp_path: Path) -> None:
    tiny_base_model("llama").save_pretrained(tmp_path / "moved")
    tiny_model("llama").save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "moved")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter" / "README.md").write_text("mine")
    AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")


def test_ignores_an_unrelated_manifest(tmp_path: Path) -> None:
    tiny_base_model("llama").save_pretrained(tmp_path)
    old = {"kind": "model", "schema": 1, "files": {"model.safetensors": [1, "0"]}}
    for manifest in ({"name": "my web page"}, old):
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)


def test_an_adapter_without_matching_modules_lists_the_existing_ones() -> None:
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ModelLoadError, match="'qkv_proj'"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tiny_base_model("phi3"), lora)


def test_rejects_a_second_adapter_and_stray_options(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    lora: PeftConfig = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ModelLoadError, match="already has an adapter"):
        AutoModelForCausalLMWithValueHead.from_pretrained(model.pretrained_model, lora)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="already has an adapter"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, lora, base_model=tiny_base_model("qwen3"))
    with pytest.raises(ModelLoadError, match="'dtype'"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tiny_base_model("qwen3"), dtype=torch.float32)


def test_quantized_base_trains_its_adapter_only(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    # bitsandbytes quantizes blocks of 64, which must fit into a row where the processor has AVX512-BF16.
    config = tiny_config("llama")
    config.hidden_size, config.head_dim = 64, 16
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    quantized = AutoModelForCausalLMWithValueHead.from_pretrained(
        tmp_path, lora, quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map={"": "cpu"}
    )
    pretrained: Any = quantized.pretrained_model
    layers = pretrained.get_base_model().model.layers
    assert layers[0].mlp.up_proj.weight.dtype == torch.uint8
    assert not any(layer.gradient_checkpointing for layer in layers)
    quantized(IDS)[0].logsumexp(-1).mean().backward()
    with_gradient = [n for n, p in pretrained.named_parameters() if p.grad is not None]
    assert with_gradient
    assert all("lora_" in name for name in with_gradient)


def test_tokenizers_reproduce_any_text() -> None:
    """Guards the helper: one token a byte, special tokens one id each."""
    for family in FAMILIES:
        tokenizer = tiny_tokenizer(family)
        text = "naïve ⚡ <|x|>\n\t 12"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text
        assert len(tokenizer(tokenizer.eos_token, add_special_tokens=False)["input_ids"]) == 1
