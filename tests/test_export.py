"""What is saved for use: the same policy again, here and in plain transformers and PEFT."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from llamagym import CheckpointError, ConfigError, evaluate, load_model_and_tokenizer, train
from llamagym.models.value_head import AutoModelForCausalLMWithValueHead
from tests.agents import ChoiceAgent, WordAgent
from tests.resumed_run import SIZES, DiceEnv, Talker
from tests.tiny import tiny_base_model, tiny_tokenizer


@pytest.fixture
def base(tmp_path) -> Path:
    """A tiny model in a folder."""
    folder = tmp_path / "base"
    tiny_base_model("llama").save_pretrained(folder)
    tiny_tokenizer("llama").save_pretrained(folder)
    return folder


def trained(kind: Any, base: Path, peft_config: Any = None, **options: Any) -> Any:
    """An agent that has learnt something."""
    model, tokenizer, device = load_model_and_tokenizer(base, "cpu", "float32", peft_config=peft_config)
    settings = {"max_new_tokens": 5, "temperature": 0.7}
    agent = kind(model, tokenizer, device, settings, SIZES, context="turn", seed=1, **options)
    train(agent, DiceEnv, 10, 2, seed=0)
    return agent


@pytest.mark.parametrize("kind", [ChoiceAgent, Talker])
@pytest.mark.parametrize("peft_config", [None, False])
def test_a_loaded_agent_is_the_one_that_was_saved(base, tmp_path, kind, peft_config):
    agent = trained(kind, base, peft_config)
    agent.save(tmp_path / "agent")
    again = kind.load(tmp_path / "agent", "cpu", "float32")
    assert again._options == json.loads(json.dumps(agent._options))
    assert again.policy.choice_prior == agent.policy.choice_prior
    for greedy in (True, False):
        results = [evaluate(each, DiceEnv, 12, seed=3, num_envs=4, greedy=greedy) for each in (agent, again)]
        assert results[0] == results[1]
    # What the constructor is given at loading goes before what was saved.
    assert kind.load(tmp_path / "agent", response_prefix="So:").response_prefix == "So:"


def test_an_agent_on_a_base_without_a_name_is_loaded_with_it(tmp_path):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_base_model("llama"))
    agent = WordAgent(model, tiny_tokenizer("llama"), seed=0)
    agent.save(tmp_path / "agent")
    again = WordAgent.load(tmp_path / "agent", model=model)
    assert again.act("x") == WordAgent.load(tmp_path / "agent").act("x") == agent.act("x")


class Announcing(ChoiceAgent):
    """Its replies begin with a prefix."""

    def extract_action(self, response: str) -> int:
        return super().extract_action(response.removeprefix("I will "))


def code_of(folder: Path) -> str:
    """The lines for plain transformers in a card."""
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]


@pytest.mark.parametrize("normalization", ["none", "token", "word"])
def test_the_card_s_lines_give_the_choices_the_same_probabilities(base, tmp_path, normalization):
    agent = trained(Announcing, base, choice_normalization=normalization, response_prefix="I will ")
    agent.save_pretrained(tmp_path / "agent", environment="Dice", results={"mean return": 1.5})
    card = (tmp_path / "agent" / "README.md").read_text()
    assert "acting in Dice" in card
    assert "| mean return | 1.5 |" in card
    for observation in range(5):
        space: dict[str, Any] = {"folder": str(tmp_path / "agent"), "observation": f"Observation {observation}"}
        exec(code_of(tmp_path / "agent"), space)
        expected = agent.action_probabilities([observation])[0]
        found = dict(zip(space["prior"], space["probabilities"].tolist(), strict=True))
        assert found == pytest.approx(expected, abs=1e-5)


def test_the_card_s_lines_write_what_the_agent_writes(base, tmp_path):
    agent = trained(Talker, base)
    agent.save_pretrained(tmp_path / "agent")
    agent.eval()
    code = code_of(tmp_path / "agent").replace("do_sample=True", "do_sample=False")
    for observation in range(5):
        space: dict[str, Any] = {"folder": str(tmp_path / "agent"), "observation": f"Observation {observation}"}
        exec(code, space)
        agent.discard_episodes([0])
        agent.act(observation)
        assert space["reply"] == agent.current_episode_messages[-1]["content"]


def test_a_plain_adapter_is_merged_and_an_activated_one_is_not(base, tmp_path):
    from llamagym.models.registry import lookup_by_architecture, lora_config

    entry = tiny_base_model("llama")
    plain = lora_config(lookup_by_architecture(entry.config), entry.config, None)
    agent = trained(ChoiceAgent, base, plain)
    agent.save_pretrained(tmp_path / "merged", merged=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    agent.save_pretrained(tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(tiny_base_model("llama"), tmp_path / "adapter")
    ids = torch.arange(40)[None]
    assert torch.allclose(merged(ids).logits, adapted(ids).logits, atol=1e-4)
    assert not torch.allclose(merged(ids).logits, tiny_base_model("llama")(ids).logits, atol=1e-4)
    again = ChoiceAgent.load(tmp_path / "merged", "cpu", "float32", model=None)
    assert again.action_probabilities([1])[0] == pytest.approx(agent.action_probabilities([1])[0], abs=1e-4)
    with pytest.raises(ConfigError, match="activated LoRA"):
        trained(ChoiceAgent, base).save_pretrained(tmp_path / "activated", merged=True)
    with pytest.raises(ConfigError, match="no adapter to merge"):
        trained(ChoiceAgent, base, False).save_pretrained(tmp_path / "activated", merged=True)
    assert not (tmp_path / "activated").exists()


def test_what_is_no_saved_agent_is_refused(base, tmp_path):
    agent = trained(ChoiceAgent, base)
    agent.save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="holds: checkpoint; expected: agent"):
        ChoiceAgent.load(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="is no agent of llamagym"):
        ChoiceAgent.load(base)
