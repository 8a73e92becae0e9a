"""Fused layers compute what the model's own modules compute, and leave to these what they cannot."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from torch import nn

from llamagym.engine import attention, verification
from llamagym.engine.cpu import fused_layer, rowwise
from llamagym.engine.kv_cache import KVBuffer, entries_of
from llamagym.engine.masks import Tokens, causal
from llamagym.engine.verification import verified_transformer
from llamagym.models.peft_internals import acting_on_every_token, layers_with_variants
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, make_agent
from tests.helpers.rounding import in_float64, rounding_noise
from tests.helpers.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.kernels

FUSED = {"llama", "smollm", "qwen2", "qwen3"}
# Terms of the longest sum in a dtype, the feed-forward block's; sums of bfloat16 numbers run in float32.
TERMS = {torch.float32: 64, torch.bfloat16: 1}


@pytest.fixture
def runs(monkeypatch):
    """The layers that have run fused so far."""
    layers, run = [], fused_layer.FusedLayer.run

    def counted(fused, *given, **more):
        layers.append(fused.layer)
        return run(fused, *given, **more)

    monkeypatch.setattr(fused_layer.FusedLayer, "run", counted)
    return layers


def model_of(family, activated=True, dtype=torch.float32):
    """A model whose adapter is not zero."""
    model = tiny_model(family, activated=activated).to(dtype)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.2)
    return model


def transformer_of(family, activated=True, dtype=torch.float32):
    return verified_transformer(model_of(family, activated, dtype))


def states_of(transformer, is_shared, dtype=None):
    """Hidden states and cache entries of two rows of three tokens after a shared prefix."""
    prefix = torch.randn(
        len(transformer.no_entries), transformer.no_entries.shape[1], 4, transformer.no_entries.shape[3]
    )
    prefix = prefix.to(dtype).to(transformer.no_entries)
    cache = KVBuffer(prefix, 2, 7, is_shared).cache(slice(None), 4)
    positions = torch.arange(4, 7).expand(2, -1)
    visible = causal(4, 3).expand(2, -1, -1).clone()
    visible[1, :, 1] = False
    with acting_on_every_token(layers_with_variants(transformer.body)):
        ids, keys = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.arange(7).expand(2, -1)
        hidden = transformer.run(transformer.body, Tokens(ids, positions, visible, keys), cache)
    return hidden, entries_of(cache, slice(-3, None))


def flat(parts):
    return torch.cat([part.double().flatten() for part in parts])


def exact_and_allowed(model, compute, dtype):
    """The result of `compute` for a float64 copy of the model, and the error that `dtype` allows."""
    exact = verified_transformer(in_float64(model))
    return compute(exact), rounding_noise(lambda: compute(exact), exact.lm, dtype, TERMS[dtype])


@torch.no_grad()
@pytest.mark.numerical
@pytest.mark.pairwise(family=FAMILIES, activated=[True, False], is_shared=[True, False], dtype=list(TERMS))
def test_fused_layers_equal_unfused_ones(family, activated, is_shared, dtype, runs):
    model = model_of(family, activated, dtype)
    transformer = verified_transformer(model)

    def states(of):
        torch.manual_seed(1)
        return flat(states_of(of, is_shared, dtype))

    runs.clear()
    fused = states(transformer)
    assert len(runs) == (len(transformer.body.layers) if family in FUSED else 0)
    runs.clear()
    transformer.unfuse()
    usual = states(transformer)
    assert not runs
    expected, allowed = exact_and_allowed(model, states, dtype)
    assert (fused - expected).norm() <= allowed
    assert (usual - expected).norm() <= allowed


@pytest.mark.parametrize("kind", [WordAgent, ChoiceAgent])
def test_acting_and_frozen_layers_in_learning_run_fused(kind, runs):
    agent = make_agent(kind)
    transformer = agent.policy.backbone.transformer
    layers = list(transformer.body.layers)
    runs.clear()
    agent.act_batch(["a", "bb", "ccc"])
    agent.assign_rewards([0.0] * 3)
    assert set(runs) == set(layers)
    runs.clear()
    agent.policy.backbone.prefix_cache.clear()
    agent.policy.evaluate([actor_of(agent).conversation(index).current_segment() for index in range(3)])
    assert set(layers[: transformer.first_top_layer]) <= set(runs)


@torch.no_grad()
@pytest.mark.parametrize("family", sorted(FUSED))
def test_layers_with_hooks_run_unfused(family, runs):
    transformer = transformer_of(family)
    called = []
    attention = transformer.body.layers[0].self_attn
    for module in (attention, attention.q_proj, transformer.body.layers[1].mlp.act_fn):
        module.register_forward_hook(lambda module, *_: called.append(module))
    runs.clear()
    states_of(transformer, True)
    assert len(called) == 3
    assert set(runs) == set(transformer.body.layers[2:])


@torch.no_grad()
@pytest.mark.parametrize("dtype", list(TERMS))
def test_output_hooks_of_transformers_do_not_unfuse_layers(dtype, runs):
    """Returning hidden states leaves hooks on all layers, which do nothing in passes that return none."""
    model = model_of("llama", dtype=dtype)
    transformer = verified_transformer(model)
    torch.manual_seed(1)
    before = flat(states_of(transformer, True, dtype))
    model(torch.tensor([[1, 2, 3]]))
    model.pretrained_model(input_ids=torch.tensor([[1, 2, 3]]), output_attentions=True)
    assert any(module._forward_hooks for module in model.modules())
    for each in (transformer, verified_transformer(model)):
        runs.clear()
        torch.manual_seed(1)
        assert torch.equal(flat(states_of(each, True, dtype)), before)
        assert set(runs) == set(transformer.body.layers)


@torch.no_grad()
def test_layers_with_replaced_forward_run_unfused(runs):
    model = tiny_model("llama")
    layers = model.pretrained_model.get_base_model().model.layers
    norm = layers[0].input_layernorm
    norm.forward = lambda states, usual=norm.forward: 2 * usual(states)
    transformer = verified_transformer(model)
    replaced = layers[1].forward
    layers[1].forward = lambda *given, **more: replaced(*given, **more)
    kept = layers[1].forward
    runs.clear()
    states_of(transformer, True)
    assert set(runs) == set(layers[2:])
    assert layers[1].forward is kept
    assert all("forward" not in vars(layer) for layer in layers[2:])


def gradients_of(transformer, is_shared, dtype):
    """Gradients of all trained weights, of a sum over the hidden states of two rows."""
    torch.manual_seed(1)
    trained = [weight for weight in transformer.body.parameters() if weight.requires_grad]
    with torch.enable_grad():
        hidden, _ = states_of(transformer, is_shared, dtype)
        return flat(torch.autograd.grad(hidden.double().pow(3).sum(), trained))


@pytest.mark.numerical
@pytest.mark.pairwise(family=sorted(FUSED), is_shared=[True, False], dtype=list(TERMS))
def test_fused_gradients_equal_unfused_ones(family, is_shared, dtype, runs):
    model = model_of(family, dtype=dtype)
    transformer = verified_transformer(model)
    runs.clear()
    fused = gradients_of(transformer, is_shared, dtype)
    assert len(runs) == len(transformer.body.layers)
    runs.clear()
    transformer.unfuse()
    usual = gradients_of(transformer, is_shared, dtype)
    assert not runs
    expected, allowed = exact_and_allowed(model, lambda of: gradients_of(of, is_shared, dtype), dtype)
    assert (fused - expected).norm() <= allowed
    assert (usual - expected).norm() <= allowed


@pytest.mark.numerical
def test_too_many_scores_are_not_stored(monkeypatch):
    model, dtype = model_of("llama"), torch.float32
    transformer = verified_transformer(model)
    held = []
    attend = fused_layer.attend_with_gradients
    monkeypatch.setattr(fused_layer, "attend_with_gradients", lambda *given: held.append(1) or attend(*given))
    expected, allowed = exact_and_allowed(model, lambda of: gradients_of(of, True, dtype), dtype)
    assert not held
    assert (gradients_of(transformer, True, dtype) - expected).norm() <= allowed
    assert len(held) == len(transformer.body.layers)
    monkeypatch.setattr(attention, "MAX_SCORES", 0)
    assert (gradients_of(transformer, True, dtype) - expected).norm() <= allowed
    assert len(held) == len(transformer.body.layers)


def test_layers_with_trained_norms_run_unfused(runs):
    transformer = transformer_of("llama")
    layers = list(transformer.body.layers)
    layers[0].input_layernorm.weight.requires_grad_()
    runs.clear()
    states_of(transformer, True)[0].sum().backward()
    assert set(runs) == set(layers[1:])
    assert layers[0].input_layernorm.weight.grad.any()


@torch.no_grad()
def test_autocast_runs_unfused(runs):
    transformer = transformer_of("llama")
    runs.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states_of(transformer, True)
    assert not runs


def test_ready_can_be_nested_and_restores_the_model():
    transformer = transformer_of("llama")
    layers = list(transformer.body.layers)

    def open_it():
        with transformer.ready():
            with transformer.ready():
                transformer.logits(torch.zeros(1, transformer.head.in_features))
            assert all("forward" in vars(layer) for layer in layers)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_it()
    assert not any("forward" in vars(module) for module in transformer.lm.modules())


def test_no_weight_is_packed_twice():
    agent = make_agent(WordAgent)
    for _ in range(2):
        agent.act_batch(["a", "bb"])
        agent.assign_rewards([1.0, 0.0])
        agent.terminate_episodes([0, 1])
    copies = agent.policy.backbone.transformer.acceleration.packed_weights.weights
    for is_transposed in (False, True):
        copied = [layer for layers, of_transposed in copies if of_transposed == is_transposed for layer in layers]
        assert len(copied) == len(set(copied)) > 0


@pytest.mark.parametrize("fault", ["wrong", "failing"])
def test_wrong_fused_layers_are_disabled(fault, monkeypatch, runs):
    def gated(gate, up):
        if fault == "failing":
            raise TypeError("no such argument")
        return rowwise.gated(up, gate)

    monkeypatch.setattr(fused_layer, "gated", gated)
    monkeypatch.setattr(verification, "FINDINGS", {})
    agent = make_agent(WordAgent)
    runs.clear()
    agent.act_batch(["a", "bb"])
    assert not runs
    assert agent.policy.backbone.transformer.can_share


@torch.no_grad()
@pytest.mark.parametrize("change", ["merged", "off", "two", "dropout"])
def test_adapters_beyond_plain_lora_run_in_peft(change):
    transformer = transformer_of("llama", activated=False)
    model = transformer.lm
    peft_layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert peft_layers
    for layer in peft_layers:
        if change == "merged":
            layer.merge()
        elif change == "off":
            layer.enable_adapters(False)
        elif change == "dropout":
            layer.lora_dropout["default"] = nn.Dropout(0.5)
        else:
            layer.update_layer("other", 2, 4, config=LoraConfig(r=2, lora_alpha=4))
            layer.set_adapter(["default", "other"])
            nn.init.normal_(layer.lora_B["other"].weight)
    torch.manual_seed(1)
    received, _ = states_of(transformer, True)
    transformer.unfuse()
    torch.manual_seed(1)
    expected, _ = states_of(transformer, True)
    assert torch.allclose(received, expected, atol=1e-4)
