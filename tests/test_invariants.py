"""The invariants that every family must keep: what is sampled is what is recorded is what is trained.

Expected values come from the model's own forward pass on one plain, unpadded sequence.
"""

from __future__ import annotations

import pytest
import torch

from llamagym.batching import Batch, TokenTree, shared_prefix_length
from llamagym.conversation import Segment
from tests.agents import ChoiceAgent, WordAgent, make_agent
from tests.tiny import FAMILIES

TOLERANCE = 2e-4


def play(agent, steps=3, envs=4):
    """Let every environment take `steps` turns, of observations of different lengths; returns their conversations."""
    for step in range(steps):
        agent.act_batch(["x" * (3 * env + step) for env in range(envs)])
        agent.assign_rewards([float(env + step) for env in range(envs)])
    return [agent.conversation(env) for env in range(envs)]


def plain_logprobs(agent, ids, temperature=1.0):
    """Log-probabilities (T - 1, V) of what follows each token, from the model's own forward pass."""
    with torch.no_grad():
        logits = agent.policy.model.pretrained_model(input_ids=torch.tensor([ids])).logits[0]
    return (logits[:-1].float() / temperature).log_softmax(-1)


def context_ids(segment):
    """All ids of a segment, prompts and replies in turn."""
    return [token for turn in segment.turns for token in (*turn.prompt.ids, *turn.reply.ids)]


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_ids_are_what_the_model_saw_and_sampled(family):
    agent = make_agent(WordAgent, family, generate={"temperature": 1.3})
    reencoding_differs = False
    for conversation in play(agent):
        segment = conversation.current_segment()
        ids = context_ids(segment)
        expected = plain_logprobs(agent, ids, temperature=1.3)
        start = 0
        for turn in segment.turns:
            start += len(turn.prompt.ids)
            for logprob, token in zip(turn.reply.logprobs, turn.reply.ids, strict=True):
                assert logprob == pytest.approx(expected[start - 1, token].item(), abs=TOLERANCE)
                start += 1
        text = agent.tokenizer.decode(ids)
        reencoding_differs |= agent.tokenizer(text, add_special_tokens=False)["input_ids"] != ids
    # The control: a random model writes broken UTF-8, so decoding and encoding again would have been seen.
    assert reencoding_differs


@pytest.mark.parametrize("family", FAMILIES)
def test_conversation_reads_as_the_template_renders_it(family):
    agent = make_agent(ChoiceAgent, family)
    conversation = play(agent, steps=3, envs=1)[0]
    ids = context_ids(conversation.current_segment())
    messages = list(conversation.messages)
    if family == "gemma":
        system, first, *rest = messages
        messages = [{"role": "user", "content": f"{system['content']}\n\n{first['content']}"}, *rest]
    rendered = agent.tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    seen = agent.tokenizer.decode(ids)
    # Qwen3's template hides earlier thinking blocks; the conversation keeps them as the model saw them.
    assert seen.replace("<think>\n\n</think>\n\n", "") == rendered + messages[-1]["content"]


@pytest.mark.parametrize("family", FAMILIES)
def test_choices_are_scored_by_their_exact_likelihood(family):
    agent = make_agent(ChoiceAgent, family, calibrate_choices=False)
    play(agent, steps=2)
    conversation = agent.conversation(2)
    segment = conversation.observe("and now?", choices=ChoiceAgent.choices)
    logprobs = agent.policy.choice_logprobs([segment])[0]
    context = [*context_ids(segment), *segment.pending.ids]
    scores = []
    for choice in segment.pending.choices:
        following = plain_logprobs(agent, [*context, *choice])
        scores.append(sum(following[len(context) - 1 + i, token].item() for i, token in enumerate(choice)))
    assert logprobs.tolist() == pytest.approx(torch.tensor(scores).log_softmax(0).tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("context", ["episode", "turn"])
@pytest.mark.parametrize("kind", [WordAgent, ChoiceAgent])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_ratio_is_one_until_the_weights_change(family, kind, context):
    agent = make_agent(kind, family, context=context, ppo={"batch_size": 100})
    conversations = play(agent)
    segments = [Segment((turn,)) for c in conversations for turn in c.turns]
    if context == "episode":
        segments = [Segment(tuple(c.turns)) for c in conversations]
    turns = [turn for segment in segments for turn in segment.turns]
    recorded = [logprob for turn in turns for logprob in turn.reply.logprobs]
    now = agent.policy.evaluate(segments)
    assert now.logprobs[now.mask].tolist() == pytest.approx(recorded, abs=TOLERANCE)
    assert now.values.tolist() == pytest.approx([turn.reply.value for turn in turns], abs=TOLERANCE)
    with torch.no_grad():
        for name, weight in agent.policy.model.named_parameters():
            if "lora_B" in name:
                weight.add_(0.05)
    changed = agent.policy.evaluate(segments)
    assert (changed.logprobs[changed.mask] - torch.tensor(recorded)).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("kind", [WordAgent, ChoiceAgent])
@pytest.mark.parametrize("family", FAMILIES)
def test_many_at_once_equal_one_at_a_time(family, kind):
    agent = make_agent(kind, family)
    segments = [c.current_segment() for c in play(agent)]
    together = agent.policy.evaluate(segments)
    rows = 0
    for segment in segments:
        alone = agent.policy.evaluate([segment])
        n, width = alone.logprobs.shape
        here = slice(rows, rows + n)
        assert torch.allclose(together.logprobs[here, :width], alone.logprobs, atol=TOLERANCE)
        assert torch.allclose(together.entropy[here, :width], alone.entropy, atol=TOLERANCE)
        assert torch.allclose(together.values[here], alone.values, atol=TOLERANCE)
        rows += n


@pytest.mark.parametrize("kind", [WordAgent, ChoiceAgent])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_through_a_shared_prefix_equal_those_without(family, kind):
    agent = make_agent(kind, family)
    segments = [c.current_segment() for c in play(agent)]
    assert shared_prefix_length([TokenTree.from_segment(s) for s in segments]) > 5
    weights = [w for w in agent.policy.model.parameters() if w.requires_grad]

    def gradients(groups):
        for weight in weights:
            weight.grad = None
        for group in groups:
            now = agent.policy.evaluate(group)
            (now.logprobs.square().sum() + now.entropy.sum() + now.values.square().sum()).backward()
        return [w.grad.clone() for w in weights]

    for shared, unshared in zip(gradients([segments]), gradients([[s] for s in segments]), strict=True):
        assert torch.allclose(shared, unshared, atol=1e-3 * max(1.0, unshared.abs().max().item()))


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_below_the_adapters_may_be_cached(family):
    agent = make_agent(ChoiceAgent, family)
    segments = [c.current_segment() for c in play(agent)]
    backbone = agent.policy._backbone
    first, before = agent.policy.evaluate(segments), backbone.trunk_tokens_forwarded
    again = agent.policy.evaluate(segments)
    assert backbone.trunk_tokens_forwarded == before
    assert backbone._trunk is not None
    backbone._trunk, backbone._top = None, backbone._body
    recomputed = agent.policy.evaluate(segments)
    assert torch.equal(first.logprobs, again.logprobs)
    assert torch.allclose(first.logprobs, recomputed.logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_the_model_without_its_adapter(family):
    agent = make_agent(WordAgent, family)
    segment = play(agent, steps=1, envs=1)[0].current_segment()
    reference = agent.policy.evaluate([segment], reference=True)
    with agent.policy.model.pretrained_model.disable_adapter():
        expected = plain_logprobs(agent, context_ids(segment))
    start = len(segment.turns[0].prompt.ids) - 1
    wanted = [expected[start + i, token].item() for i, token in enumerate(segment.turns[0].reply.ids)]
    assert reference.logprobs[0].tolist() == pytest.approx(wanted, abs=TOLERANCE)


def test_a_node_sees_its_ancestors_and_nothing_else():
    agent = make_agent(ChoiceAgent, "llama")
    segments = [c.current_segment() for c in play(agent, steps=2, envs=3)]
    trees = [TokenTree.from_segment(s) for s in segments]
    prefix = shared_prefix_length(trees)
    batch = Batch.from_trees(trees, prefix)
    for row, tree in enumerate(trees):
        for node in range(prefix, len(tree)):
            ancestors, depth, current = {node}, 0, node
            while tree.parents[current] >= 0:
                current, depth = tree.parents[current], depth + 1
                ancestors.add(current)
            seen = set(batch.visible[row, node - prefix].nonzero()[:, 0].tolist())
            assert seen == ancestors
            assert batch.positions[row, node - prefix] == depth


def test_same_observation_costs_once():
    agent = make_agent(ChoiceAgent, context="turn")
    agent.act_batch(["same"] * 3)
    tokens = agent.policy.tokens_forwarded
    agent.assign_rewards([0.0] * 3)
    agent.act_batch(["same"] * 3)
    assert agent.policy.tokens_forwarded == tokens
