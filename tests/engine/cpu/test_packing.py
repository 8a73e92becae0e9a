"""Packed weights give the same products and gradients, and leave the model unchanged."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from llamagym.engine.cpu import packing
from llamagym.engine.cpu.packing import PackedWeights
from tests.helpers.agents import ChoiceAgent, WordAgent, make_agent
from tests.helpers.rounding import assert_within_rounding, in_float64, rounding_noise
from tests.helpers.tiny import FAMILIES, tiny_model

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="PyTorch has no FBGEMM here"),
]


# float32 that float16 represents, float32 that it does not, and bfloat16.
ROUNDINGS = {"half": lambda layer: layer.half().float(), "single": lambda layer: layer, "bfloat16": nn.Module.bfloat16}


@pytest.fixture
def products(monkeypatch):
    """The inputs of all products with packed weights so far."""
    inputs, pack = [], packing.pack_weight

    def counted(*given):
        copied = pack(*given)

        def multiply(rows):
            inputs.append(rows)
            return copied.multiply(rows)

        return copied and replace(copied, multiply=multiply)

    monkeypatch.setattr(packing, "pack_weight", counted)
    return inputs


# Enough bytes for all packed weights.
AMPLE = 2**30


def frozen_layer(bias=True, inputs=24, outputs=40, rounding="half"):
    return ROUNDINGS[rounding](nn.Linear(inputs, outputs, bias=bias)).requires_grad_(False)


@pytest.mark.numerical
@pytest.mark.pairwise(shape=[(1, 24), (0, 24), (3, 7, 24)], bias=[True, False], rounding=ROUNDINGS)
def test_packed_products_and_gradients_equal_the_layer_s(bias, shape, rounding, products):
    if rounding == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("no bfloat16 here")
    layer = frozen_layer(bias, rounding=rounding)
    inputs = torch.randn(shape).to(layer.weight)

    def outputs_and_gradient(layer, inputs):
        leaf = inputs.clone().requires_grad_()
        output = layer(leaf)
        output.square().sum().backward()
        with torch.no_grad():
            return output.detach(), layer(inputs.transpose(0, -2)), leaf.grad

    expected = outputs_and_gradient(copy.deepcopy(layer).double(), inputs.double())
    usual = outputs_and_gradient(layer, inputs)
    with PackedWeights(layer, AMPLE):
        received = outputs_and_gradient(layer, inputs)
    assert len(products) == (3 if len(inputs) else 0)
    dtype = layer.weight.dtype
    # Sums over 24 inputs, then over 40 outputs. In bfloat16 a product, its sum with a bias, its double and the gradient
    # are rounded.
    terms = 24 + 40 if dtype == torch.float32 else 4
    for one, other, exact in zip(received, usual, expected, strict=True):
        assert one.dtype == dtype
        assert_within_rounding(one, exact, dtype, terms)
        assert_within_rounding(other, exact, dtype, terms)


def test_bias_beside_a_packed_weight_gets_gradients(products):
    layer, inputs = frozen_layer(), torch.randn(3, 24)
    layer.bias.requires_grad_(True)
    with PackedWeights(layer, AMPLE):
        layer(inputs).sum().backward()
    assert products
    assert torch.equal(layer.bias.grad, torch.full((40,), 3.0))


def test_model_is_unchanged_outside_the_context(products):
    layer = frozen_layer()
    names = set(vars(layer))
    with pytest.raises(RuntimeError), PackedWeights(layer, AMPLE):
        layer(torch.randn(2, 23))
    products.clear()
    layer(torch.randn(2, 24))
    assert not products
    assert set(vars(layer)) == names
    copy.deepcopy(layer)


@pytest.mark.numerical
@pytest.mark.parametrize(
    ("change", "is_packed"),
    [
        (lambda layer: layer.load_state_dict(frozen_layer().state_dict()), True),
        (lambda layer: setattr(layer.weight, "data", torch.randn(40, 24).half().float()), True),
        (lambda layer: setattr(layer.weight, "data", torch.randn(40, 24).bfloat16().float()), True),
        (lambda layer: layer.weight.mul_(1.1), True),
        (lambda layer: layer.weight.mul_(2.0**20), True),
        (lambda layer: layer.requires_grad_(True), False),
        (lambda layer: layer.double(), False),
    ],
    ids=["loaded", "float16", "bfloat16", "float32", "large", "unfrozen", "cast"],
)
def test_changed_weights_are_packed_again(change, is_packed, products):
    layer = frozen_layer()
    packed = PackedWeights(layer, AMPLE)
    with packed:
        layer(torch.randn(3, 24))
    change(layer)
    products.clear()
    with packed:
        inputs = torch.randn(3, 24, dtype=layer.weight.dtype)
        received = layer(inputs)
    exact = copy.deepcopy(layer).double()(inputs.double())
    assert_within_rounding(received.detach(), exact.detach(), received.dtype, 24 + 1)
    assert bool(products) == is_packed


def test_trained_hooked_and_float64_layers_are_not_packed():
    layers = nn.ModuleDict({name: frozen_layer() for name in ("plain", "trained", "hooked", "wide")})
    layers["hooked"].forward = layers["hooked"].forward
    layers["wide"].double()
    layers["trained"].requires_grad_(True)
    with PackedWeights(layers, AMPLE):
        replaced = [name for name, layer in layers.items() if "forward" in vars(layer)]
        hooked = layers["hooked"].forward
    assert replaced == ["plain", "hooked"]
    assert hooked == layers["hooked"].forward


def test_a_forward_set_by_another_library_stays():
    layer = frozen_layer()
    packed = PackedWeights(layer, AMPLE)
    layer.forward = lambda inputs: "before"
    with packed:
        assert layer(None) == "before"
        layer.forward = lambda inputs: "inside"
    assert layer(None) == "inside"


@pytest.mark.parametrize(("room", "is_packed"), [(0, [False, False]), (1, [True, False]), (2, [True, True])])
def test_packed_weights_stay_within_the_budget(room, is_packed, products):
    first, second = frozen_layer(), frozen_layer(inputs=40, outputs=24)
    inputs = torch.randn(3, 24)
    budget = room * first.weight.nbytes // 2
    packed = PackedWeights(nn.Sequential(first, second), budget)
    with packed:
        hidden = first(inputs)
        output = second(hidden)
    assert packed.nbytes == budget
    assert [any(given is fed for given in products) for fed in (inputs, hidden)] == is_packed
    exact = copy.deepcopy(nn.Sequential(first, second)).double()(inputs.double())
    assert_within_rounding(output, exact, torch.float32, 24 + 40 + 2)


@pytest.mark.parametrize("room", [0, 1, 2])
def test_learning_packs_the_transposed_weight_if_there_is_room(room, products):
    layer = frozen_layer()
    leaf = torch.randn(3, 24, requires_grad=True)
    with PackedWeights(layer, room * layer.weight.nbytes // 2):
        layer(leaf).sum().backward()
    assert len(products) == room
    weight = layer.weight.double()
    exact, scale = (rows.sum(0).expand(3, -1) for rows in (weight, weight.abs()))
    assert_within_rounding(leaf.grad, exact, torch.float32, 40, scale)


def test_temporary_packing_drops_only_new_weights(products):
    first, second = frozen_layer(), frozen_layer()
    packed = PackedWeights(nn.ModuleList((first, second)), int(1.5 * first.weight.nbytes // 2))
    inputs = torch.randn(3, 24)
    with packed:
        with packed.temporary():
            first(inputs)
        second(inputs)
        first(inputs)
    # There is room for one packed weight, which the first layer has released.
    assert len(products) == 2
    assert [layers for (layers, _), (_, copied) in packed.weights.items() if copied is not None] == [(second,)]


@pytest.mark.parametrize(("rounding", "share"), [("half", 1 / 2), ("single", 1)])
def test_weights_that_float16_represents_take_half_the_bytes(rounding, share, products):
    layer = frozen_layer(rounding=rounding)
    for room, is_packed in ((share, True), (0.9 * share, False)):
        products.clear()
        with PackedWeights(layer, int(room * layer.weight.nbytes)):
            layer(torch.randn(3, 24))
        assert bool(products) == is_packed


@pytest.mark.parametrize("kind", [WordAgent, ChoiceAgent])
def test_acting_and_learning_pack_each_weight_once_per_direction(kind, monkeypatch):
    agent = make_agent(kind, context="turn")
    # The comparison of the first model of a structure packs weights of its own.
    made, pack = [], packing.pack_weight
    monkeypatch.setattr(packing, "pack_weight", lambda *given: made.append(pack(*given)) or made[-1])
    for name, weight in agent.policy.model.named_parameters():
        if "lora_B" in name or "v_head" in name:
            nn.init.zeros_(weight)
    for observation in ("a", "bb", "ccc", "dddd", "e"):
        agent.act(observation)
        agent.assign_reward(float(len(observation)))
        agent.terminate_episode()
    agent.policy.drop_caches()
    agent.act("x")
    assert agent.policy.num_updates
    assert agent.policy.is_initialized_from_data
    copies = agent.policy.backbone.transformer.acceleration.packed_weights.weights
    copied = [(layer, is_transposed) for layers, is_transposed in copies for layer in layers]
    assert {is_transposed for _, is_transposed in copied} == {True, False}
    assert len(set(copied)) == len(copied)
    # Choices need no product with the whole vocabulary.
    assert (kind is WordAgent) == (agent.policy.backbone.transformer.head in {layer for layer, _ in copied})
    # No weight is packed twice. To aim the adapter, q, k, v, gate and up of its layers multiply one by one, once.
    watched = 5 * len(agent.policy.backbone.transformer.top.layers)
    assert len(made) == len(copies) + watched


@torch.no_grad()
def assert_as_exact(logits, model, ids):
    """Fail if logits are further from those of a float64 copy of the model than rounding explains."""
    exact = in_float64(model)
    allowed = rounding_noise(lambda: exact(ids).logits, exact, torch.float32, terms=64)
    assert (logits - exact(ids).logits).norm() <= allowed


@pytest.mark.numerical
@pytest.mark.pairwise(kind=[WordAgent, ChoiceAgent], family=FAMILIES)
def test_policy_with_packed_weights_equals_the_model(kind, family, products):
    agent = make_agent(kind, family)
    products.clear()
    agent.act("x")
    assert products
    model, ids = agent.policy.model.pretrained_model.get_base_model(), torch.tensor([[1, 2, 3, 4]])
    before = len(products)
    with torch.no_grad(), agent.policy.backbone.transformer.acceleration.packed_weights:
        received = model(ids).logits
    assert len(products) > before
    assert_as_exact(received, model, ids)


@pytest.mark.parametrize("safely", [True, False])
def test_adapter_can_be_merged_and_unmerged(safely, products):
    model = tiny_model("llama", activated=False).pretrained_model
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    packed, ids = PackedWeights(model, AMPLE), torch.tensor([[1, 2, 3, 4]])

    @torch.no_grad()
    def check():
        products.clear()
        with packed:
            received = model(ids).logits
        assert_as_exact(received, model, ids)
        return len(products)

    beside = check()
    model.merge_adapter(safe_merge=safely)
    assert check() == beside
    model.unmerge_adapter()
    check()
    model.merge_and_unload(safe_merge=safely)
    check()
