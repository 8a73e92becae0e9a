"""Packed copies of frozen weights: the same products and gradients, and a model that stays as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from llamagym import packing
from llamagym.packing import Packed
from tests.agents import ChoiceAgent, make_agent
from tests.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN here")


@pytest.fixture
def products(monkeypatch):
    """The inputs of all products with packed copies so far."""
    inputs, product = [], packing._product

    def counted(given, *others):
        inputs.append(given)
        return product(given, *others)

    monkeypatch.setattr(packing, "_product", counted)
    return inputs


def frozen_layer(bias=True):
    return nn.Linear(24, 40, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 24), (0, 24), (3, 7, 24)])
def test_products_and_gradients_are_the_layer_s(bias, shape, products):
    layer, inputs = frozen_layer(bias), torch.randn(shape)

    def outputs_and_gradient():
        leaf = inputs.clone().requires_grad_()
        output = layer(leaf)
        output.square().sum().backward()
        with torch.no_grad():
            return output, layer(inputs.transpose(0, -2)), leaf.grad

    expected = outputs_and_gradient()
    with Packed(layer):
        received = outputs_and_gradient()
    assert len(products) == 2
    for one, other in zip(received, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_bias_learns_beside_a_frozen_weight(products):
    layer, inputs = frozen_layer(), torch.randn(3, 24)
    layer.bias.requires_grad_(True)
    with Packed(layer):
        layer(inputs).sum().backward()
    assert products
    assert torch.equal(layer.bias.grad, torch.full((40,), 3.0))


def test_outside_the_context_the_model_is_as_it_was(products):
    layer = frozen_layer()
    names = set(vars(layer))
    with pytest.raises(RuntimeError), Packed(layer):
        layer(torch.randn(2, 23))
    products.clear()
    layer(torch.randn(2, 24))
    assert not products
    assert set(vars(layer)) == names
    copy.deepcopy(layer)


@pytest.mark.parametrize(
    ("change", "is_packed"),
    [
        (lambda layer: layer.load_state_dict(frozen_layer().state_dict()), True),
        (lambda layer: setattr(layer.weight, "data", torch.randn(40, 24)), True),
        (lambda layer: layer.requires_grad_(True), False),
        (lambda layer: layer.double(), False),
    ],
    ids=["loaded", "replaced", "unfrozen", "cast"],
)
def test_a_copy_follows_its_weight(change, is_packed, products):
    layer = frozen_layer()
    with Packed(layer):
        layer(torch.randn(3, 24))
        change(layer)
        products.clear()
        inputs = torch.randn(3, 24, dtype=layer.weight.dtype)
        received = layer(inputs)
    assert torch.allclose(received, layer(inputs), atol=1e-5)
    assert bool(products) == is_packed


def test_what_is_trained_adapted_hooked_or_not_in_float32_is_left_alone():
    layers = nn.ModuleDict({name: frozen_layer() for name in ("plain", "trained", "adapted", "hooked", "narrow")})
    layers["hooked"].forward = layers["hooked"].forward
    layers["narrow"].bfloat16()
    model = get_peft_model(layers, LoraConfig(target_modules=["adapted"]))
    layers["trained"].requires_grad_(True)
    with Packed(model):
        replaced = [name for name, layer in layers.items() if "forward" in vars(layer)]
        hooked = layers["hooked"].forward
    assert replaced == ["plain", "hooked"]
    assert hooked == layers["hooked"].forward


@pytest.mark.parametrize(("room", "is_packed"), [(0, [False, False]), (1, [True, False]), (2, [True, True])])
def test_copies_take_a_share_of_the_memory(room, is_packed, products, monkeypatch):
    first, second = frozen_layer(), nn.Linear(40, 24).requires_grad_(False)
    monkeypatch.setattr(packing, "memory_bytes", lambda device: 16 * room * first.weight.nbytes)
    inputs = torch.randn(3, 24)
    with Packed(nn.Sequential(first, second)):
        hidden = first(inputs)
        output = second(hidden)
    assert [any(given is fed for given in products) for fed in (inputs, hidden)] == is_packed
    assert torch.allclose(output, second(first(inputs)), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_that_writes_multiplies_by_copies_and_says_what_the_model_says(family, products):
    agent = make_agent(family=family)
    agent.act("x")
    assert products
    model, ids = agent.policy.model.pretrained_model.get_base_model(), torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        expected, before = model(ids).logits, len(products)
        with agent.policy._backbone._packed:
            assert torch.allclose(model(ids).logits, expected, atol=1e-4)
    assert len(products) > before


def test_choices_take_no_memory_for_copies(products):
    agent = make_agent(ChoiceAgent)
    agent.act("x")
    agent.assign_reward(1.0)
    agent.terminate_episode()
    assert not products


def test_an_adapter_can_be_merged_after_copies_were_made():
    model = tiny_model("llama", activated=False).pretrained_model
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    packed, ids = Packed(model), torch.tensor([[1, 2, 3, 4]])
    with packed, torch.no_grad():
        model(ids)
    merged = model.merge_and_unload()
    with torch.no_grad():
        expected = merged(ids).logits
        with packed:
            assert torch.allclose(merged(ids).logits, expected, atol=1e-4)
