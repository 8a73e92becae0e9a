"""Replies that begin alike are written once, those that part ways go on right; tokens are drawn as they should be."""

from __future__ import annotations

import pytest
import torch

from llamagym.policy.sampling import draw, draw_choices
from tests.helpers.agents import WordAgent, actor_of, make_agent, touch_weights
from tests.helpers.rounding import LOGPROB_TOLERANCE
from tests.helpers.tiny import FAMILIES


def speaker(family="llama", temperature=1.0, **options):
    return make_agent(WordAgent, family, context="turn", generate={"temperature": temperature}, **options)


def say(agent, texts):
    """Let environments answer; returns their replies and the tokens forwarded for them."""
    before = agent.policy.tokens_forwarded
    agent.act_batch(texts)
    agent.assign_rewards([0.0] * len(texts))
    return [
        actor_of(agent).conversation(env).turns[-1].reply for env in range(len(texts))
    ], agent.policy.tokens_forwarded - before


@pytest.mark.equivalence
@pytest.mark.pairwise(family=FAMILIES, activated=[True, False])
def test_replies_that_part_ways_are_recorded_as_they_are_evaluated(family, activated):
    """Many replies to few contexts, call after call: known beginnings, copies, and rows that end."""
    agent = speaker(family, 0.5, activated=activated, response_prefix="I ")
    distinct, forwarded = [], []
    for _ in range(4):
        replies, tokens = say(agent, ["x", "xyz", "x" * 9] * 8)
        distinct.append(
            len({(row % 3, reply.ids[:t]) for row, reply in enumerate(replies) for t in range(len(reply.ids))})
        )
        forwarded.append(tokens)
    # One token for each distinct beginning, and those that open replies at first only.
    assert all(tokens <= count for tokens, count in zip(forwarded[1:], distinct[1:], strict=True))
    segments = [actor_of(agent).conversation(env).current_segment() for env in range(24)]
    recorded = [actor_of(agent).conversation(env).turns[-1].reply.logprobs for env in range(24)]
    assert len({actor_of(agent).conversation(env).turns[-1].reply.ids for env in range(24)}) > 3
    now = agent.policy.evaluate(segments)
    assert now.logprobs[now.mask].tolist() == pytest.approx([p for row in recorded for p in row], abs=LOGPROB_TOLERANCE)


def test_a_reply_given_before_costs_nothing_until_the_weights_change():
    agent = speaker()
    agent.eval(greedy=True)
    (first,), tokens = say(agent, ["x"])
    assert tokens >= len(first.ids)
    (again, twin), tokens = say(agent, ["x", "x"])
    assert tokens == 0
    assert again.ids == twin.ids == first.ids
    assert again.logprobs == twin.logprobs
    # Several threads split the sums of one row and of two in different ways.
    assert again.logprobs == pytest.approx(first.logprobs, abs=LOGPROB_TOLERANCE)
    touch_weights(agent)
    _, tokens = say(agent, ["x"])
    assert tokens == len(first.ids)


def test_evicted_replies_are_computed_again():
    agent, forgetful = speaker(), speaker()
    forgetful.policy.backbone.prefix_cache.activations.max_bytes = 10_000
    for _ in range(3):
        (expected, _), (received, _) = (say(one, ["x", "yy"] * 4) for one in (agent, forgetful))
        assert [reply.ids for reply in expected] == [reply.ids for reply in received]
        for one, other in zip(expected, received, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=LOGPROB_TOLERANCE)


@pytest.mark.equivalence
@pytest.mark.pairwise(activated=[True, False])
def test_does_not_read_uninitialized_memory(activated):
    """PyTorch's deterministic mode fills new memory with NaN, which a mask alone would let through."""
    agent = speaker(activated=activated, response_prefix="I ")
    torch.use_deterministic_algorithms(True)
    replies = []
    try:
        for _ in range(2):
            replies += say(agent, ["x", "xyz", "x" * 9] * 8)[0]
        with torch.no_grad():
            now = agent.policy.evaluate([actor_of(agent).conversation(env).current_segment() for env in range(24)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.tensor(reply.logprobs).isfinite().all() for reply in replies)
    assert now.logprobs.isfinite().all()


def test_acting_goes_on_outside_of_inference_mode():
    agent = speaker()
    with torch.inference_mode():
        say(agent, ["x", "yy"])
    touch_weights(agent)
    say(agent, ["x", "yy"])


def test_a_prompt_is_rendered_once(monkeypatch):
    agent = speaker()
    template, render, rendered = actor_of(agent).chat_template, agent.tokenizer.apply_chat_template, []
    monkeypatch.setattr(
        agent.tokenizer,
        "apply_chat_template",
        lambda *args, **options: rendered.append(args) or render(*args, **options),
    )
    first, following = template.first_prompt("s", "x"), template.next_prompt("s", "x", None)
    expected = list(first), list(following)
    assert len(rendered) == 2
    # A caller's list is its own.
    first.clear(), following.clear()
    assert (template.first_prompt("s", "x"), template.next_prompt("s", "x", None)) == expected
    assert len(rendered) == 2
    assert template.first_prompt("s", "y") != expected[0]


def test_a_draw_is_in_proportion_to_weights():
    rng = torch.Generator().manual_seed(0)
    drawn = torch.stack([draw(torch.tensor([0.0, 6.0, 2.0, 0.0]), rng) for _ in range(10_000)])
    assert (drawn.bincount(minlength=4) / 10_000).tolist() == pytest.approx([0, 0.75, 0.25, 0], abs=0.022)


def test_of_equally_likely_choices_the_first_is_taken():
    offers = [torch.tensor([0.25, 0.375, 0.375]).log(), torch.tensor([0.5, 0.5]).log()]
    assert draw_choices(offers, greedy=True, rng=torch.Generator()) == [1, 0]


def test_choices_drawn_together_equal_those_drawn_one_by_one():
    offers = [torch.randn(count).log_softmax(-1) for count in (2, 5, 1, 3) * 20]
    together, alone = (torch.Generator().manual_seed(3) for _ in range(2))
    assert draw_choices(offers, False, together) == [int(draw(offer.exp(), alone)) for offer in offers]
    assert draw_choices(offers, True, together) == [int(offer.argmax()) for offer in offers]
    assert draw_choices([], False, together) == []
