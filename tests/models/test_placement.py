"""Models that are spread over devices, quantized or moved: they work, or one error names the next move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

from llamagym import AutoModelForCausalLMWithValueHead, ConfigError, load_model_and_tokenizer, train
from llamagym.models.hardware import computing_dtype, pass_tokens, precision_on
from llamagym.models.loading import move_
from tests.helpers.agents import ChoiceAgent, CountdownEnv, WordAgent
from tests.helpers.tiny import tiny_base_model, tiny_model, tiny_tokenizer


def agent_of(model: AutoModelForCausalLMWithValueHead, device: str | None = None) -> WordAgent:
    """An agent on a model."""
    return WordAgent(model, tiny_tokenizer("llama"), device, {"max_new_tokens": 2}, seed=0)


def loaded(folder: Path, **options: Any) -> AutoModelForCausalLMWithValueHead:
    """A model of a folder."""
    tiny_base_model("llama").save_pretrained(folder)
    return AutoModelForCausalLMWithValueHead.from_pretrained(folder, **options)


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_accepts_a_device_map_of_one_device(tmp_path: Path, device_map: Any):
    assert agent_of(loaded(tmp_path, device_map=device_map)).act("x")


def test_rejects_a_model_on_several_devices(tmp_path: Path):
    everywhere = {"model": "cpu", "lm_head": "disk"}
    model = loaded(tmp_path, device_map=everywhere, offload_folder=str(tmp_path / "offloaded"))
    with pytest.raises(ConfigError, match=r"lie on cpu and meta.*device_map=\{'': 'cuda:0'\}.*docs/scaling\.md"):
        agent_of(model)


def test_rejects_a_model_that_was_moved_partly():
    agent = agent_of(tiny_model("llama"))
    agent.act("x")
    agent.assign_reward(0.0)
    cpu_offload(agent.policy.model.pretrained_model.get_base_model(), torch.device("cpu"))
    with pytest.raises(ConfigError, match="lie on cpu and meta"):
        agent.act("x")


def test_a_quantized_model_cannot_be_moved():
    model = tiny_model("llama")
    # What transformers leaves at a model that bitsandbytes has quantized, which takes a CUDA device.
    model.pretrained_model.get_base_model().hf_quantizer = object()
    assert agent_of(model, "cpu").act("x")
    with pytest.raises(ConfigError, match=r"cannot be moved from cpu to cuda:0.*device_map=\{'': 'cuda:0'\}"):
        move_(model, torch.device("cuda:0"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bits", ["load_in_8bit", "load_in_4bit"])
def test_a_quantized_base_acts_and_learns(bits: str):
    pytest.importorskip("bitsandbytes")
    model, tokenizer, device = load_model_and_tokenizer("smollm2-135m", "cuda", **{bits: True})  # type: ignore[arg-type]
    frozen = {name: weight.data.clone() for name, weight in model.named_parameters() if not weight.requires_grad}
    learned = {name: weight.data.clone() for name, weight in model.named_parameters() if weight.requires_grad}
    agent = ChoiceAgent(model, tokenizer, device, ppo_config_dict={"batch_size": 32}, seed=0)
    updates = train(agent, lambda: CountdownEnv(2), episodes=64, num_envs=16, seed=0).updates
    assert updates
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], weight) for name, weight in frozen.items())
    assert not any(torch.equal(now[name], weight) for name, weight in learned.items() if "lora_B" in name)
    # What 8 bits round depends on the pass; see docs/scaling.md.
    assert max(update["ratio_error"] for update in updates) < {"load_in_8bit": 1.0, "load_in_4bit": 0.3}[bits]


def test_computing_dtype_of_quantized_weights_is_bfloat16():
    model = tiny_model("llama")
    assert computing_dtype(model.pretrained_model) == torch.float32
    model.pretrained_model.get_base_model().is_quantized = True
    assert computing_dtype(model.pretrained_model) == torch.bfloat16


def test_pass_tokens_depend_on_device_and_model():
    processor, gpu = torch.device("cpu"), torch.device("cuda")
    assert [pass_tokens(processor, weights) for weights in (10**6, 10**10)] == [1024, 1024]
    assert [pass_tokens(gpu, weights) for weights in (10**8, 494 * 10**6, 7 * 10**9)] == [8192, 1024, 1024]
    assert pass_tokens(gpu, 135 * 10**6) == 7168


def test_every_device_type_has_a_precision():
    assert not precision_on("mps").has_bfloat16()
    assert precision_on("cuda").float16_above < 0 < precision_on("mps").float16_above
    assert precision_on("xpu").float16_above == precision_on("cpu").float16_above == float("inf")
