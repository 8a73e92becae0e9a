"""The doctor passes working models, and names the checks that fail."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from llamagym import Agent
from llamagym.agent import probes
from llamagym.agent.agent import collector_of
from llamagym.agent.preflight import preflight
from llamagym.cli.doctor import examine
from llamagym.models import torch_internals
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, make_agent
from tests.helpers.tiny import FAMILIES, tiny_base_model, tiny_tokenizer


@pytest.mark.long
def test_the_embedded_model_passes_all_checks():
    result = subprocess.run([sys.executable, "-m", "llamagym", "doctor"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAIL" not in result.stdout
    # On a machine that has other work to do, less is looked at in half a minute.
    was_skipped = "no time left" in result.stdout
    assert result.stdout.endswith("All checks passed.\n") or was_skipped
    assert len(re.findall(r"turns/s acting, [0-9.]+ in a pass of learning", result.stdout)) == 2 or was_skipped


@pytest.mark.pairwise(context=["turn", "episode"], family=FAMILIES)
def test_tiny_models_of_every_family_pass_all_checks(family, context):
    agent = make_agent(ChoiceAgent, family, context=context)
    for observations in ((), [1, 2, 3]):
        report = agent.preflight(observations)
        assert report.passed, str(report)


def test_a_preflight_leaves_no_trace():
    agent, other = make_agent(ChoiceAgent), make_agent(ChoiceAgent)
    agent.act(1)
    other.act(1)
    before = str(collector_of(agent).state_dict())
    agent.preflight([1, 2])
    assert str(collector_of(agent).state_dict()) == before
    agent.assign_reward(1.0)
    other.assign_reward(1.0)
    assert agent.act(2) == other.act(2)


class SlowEmbedding(torch.nn.Embedding):
    """Takes its time."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return super().forward(ids)


@pytest.mark.long
@pytest.mark.parametrize("seconds", [3.0, 0.0])
def test_checks_of_a_slow_model_keep_the_time_limit(seconds):
    agent = make_agent(WordAgent, generate={"max_new_tokens": 300})
    agent.policy.model.pretrained_model.get_input_embeddings().__class__ = SlowEmbedding
    report = preflight(actor_of(agent), agent.learner, [1, 2], seconds)
    assert report.passed, str(report)
    found = {check.name: check.finding for check in report.checks}
    assert ("no time left" in found["one = many"]) == ("one = many" in report.skipped) == (not seconds)
    assert ("--   one = many" in str(report)) == (not seconds)
    # 300 tokens, three times over, would take 45 seconds.
    if said := re.search(r"replies of (\d+) tokens", found["speed"]):
        assert int(said[1]) <= 20
    assert agent.policy.generation.max_new_tokens == 300


@pytest.mark.parametrize(("kind", "name"), [(WordAgent, "free text"), (ChoiceAgent, "choices")])
def test_speed_is_that_of_acting_and_of_learning_in_the_agents_way(kind, name):
    agent = make_agent(kind, ppo={"ppo_epochs": 3})
    found = {check.name: check.finding for check in agent.preflight([1, 2]).checks}["speed"]
    assert found.startswith(f"{name}, new observations: ")
    acting, learning, both = map(float, re.findall(r"([0-9.]+) (?:turns/s acting|in a pass|with up to 3)", found))
    assert 1 / both == pytest.approx(1 / acting + 3 / learning, rel=0.1)
    assert ("choices" in found) == (kind is ChoiceAgent)


class Forgetful(ChoiceAgent):
    """Does not know one of its choices."""

    def extract_action(self, response: str) -> int:
        return ("go left", "stay").index(response)


class Confused(ChoiceAgent):
    """Formats no observation."""

    def format_observation(self, observation: Any) -> str:
        raise KeyError("hands")


class NoisyEmbedding(torch.nn.Embedding):
    """Draws random numbers whenever it is called."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = super().forward(ids)
        return out + out.std() * torch.randn_like(out)


def edited_unseen(monkeypatch: pytest.MonkeyPatch) -> Agent:
    agent = make_agent(ChoiceAgent)
    agent.act(1)
    agent.policy.model.pretrained_model.get_base_model().model.layers[0].mlp.down_proj.weight.data.mul_(3.0)
    return agent


def drawing(monkeypatch: pytest.MonkeyPatch) -> Agent:
    agent = make_agent(WordAgent)
    agent.policy.model.pretrained_model.get_input_embeddings().__class__ = NoisyEmbedding
    return agent


class CrowdedEmbedding(torch.nn.Embedding):
    """Depends on how many sequences there are."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = super().forward(ids)
        return out.roll(ids.shape[0], dims=-1)


def crowd_dependent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    agent = make_agent(WordAgent)
    agent.policy.model.pretrained_model.get_input_embeddings().__class__ = CrowdedEmbedding
    return agent


def foreign(monkeypatch: pytest.MonkeyPatch) -> Agent:
    """A trained model's English costs more than chance by another tokenizer."""
    agent = make_agent(WordAgent)
    with torch.no_grad():
        agent.policy.model.pretrained_model.get_base_model().lm_head.weight.mul_(300.0)
    return agent


def endless(monkeypatch: pytest.MonkeyPatch) -> Agent:
    agent = make_agent(WordAgent, "smollm")
    agent.policy.model.pretrained_model.generation_config.eos_token_id = None
    agent.tokenizer.eos_token = "<|im_start|>"
    return agent


def lossy(monkeypatch: pytest.MonkeyPatch) -> Agent:
    from tokenizers import normalizers

    agent = make_agent(WordAgent)
    agent.tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return agent


def infinite(monkeypatch: pytest.MonkeyPatch) -> Agent:
    agent = make_agent(WordAgent)
    with torch.no_grad():
        agent.policy.model.pretrained_model.get_base_model().lm_head.weight[0] = torch.nan
    return agent


def crowded(monkeypatch: pytest.MonkeyPatch) -> Agent:
    monkeypatch.setattr(probes, "container_limit", lambda: 1000.0)
    return make_agent(WordAgent)


def heaped(monkeypatch: pytest.MonkeyPatch) -> Agent:
    """A forward and backward pass of a billion tokens."""
    return make_agent(WordAgent, ppo={"max_tokens_per_pass": 10**9})


def changed(monkeypatch: pytest.MonkeyPatch) -> Agent:
    monkeypatch.setitem(vars(torch_internals.VERSION_COUNTERS), "works", False)
    return make_agent(WordAgent)


BROKEN = {
    "weights edited unseen": (edited_unseen, "caches", "agent.policy.weights_changed"),
    "a layer that draws": (drawing, "ratio", "random numbers"),
    "a layer that depends on the batch": (crowd_dependent, "one = many", "depend on the batch"),
    "another tokenizer": (foreign, "language", "another model's"),
    "no end": (endless, "reply's end", "would run on"),
    "a tokenizer that changes texts": (lossy, "tokenizer", "normalizer"),
    "weights that are not finite": (infinite, "language", "not finite"),
    "no memory": (crowded, "memory", "load a smaller model"),
    "too much at once": (heaped, "memory", "Lower max_tokens_per_pass"),
    "a private API that has changed": (changed, "versions", "Tensor._version"),
    "a choice that names no action": (lambda _: make_agent(Forgetful), "actions", "'go right'"),
    "a method that fails": (lambda _: make_agent(Confused), "replies", "KeyError"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_names_the_failed_check(what, monkeypatch):
    broken, name, advice = BROKEN[what]
    report = broken(monkeypatch).preflight([1, 2])
    found = {check.name: check for check in report.checks}[name]
    assert not found.passed
    assert advice in found.finding
    assert name in report.failing
    assert not report.passed
    assert f"FAIL {name}" in str(report)


def test_a_template_that_cannot_be_appended_to_is_named(tmp_path):
    tokenizer = tiny_tokenizer("smollm")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ loop.index0 }}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    tiny_base_model("smollm").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    report = examine(str(tmp_path), "cpu", "float32")
    assert report.failing == ["template"]
    assert "append" in str(report)


def test_a_model_that_cannot_be_loaded_is_named(tmp_path):
    report = examine(str(tmp_path / "nothing" / "here"))
    assert report.failing == ["model"]


@pytest.mark.long
def test_a_failed_check_sets_the_exit_status(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-m", "llamagym", "doctor", "--model", str(tmp_path), "--device", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert result.stdout.startswith("FAIL model")
    assert result.stdout.endswith("Failed: model.\n")
