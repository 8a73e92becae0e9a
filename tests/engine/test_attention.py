"""Attention to a shared prefix equals attention to a copy in each row, in every family, in acting and learning."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llamagym.engine import attention, transformer, verification
from llamagym.engine.cpu import fused_layer
from llamagym.engine.kv_cache import KVBuffer
from llamagym.engine.verification import verified_transformer
from llamagym.models.transformers_internals import attention_name
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, make_agent
from tests.helpers.rounding import LOGPROB_TOLERANCE, assert_within_rounding
from tests.helpers.tiny import FAMILIES, tiny_model

# Usually the first model registers it; these tests replace the registered function before they load one.
attention.register()


@pytest.fixture
def passes(monkeypatch):
    """Number of queries to a shared prefix, by layer and pass, except those of fused layers in acting."""
    rows, fused = [], fused_layer.attend_with_gradients
    attend = ALL_ATTENTION_FUNCTIONS[attention.SHARED_PREFIX_ATTENTION]

    def counted_fused(query, key, value, angles, cached, shared, *others):
        if shared is not None:
            rows.append(query.shape[0] * query.shape[1])
        return fused(query, key, value, angles, cached, shared, *others)

    monkeypatch.setattr(fused_layer, "attend_with_gradients", counted_fused)

    def counted(module, query, *others, **more):
        rows.append(query.shape[0] * query.shape[2])
        return attend(module, query, *others, **more)

    ALL_ATTENTION_FUNCTIONS.register(attention.SHARED_PREFIX_ATTENTION, counted)
    yield rows
    ALL_ATTENTION_FUNCTIONS.register(attention.SHARED_PREFIX_ATTENTION, attend)


@pytest.mark.numerical
@pytest.mark.equivalence
@pytest.mark.parametrize("scores", [0, 2**23], ids=["too many to store", "stored"])
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("heads", [2, 6])
def test_shared_prefix_equals_a_copy_in_each_row(heads, length, scores, monkeypatch):
    monkeypatch.setattr(attention, "MAX_SCORES", scores)
    rows, groups, shared, own, size = 3, 2, 7, 6, 4
    inputs = [
        torch.randn(rows, length, heads, size),
        *torch.randn(2, rows, groups, own, size),
        torch.randn(2, groups, shared, size),
    ]
    visible = torch.rand(rows, 1, length, shared + own) < 0.6
    visible[..., -1] = True
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    module = SimpleNamespace(layer_idx=1, num_key_value_groups=heads // groups, is_causal=True)

    def output_and_gradients(is_shared, dtype=torch.float32):
        query, key, value, prefix = leaves = [part.to(dtype).clone().requires_grad_() for part in inputs]
        if is_shared:
            more = {"shared_prefix": [None, prefix]}
        else:
            more = {}
            prefixes = prefix[:, None].expand(-1, rows, -1, -1, -1)
            key, value = torch.cat([prefixes, torch.stack([key, value])], dim=3)
        attend = ALL_ATTENTION_FUNCTIONS[attention.SHARED_PREFIX_ATTENTION if is_shared else "sdpa"]
        output, _ = attend(module, query.transpose(1, 2), key, value, mask.to(dtype), scaling=0.3, dropout=0.0, **more)
        output.square().sum().backward()
        return [output.detach(), *(leaf.grad for leaf in leaves)]

    expected = output_and_gradients(False, torch.float64)
    # Sums over a head and over all columns, forward and backward, and over the queries of all rows.
    terms = 2 * (size + shared + own) + rows * heads * length
    for is_shared in (True, False):
        for received, exact in zip(output_and_gradients(is_shared), expected, strict=True):
            assert_within_rounding(received, exact, torch.float32, terms)
    # float64 states are summed in float64.
    for received, exact in zip(output_and_gradients(True, torch.float64), expected, strict=True):
        assert_within_rounding(received, exact, torch.float64, terms)


@pytest.mark.equivalence
@pytest.mark.pairwise(family=FAMILIES, kind=[WordAgent, ChoiceAgent], activated=[True, False])
def test_agent_with_shared_prefix_equals_copies_in_each_row(family, kind, activated, passes, monkeypatch):
    monkeypatch.setattr(transformer, "MIN_SHARED_SCORES", 0)
    agent = make_agent(kind, family, activated)
    backbone = agent.policy.backbone
    for texts in (["a", "bb", "ccc"], ["dd", "e", "f"]):
        agent.act_batch(texts)
        agent.assign_rewards([0.0] * 3)
    segments = [actor_of(agent).conversation(index).current_segment() for index in range(3)]
    recorded = [logprob for segment in segments for turn in segment.turns for logprob in turn.reply.logprobs]
    weights = [weight for weight in agent.policy.model.parameters() if weight.requires_grad]

    def learned():
        passes.clear()
        backbone.prefix_cache.clear()
        now = agent.policy.evaluate(segments)
        gradients = torch.autograd.grad(now.logprobs[now.mask].square().sum() + now.values.square().sum(), weights)
        return now, gradients

    shared, shared_gradients = learned()
    assert passes
    if kind is WordAgent:
        assert shared.logprobs[shared.mask].tolist() == pytest.approx(recorded, abs=LOGPROB_TOLERANCE)
    backbone.transformer.can_share = False
    copied, copied_gradients = learned()
    assert not passes
    for name in ("logprobs", "values", "entropy"):
        assert torch.allclose(getattr(shared, name), getattr(copied, name), atol=LOGPROB_TOLERANCE)
    for one, other in zip(shared_gradients, copied_gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-3 * max(1.0, other.abs().max().item()))


def test_eager_attention_does_not_share_a_prefix(passes):
    model = tiny_model("llama")
    model.pretrained_model.get_base_model().set_attn_implementation("eager")
    assert not verified_transformer(model).shares(torch.zeros(8, 2, 1000, 8), 1000)
    assert not passes


@pytest.mark.equivalence
@pytest.mark.pairwise(family=FAMILIES)
def test_wrong_shared_attention_disables_sharing(family, monkeypatch):
    attend, fused = ALL_ATTENTION_FUNCTIONS[attention.SHARED_PREFIX_ATTENTION], fused_layer.attend_with_gradients

    def narrowed(mask):
        """Hides the first visible token, which is a shared one, unless it is the only one."""
        first = (mask == 0).float().argmax(-1, keepdim=True)
        others = mask.scatter(-1, first, torch.finfo(mask.dtype).min)
        return torch.where((others == 0).any(-1, keepdim=True), others, mask)

    def blind(module, query, key, value, mask, **more):
        return attend(module, query, key, value, narrowed(mask), **more)

    def blind_fused(query, key, value, angles, cached, shared, mask, scaling):
        return fused(query, key, value, angles, cached, shared, narrowed(mask), scaling)

    usual = verified_transformer(tiny_model(family))
    assert usual.can_share
    monkeypatch.setattr(fused_layer, "attend_with_gradients", blind_fused)
    monkeypatch.setattr(verification, "FINDINGS", {})
    ALL_ATTENTION_FUNCTIONS.register(attention.SHARED_PREFIX_ATTENTION, blind)
    try:
        misled = verified_transformer(tiny_model(family))
        assert not misled.can_share
    finally:
        ALL_ATTENTION_FUNCTIONS.register(attention.SHARED_PREFIX_ATTENTION, attend)


@pytest.mark.equivalence
@pytest.mark.pairwise(family=FAMILIES, dtype=[torch.float32, torch.bfloat16])
def test_packed_weights_with_an_activated_adapter_share_a_prefix(family, dtype):
    model = tiny_model(family).to(torch.bfloat16).to(dtype)
    assert verified_transformer(model).can_share


def test_few_queries_do_not_share_a_prefix():
    backbone = make_agent().policy.backbone
    prefix = torch.zeros(8, 2, 32, 8)
    assert backbone.transformer.shares(prefix, 32)
    assert not backbone.transformer.shares(prefix, 31)
    assert not backbone.transformer.shares(prefix[:, :, :0], 10_000)


def test_attention_is_restored_after_a_pass():
    backbone = make_agent().policy.backbone
    config = backbone.transformer.body.config
    prefix = backbone.prefix((1, 2, 3))[1]
    cache = KVBuffer(prefix, 1, 4, True).cache(slice(None), 3)
    with attention.sharing(backbone.transformer.body, cache) as given:
        assert given["shared_prefix"]
        assert attention_name(config) == attention.SHARED_PREFIX_ATTENTION
    assert attention_name(config) == "sdpa"
    with pytest.raises(RuntimeError), attention.sharing(backbone.transformer.body, cache):
        raise RuntimeError
    assert attention_name(config) == "sdpa"
    with attention.sharing(backbone.transformer.body, DynamicCache()) as given:
        assert given == {}
        assert attention_name(config) == "sdpa"
