"""Every method and option of PEFT equals plain PEFT in acting, learning, saving and loading, or is rejected by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from llamagym import AutoModelForCausalLMWithValueHead, ConfigError, ModelLoadError, PPOConfig, PPOTrainer
from llamagym.models.adapters import LORA_OPTIONS, SUPPORTED
from scripts import check_adapters
from tests.helpers.agents import WordAgent, actor_of
from tests.helpers.plain import compare
from tests.helpers.tiny import tiny_base_model, tiny_model, tiny_tokenizer

TOLERANCE = check_adapters.TOLERANCE
CASES = check_adapters.cases()
# What failed, or was computed otherwise than by PEFT, before these were compared.
SHORT = [
    "IA3",
    "LN_TUNING",
    "LORA: use_dora",
    "LORA: target_modules=['embed_tokens']",
    "LORA: target_modules=['lm_head']",
    "LORA: target_parameters",
    "LORA: modules_to_save=['embed_tokens']",
    "LORA: trainable_token_indices",
]
REJECTED = [
    "ADALORA",
    "ADAPTION_PROMPT",
    "LILY",
    "PREFIX_TUNING",
    "PROMPT_TUNING",
    "P_TUNING",
    "LORA: alora_invocation_tokens, lm_head",
    "LORA: bias='all'",
    "LORA: init_lora_weights='pissa'",
    "LORA: init_lora_weights='olora'",
    "LORA: layer_replication",
    "LORA: kasa_config",
]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning", "ignore::FutureWarning")


def agent_on(model: Any, **options: Any) -> WordAgent:
    wrapped = AutoModelForCausalLMWithValueHead(model)
    return WordAgent(wrapped, tiny_tokenizer("llama"), None, {"max_new_tokens": 6}, seed=0, **options)


@pytest.mark.parametrize("name", SHORT)
def test_an_adapter_equals_plain_peft(name: str, tmp_path: Path):
    assert check_adapters.check(name, CASES[name], tmp_path)["result"] == "equal"


@pytest.mark.parametrize("name", REJECTED)
def test_rejects_an_adapter_that_does_not_equal_plain_peft(name: str, tmp_path: Path):
    found = check_adapters.check(name, CASES[name], tmp_path)
    assert found["result"] == "rejected"
    assert f"({name.split(':')[0]}" in found["reason"]


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(CASES) - set(SHORT) - set(REJECTED)))
def test_any_adapter_equals_plain_peft_or_is_rejected(name: str, tmp_path: Path):
    assert check_adapters.check(name, CASES[name], tmp_path)["result"] in ("equal", "rejected", "not run by PEFT alone")


def test_supported_methods_and_options_exist_and_are_compared():
    methods = {name for name in CASES if ":" not in name}
    assert methods >= SUPPORTED
    options = {option for name in CASES for option in check_adapters.OPTIONS.get(name.removeprefix("LORA: "), {})}
    assert {*options, "r", "target_modules", "lora_alpha", "layers_pattern"} >= LORA_OPTIONS
    assert set(vars(peft.LoraConfig())) >= LORA_OPTIONS


def test_two_adapters_at_once_equal_plain_peft():
    model = peft.get_peft_model(tiny_base_model("llama"), check_adapters.lora_config({}))
    model.add_adapter("other", check_adapters.lora_config({"r": 2}))
    model.base_model.set_adapter(["default", "other"])
    check_adapters.randomize(model)
    assert compare(agent_on(model), steps=2, envs=2).largest < TOLERANCE


def test_rejects_an_activated_adapter_beside_another():
    activated = check_adapters.lora_config({"alora_invocation_tokens": None})
    model = peft.get_peft_model(tiny_base_model("llama"), activated)
    model.add_adapter("other", check_adapters.lora_config({}))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ModelLoadError, match="active at once"):
        agent_on(model)


def test_rejects_adapters_of_several_methods_at_once():
    model = peft.get_peft_model(tiny_base_model("llama"), check_adapters.lora_config({}), mixed=True)
    with pytest.raises(ModelLoadError, match="PeftMixedModel"):
        agent_on(model)


def frozen() -> Any:
    return tiny_base_model("llama").requires_grad_(False)


def loaded_for_inference(folder: Path) -> Any:
    tiny_model("llama").pretrained_model.save_pretrained(folder)
    return peft.PeftModel.from_pretrained(tiny_base_model("llama"), folder)


@pytest.mark.parametrize("make", [lambda _: frozen(), loaded_for_inference], ids=["frozen", "inference"])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "reinforce"])
def test_rejects_a_model_of_which_nothing_can_be_trained(make: Callable[[Path], Any], algorithm: Any, tmp_path: Path):
    model = make(tmp_path)
    with pytest.raises(ConfigError, match=r"Nothing of .* can be trained"):
        agent_on(model, algorithm=algorithm)
    with pytest.raises(ConfigError, match=r"Nothing of .* can be trained"):
        PPOTrainer(PPOConfig(), AutoModelForCausalLMWithValueHead(model))


def test_other_lora_variants_act_outside_of_the_activation_context():
    """DoRA was plain LoRA while choices were read, and DoRA while what led to them was."""
    model = peft.get_peft_model(tiny_base_model("llama"), check_adapters.lora_config({"use_dora": True}))
    check_adapters.randomize(model)
    agent = agent_on(model)
    assert compare(agent, steps=2, envs=2).largest < TOLERANCE
    actor_of(agent).discard_episodes([0, 1])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "magnitude" in name:
                weight.mul_(2.0)
    assert compare(agent, steps=2, envs=2).largest < TOLERANCE


def test_published_adapters_are_equal_or_rejected():
    found = json.loads((check_adapters.ROOT / "scripts" / "results" / "adapters.json").read_text(encoding="utf-8"))
    results = {name: part["result"] for name, part in found["cases"].items()}
    assert set(results.values()) <= {"equal", "rejected", "not run by PEFT alone"}
    assert {name for name, result in results.items() if result == "equal" and ":" not in name} == SUPPORTED
