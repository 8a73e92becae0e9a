"""After any change of the weights, an agent acts like one that was created afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llamagym import AutoModelForCausalLMWithValueHead
from llamagym.engine.weights import Change, WeightsState
from llamagym.learners import base
from llamagym.learners.ppo import PPOConfig
from llamagym.text.episode import Conversation
from llamagym.trl_compat.ppo_trainer import PPOTrainer
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, experienced, make_agent, settled
from tests.helpers.tiny import tiny_tokenizer

OBSERVATIONS = ["a", "bb", "ccc"]
TOLERANCE = 1e-5


def weights(model: AutoModelForCausalLMWithValueHead, learn: bool) -> list[Tensor]:
    """The body's trained weights, or its frozen ones."""
    return [weight for weight in model.pretrained_model.parameters() if weight.requires_grad == learn]


def noise(weight: Tensor) -> Tensor:
    """Changes weights enough to change replies."""
    return 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * weight.abs().mean()


def step(agent: Any, fused: bool = False) -> None:
    """Steps an optimizer that is not the learner's."""
    model = agent.policy.model
    optimizer = torch.optim.AdamW(weights(model, learn=True), lr=0.3, fused=fused)
    model(torch.tensor([[1, 2, 3]]))[0].square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def fused_step(agent: Any) -> None:
    """Steps a fused optimizer, which does not increment versions."""
    step(agent, fused=True)


@torch.no_grad()
def load(agent: Any) -> None:
    model = agent.policy.model
    changed = {name: w + noise(w) if "lora_" in name else w for name, w in model.state_dict().items()}
    model.load_state_dict(changed)


@torch.no_grad()
def change_base(agent: Any) -> None:
    for weight in weights(agent.policy.model, learn=False):
        weight.add_(noise(weight))


def replace_base_data(agent: Any) -> None:
    for weight in weights(agent.policy.model, learn=False):
        weight.data = weight.data + noise(weight.data)


@torch.no_grad()
def change_value_head(agent: Any) -> None:
    for weight in agent.policy.model.v_head.parameters():
        weight.add_(noise(weight) + 0.1)


def switch_off(agent: Any) -> None:
    agent.policy.model.pretrained_model.base_model.disable_adapter_layers()


@torch.no_grad()
def other_adapter(agent: Any) -> None:
    pretrained = agent.policy.model.pretrained_model
    pretrained.add_adapter("other", copy.deepcopy(pretrained.peft_config["default"]))
    for name, weight in pretrained.named_parameters():
        if ".other." in name:
            weight.normal_(std=0.2, generator=torch.Generator().manual_seed(2))
    pretrained.set_adapter("other")


@torch.no_grad()
def adapter_elsewhere(agent: Any) -> None:
    """Adds an adapter to other modules, from the first layer on."""
    pretrained = agent.policy.model.pretrained_model
    config = copy.deepcopy(pretrained.peft_config["default"])
    config.target_modules, config.layers_to_transform = {"v_proj", "up_proj"}, None
    pretrained.add_adapter("elsewhere", config)
    for name, weight in pretrained.named_parameters():
        if ".elsewhere." in name:
            weight.normal_(std=0.2, generator=torch.Generator().manual_seed(2))
    pretrained.set_adapter("elsewhere")


def trainer_step(agent: Any) -> None:
    """Trains with `PPOTrainer`, which knows nothing of agents."""
    config = PPOConfig(batch_size=1, mini_batch_size=1, learning_rate=0.1, warmup_steps=1)
    trainer = PPOTrainer(config, agent.policy.model)
    trainer.step([torch.tensor([1, 2])], [torch.tensor([3, 4])], [1.0])


def merge(agent: Any) -> None:
    agent.policy.model.pretrained_model.merge_adapter()


def unload(agent: Any) -> None:
    model = agent.policy.model
    model.pretrained_model = model.pretrained_model.unload()


def scale(agent: Any) -> None:
    for module in agent.policy.model.modules():
        if hasattr(module, "scaling") and isinstance(module.scaling, dict):
            module.scaling["default"] *= 3


def resize(agent: Any) -> None:
    pretrained = agent.policy.model.pretrained_model
    size = pretrained.get_input_embeddings().weight.shape[0]
    pretrained.resize_token_embeddings(size + 8, mean_resizing=False)


def learn_all(agent: Any) -> None:
    agent.policy.model.requires_grad_(True)
    with torch.no_grad():
        for weight in weights(agent.policy.model, learn=True):
            weight.add_(noise(weight))


def through_data(agent: Any) -> None:
    for weight in weights(agent.policy.model, learn=False):
        weight.data.add_(noise(weight.data))
    agent.policy.weights_changed()


def through_numpy(agent: Any) -> None:
    for weight in weights(agent.policy.model, learn=True):
        weight.detach().numpy()[:] += noise(weight.detach()).numpy()
    agent.policy.weights_changed()


EVERY_KIND = [
    step,
    trainer_step,
    adapter_elsewhere,
    fused_step,
    load,
    change_base,
    replace_base_data,
    change_value_head,
    switch_off,
    other_adapter,
    scale,
    resize,
    learn_all,
    through_data,
    through_numpy,
]
# An activated LoRA is part of no weight.
OF_PLAIN_LORA = [merge, unload]


def says(agent: Any) -> list[Tensor]:
    """An agent's results on some observations: probabilities, replies with log-probabilities, values."""
    agent.eval(greedy=True)
    said = []
    for observation in OBSERVATIONS:
        agent.act(observation)
        conversation: Conversation = actor_of(agent).conversation(0)
        segment, reply = conversation.current_segment(), conversation.turns[-1].reply
        with torch.no_grad():
            now = agent.policy.evaluate([segment])
        said += [torch.tensor([*reply.ids, *reply.logprobs, reply.value]), now.logprobs.flatten(), now.values]
        actor_of(agent).discard_episodes([0])
    return said


def are_alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(
        a.shape == b.shape and torch.allclose(a, b, atol=TOLERANCE, rtol=1e-4) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.pairwise(change=EVERY_KIND, activated=[True, False], kind=[ChoiceAgent, WordAgent])
def test_no_stale_results_after_a_change_of_weights(kind: type, change: Callable[[Any], None], activated: bool):
    check_nothing_is_stale(kind, change, activated)


@pytest.mark.pairwise(change=OF_PLAIN_LORA, kind=[ChoiceAgent, WordAgent])
def test_no_stale_results_after_merging_a_plain_lora(kind: type, change: Callable[[Any], None]):
    check_nothing_is_stale(kind, change, activated=False)


def check_nothing_is_stale(kind: type, change: Callable[[Any], None], activated: bool) -> None:
    """Checks that an agent acts like one that is created after the change."""
    agent = settled(make_agent(kind, "llama", activated))
    before = says(agent)
    change(agent)
    after = says(agent)
    settings = {"max_new_tokens": 6}
    # An agent needs a model with trained weights.
    frozen = [] if weights(agent.policy.model, learn=True) else weights(agent.policy.model, learn=False)
    for weight in frozen:
        weight.requires_grad_(True)
    fresh = settled(kind(agent.policy.model, tiny_tokenizer("llama"), None, settings, seed=0))
    for weight in frozen:
        weight.requires_grad_(False)
    assert are_alike(after, says(fresh))
    if change not in (resize, merge):
        assert not are_alike(before, after)


def test_sees_what_another_agent_learns_on_the_same_model():
    agent = make_agent(ChoiceAgent, ppo={"learning_rate": 0.1, "warmup_steps": 1, "batch_size": 4})
    other = settled(ChoiceAgent(agent.policy.model, tiny_tokenizer("llama"), seed=0))
    says(other)
    for reward in (1.0, 0.0, 1.0, 0.0):
        agent.act("a")
        agent.assign_reward(reward)
        agent.terminate_episode()
    assert agent.policy.num_updates == 1
    fresh = settled(ChoiceAgent(agent.policy.model, tiny_tokenizer("llama"), seed=0))
    # Priors are measured once, with the base model.
    assert are_alike(says(other), says(fresh))


@pytest.mark.parametrize("activated", [True, False])
def test_kl_of_a_step_uses_no_stale_results(activated: bool, monkeypatch):
    options = {"learning_rate": 0.1, "warmup_steps": 1, "batch_size": 4, "ppo_epochs": 1, "target_kl": 100.0}
    agent = experienced(make_agent(WordAgent, "llama", activated, ppo=options, context="episode"))
    measured, usual = [], base.measure_kl

    def measure(*given: Any) -> float:
        kl = usual(*given)
        agent.policy.drop_caches()
        measured.append((kl, usual(*given)))
        return kl

    monkeypatch.setattr(base, "measure_kl", measure)
    for reward in (1.0, 0.0, 1.0, 0.0):
        agent.act("a")
        agent.assign_reward(reward)
    agent.terminate_episode()
    ((kl, again),) = measured
    assert kl > 1e-3
    assert kl == pytest.approx(again, rel=1e-3)


def test_turns_of_other_weights_are_evaluated_again():
    agent = make_agent(ChoiceAgent, ppo={"batch_size": 4})
    for reward in (1.0, 0.0, 1.0):
        agent.act("a")
        agent.assign_reward(reward)
        agent.terminate_episode()
    load(agent)
    agent.act("a")
    agent.assign_reward(0.0)
    stats = agent.terminate_episode()
    assert stats["ratio_error"] < 1e-3


def test_optimizer_follows_replaced_weights(caplog):
    agent = make_agent(ChoiceAgent, ppo={"batch_size": 1, "mini_batch_size": 1, "learning_rate": 0.1})
    other_adapter(agent)
    learns = [weight for weight in agent.policy.model.pretrained_model.parameters() if weight.requires_grad]
    before = [weight.clone() for weight in learns]
    for reward in (1.0, 0.0, 1.0):
        agent.act("a")
        agent.assign_reward(reward)
        agent.terminate_episode()
    assert "optimizer starts again" in caplog.text
    assert not all(torch.equal(weight, old) for weight, old in zip(learns, before, strict=True))


@pytest.mark.parametrize("activated", [True, False])
def test_state_changes_only_after_a_change(activated: bool):
    agent = make_agent(ChoiceAgent, "llama", activated)
    state = WeightsState(agent.policy.model)
    says(agent)
    agent.policy.model(torch.tensor([[1, 2, 3]]))
    assert state.change() is Change.NONE
    step(agent)
    assert state.change() is Change.TRAINED
    state.accept(Change.TRAINED)
    assert state.change() is Change.NONE
    change_base(agent)
    assert state.change() is Change.FROZEN
    state.record()
    assert (state.change(), state.number) == (Change.NONE, 1)
    resize(agent)
    assert state.change() is Change.PARTS
