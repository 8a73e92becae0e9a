"""Use of the context window: tokens reserved for a reply, and turns dropped once a conversation is full."""

from __future__ import annotations

import itertools
import json
import random
import re

import numpy as np
import pytest

from llamagym import ConfigError
from llamagym.text.chat_template import ChatTemplate
from llamagym.text.episode import Conversation, Reply
from llamagym.text.records import IdTable, conversation_record, restore_conversation
from tests.helpers.agents import WordAgent, actor_of, make_agent
from tests.helpers.tiny import tiny_tokenizer

WINDOW = 1000
REPLY = 20
TOKENIZER = tiny_tokenizer("llama")


@pytest.fixture(scope="module")
def template():
    return ChatTemplate(TOKENIZER, append_only=True)


def new_conversation(template, max_length=WINDOW, reply_length=REPLY):
    return Conversation(template, "Say something.", "episode", max_length, reply_length)


def take_turn(conversation, text, choices=None):
    """Takes a turn with a reply of five tokens or the first choice; returns the context before the reply."""
    context = conversation.observe(text, "", choices)
    if choices is None:
        ids, kind, index = tuple(conversation.template.encode("reply")), "length", None
    else:
        ids, kind, index = context.pending.choices[0], "choice", 0
    conversation.answer(Reply(ids, (0.0,) * len(ids), 0.0, kind, index, 0), "reply")
    return context


def turns_shown(context):
    """Returns the numbers of the observations in a context, the pending one last."""
    ids = [*itertools.chain(*((*turn.prompt.ids, *turn.reply.ids) for turn in context.turns)), *context.pending.ids]
    text = TOKENIZER.decode(ids)
    return [int(number) for number in re.findall(r"number (\d+)\.", text)]


def observation(number, filler=20):
    return f"number {number}. {'x' * filler}"


def test_reserves_the_longest_choice_and_not_all_of_them(template):
    # 170 choices of 14 tokens, and one of 40.
    choices = [f"choice {number:07d}" for number in range(170)] + ["y" * 40]
    conversation = new_conversation(template)
    for number in range(8):
        context = take_turn(conversation, observation(number), choices)
        assert turns_shown(context) == list(range(number + 1))
    # The last token that fits, and one more.
    used = conversation.current_segment().token_count
    prompt = len(template.next_prompt("", "", None))
    exact = new_conversation(template, max_length=used + prompt + 40)
    for conversation, fits in ((exact, True), (new_conversation(template, max_length=used + prompt + 39), False)):
        for number in range(8):
            take_turn(conversation, observation(number), choices)
        assert conversation.observe("", "", choices).pending.starts_context != fits


def test_a_context_with_many_choices_fills_the_window():
    """Branches of the trie of choices share positions, so the longest choice counts and not their sum."""
    codes = ["".join(code) for code in itertools.product("123456", repeat=4)]

    class Breaker(WordAgent):
        def get_action_choices(self, observation):
            return codes

    agent = make_agent(Breaker, "llama")
    agent.policy.backbone.transformer.max_length = 300
    # With 259 places where codes part, nothing would fit beside them.
    agent.act("x" * 120)
    agent.assign_reward(0.0)
    agent.act("y" * 10)
    assert len(actor_of(agent).conversation(0).current_segment().turns) == 2


def least_dropped(shown, fits):
    """Returns the turns kept by the rule: a quarter is dropped, at least one, and as many more as do not fit."""
    kept = shown - max(1, shown // 4)
    while kept and not fits(kept):
        kept -= 1
    return kept


@pytest.mark.parametrize("max_length", [300, 1000, 2500])
def test_every_truncation_drops_a_quarter_of_the_visible_turns(template, max_length):
    conversation = new_conversation(template, max_length)
    lowest, truncations, before = 1.0, 0, []
    for number in range(150):
        context = take_turn(conversation, observation(number))
        shown = turns_shown(context)
        assert shown == list(range(shown[0], number + 1))
        if shown[0] == (before or shown)[0]:
            before = shown
            continue
        truncations += 1
        assert len(shown) - 1 == least_dropped(len(before), lambda kept: True)
        lowest = min(lowest, len(shown) / len(before))
        before = shown
    assert truncations >= 5
    # Of few turns a quarter is rounded, and the one that is answered is beside those that are kept.
    assert lowest >= 0.75


def test_a_long_observation_drops_only_as_many_more_turns_as_necessary(template):
    conversation = new_conversation(template)
    for number in range(9):
        take_turn(conversation, observation(number))
    context = take_turn(conversation, observation(9, 600))
    shown = turns_shown(context)
    assert context.pending.starts_context
    # A quarter of nine would be two.
    assert 1 < len(shown) < 8
    assert len(context.pending.ids) + REPLY <= WINDOW
    # One more turn would not have fitted.
    one_more = len(template.next_prompt("", observation(0), None)) + 5
    assert len(context.pending.ids) + one_more + REPLY > WINDOW
    # Where even the observation alone is too long, nothing is kept.
    alone = take_turn(conversation, observation(10, 2 * WINDOW))
    assert turns_shown(alone) == [10]


def test_a_restored_conversation_is_truncated_at_the_same_turns(template):
    conversation = new_conversation(template)
    for number in range(25):
        take_turn(conversation, observation(number))
    table = IdTable()
    record = json.loads(json.dumps(conversation_record(conversation, table)))
    restored = new_conversation(template)
    restore_conversation(restored, record, table)
    for number in range(25, 60):
        one, other = (take_turn(each, observation(number)) for each in (conversation, restored))
        assert one.pending == other.pending


@pytest.mark.parametrize("count", [1, 3])
def test_a_number_shows_that_many_earlier_turns(template, count):
    conversation = Conversation(template, "Say something.", count, WINDOW, REPLY)
    whole = new_conversation(template, max_length=None)
    for number in range(8):
        context = take_turn(conversation, observation(number))
        expected = take_turn(whole, observation(number))
        first = max(0, number - count)
        assert turns_shown(context) == list(range(first, number + 1))
        # As long as no turn is left out, tokens are appended; then each context is the beginning of a new one.
        assert context.pending.starts_context == (number == 0 or number > count)
        if number <= count:
            assert context.pending == expected.pending
    assert [turn.reply.ids for turn in conversation.turns] == [turn.reply.ids for turn in whole.turns]


def test_a_number_of_turns_that_does_not_fit_is_shortened(template):
    conversation = Conversation(template, "Say something.", 5, 300, REPLY)
    shown = [turns_shown(take_turn(conversation, observation(number))) for number in range(12)]
    assert 1 < max(map(len, shown)) < 6
    assert all(each[-1] == number for number, each in enumerate(shown))


@pytest.mark.parametrize("context", [0, -1, True, 1.5, "turns", None])
def test_rejects_an_invalid_context(context):
    with pytest.raises(ConfigError, match="context"):
        make_agent(context=context)


def test_a_number_of_numpy_is_a_number_of_turns():
    assert actor_of(make_agent(context=np.int64(2))).context == 2


@pytest.mark.parametrize("activated", [True, False])
def test_an_agent_that_sees_some_turns_learns_what_it_sampled(activated):
    """Segments that overlap are evaluated as they were sampled, in one batch and with caches."""
    agent = make_agent(context=2, activated=activated, ppo={"batch_size": 20, "target_kl": None})
    rng = random.Random(0)
    stats = {}
    for turn in range(5):
        agent.act_batch([rng.randrange(3) for _ in range(4)])
        agent.assign_rewards([float(rng.randrange(2)) for _ in range(4)])
        if turn == 4:
            stats = agent.terminate_episodes(range(4), terminated=[True] * 4)
    assert stats["turns"] == 20
    assert stats["ratio_error"] < 1e-5


def test_rolling_back_a_turn_restores_the_context(template):
    one, other = new_conversation(template), new_conversation(template)
    for number in range(40):
        roll_back = one.savepoint()
        take_turn(one, "z" * 600)
        roll_back()
        assert take_turn(one, observation(number)).pending == take_turn(other, observation(number)).pending
