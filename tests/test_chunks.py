"""How turns are parted into the passes of learning, and run in them without padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llamagym.conversation.episode import Segment
from llamagym.engine import prefix_cache
from llamagym.engine.kv_cache import Places
from llamagym.engine.token_tree import TokenTree
from tests.agents import WordAgent, make_agent
from tests.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.equivalence


def turns_saying(agent, counts):
    """One turn each, whose reply has so many tokens."""
    agent.act("x")
    turn = agent.conversation(0).turns[-1]

    def said(*ids):
        return Segment((replace(turn, reply=replace(turn.reply, ids=ids, logprobs=(-1.0,) * len(ids))),))

    return [said(*range(first, first + count)) for first, count in enumerate(counts, start=20)]


def test_replies_come_by_length_and_equal_ones_count_once():
    agent = make_agent(WordAgent)
    segments = turns_saying(agent, [5, 1, 4, 2, 2])
    segments.append(replace(segments[1]))
    size = agent.policy._backbone.size(TokenTree.from_segment(segments[3]))

    def parted(nodes):
        return [
            [len(segment.turns[0].reply.ids) for segment in chunk] for chunk in agent.policy.chunks(segments, nodes)
        ]

    assert parted(3 * size) == [[1, 1, 2, 2], [4, 5]]
    assert parted(3 * size - 1) == [[1, 1, 2], [2, 4], [5]]


def test_places_are_found_again():
    places = Places(torch.tensor([0, 2, 3, 4]), rows=2, width=3)
    heads = torch.randn(1, 5, 4, 7)
    spread = places.spread(heads)
    assert spread.shape == (2, 5, 3, 7)
    assert spread[0, :, 1].eq(0).all()
    assert spread[1, :, 2].eq(0).all()
    assert places.gather(spread.transpose(1, 2)).equal(heads.transpose(1, 2))


def test_what_computes_attention_in_a_way_of_its_own_is_padded():
    model = tiny_model("llama")
    model.pretrained_model.get_base_model().set_attn_implementation("eager")
    assert not prefix_cache.PrefixCache(model)._can_pack


@pytest.mark.parametrize("activated", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_replies_of_several_lengths_run_without_padding(family, activated):
    agent = make_agent(WordAgent, family, activated)
    adapter = {name: weight for name, weight in agent.policy.model.named_parameters() if "lora_" in name}
    for name, weight in adapter.items():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    backbone = agent.policy._backbone
    segments = turns_saying(agent, [5, 1, 4, 2])
    nodes = [TokenTree.from_segment(segment).node_count for segment in segments]
    assert backbone._can_pack

    def learnt():
        before = agent.policy.tokens_forwarded
        now = agent.policy.evaluate(segments)
        gradients = torch.autograd.grad(
            now.logprobs[now.mask].square().sum() + now.entropy.sum(), list(adapter.values())
        )
        return now, gradients, agent.policy.tokens_forwarded - before

    # Histories that are kept are read once.
    learnt()
    packed, packed_gradients, count = learnt()
    backbone._can_pack = False
    padded, padded_gradients, of_padded = learnt()
    assert of_padded - count == len(nodes) * max(nodes) - sum(nodes) > 0
    for name in ("logprobs", "values", "entropy"):
        assert torch.allclose(getattr(packed, name), getattr(padded, name), atol=2e-4)
    for one, other in zip(packed_gradients, padded_gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-3 * max(1.0, other.abs().max().item()))
