"""Models of the same structure are compared with their own forward pass once."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from llamagym.engine import verification
from llamagym.engine.verification import structure_of
from tests.helpers.agents import ChoiceAgent, make_agent
from tests.helpers.tiny import tiny_base_model, tiny_model


def model() -> Any:
    """The language model inside a tiny one with an adapter."""
    return tiny_model("llama").pretrained_model.get_base_model()


def test_models_that_differ_in_weights_only_are_compared_once(monkeypatch):
    monkeypatch.setattr(verification, "FINDINGS", {})
    checks, compare = [], verification.compare
    monkeypatch.setattr(verification, "compare", lambda checked: checks.append(checked) or compare(checked))
    agents = [make_agent(ChoiceAgent) for _ in range(2)]
    assert len(checks) == 1
    one, other = (agent.policy.backbone.transformer for agent in agents)
    assert one.first_top_layer == other.first_top_layer > 0
    assert one.can_share == other.can_share
    make_agent(ChoiceAgent, "qwen3")
    make_agent(ChoiceAgent, activated=False)
    make_agent(ChoiceAgent, dtype=torch.bfloat16)
    assert len(checks) == 4


def test_number_of_findings_is_limited(monkeypatch):
    monkeypatch.setattr(verification, "FINDINGS", {})
    monkeypatch.setattr(verification, "MAX_FINDINGS", 2)
    for family in ("llama", "qwen3", "gemma"):
        make_agent(ChoiceAgent, family)
    assert len(verification.FINDINGS) == 2


def eager(lm: Any) -> None:
    lm.set_attn_implementation("eager")


def wider_window(lm: Any) -> None:
    lm.config.sliding_window = 3


def other_class(lm: Any) -> None:
    class Doubled(nn.Embedding):
        pass

    lm.get_input_embeddings().__class__ = Doubled


def other_number(lm: Any) -> None:
    lm.model.norm.variance_epsilon *= 2


def rescaled(lm: Any) -> None:
    lm.model.layers[-1].self_attn.o_proj.scaling["default"] *= 2


def trained(lm: Any) -> None:
    lm.lm_head.weight.requires_grad_(True)


def other_threads(lm: Any) -> None:
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def one_thread():
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("change", [eager, wider_window, other_class, other_number, rescaled, trained, other_threads])
def test_structure_depends_on_everything_that_is_computed(change: Callable[[Any], None]):
    one, other = model(), model()
    assert structure_of(one) == structure_of(other)
    before = structure_of(one)
    change(one)
    assert structure_of(one) != before


def test_structure_does_not_depend_on_weights():
    assert structure_of(tiny_base_model("llama", seed=0)) == structure_of(tiny_base_model("llama", seed=1))


def test_hooks_and_replaced_forward_have_no_structure():
    hooked, replaced = model(), model()
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    layer = replaced.model.layers[0]
    layer.forward = MethodType(type(layer).forward, layer)
    assert structure_of(hooked) is None
    assert structure_of(replaced) is None
