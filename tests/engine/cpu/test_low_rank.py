"""LoRA as one function gives PEFT's outputs and gradients, and is not used beyond plain LoRA."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.variants import ALoraLinearVariant
from torch import nn

from llamagym.engine.cpu import low_rank
from llamagym.engine.cpu.low_rank import add_low_rank
from llamagym.models.peft_internals import low_rank_of
from tests.helpers.rounding import assert_within_rounding

# Successive sums over 24 inputs, 21 rows and 40 outputs; in bfloat16 products, sums and results are rounded.
TERMS = {torch.float32: 24 + 21 + 40, torch.bfloat16: 8}


def adapted_model(dtype=torch.float32, bias=False):
    """A model of one linear layer, 24 to 40, with a LoRA that is not zero, and this layer."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(24, 40, bias=bias)).to(dtype)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules=["0"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    return model.eval(), model.base_model.model[0]


@pytest.mark.numerical
@pytest.mark.parametrize("dtype", TERMS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 24), (0, 24), (3, 7, 24)])
def test_lora_outputs_and_gradients_equal_peft_s(shape, bias, dtype):
    model, layer = adapted_model(dtype, bias)
    inputs = torch.randn(shape, dtype=dtype)
    trained = [weight for weight in model.parameters() if weight.requires_grad]

    def outputs_and_gradients(forward, inputs, trained):
        leaf = inputs.clone().requires_grad_()
        output = forward(leaf)
        return [output, *torch.autograd.grad(output.double().square().sum(), [leaf, *trained])]

    received = outputs_and_gradients(
        lambda leaf: add_low_rank(layer.base_layer(leaf), leaf, low_rank_of(layer)), inputs, trained
    )
    usual = outputs_and_gradients(model, inputs, trained)
    exact = copy.deepcopy(model).double()
    exactly_trained = [weight for weight in exact.parameters() if weight.requires_grad]
    expected = outputs_and_gradients(exact, inputs.double(), exactly_trained)
    for ours, theirs, wanted in zip(received, usual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        for result in (ours, theirs):
            assert_within_rounding(result.detach(), wanted.detach(), dtype, TERMS[dtype])


@pytest.mark.numerical
@pytest.mark.parametrize("dtype", TERMS)
@pytest.mark.parametrize("rows", [1, 3, 31, 32])
def test_few_rows_without_gradients_equal_peft_s(rows, dtype, monkeypatch):
    runs = []
    kernel = low_rank._add_low_rank
    monkeypatch.setattr(low_rank, "_add_low_rank", lambda *args: runs.append(args) or kernel(*args))
    model, layer = adapted_model(dtype)
    inputs = torch.randn(1, rows, 24, dtype=dtype)
    # A part of a joined product, whose rows are further apart than their width.
    product = torch.cat([layer.base_layer(inputs), inputs], dim=-1)[..., :40]
    with torch.no_grad():
        received = add_low_rank(product, inputs, low_rank_of(layer))
    exact = copy.deepcopy(model).double()(inputs.double())
    assert len(runs) == (rows < 32)
    assert received.dtype == dtype
    assert_within_rounding(received, exact, dtype, TERMS[dtype])


def test_weights_of_any_strides_are_read_right():
    model, layer = adapted_model()
    inputs = torch.randn(1, 2, 24)
    with torch.no_grad():
        expected = model(inputs)
        for matrices in (layer.lora_A, layer.lora_B):
            weight = matrices["default"].weight
            weight.data = weight.data.T.contiguous().T
        received = add_low_rank(layer.base_layer(inputs), inputs, low_rank_of(layer))
    assert received == pytest.approx(expected, abs=1e-5)


def test_lora_gets_gradients_when_inputs_need_none():
    model, layer = adapted_model()
    inputs = torch.randn(3, 24)
    add_low_rank(layer.base_layer(inputs), inputs, low_rank_of(layer)).sum().backward()
    assert all(weight.grad.any() for weight in model.parameters() if weight.requires_grad)


def test_disabled_and_unactivated_lora_add_nothing():
    inputs = torch.randn(1, 3, 24)
    plain, layer = adapted_model()
    plain.base_model.disable_adapter_layers()
    # An activated LoRA without an invocation.
    _, other = adapted_model()
    other.lora_variant["default"] = ALoraLinearVariant()
    for each in (layer, other):
        assert each(inputs).equal(each.base_layer(inputs))
        assert low_rank_of(each) == ()
    assert low_rank_of(nn.Linear(2, 2)) == ()


def merged(model, layer):
    model.merge_adapter()


def with_dropout(model, layer):
    layer.lora_dropout["default"] = nn.Dropout(0.5).train()


def with_two_adapters(model, layer):
    model.add_adapter("other", LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])


def with_another_variant(model, layer):
    layer.lora_variant["default"] = object()


def with_bias(model, layer):
    layer.lora_bias["default"] = True


@pytest.mark.parametrize("change", [merged, with_dropout, with_two_adapters, with_another_variant, with_bias])
def test_low_rank_of_is_none_beyond_plain_lora(change):
    model, layer = adapted_model()
    assert low_rank_of(layer)
    change(model, layer)
    assert low_rank_of(layer) is None
