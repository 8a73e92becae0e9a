"""The reference that `init_kl_coef` holds the policy to: the policy at the start of learning from rewards."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from llamagym import AutoModelForCausalLMWithValueHead
from tests.helpers.agents import ChoiceAgent, actor_of, make_agent
from tests.helpers.tiny import tiny_base_model, tiny_model, tiny_tokenizer

# Each case is a run or a model of its own.
pytestmark = pytest.mark.long

PPO = {"batch_size": 8, "mini_batch_size": 8, "learning_rate": 3e-3, "warmup_steps": 1, "target_kl": None}
KINDS = ["activated", "plain", "all weights", "a layer beside LoRA"]


def model_of(kind: str) -> Any:
    if kind in ("activated", "plain"):
        return tiny_model("llama", activated=kind == "activated")
    config = None
    if kind == "a layer beside LoRA":
        config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    return AutoModelForCausalLMWithValueHead.from_pretrained(tiny_base_model("llama"), config)


def agent_of(kind: str, **ppo: Any) -> ChoiceAgent:
    config = {**PPO, "init_kl_coef": 0.3, **ppo}
    return ChoiceAgent(model_of(kind), tiny_tokenizer("llama"), None, None, config, context="turn", seed=0)


def start_warm(agent: ChoiceAgent, folder: Path, choice: str = "go right", **options: Any) -> None:
    """Show the agent one choice for every observation."""
    path = folder / "demonstrations.jsonl"
    shown = (
        [{"role": "user", "content": f"Observation {number}"}, {"role": "assistant", "content": choice}]
        for number in range(4)
    )
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in shown))
    agent.sft_from_jsonl(path, **{"epochs": 10, "learning_rate": 1e-2, **options})


def update(agent: ChoiceAgent, rewards: tuple[float, ...] = (0.0,) * 8) -> dict[str, float]:
    agent.act_batch([index % 4 for index in range(8)])
    agent.assign_rewards(rewards)
    return agent.terminate_episodes(range(8))


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_policy_at_the_end_of_a_warm_start(kind, tmp_path):
    agent = agent_of(kind)
    start_warm(agent, tmp_path)
    started = deepcopy(agent.policy.model)
    rewards = tuple(float(index % 3) for index in range(8))
    stats = [update(agent, rewards) for _ in range(3)]
    assert stats[0]["ref_kl"] == pytest.approx(0.0, abs=1e-4)
    assert abs(stats[2]["ref_kl"]) > 1e-4
    # It is read as an agent that stopped there would be.
    other = ChoiceAgent(
        started, tiny_tokenizer("llama"), None, None, PPO, context="turn", seed=0, calibrate_choices=False
    )
    agent.act_batch([0, 1, 2])
    segments = [actor_of(agent).conversation(env).current_segment() for env in range(3)]
    with torch.no_grad():
        version = agent.policy.weights_version
        reference = agent.policy.evaluate(segments, reference=True).logprobs
        now = agent.policy.evaluate(segments).logprobs
        expected = other.policy.evaluate(segments).logprobs
    assert torch.allclose(reference, expected, atol=2e-5)
    # The demonstrated policy is nearly certain, so that updates are small.
    assert not torch.allclose(now, expected, atol=2e-4)
    # Reading it leaves the policy as it was.
    assert agent.policy.weights_version == version
    assert now[:, 0].tolist() == pytest.approx([segment.turns[0].reply.logprobs[0] for segment in segments], abs=1e-4)


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_a_warm_started_policy_is_not_pulled_back_to_the_base(tmp_path, placement):
    """With the penalty alone, and nothing to earn."""
    alone = {"init_kl_coef": 1.0, "entropy_coef": 0.0, "whiten_advantages": False, "learning_rate": 1e-2}
    agent = agent_of("activated", kl_placement=placement, ppo_epochs=4, **alone)
    start_warm(agent, tmp_path, epochs=30)
    chances = []
    for _ in range(15):
        update(agent)
        chances.append(agent.action_probabilities([0])[0]["go right"])
    # Rounding alone moves it by a little; against the base's 0.4 it went to 0.7 on average.
    assert sum(chances) / len(chances) > 0.9


def test_under_a_fresh_adapter_the_reference_costs_nothing():
    agent = agent_of("activated")
    rewards = tuple(float(index % 3) for index in range(8))
    first, *_, last = [update(agent, rewards) for _ in range(4)]
    assert agent.policy.reference == {}
    assert first["ref_kl"] == pytest.approx(0.0, abs=1e-4)
    assert abs(last["ref_kl"]) > 1e-3
    # Without a penalty no reference is kept.
    agent = agent_of("all weights", init_kl_coef=0.0)
    update(agent)
    assert agent.policy.reference is None


def test_the_reference_is_a_copy_of_the_weights_that_learn_alone(tmp_path):
    agent = agent_of("activated")
    start_warm(agent, tmp_path)
    update(agent)
    learns = {
        name: weight for name, weight in agent.policy.model.pretrained_model.named_parameters() if weight.requires_grad
    }
    assert {name: weight.shape for name, weight in agent.policy.reference.items()} == {
        name: weight.shape for name, weight in learns.items()
    }
    assert not any(agent.policy.reference[name].data_ptr() == weight.data_ptr() for name, weight in learns.items())


def test_a_loaded_adapter_is_the_start_too():
    """It says something already when learning begins."""
    agent = make_agent(ChoiceAgent, context="turn", ppo={**PPO, "init_kl_coef": 0.3})
    assert update(agent)["ref_kl"] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_goes_on_from_a_checkpoint(kind, tmp_path):
    rewards = tuple(float(index % 3) for index in range(8))
    one = agent_of(kind)
    start_warm(one, tmp_path, epochs=2)
    for _ in range(2):
        update(one, rewards)
    one.save_checkpoint(tmp_path / "checkpoint")
    other = agent_of(kind)
    other.load_checkpoint(tmp_path / "checkpoint")
    for _ in range(2):
        stats = [update(each, rewards) for each in (one, other)]
        same = [{name: value for name, value in of.items() if not name.endswith("_s")} for of in stats]
        assert same[0] == same[1]
        assert stats[0]["ref_kl"] != 0.0


def test_a_checkpoint_between_warm_start_and_first_update_leaves_the_reference_open(tmp_path):
    one = agent_of("activated")
    start_warm(one, tmp_path)
    one.save_checkpoint(tmp_path / "checkpoint")
    other = agent_of("activated")
    other.load_checkpoint(tmp_path / "checkpoint")
    assert update(other)["ref_kl"] == pytest.approx(0.0, abs=1e-4)


def test_an_update_that_fails_leaves_the_reference_open(monkeypatch):
    agent = agent_of("all weights")
    monkeypatch.setattr(agent.learner, "compute_targets", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        update(agent)
    assert agent.policy.reference is None


def test_weights_that_take_the_place_of_others_are_the_reference_from_then_on(caplog):
    agent = make_agent(ChoiceAgent, activated=False, context="turn", ppo={**PPO, "init_kl_coef": 0.3})
    update(agent)
    agent.policy.model.pretrained_model.add_adapter(
        "other", LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    )
    agent.policy.model.pretrained_model.set_adapter("other")
    actor_of(agent).discard_episodes(range(8))
    assert update(agent)["ref_kl"] == pytest.approx(0.0, abs=1e-4)
    assert "the reference is the policy as it is now" in caplog.text
