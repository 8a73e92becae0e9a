"""Warm starts: the trained ids are those that acting reads, replies alone are learned, and nothing else changes."""

from __future__ import annotations

import json
import random
import socket
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import nn

import llamagym.learners.sft as sft
from llamagym import ConfigError, ContextLengthError, load_model_and_tokenizer
from llamagym.errors import DivergedError
from llamagym.models.lora import fresh_rows, has_frozen_half, is_activated
from llamagym.models.value_head import AutoModelForCausalLMWithValueHead
from llamagym.text.demonstrations import demonstrations_path, read_demonstrations
from llamagym.text.episode import segments_of
from scripts import check_adapters
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, make_agent
from tests.helpers.tiny import FAMILIES, tiny_base_model, tiny_model, tiny_tokenizer

SYSTEM = {"role": "system", "content": "Say something."}


def turns(*said: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]


def write(path: Path, *conversations: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return path


@pytest.fixture
def demos(tmp_path):
    """Four conversations of one turn, four of two; the reply depends on the observation."""
    words = ["go left", "go right", "stay", "go left"]
    short = [[SYSTEM, *turns(f"Observation {i}", word)] for i, word in enumerate(words)]
    long = [[SYSTEM, *turns(f"Observation {i}", word, "Observation 9", "stay")] for i, word in enumerate(words)]
    return write(tmp_path / "demos.jsonl", *short, *long)


def episodes_of(agent, path):
    end = actor_of(agent).chat_template.closing_id(agent.policy.eos_ids)
    return read_demonstrations(path, actor_of(agent).new_conversation, actor_of(agent).hooks.response_prefix, end)


def segments_shown(agent, path):
    return segments_of(episodes_of(agent, path))


def trained_turns(agent, path):
    """Of each turn: the ids before the reply, the reply's, and where an activated LoRA begins to act."""
    found = []
    for segment in segments_shown(agent, path):
        context: list[int] = []
        for turn in segment.turns:
            context = [*context, *turn.prompt.ids]
            found.append((context, list(turn.reply.ids), len(context) - turn.prompt.opening_length))
            context = [*context, *turn.reply.ids]
    return found


def plain_loss(agent, path) -> float:
    """The replies' loss by the model's ordinary forward pass, turn by turn."""
    pretrained = agent.policy.model.pretrained_model
    losses = []
    for context, reply, active_from in trained_turns(agent, path):
        offsets = {"alora_offsets": [len(context) + len(reply) - active_from]} if is_activated(pretrained) else {}
        with torch.no_grad():
            logits = pretrained(input_ids=torch.tensor([context + reply]), **offsets).logits[0]
        losses.append(nn.functional.cross_entropy(logits[len(context) - 1 : -1], torch.tensor(reply), reduction="none"))
    return torch.cat(losses).mean().item()


def loss_of(agent, path) -> float:
    with torch.no_grad():
        now = agent.policy.evaluate(segments_shown(agent, path))
    return -now.logprobs[now.mask].mean().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_warm_start_trains_the_templates_ids_and_only_replies(family, tmp_path):
    """Against the template's own rendering of the whole conversation, which nothing here is computed from."""
    agent = make_agent(family=family)
    said = turns("Observation 1", "go left", "Observation 2", "stay")
    path = write(tmp_path / "demo.jsonl", [SYSTEM, *said])
    (before, first, _), (context, second, _) = trained_turns(agent, path)
    tokenizer = tiny_tokenizer(family)
    for reply, words in ((first, "go left"), (second, "stay")):
        assert tokenizer.decode(reply[:-1]) == words
        assert reply[-1] in agent.policy.eos_ids
    assert context[: len(before + first)] == before + first
    opening = [SYSTEM]
    if not actor_of(agent).chat_template.has_system_role:
        opening, said[0]["content"] = [], f"{SYSTEM['content']}\n\n{said[0]['content']}"
    # One more observation, so that no template treats the last reply as special.
    rendered = tokenizer.apply_chat_template([*opening, *said, *turns("probe")], tokenize=False)
    expected = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    if family == "qwen3":  # opens replies with an empty thought, and takes it out of the past
        thought = tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"]
        assert before[-len(thought) :] == context[-len(thought) :] == thought
        before, context = without(before, thought), without(context, thought)
    # A template may close replies without a token; the end token that acting waits for is learned all the same.
    closes = expected[len(before) + len(first) - 1] == first[-1]
    assert expected[: len(before) + len(first) - 1 + closes] == (before + first)[: None if closes else -1]
    if closes:
        assert expected[: len(context + second)] == context + second


def without(ids, part):
    """Token ids but for every occurrence of a part."""
    starts = [start for start in range(len(ids)) if ids[start : start + len(part)] == part]
    dropped = {start + offset for start in starts for offset in range(len(part))}
    return [token for index, token in enumerate(ids) if index not in dropped]


def model_of(kind: str) -> AutoModelForCausalLMWithValueHead:
    if kind in ("activated", "plain"):
        return tiny_model("llama", activated=kind == "activated")
    dropout = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.9)
    peft_config = dropout if kind == "dropout" else None
    return AutoModelForCausalLMWithValueHead.from_pretrained(tiny_base_model("llama"), peft_config)


def recorded_losses(monkeypatch) -> list[float]:
    """Grows by the loss of each step that the trainer takes from now on."""
    losses: list[float] = []
    compute = sft.LossTrainer.compute_loss

    def recording(self, *args, **kwargs):
        loss = compute(self, *args, **kwargs)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(sft.LossTrainer, "compute_loss", recording)
    return losses


@pytest.mark.parametrize(
    ("kind", "context"),
    [("activated", "episode"), ("activated", "turn"), ("plain", "episode"), ("dropout", "turn"), ("full", "episode")],
)
def test_the_trainers_loss_is_the_policys(demos, monkeypatch, kind, context):
    """One step on everything at once, against the ordinary forward pass with PEFT's activated LoRA."""
    model = model_of(kind)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.2)
    agent = WordAgent(model, tiny_tokenizer("llama"), context=context, seed=0)
    losses = recorded_losses(monkeypatch)
    expected = plain_loss(agent, demos)
    stats = agent.sft_from_jsonl(demos, epochs=1, batch_size=12)
    assert losses == [pytest.approx(expected, abs=1e-4)]
    assert stats["loss_before"] == pytest.approx(expected, abs=1e-4)
    assert stats["samples"] == 12


@pytest.mark.long
def test_losses_are_measured_on_some_of_many_conversations(demos, monkeypatch):
    monkeypatch.setattr(sft, "MAX_MEASURED", 2)
    agent = WordAgent(model_of("activated"), tiny_tokenizer("llama"), context="turn", seed=0)
    measured, measure = [], sft.measure
    monkeypatch.setattr(sft, "measure", lambda policy, some: measured.append(some) or measure(policy, some))
    stats = agent.sft_from_jsonl(demos, epochs=1)
    assert [len(some) for some in measured] == [2, 2]
    assert stats["samples"] == 12


@pytest.mark.long
@pytest.mark.parametrize("context", ["episode", "turn"])
@pytest.mark.parametrize(("batch_size", "steps"), [(1, {"episode": 8, "turn": 12}), (3, {"episode": 4, "turn": 4})])
def test_a_step_takes_batch_size_replies_in_any_context(demos, monkeypatch, context, batch_size, steps):
    agent = WordAgent(model_of("activated"), tiny_tokenizer("llama"), context=context, seed=0)
    losses = recorded_losses(monkeypatch)
    agent.sft_from_jsonl(demos, epochs=1, batch_size=batch_size)
    assert len(losses) == steps[context]


@pytest.mark.parametrize(
    "kind", ["activated", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("plain", "full"))]
)
def test_replies_become_likely_and_nothing_else_changes(demos, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = model_of(kind)
    nn.init.ones_(model.v_head.summary.weight)
    agent = WordAgent(model, tiny_tokenizer("llama"), None, {"max_new_tokens": 4}, {"batch_size": 2}, seed=0)
    agent.act(0)  # fills the caches
    actor_of(agent).discard_episodes([0])
    base = model.pretrained_model.get_base_model() if kind != "full" else model.pretrained_model
    weights = {name: (weight, weight.clone(), weight.requires_grad) for name, weight in model.named_parameters()}
    head = {name: tensor.clone() for name, tensor in model.v_head.state_dict().items()}
    generation, config, tags = base.generation_config.to_dict(), base.config.to_dict(), base.model_tags
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    stats = agent.sft_from_jsonl(demos, epochs=40, learning_rate=1e-2, batch_size=4)

    assert stats["loss_after"] < 0.2 * stats["loss_before"]
    assert stats["entropy_after"] < stats["entropy_before"]
    assert stats["loss_after"] == pytest.approx(loss_of(agent, demos))
    assert stats["token_accuracy"] > 0.5
    for name, tensor in model.v_head.state_dict().items():
        assert torch.equal(tensor, head[name])
    changed = set()
    for name, weight in model.named_parameters():
        same, before, requires_grad = weights[name]
        # What LoRA has learned is frozen: its matrices are new, and larger.
        assert weight is same or "lora_" in name
        assert weight.dtype == before.dtype
        assert weight.requires_grad == requires_grad
        assert weight.grad is None
        if not torch.equal(weight, before):
            changed.add(name)
    assert changed
    assert all("lora_" in name for name in changed) or kind == "full"
    assert not any(module.training for module in model.modules())
    assert "forward" not in vars(base)
    assert (base.generation_config.to_dict(), base.config.to_dict(), base.model_tags) == (generation, config, tags)
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert list(tmp_path.iterdir()) == [demos]

    # The learner goes on with the same weights.
    assert agent.learner.optimizer.param_groups[0]["params"][0] is next(
        weight for weight in model.parameters() if weight.requires_grad
    )
    moved = {name: weight.clone() for name, weight in model.named_parameters() if weight.requires_grad}
    for reward in (1.0, 0.0):
        agent.act(0)
        agent.assign_reward(reward)
        update = agent.terminate_episode()
    assert update["ratio_error"] < 1e-3
    assert any(not torch.equal(weight, moved[name]) for name, weight in model.named_parameters() if name in moved)


def test_warm_start_initializes_a_fresh_adapter_and_not_the_critic(demos):
    for aim in (True, False):
        model = tiny_model("llama")
        agent = WordAgent(model, tiny_tokenizer("llama"), None, {}, {"batch_size": 2}, aim_lora=aim, seed=0)
        downs = list(fresh_rows(model))
        before = [layer.weight.clone() for layer in downs]
        agent.sft_from_jsonl(demos, learning_rate=1e-9)
        moved = [(layer.weight[: len(old)] - old).abs().max().item() for layer, old in zip(downs, before, strict=True)]
        assert min(moved) > 1e-3 if aim else max(moved) < 1e-6
        # What was learned is frozen: there is as much again.
        ranks = {layer: layer.out_features for layer in downs}
        assert {layer: 2 * len(rows) for layer, rows in fresh_rows(model).items()} == (ranks if aim else {})
        # The first update still standardizes the features, now those of the trained adapter.
        assert not agent.policy.is_initialized_from_data
        assert not model.v_head.feature_mean.any()
        for reward in (1.0, 0.0):
            agent.act(reward)
            agent.assign_reward(reward)
            agent.terminate_episode()
        assert model.v_head.feature_mean.any()


def test_a_diverged_warm_start_leaves_no_trace(demos):
    agent = make_agent(WordAgent)
    before = [weight.clone() for weight in agent.policy.model.parameters()]
    with pytest.raises(DivergedError, match="After 3 epochs on demonstrations"):
        agent.sft_from_jsonl(demos, epochs=3, learning_rate=1e37)
    assert all(torch.equal(now, old) for now, old in zip(agent.policy.model.parameters(), before, strict=True))
    assert agent.policy.num_updates == 0
    agent.act("a")


@pytest.mark.parametrize("calibrate", [True, False])
def test_choices_that_were_demonstrated_become_likely_and_stay_so(tmp_path, calibrate):
    agent = make_agent(ChoiceAgent, context="turn", calibrate_choices=calibrate)
    before = agent.action_probabilities([1])[0]
    rarest = min(before, key=lambda choice: before[choice])
    path = write(tmp_path / "demo.jsonl", turns("Observation 1", rarest), turns("Observation 2", rarest))
    agent.sft_from_jsonl(path, epochs=10, learning_rate=1e-2)
    after = agent.action_probabilities([1])[0]
    assert after[rarest] > 0.7 > 0.5 > before[rarest]
    agent.save_checkpoint(tmp_path / "checkpoint")
    agent.save(tmp_path / "agent")
    resumed = make_agent(ChoiceAgent, context="turn", calibrate_choices=calibrate)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert resumed.action_probabilities([1])[0] == pytest.approx(after, abs=1e-6)
    assert "prior = {" not in (tmp_path / "agent" / "README.md").read_text()


@pytest.mark.long
def test_demonstrations_after_rewards_keep_the_prior(tmp_path):
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 4, "mini_batch_size": 4})
    for reward in (1.0, 0.0, 1.0, 0.0):
        agent.act(1)
        agent.assign_reward(reward)
        agent.terminate_episode()
    prior = dict(agent.policy.calibration.prior)
    assert agent.policy.num_updates == 1
    agent.sft_from_jsonl(write(tmp_path / "demo.jsonl", turns("Observation 1", agent.choices[0])), epochs=1)
    assert prior
    assert agent.policy.calibration.prior == prior


def test_warm_start_does_not_train_on_the_prefix(tmp_path):
    agent = make_agent(response_prefix="I will")
    with_it, without = ([SYSTEM, *turns("Observation 1", text)] for text in ("I will stay", " stay"))
    one, other = trained_turns(agent, write(tmp_path / "demo.jsonl", with_it, without))
    assert one == other
    context, reply, active_from = one
    assert agent.tokenizer.decode(reply[:-1]) == " stay"
    assert agent.tokenizer.decode(context[active_from + 1 :]) == "I will"


class Started(WordAgent):
    """Starts warm from a file."""


def test_warm_start_happens_when_the_agent_is_made(demos, monkeypatch):
    monkeypatch.setattr(Started, "demonstrations", demos)
    started, plain = make_agent(Started, sft_warm_start=True), make_agent(Started)
    assert loss_of(started, demos) < loss_of(plain, demos)


@pytest.mark.long
def test_no_network_is_needed(demos, monkeypatch):
    def refuse(*args):
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    make_agent().sft_from_jsonl(demos)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "are empty"),
        ("\n\n", "are empty"),
        ('{"messages": [', "line 1 is not a conversation"),
        ('{"conversation": []}', "line 1 is not a conversation .KeyError"),
        ('{"messages": ["hit"]}', "line 1 is not a conversation .TypeError"),
        ('\n{"messages": []}', "line 2 has the roles"),
        ('{"messages": [{"role": "user", "content": "a"}]}', r"line 1 has the roles \['user'\].*'assistant' last"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}',
            "line 1 holds a message without text",
        ),
        (
            json.dumps({"messages": [{"role": "system", "content": "Play."}, *turns("a", "b")]}),
            "opens with the system prompt 'Play.', but the agent's is 'Say something.'",
        ),
    ],
)
def test_bad_demonstrations_are_refused_by_line(tmp_path, content, message):
    path = tmp_path / "demo.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        make_agent().sft_from_jsonl(path)


def test_rejects_invalid_warm_starts(tmp_path):
    agent = make_agent()
    with pytest.raises(ConfigError, match=r"cannot read the demonstrations.*missing\.jsonl"):
        agent.sft_from_jsonl(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="Did you mean 'epochs'"):
        agent.sft_from_jsonl(tmp_path / "missing.jsonl", epoch=2)
    with pytest.raises(ConfigError, match="epochs=0 is too small"):
        agent.sft_from_jsonl(tmp_path / "missing.jsonl", epochs=0)
    with pytest.raises(ConfigError, match="no demonstrations file is set"):
        make_agent(sft_warm_start=True)
    path = write(tmp_path / "long.jsonl", turns("a", "b"), turns("a", "go left " * 2000))
    with pytest.raises(ContextLengthError, match=r"line 2 needs \d+ tokens, more than the model's 2048"):
        agent.sft_from_jsonl(path)
    assert agent.policy.num_updates == 0


@pytest.mark.long
def test_a_quarter_of_the_format_s_demonstrations_teach_it_and_leave_the_choice_open(tmp_path):
    from blackjack import BlackjackAgent
    from blackjack_exact import STATES

    model, tokenizer, device = load_model_and_tokenizer("smollm2-135m", device="cpu", dtype="float32")
    agent = BlackjackAgent(model, tokenizer, device, {"max_new_tokens": 4}, context="turn", seed=0)
    agent.free_text = True
    lines = demonstrations_path("format_blackjack").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "quarter.jsonl").write_text("".join(lines[: len(lines) // 4]), encoding="utf-8")
    stats = agent.sft_from_jsonl(tmp_path / "quarter.jsonl")
    states = STATES[::2]
    agent.act_batch(states)
    conversations = [actor_of(agent).conversation(index) for index in range(len(states))]
    hits = [conversation.messages[-1]["content"].lower() == "hit" for conversation in conversations]
    assert np.mean([conversation.turns[0].valid for conversation in conversations]) > 0.95
    assert 0.35 < np.mean(hits) < 0.65
    # One choice of two words, then a certain end: ln 2 / 2 = 0.35 nats a token.
    assert 0.25 < stats["entropy_after"] < 0.45
    assert stats["loss_after"] < 0.45


@pytest.mark.parametrize("option", ["use_dora", "monteclora_config"])
def test_a_variant_of_lora_is_not_extended_after_a_warm_start(option, demos):
    pytest.importorskip("trl")
    config = check_adapters.lora_config(check_adapters.OPTIONS[option])
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_base_model("llama"), config)
    agent = ChoiceAgent(model, tiny_tokenizer("llama"), seed=0)
    agent.sft_from_jsonl(demos, epochs=1)
    assert not has_frozen_half(model.pretrained_model)
    agent.act("x")
