"""Each token of a conversation is forwarded once, with the same results as recomputing."""

from __future__ import annotations

import pytest
import torch

from llamagym.engine.radix_tree import RadixTree
from llamagym.engine.token_tree import TokenTree
from llamagym.text.episode import Episode, Segment, segments_of
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, make_agent, settled, touch_weights
from tests.helpers.rounding import LOGPROB_TOLERANCE
from tests.helpers.tiny import FAMILIES


class SingleTokens(ChoiceAgent):
    """Chooses among strings of one token each."""

    choices = ("a", "b", "c")

    def extract_action(self, response: str) -> int:
        return self.choices.index(response[-1])


def entries_of(backbone, trees):
    """Keys and values of histories, the trunk's first."""
    return [
        torch.cat([torch.cat([piece.entries for piece in pieces], dim=2) for pieces in (known.trunk, known.history)])
        for known in backbone.prefill(trees)
    ]


def step(agent, text="x"):
    """One environment step; returns the tokens it forwarded."""
    before = agent.policy.tokens_forwarded
    agent.act(text)
    agent.assign_reward(0.0)
    return agent.policy.tokens_forwarded - before


@pytest.mark.pairwise(activated=[True, False], family=FAMILIES)
def test_a_step_forwards_the_new_tokens_at_turn_25_as_at_turn_2(family, activated):
    agent = settled(make_agent(SingleTokens, family, activated))
    # Texts have many byte-level tokens; dropping of turns has its own test.
    agent.policy.backbone.transformer.max_length = 10_000
    step(agent)
    for _ in range(2, 26):
        forwarded = step(agent)
        turn = actor_of(agent).conversation(0).turns[-1]
        # The observation's tokens and the earlier reply's one; the token before the reply runs again once the reply is
        # history.
        assert forwarded <= len(turn.prompt.ids) + len(turn.reply.ids) + 1
    assert len(actor_of(agent).conversation(0).turns) == 25


@pytest.mark.equivalence
@pytest.mark.pairwise(activated=[True, False], family=FAMILIES)
def test_free_text_forwards_each_token_of_a_conversation_once(family, activated):
    agent = make_agent(WordAgent, family, activated, generate={"max_new_tokens": 6, "max_draft_tokens": 0})
    agent.policy.backbone.transformer.max_length = 10_000
    forwarded = step(agent)
    turn = actor_of(agent).conversation(0).turns[-1]
    # Nothing is forwarded for the last sampled token until it is history.
    assert forwarded == len(turn.prompt.ids) + len(turn.reply.ids) - 1
    for _ in range(2, 13):
        forwarded = step(agent)
        turn = actor_of(agent).conversation(0).turns[-1]
        assert forwarded == len(turn.prompt.ids) + len(turn.reply.ids)


def test_reply_runs_again_without_a_trunk():
    """If the adapter acts from the first layer on, no activations of a reply are valid for histories."""
    agent = make_agent(WordAgent, generate={"max_new_tokens": 6, "max_draft_tokens": 0})
    backbone = agent.policy.backbone
    backbone.transformer.unsplit()
    for _ in range(3):
        forwarded = step(agent)
    earlier, turn = actor_of(agent).conversation(0).turns[-2:]
    again = earlier.prompt.opening_length + len(earlier.reply.ids) - 1
    assert forwarded == len(turn.prompt.ids) + len(turn.reply.ids) + again
    recorded = [logprob for turn in actor_of(agent).conversation(0).turns for logprob in turn.reply.logprobs]
    backbone.prefix_cache.clear()
    now = agent.policy.evaluate([actor_of(agent).conversation(0).current_segment()])
    assert now.logprobs[now.mask].tolist() == pytest.approx(recorded, abs=LOGPROB_TOLERANCE)


@pytest.mark.equivalence
@pytest.mark.pairwise(kind=[WordAgent, ChoiceAgent], context=["episode", "turn"])
def test_learning_reuses_the_trunk_s_output_of_acting(kind, context):
    agent = make_agent(kind, context=context)
    agent.policy.backbone.transformer.max_length = 10_000
    for turn in range(3):
        agent.act_batch(["x" * (env + turn) for env in range(4)])
        agent.assign_rewards([0.0] * 4)
    segments = [actor_of(agent).conversation(env).current_segment() for env in range(4)]
    if context == "turn":
        segments = [Segment((turn,)) for segment in segments for turn in segment.turns]
    passes = []
    handle = agent.policy.backbone.transformer.trunk.layers[0].register_forward_hook(lambda *_: passes.append(1))
    now = agent.policy.evaluate(segments)
    assert not passes
    # The control: without the cache they must run.
    agent.policy.backbone.prefix_cache.clear()
    again = agent.policy.evaluate(segments)
    handle.remove()
    assert passes
    assert torch.allclose(now.logprobs, again.logprobs, atol=LOGPROB_TOLERANCE)


def test_generation_prompt_runs_through_the_trunk_with_its_observation():
    agent, passes = make_agent(WordAgent, context="turn", generate={"max_new_tokens": 1}), []
    step(agent, "a")
    agent.policy.backbone.transformer.trunk.layers[0].register_forward_hook(lambda *_: passes.append(1))
    agent.policy.rng.manual_seed(1)
    step(agent, "b")
    # One pass over the observation and the generation prompt; none for the same observation, even after learning.
    assert len(passes) == 1
    touch_weights(agent)
    agent.policy.rng.manual_seed(1)
    step(agent, "b")
    assert len(passes) == 1
    first, second = (turn.reply for turn in actor_of(agent).conversation(0).turns[-2:])
    assert (first.ids, first.logprobs) == (second.ids, pytest.approx(second.logprobs, abs=LOGPROB_TOLERANCE))


def test_choices_with_the_same_tokens_but_other_branches_are_not_confused():
    """One choice of two tokens, and two of one token: the nodes have the same ids in the same order."""
    agent = make_agent(ChoiceAgent, context="turn", calibrate_choices=False)
    offers = (["abc", "abd", "zz"], ["ac", "ad", "bc", "bd", "zz"])
    first, second = (actor_of(agent).new_conversation().observe("x", "", choices) for choices in offers)
    trees = [TokenTree.from_segment(segment).decisions[0] for segment in (first, second)]
    assert trees[0].ids == trees[1].ids
    assert trees[0].parents != trees[1].parents
    agent.policy.choice_logprobs([first])
    after = agent.policy.choice_logprobs([second])[0]
    agent.policy.drop_caches()
    assert torch.allclose(after, agent.policy.choice_logprobs([second])[0], atol=LOGPROB_TOLERANCE)


def test_system_prompt_runs_once_for_all_environments():
    agent = make_agent(SingleTokens, context="turn")
    agent.act("first")
    shared = actor_of(agent).conversation(0).turns[0].prompt.shared_length
    before = agent.policy.tokens_forwarded
    agent.act_batch(["xyzzy", "plugh"], [1, 2])
    own = [len(actor_of(agent).conversation(env).turns[0].prompt.ids) - shared for env in (1, 2)]
    # At most: observations may have a common beginning, too.
    assert agent.policy.tokens_forwarded - before <= sum(own)


@pytest.mark.equivalence
@pytest.mark.pairwise(family=FAMILIES, kind=[WordAgent, ChoiceAgent])
def test_growing_histories_equal_recomputed_ones(family, kind):
    """Different lengths, environments that end and begin at different times, more than the window of 64 tokens."""
    agent = settled(make_agent(kind, family))
    policy = agent.policy
    for turn in range(8):
        agent.act_batch(["x" * (env + turn) for env in range(3)])
        agent.assign_rewards([0.0] * 3)
        if turn == 3:
            actor_of(agent).discard_episodes([1])
    segments = [actor_of(agent).conversation(env).current_segment() for env in range(3)]
    trees = [TokenTree.from_segment(segment) for segment in segments]
    grown = entries_of(policy.backbone, trees)
    policy.backbone.prefix_cache.clear()
    assert max(tree.context_length for tree in trees) > 64
    for one, other in zip(grown, entries_of(policy.backbone, trees), strict=True):
        assert torch.allclose(one, other, atol=LOGPROB_TOLERANCE)
    recorded = [logprob for segment in segments for turn in segment.turns for logprob in turn.reply.logprobs]
    now = policy.evaluate(segments)
    assert now.logprobs[now.mask].tolist() == pytest.approx(recorded, abs=LOGPROB_TOLERANCE)


class OneWord(SingleTokens):
    """Has a single choice, so that conversations stay equal."""

    choices = ("a",)


@pytest.mark.equivalence
def test_diverging_conversations_equal_separate_ones():
    """As in groups of episodes with one seed; their continuations differ in length and need several passes."""
    agent = make_agent(OneWord, "llama")
    for text in ("first", "second"):
        agent.act_batch([text] * 4)
        agent.assign_rewards([0.0] * 4)
    segments = [
        actor_of(agent).conversation(env).observe("x" * (1 + 600 * env), "", OneWord.choices) for env in range(4)
    ]
    trees = [TokenTree.from_segment(segment) for segment in segments]
    backbone = agent.policy.backbone
    together = entries_of(backbone, trees)
    for tree, entries in zip(trees, together, strict=True):
        backbone.prefix_cache.clear()
        assert torch.allclose(entries_of(backbone, [tree])[0], entries, atol=LOGPROB_TOLERANCE)


@pytest.mark.pairwise(activated=[True, False])
def test_changed_weights_outdate_histories_of_plain_lora_only(activated):
    agent = make_agent(SingleTokens, "llama", activated)
    step(agent)
    step(agent)
    usual = step(agent)
    touch_weights(agent)
    assert (step(agent) > usual) == (not activated)


def test_evicted_activations_are_recomputed():
    agent = settled(make_agent(SingleTokens, "llama"))
    step(agent)
    usual = step(agent)
    backbone = agent.policy.backbone
    backbone.prefix_cache.activations = RadixTree(max_bytes=1000)
    assert step(agent) > 3 * usual
    conversation = actor_of(agent).conversation(0)
    recorded = [turn.reply.logprobs[0] for turn in conversation.turns]
    now = agent.policy.evaluate([Segment(tuple(conversation.turns))])
    assert now.logprobs[:, 0].tolist() == pytest.approx(recorded, abs=LOGPROB_TOLERANCE)


@pytest.mark.equivalence
@pytest.mark.pairwise(family=FAMILIES, kind=[WordAgent, SingleTokens])
def test_full_context_drops_its_oldest_turns_and_trains_on_what_was_seen(family, kind):
    agent = settled(make_agent(kind, family, ppo={"batch_size": 20, "mini_batch_size": 20}, response_prefix="I say "))
    agent.policy.backbone.transformer.max_length = 300
    for turn in range(20):
        agent.act(f"number {turn}")
        agent.assign_reward(0.0)
    conversation = actor_of(agent).conversation(0)
    starts = [index for index, turn in enumerate(conversation.turns) if turn.prompt.starts_context]
    assert len(starts) > 2
    for index in starts[1:]:
        seen = agent.tokenizer.decode(conversation.turns[index].prompt.ids)
        assert "Say something." in seen
        assert f"number {index - 1}" in seen
        assert "number 0" not in seen
        reply = agent.tokenizer.decode(conversation.turns[index - 1].reply.ids)
        assert "I say " + reply in seen
    recorded = [logprob for turn in conversation.turns for logprob in turn.reply.logprobs]
    segments = segments_of([Episode(tuple(conversation.turns), True, False)])
    assert len(segments) == len(starts)
    assert max(TokenTree.from_segment(segment).context_length for segment in segments) < 300
    now = agent.policy.evaluate(segments)
    assert now.logprobs[now.mask].tolist() == pytest.approx(recorded, abs=LOGPROB_TOLERANCE)
    assert agent.terminate_episode()["turns"] == 20
