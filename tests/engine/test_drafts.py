"""Drafts change the number of passes and no reply: the same seed gives the same tokens with the same probabilities."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from scipy.stats import chisquare

from llamagym.engine.decode import Decoder
from llamagym.policy.drafts import Draft, DraftContext, Drafter, best_draft_length
from llamagym.text.episode import Reply
from tests.helpers.agents import WordAgent, actor_of, make_agent
from tests.helpers.rounding import LOGPROB_TOLERANCE
from tests.helpers.tiny import FAMILIES

OBSERVATIONS = ["x", "xyz", "x" * 9, "y" * 30] * 3


def speaker(max_draft_tokens, family="llama", temperature=1.0, **options):
    generate = {"max_new_tokens": 24, "temperature": temperature, "max_draft_tokens": max_draft_tokens}
    return make_agent(WordAgent, family, generate=generate, **options)


def replies_of(agent, calls=2):
    """The replies to the same observations, call after call."""
    replies = []
    for _ in range(calls):
        agent.act_batch(OBSERVATIONS)
        agent.assign_rewards([0.0] * len(OBSERVATIONS))
        replies.append([actor_of(agent).conversation(env).turns[-1].reply for env in range(len(OBSERVATIONS))])
    return replies


@pytest.fixture
def passes(monkeypatch):
    """Counts the passes of decoding."""
    counted = []
    run = Decoder._run

    def count(self, replies, *args):
        counted.extend([None] * bool(replies))
        return run(self, replies, *args)

    monkeypatch.setattr(Decoder, "_run", count)
    return counted


def draft_from(monkeypatch, expected, error_rate):
    """Lets drafts be the replies that are expected, with some wrong tokens, and always verifies all of them."""
    rng = random.Random(0)
    known = [reply.ids for call in expected for reply in call]

    def draft(self, context, reply, max_tokens):
        continuations = [ids[len(reply) :] for ids in known if ids[: len(reply)] == reply]
        # Beyond the end of a reply, too.
        ids = (*rng.choice(continuations or [()]), 7, 7, 7)[: min(max_tokens, rng.randrange(12))]
        ids = tuple(token if rng.random() >= error_rate else rng.randrange(9, 40) for token in ids)
        return Draft(ids, (1.0,) * len(ids))

    monkeypatch.setattr(Drafter, "draft", draft)
    monkeypatch.setattr(
        "llamagym.policy.sampling.best_draft_length", lambda drafts, cost: max(len(draft.ids) for draft in drafts)
    )


@pytest.mark.equivalence
@pytest.mark.pairwise(
    family=FAMILIES,
    activated=[True, False],
    context=["turn", "episode"],
    error_rate=[0.0, 0.1, 1.0],
    temperature=[1.0, 0.3],
)
def test_drafts_change_no_reply(family, activated, context, error_rate, temperature, monkeypatch, passes):
    options = {"activated": activated, "context": context, "response_prefix": "I "}
    expected = replies_of(speaker(0, family, temperature, **options))
    plain_passes = len(passes)
    passes.clear()
    draft_from(monkeypatch, expected, error_rate)
    agent = speaker(16, family, temperature, **options)
    received = replies_of(agent)
    for expected_call, received_call in zip(expected, received, strict=True):
        for one, other in zip(expected_call, received_call, strict=True):
            assert one.ids == other.ids
            assert one.finish_reason == other.finish_reason
            assert one.logprobs == pytest.approx(other.logprobs, abs=LOGPROB_TOLERANCE)
    if error_rate < 1:
        assert len(passes) < plain_passes
    segments = [actor_of(agent).conversation(env).current_segment() for env in range(len(OBSERVATIONS))]
    evaluated = agent.policy.evaluate(segments)
    turns = [turn for env in range(len(OBSERVATIONS)) for turn in segments[env].turns]
    recorded = [logprob for turn in turns for logprob in turn.reply.logprobs]
    assert evaluated.logprobs[evaluated.mask].tolist() == pytest.approx(recorded, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_greedy_replies_are_the_same_with_drafts(family, monkeypatch, passes):
    expected_agent = speaker(0, family)
    expected_agent.eval(greedy=True)
    expected = replies_of(expected_agent)
    plain_passes = len(passes)
    passes.clear()
    draft_from(monkeypatch, expected, 0.1)
    agent = speaker(16, family)
    agent.eval(greedy=True)
    assert [[reply.ids for reply in call] for call in replies_of(agent)] == [
        [reply.ids for reply in call] for call in expected
    ]
    assert len(passes) < plain_passes


def test_greedy_replies_draw_no_random_numbers():
    agent = speaker(16)
    agent.eval(greedy=True)
    state = agent.policy.rng.get_state()
    replies_of(agent)
    assert agent.policy.rng.get_state().equal(state)


def test_accepted_tokens_have_the_policy_s_frequencies(monkeypatch):
    """Drafts are the likeliest tokens: if a draft raised their probability, they would be too frequent."""
    agent = make_agent(WordAgent, generate={"max_new_tokens": 2, "temperature": 0.4})
    agent.eval(greedy=True)
    agent.act("x")
    likeliest = actor_of(agent).conversation(0).turns[-1].reply.ids
    assert len(likeliest) == 2
    agent.terminate_episode()
    agent.eval(greedy=False)
    drafted = []

    def draft(self, context, reply, max_tokens):
        ids = likeliest[len(reply) :][:max_tokens] if likeliest[: len(reply)] == reply else ()
        drafted.extend(ids)
        return Draft(ids, (1.0,) * len(ids))

    monkeypatch.setattr(Drafter, "draft", draft)
    monkeypatch.setattr("llamagym.policy.sampling.best_draft_length", lambda drafts, cost: 16)
    counts = Counter()
    probabilities = {}
    for _ in range(200):
        agent.act_batch(["x"] * 16)
        for env in range(16):
            reply = actor_of(agent).conversation(env).turns[-1].reply
            counts[reply.ids] += 1
            probabilities[reply.ids] = math.exp(sum(reply.logprobs))
        agent.terminate_episodes(range(16))
    assert drafted
    total = counts.total()
    frequent = [ids for ids, probability in probabilities.items() if probability * total >= 8]
    observed = [counts[ids] for ids in frequent]
    expected = [probabilities[ids] * total for ids in frequent]
    assert likeliest in frequent
    assert len(frequent) >= 5
    assert chisquare([*observed, total - sum(observed)], [*expected, total - sum(expected)]).pvalue > 1e-3


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("max_bytes", [60_000, 10**9])
def test_memory_that_was_never_written_is_not_read(kernels, max_bytes, monkeypatch, passes):
    """PyTorch's deterministic mode fills new memory with NaN.

    With a small cache, some replies begin again beside others that have unused columns.
    """
    monkeypatch.setenv("LLAMAGYM_CPU_KERNELS", kernels)
    expected = replies_of(speaker(0, context="turn"), calls=4)
    plain_passes = len(passes)
    passes.clear()
    draft_from(monkeypatch, expected, 0.5)
    torch.use_deterministic_algorithms(True)
    try:
        agent = speaker(16, context="turn")
        agent.policy.backbone.prefix_cache.activations.max_bytes = max_bytes
        received = replies_of(agent, calls=4)
    finally:
        torch.use_deterministic_algorithms(False)
    assert 0 < len(passes) < plain_passes
    assert [[reply.ids for reply in call] for call in received] == [[reply.ids for reply in call] for call in expected]


def test_repeated_formats_are_drafted(passes):
    """Nearly certain replies to observations that are all different: nothing is cached, but the replies are alike."""

    def count(max_draft_tokens):
        passes.clear()
        agent = speaker(max_draft_tokens, temperature=0.02, context="turn")
        agent.eval(greedy=False)
        for number in range(12):
            agent.act(f"x{number}")
        return len(passes)

    assert count(16) < 0.7 * count(0)


def test_a_drafter_guesses_what_followed_before():
    drafter = Drafter()
    context = DraftContext((1, 2, 3, 4, 5))
    drafter.add(context, (10, 11, 12, 13))
    assert drafter.draft(context, (), 3).ids == (10, 11, 12)
    assert drafter.draft(context, (10, 11), 9).ids == (12, 13)
    # After a right guess others are more often right than after a wrong one.
    for _ in range(20):
        drafter.add(context, (10, 11, 12, 13))
        drafter.add(context, (30, 11, 99, 13))
    assert drafter.draft(context, (10, 11), 1).probabilities > drafter.draft(context, (40, 11), 1).probabilities
    drafter.add(context, (10, 11, 12, 13))
    # Other contexts whose last tokens are the same.
    assert drafter.draft(DraftContext((9, 9, 9, 2, 3, 4, 5)), (), 2).ids == (10, 11)
    assert drafter.draft(DraftContext((9, 8)), (), 2).ids == ()
    # The latest reply counts.
    drafter.add(context, (10, 20, 21))
    assert drafter.draft(context, (10,), 2).ids == (20, 21)


def test_a_drafter_guesses_words_of_the_context():
    context = DraftContext((1, 2, 3, 4, 5, 6, 7, 0))
    assert Drafter().draft(context, (40, 2, 3), 4).ids == (4, 5, 6, 7)


def test_guesses_that_fail_are_not_drafted():
    rng = random.Random(0)
    drafter = Drafter()
    context = DraftContext((1, 2, 3, 4, 5, 6, 7, 8))
    before = drafter.draft(context, (3, 4), 16)
    assert best_draft_length([before], 16) > 0
    for _ in range(60):
        drafter.add(context, tuple(rng.randrange(40) for _ in range(20)))
    draft = drafter.draft(context, (rng.randrange(40), *next(iter(drafter._following[2]))), 16)
    assert best_draft_length([draft], 16) == 0


def test_longer_drafts_need_fewer_rows():
    draft = Draft(tuple(range(16)), tuple(0.9**n for n in range(1, 17)))
    lengths = [best_draft_length([draft] * rows, 16) for rows in (1, 4, 16, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 16
    assert lengths[-1] <= 3
    # A single row's draft does not pay for the padding of all others.
    assert best_draft_length([draft, *[Draft((), ())] * 15], 16) == 0


def test_a_drafter_forgets(monkeypatch):
    monkeypatch.setattr("llamagym.policy.drafts._MAX_SEQUENCES", 10)
    drafter = Drafter()
    context = DraftContext((1, 2))
    for start in range(0, 100, 5):
        drafter.add(context, tuple(range(start, start + 5)))
    assert all(len(following) <= 10 for following in drafter._following.values())
    assert drafter.draft(context, (95, 96), 2).ids == (97, 98)
    assert drafter.draft(context, (5, 6), 2).ids == ()


@pytest.mark.parametrize("error_rate", [None, 0.0, 1.0])
def test_watcher_ends_a_reply_at_any_token(error_rate, monkeypatch):
    """`error_rate` of drafts that were guessed; None for no drafts."""
    agent = speaker(0)
    contexts = [actor_of(agent).new_conversation().observe(text) for text in OBSERVATIONS]
    config = agent.policy.generation
    trees = agent.policy.trees.of(contexts)

    def written(limits):
        """Writes replies that end at limits; with what each watcher has seen."""
        seen = [[] for _ in trees]

        def watcher(row):
            def watch(ids):
                seen[row].append(ids)
                return limits[row] if len(ids) >= limits[row] else None

            return watch

        agent.policy.rng.manual_seed(0)
        return agent.policy.write(trees, config, True, [watcher(row) for row in range(len(trees))]), seen

    whole, _ = written([99] * len(trees))
    if error_rate is not None:
        config = replace(config, max_draft_tokens=16)
        expected = [[Reply(text.ids, text.logprobs, 0.0, "eos", None, 0) for text in whole]]
        draft_from(monkeypatch, expected, error_rate)
    limits = [1 + row % 5 for row in range(len(trees))]
    texts, seen = written(limits)
    for text, full, limit, calls in zip(texts, whole, limits, seen, strict=True):
        assert text.ids == full.ids[:limit]
        assert text.logprobs == pytest.approx(full.logprobs[:limit], abs=LOGPROB_TOLERANCE)
        assert text.finish_reason == ("stop" if limit < len(full.ids) else full.finish_reason)
        # Each call continues the previous one.
        assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(calls))
