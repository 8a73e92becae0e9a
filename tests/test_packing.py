"""Packed copies of frozen weights: the same products and gradients, and a model that stays as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional

from llamagym import packing
from llamagym.packing import Packed
from tests.agents import make_agent
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


def test_outside_the_context_the_model_is_as_it_was(products):
    layer = frozen_layer()
    names, packed = set(vars(layer)), Packed(layer)
    with pytest.raises(RuntimeError), packed:
        layer(torch.randn(2, 23))
    layer(torch.randn(2, 24))
    assert len(products) == 1
    assert set(vars(layer)) == names
    copy.deepcopy(layer)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.load_state_dict(frozen_layer().state_dict()),
        lambda layer: setattr(layer.weight, "data", torch.randn(40, 24)),
        lambda layer: layer.requires_grad_(True),
        lambda layer: layer.double(),
    ],
    ids=["loaded", "replaced", "unfrozen", "cast"],
)
def test_a_copy_of_what_has_changed_is_not_used(change, products):
    layer = frozen_layer()
    packed = Packed(layer)
    change(layer)
    inputs = torch.randn(3, 24, dtype=layer.weight.dtype)
    with packed:
        received = layer(inputs)
    assert torch.equal(received, functional.linear(inputs, layer.weight, layer.bias))
    assert not products


def test_what_is_trained_adapted_hooked_or_not_in_float32_is_left_alone():
    layers = nn.ModuleDict({name: frozen_layer() for name in ("plain", "trained", "adapted", "hooked", "narrow")})
    layers["hooked"].forward = layers["hooked"].forward
    layers["narrow"].bfloat16()
    model = get_peft_model(layers, LoraConfig(target_modules=["adapted"]))
    layers["trained"].requires_grad_(True)
    assert [layer for layer, _ in Packed(model)._forwards] == [layers["plain"]]


def test_copies_take_a_share_of_the_memory_the_largest_first(monkeypatch):
    small, large = frozen_layer(), nn.Linear(24, 400).requires_grad_(False)
    monkeypatch.setattr(packing, "memory_bytes", lambda device: 16 * large.weight.nbytes)
    assert [layer for layer, _ in Packed(nn.Sequential(small, large))._forwards] == [large]
    monkeypatch.setattr(packing, "memory_bytes", lambda device: 0)
    assert not Packed(nn.Sequential(small, large))._forwards


@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_multiplies_by_copies_and_says_what_the_model_says(family, products):
    agent = make_agent(family=family)
    agent.act("x")
    assert products
    model, ids = agent.policy.model.pretrained_model.get_base_model(), torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        expected, before = model(ids).logits, len(products)
        with agent.policy._backbone._packed:
            assert torch.allclose(model(ids).logits, expected, atol=1e-4)
    assert len(products) > before


def test_an_adapter_can_be_merged_after_copies_were_made():
    model = tiny_model("llama", activated=False).pretrained_model
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    packed, ids = Packed(model), torch.tensor([[1, 2, 3, 4]])
    merged = model.merge_and_unload()
    with torch.no_grad():
        expected = merged(ids).logits
        with packed:
            assert torch.allclose(merged(ids).logits, expected, atol=1e-4)
