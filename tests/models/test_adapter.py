"""Where LoRA acts, and what it is aimed at."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from llamagym.models.lora import (
    freeze_and_extend_,
    fresh_rows,
    initialize_rows_,
    is_activated,
    is_fresh,
    latest_inputs,
    lora_matrices,
    within_group_components,
)
from llamagym.models.peft_internals import acting_on_every_token, layers_with_variants
from llamagym.policy import evaluation
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, make_agent
from tests.helpers.tiny import FAMILIES, tiny_base_model, tiny_model


def test_components_are_centered_and_orthogonal_to_the_mean() -> None:
    rng = torch.Generator().manual_seed(0)
    mean = torch.tensor([100.0, 0.0, 0.0, 0.0])
    spread = torch.diag(torch.tensor([50.0, 3.0, 1.0, 0.0]))
    inputs = mean + torch.randn(4000, 4, generator=rng) @ spread
    directions, deviations = within_group_components(inputs, torch.zeros(4000, dtype=torch.long), 3)
    # The largest spread lies along the mean and is left out; the last dimension does not vary at all.
    assert directions.abs().tolist() == [pytest.approx([0, 1, 0, 0], abs=0.05), pytest.approx([0, 0, 1, 0], abs=0.05)]
    assert deviations.tolist() == pytest.approx([3.0, 1.0], rel=0.05)
    assert len(within_group_components(mean.expand(5, 4), torch.zeros(5, dtype=torch.long), 3)[0]) == 0
    # Of what sets the groups apart, nothing is left either.
    groups = torch.arange(4000) % 2
    inputs[:, 2] += 20.0 * groups
    directions, _ = within_group_components(inputs, groups, 3)
    assert directions.abs().tolist() == [pytest.approx([0, 1, 0, 0], abs=0.05)]


def test_initialization_gives_all_components_the_same_deviation() -> None:
    layer = nn.Linear(6, 2, bias=False)
    length = layer.weight.norm(dim=1).mean().item()
    inputs = 5.0 + torch.randn(500, 6) @ torch.diag(torch.tensor([2.0, 1.0, 0.5, 0.1, 0.1, 0.1]))
    size = inputs.square().mean().sqrt().item()
    initialize_rows_(layer, torch.arange(2), inputs, torch.zeros(500, dtype=torch.long))
    outputs = layer(inputs)
    assert outputs.std(dim=0, correction=0).tolist() == pytest.approx([length * size] * 2, rel=1e-3)
    assert (outputs.mean(0).abs() < 0.05 * length * size).all()


@pytest.mark.pairwise(family=FAMILIES, activated=[True, False])
def test_initialization_keeps_the_policy_and_happens_once(family: str, activated: bool) -> None:
    options = {"context": "turn", "calibrate_choices": False, "ppo": {"batch_size": 12, "learning_rate": 0.0}}
    agent = make_agent(ChoiceAgent, family, activated, **options)
    with torch.no_grad():
        for name, weight in agent.policy.model.named_parameters():
            if "lora_B" in name or "v_head" in name:
                weight.zero_()
    before = agent.action_probabilities(["a", "bb", "c"])
    weights = [layer.weight.clone() for layer in fresh_rows(agent.policy.model)]
    assert weights
    for text in ("a", "bb", "c", "dd"):
        agent.act_batch([text] * 3)
        agent.assign_rewards([1.0, 0.0, 2.0])
        agent.terminate_episodes([0, 1, 2])
    assert agent.policy.num_updates == 1
    after = agent.action_probabilities(["a", "bb", "c"])
    for one, other in zip(before, after, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    layers = fresh_rows(agent.policy.model)
    assert not any(torch.equal(layer.weight, weight) for layer, weight in zip(layers, weights, strict=True))


def test_initialized_gradients_distinguish_observations() -> None:
    """The reason for it: how alike are the gradients of two observations' choices?"""
    alike = {}
    for aimed in (False, True):
        agent = make_agent(ChoiceAgent, "llama", context="turn", aim_lora=aimed)
        with torch.no_grad():
            for name, weight in agent.policy.model.named_parameters():
                if "lora_B" in name:
                    weight.zero_()
        segments = [
            actor_of(agent).conversation(i).observe(f"Observation {i}", "", ChoiceAgent.choices) for i in range(8)
        ]
        agent.policy.initialize_from_data(segments)
        ups = [w for name, w in agent.policy.model.named_parameters() if "lora_B" in name]
        gradients = []
        for i, reply in enumerate(agent.policy.sample(segments)):
            first = replace(reply, choice_index=0, ids=segments[i].pending.choices[0])
            actor_of(agent).conversation(i).answer(first, "")
            logprob = agent.policy.evaluate([actor_of(agent).conversation(i).current_segment()]).logprobs.sum()
            gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(logprob, ups)]))
        unit = nn.functional.normalize(torch.stack(gradients), dim=1)
        alike[aimed] = (unit @ unit.T).fill_diagonal_(0).abs().sum().item() / 56
    assert alike[True] < 0.5 * alike[False]


def test_only_fresh_rows_are_initialized() -> None:
    model = tiny_model("llama").pretrained_model
    assert len(fresh_rows(model)) == 6
    for name, weight in model.named_parameters():
        if "o_proj.lora_B" in name:
            nn.init.ones_(weight)
        elif "q_proj.lora_B" in name:
            weight.data[:, 1] = 1.0
    rank = next(iter(fresh_rows(model))).out_features
    assert sorted(map(len, fresh_rows(model).values())) == [rank - 1, rank - 1, rank, rank]
    layer = next(layer for layer, rows in fresh_rows(model).items() if len(rows) < rank)
    before = layer.weight.clone()
    inputs = torch.randn(50, layer.in_features)
    initialize_rows_(layer, fresh_rows(model)[layer], inputs, torch.zeros(50, dtype=torch.long))
    moved = (layer.weight != before).any(dim=1)
    assert moved.nonzero()[:, 0].tolist() == fresh_rows(model)[layer].tolist()


def test_components_come_from_a_limited_number_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long replies have many: all of them would take gigabytes."""
    agent = make_agent(WordAgent, generate={"max_new_tokens": 30})
    for conversation in range(12):
        agent.act_batch([conversation], [conversation])
    segments = [actor_of(agent).conversation(conversation).current_segment() for conversation in range(12)]
    trees = agent.policy.trees.of(segments)
    nodes = sum(tree.node_count for tree in trees)
    layers = [down for down, _ in lora_matrices(agent.model.pretrained_model)]

    @torch.no_grad()
    def recorded(chunks: list[Any]) -> Any:
        with agent.policy.backbone.transformer.temporary_packing():
            return evaluation.read_inputs(chunks, nodes, layers, lambda chunk: agent.policy._read(chunk).features)

    _, inputs, groups = recorded([trees])
    assert len(groups) == nodes > 100
    monkeypatch.setattr(evaluation, "_MAX_INPUTS", 100)
    stride = -(-nodes // 100)
    for chunks in ([trees], [trees[:5], trees[5:]]):
        features, fewer, fewer_groups = recorded(chunks)
        assert len(features) == 12
        assert len(fewer_groups) <= 100
        for layer in layers:
            assert torch.allclose(fewer[layer], inputs[layer][::stride], atol=1e-5)
        same = groups[::stride][:, None] == groups[::stride]
        assert torch.equal(fewer_groups[:, None] == fewer_groups, same)


@pytest.mark.parametrize("activated", [True, False])
def test_the_trained_half_is_frozen_and_the_fresh_half_learns(activated: bool, tmp_path: Path) -> None:
    options = {"batch_size": 4, "learning_rate": 0.01, "warmup_steps": 1, "target_kl": None}
    agent = make_agent(ChoiceAgent, "llama", activated, context="turn", ppo=options)
    model = agent.policy.model.pretrained_model
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.zeros_(weight)
    assert is_fresh(model)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    assert not is_fresh(model)
    learned = {name: weight.clone() for name, weight in model.named_parameters() if weight.requires_grad}
    before = agent.action_probabilities(["a", "bb"])

    freeze_and_extend_(model)
    agent.learner.reset_optimizer()
    assert not is_fresh(model)
    after = agent.action_probabilities(["a", "bb"])
    for one, other in zip(before, after, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    for index in range(8):
        agent.act("ab"[index % 2])
        agent.assign_reward(float(index % 3))
        agent.terminate_episode()
    moved = agent.action_probabilities(["a", "bb"])
    assert any(one != pytest.approx(other, abs=1e-4) for one, other in zip(after, moved, strict=True))
    for name, weight in model.named_parameters():
        if name not in learned:
            continue
        of_rank = weight if "lora_A" in name else weight.T
        old = learned[name] if "lora_A" in name else learned[name].T
        assert len(of_rank) == 2 * len(old)
        assert torch.equal(of_rank[: len(old)], old)
        assert of_rank[len(old) :].any()

    # A deep copy, which has none of the tensors' hooks, keeps it as well.
    copied = copy.deepcopy(agent.policy.model)
    again = ChoiceAgent(copied, agent.tokenizer, None, {"max_new_tokens": 6}, options, context="turn", seed=0)
    for index in range(8):
        again.act("ab"[index % 2])
        again.assign_reward(float(index % 3))
        again.terminate_episode()
    ours, its = (dict(of.named_parameters()) for of in (model, copied.pretrained_model))
    for name, old in learned.items():
        halves = [of if "lora_A" in name else of.T for of in (its[name], old, ours[name])]
        assert torch.equal(halves[0][: len(halves[1])], halves[1])
        assert not torch.equal(halves[0], halves[2])

    # It is an ordinary adapter of twice the rank, and loads as one.
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_base_model("llama"), tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    with (
        torch.no_grad(),
        acting_on_every_token(layers_with_variants(model)),
        acting_on_every_token(layers_with_variants(loaded)),
    ):
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_latest_inputs_are_those_of_the_last_pass() -> None:
    layer = nn.Linear(2, 2)
    with latest_inputs([layer]) as inputs:
        layer(torch.zeros(3, 2))
        layer(torch.ones(1, 2))
    layer(torch.zeros(4, 2))
    assert inputs[layer].tolist() == [[1.0, 1.0]]


def test_is_activated_needs_an_invocation_and_lora_alone() -> None:
    assert is_activated(tiny_model("llama").pretrained_model)
    assert not is_activated(tiny_model("llama", activated=False).pretrained_model)
    assert not is_activated(tiny_base_model("llama"))
    config = LoraConfig(
        target_modules=["o_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM", alora_invocation_tokens=[1]
    )
    # Embeddings that are trained change what is read.
    assert not is_activated(get_peft_model(tiny_base_model("llama"), config))


def test_an_activated_adapter_acts_only_inside_its_context() -> None:
    agent = make_agent(ChoiceAgent, "llama")
    lm = agent.policy.model.pretrained_model.get_base_model()
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        inert = lm(ids).logits
        with acting_on_every_token(layers_with_variants(lm)):
            acting = lm(ids).logits
        again = lm(ids).logits
    assert not torch.allclose(inert, acting, atol=1e-3)
    assert torch.equal(inert, again)
