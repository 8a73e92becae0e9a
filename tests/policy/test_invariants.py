"""The invariants that every family must keep: what is sampled is what is recorded is what is trained.

Expected values come from the model's own forward pass on one plain, unpadded sequence, with PEFT's own LoRA: an
activated one is told where the reply begins, a plain one acts on every token.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llamagym.engine.token_tree import Batch, TokenTree
from llamagym.text.episode import Segment
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, make_agent
from tests.helpers.rounding import LOGPROB_TOLERANCE, in_float64
from tests.helpers.tiny import FAMILIES

pytestmark = pytest.mark.equivalence


def play(agent, steps=3, envs=4):
    """Let every environment take `steps` turns, of observations of different lengths; returns their conversations."""
    for step in range(steps):
        agent.act_batch(["x" * (3 * env + step) for env in range(envs)])
        agent.assign_rewards([float(env + step) for env in range(envs)])
    return [actor_of(agent).conversation(env) for env in range(envs)]


def plain_logprobs(agent, ids, opening, temperature=1.0, model=None):
    """Log-probabilities (T - 1, V) of what follows each token, where the reply opens at token `opening`.

    They are those of the agent's model as it is, or of a given one: a copy in float64.
    """
    with torch.no_grad():
        model = model or agent.policy.model.pretrained_model
        logits = model(input_ids=torch.tensor([ids]), alora_offsets=[len(ids) - opening]).logits[0]
    return (logits[:-1].double() / temperature).log_softmax(-1)


def forget(agent):
    """Drop what was read before."""
    agent.policy.backbone.prefix_cache.clear()


def context_ids(segment):
    """All ids of a segment, prompts and replies in turn."""
    return [token for turn in segment.turns for token in (*turn.prompt.ids, *turn.reply.ids)]


@pytest.mark.numerical
@pytest.mark.pairwise(family=FAMILIES, activated=[True, False], prefix=["", "I say "])
def test_recorded_ids_are_what_the_model_saw_and_sampled(family, activated, prefix):
    agent = make_agent(WordAgent, family, activated, generate={"temperature": 1.3}, response_prefix=prefix)
    reencoding_differs = False
    exact = in_float64(agent.policy.model.pretrained_model)
    for conversation in play(agent):
        ids = []
        for turn in conversation.turns:
            ids += turn.prompt.ids
            start, opening = len(ids), len(ids) - 1 - len(agent.tokenizer(prefix)["input_ids"])
            ids += turn.reply.ids
            expected = plain_logprobs(agent, ids, opening, 1.3, exact)
            for offset, (logprob, token) in enumerate(zip(turn.reply.logprobs, turn.reply.ids, strict=True)):
                assert logprob == pytest.approx(expected[start - 1 + offset, token].item(), abs=LOGPROB_TOLERANCE)
        assert ids == context_ids(conversation.current_segment())
        text = agent.tokenizer.decode(ids)
        reencoding_differs |= agent.tokenizer(text, add_special_tokens=False)["input_ids"] != ids
    # The control: a random model writes broken UTF-8, so decoding and encoding again would have been seen.
    assert reencoding_differs


@pytest.mark.pairwise(family=FAMILIES)
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


@pytest.mark.pairwise(family=FAMILIES, activated=[True, False])
def test_choices_are_written_token_by_token_after_a_conversation(family, activated):
    agent = make_agent(ChoiceAgent, family, activated, calibrate_choices=False)
    play(agent, steps=2)
    segment = actor_of(agent).conversation(2).observe("and now?", choices=ChoiceAgent.choices)
    context = [*context_ids(segment), *segment.pending.ids]

    def following(path):
        ids = [*context, *path]
        return plain_logprobs(agent, [*ids, 0], len(context) - 1)[len(ids) - 1]

    left, right, stay = segment.pending.choices
    alike = next(at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    assert left[0] == right[0] != stay[0]
    assert alike < min(len(left), len(right))
    first, second = following(())[[left[0], stay[0]]], following(left[:alike])[[left[alike], right[alike]]]
    (go, staying), directions = first.log_softmax(0), second.log_softmax(0)
    expected = [(go + directions[0]).item(), (go + directions[1]).item(), staying.item()]
    assert agent.policy.choice_logprobs([segment])[0].tolist() == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


@pytest.mark.numerical
@pytest.mark.pairwise(
    family=FAMILIES, kind=[WordAgent, ChoiceAgent], context=["episode", "turn"], activated=[True, False]
)
def test_every_ratio_is_one_until_the_weights_change(family, kind, context, activated):
    agent = make_agent(kind, family, activated, context=context, ppo={"batch_size": 100})
    conversations = play(agent)
    segments = [Segment((turn,)) for c in conversations for turn in c.turns]
    if context == "episode":
        segments = [Segment(tuple(c.turns)) for c in conversations]
    turns = [turn for segment in segments for turn in segment.turns]
    # The first choices were drawn before those after them were known, to calibrate them all; in a conversation each of
    # the three turns shows what more earlier replies do.
    fresh = [row for row, turn in enumerate(turns) if turn.reply.weights_version == agent.policy.weights_version]
    of_choices = 1 / 3 if context == "episode" else 2 / 3
    assert len(fresh) >= (1.0 if kind is WordAgent else of_choices) * len(turns)
    recorded = [logprob for row in fresh for logprob in turns[row].reply.logprobs]
    now = agent.policy.evaluate(segments)
    assert now.logprobs[fresh][now.mask[fresh]].tolist() == pytest.approx(recorded, abs=LOGPROB_TOLERANCE)
    assert now.values.tolist() == pytest.approx([turn.reply.value for turn in turns], abs=LOGPROB_TOLERANCE)
    with torch.no_grad():
        for name, weight in agent.policy.model.named_parameters():
            if "lora_B" in name:
                weight.add_(0.05)
    changed = agent.policy.evaluate(segments)
    assert (changed.logprobs - now.logprobs).abs().max() > 50 * LOGPROB_TOLERANCE
    # What was read before the change is still right after it.
    forget(agent)
    recomputed = agent.policy.evaluate(segments)
    assert torch.allclose(changed.logprobs, recomputed.logprobs, atol=LOGPROB_TOLERANCE)


@pytest.mark.numerical
@pytest.mark.pairwise(family=FAMILIES, kind=[WordAgent, ChoiceAgent])
def test_many_at_once_equal_one_at_a_time(family, kind):
    agent = make_agent(kind, family)
    segments = [c.current_segment() for c in play(agent)]
    together = agent.policy.evaluate(segments)
    rows = 0
    for segment in segments:
        alone = agent.policy.evaluate([segment])
        n, width = alone.logprobs.shape
        here = slice(rows, rows + n)
        assert torch.allclose(together.logprobs[here, :width], alone.logprobs, atol=LOGPROB_TOLERANCE)
        assert torch.allclose(together.entropy[here, :width], alone.entropy, atol=LOGPROB_TOLERANCE)
        assert torch.allclose(together.values[here], alone.values, atol=LOGPROB_TOLERANCE)
        rows += n


@pytest.mark.numerical
@pytest.mark.pairwise(family=FAMILIES, kind=[WordAgent, ChoiceAgent], activated=[True, False])
def test_gradients_with_a_shared_prefix_equal_those_without(family, kind, activated):
    agent = make_agent(kind, family, activated)
    segments = [c.current_segment() for c in play(agent)]
    assert segments[0].turns[0].prompt.shared_length > 5
    weights = [w for w in agent.policy.model.parameters() if w.requires_grad]

    def unshared(segment):
        first, *others = segment.turns
        return Segment((replace(first, prompt=replace(first.prompt, shared_length=0)), *others))

    def gradients(groups):
        for weight in weights:
            weight.grad = None
        for group in groups:
            now = agent.policy.evaluate(group)
            (now.logprobs.square().sum() + now.entropy.sum() + now.values.square().sum()).backward()
        return [w.grad.clone() for w in weights]

    for with_it, without in zip(gradients([segments]), gradients([[unshared(s)] for s in segments]), strict=True):
        assert torch.allclose(with_it, without, atol=1e-3 * max(1.0, without.abs().max().item()))


@pytest.mark.pairwise(family=FAMILIES, kind=[WordAgent, ChoiceAgent])
def test_an_episode_as_one_sequence_equals_turn_by_turn(family, kind):
    agent = make_agent(kind, family)
    for conversation in play(agent):
        turns = conversation.turns
        whole = agent.policy.evaluate([Segment(tuple(turns))])
        for index, turn in enumerate(turns):
            ids = context_ids(Segment(tuple(turns[:index]))) + list(turn.prompt.ids)
            alone = replace(turn, prompt=replace(turn.prompt, ids=tuple(ids), starts_context=True))
            part = agent.policy.evaluate([Segment((alone,))])
            width = part.logprobs.shape[1]
            assert torch.allclose(whole.logprobs[index, :width], part.logprobs[0], atol=LOGPROB_TOLERANCE)
            assert torch.allclose(whole.entropy[index, :width], part.entropy[0], atol=LOGPROB_TOLERANCE)
            assert whole.values[index].item() == pytest.approx(part.values[0].item(), abs=LOGPROB_TOLERANCE)


@pytest.mark.pairwise(family=FAMILIES)
def test_histories_run_once_and_are_recalled_exactly(family):
    agent = make_agent(ChoiceAgent, family)
    segments = [c.current_segment() for c in play(agent)]
    policy, backbone = agent.policy, agent.policy.backbone
    forget(agent)
    before = policy.tokens_forwarded
    first, middle = policy.evaluate(segments), policy.tokens_forwarded
    again = policy.evaluate(segments)
    assert torch.allclose(first.logprobs, again.logprobs, atol=1e-5)
    trees = [TokenTree.from_segment(segment) for segment in segments]
    assert policy.tokens_forwarded - middle == len(trees) * max(tree.node_count for tree in trees)
    assert middle - before > policy.tokens_forwarded - middle
    assert torch.equal(again.logprobs, policy.evaluate(segments).logprobs)
    # The control: no layer is skipped.
    assert backbone.transformer.trunk is not None
    forget(agent)
    backbone.transformer.unsplit()
    recomputed = policy.evaluate(segments)
    assert torch.allclose(first.logprobs, recomputed.logprobs, atol=LOGPROB_TOLERANCE)


@pytest.mark.pairwise(family=FAMILIES, activated=[True, False])
def test_the_reference_is_the_model_without_its_adapter(family, activated):
    agent = make_agent(WordAgent, family, activated)
    segment = play(agent, steps=1, envs=1)[0].current_segment()
    reference = agent.policy.evaluate([segment], reference=True)
    with agent.policy.model.pretrained_model.disable_adapter():
        expected = plain_logprobs(agent, context_ids(segment), 0)
    start = len(segment.turns[0].prompt.ids) - 1
    wanted = [expected[start + i, token].item() for i, token in enumerate(segment.turns[0].reply.ids)]
    assert reference.logprobs[0].tolist() == pytest.approx(wanted, abs=LOGPROB_TOLERANCE)


def test_node_attends_to_its_context_and_ancestors_only():
    agent = make_agent(ChoiceAgent, "llama")
    segments = [c.current_segment() for c in play(agent, steps=2, envs=3)]
    trees = [TokenTree.from_segment(s) for s in segments]
    batch = Batch.from_trees(trees)
    own = batch.prefix_length + batch.history.shape[1]
    for row, tree in enumerate(trees):
        base = 0
        for decision in tree.decisions:
            for node, parent in enumerate(decision.parents):
                ancestors, depth = {node}, 0
                while parent >= 0:
                    ancestors.add(parent)
                    parent, depth = decision.parents[parent], depth + 1
                seen = set(batch.nodes.visible[row, base + node].nonzero()[:, 0].tolist())
                assert seen == set(range(decision.start)) | {own + base + ancestor for ancestor in ancestors}
                assert batch.nodes.positions[row, base + node] == decision.start + depth
            base += len(decision.ids)


@pytest.mark.pairwise(family=["smollm", "llama", "gemma"])
def test_the_live_model_generates_as_the_agent_replies(family):
    """PEFT activates the adapter at the invocation token, without the engine."""
    agent = make_agent(WordAgent, family, context="turn", generate={"max_new_tokens": 5})
    agent.eval(greedy=True)
    agent.act("x")
    turn = actor_of(agent).conversation(0).turns[0]
    prompt = torch.tensor([turn.prompt.ids])
    output = agent.policy.model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=5
    )
    assert output[0, prompt.shape[1] :].tolist() == list(turn.reply.ids)
    without = agent.policy.evaluate([Segment((turn,))], reference=True)
    assert (without.logprobs - torch.tensor([turn.reply.logprobs])).abs().max() > 50 * LOGPROB_TOLERANCE


def test_same_observation_costs_once():
    agent = make_agent(ChoiceAgent, context="turn")
    agent.act_batch(["same"] * 3)
    tokens = agent.policy.tokens_forwarded
    agent.assign_rewards([0.0] * 3)
    agent.act_batch(["same"] * 3)
    assert agent.policy.tokens_forwarded == tokens


def test_short_texts_are_not_padded_to_long_ones():
    """A pass over eight texts of unequal lengths forwards hardly more tokens than each of them alone."""
    texts = ["x" * length for length in (5, 6, 7, 50, 52, 120, 180, 240)]
    agent = make_agent(ChoiceAgent, context="turn")
    agent.act_batch(texts)
    trees = [TokenTree.from_segment(actor_of(agent).conversation(env).current_segment()) for env in range(len(texts))]
    lengths = [len(tree.history) for tree in trees]
    assert len(lengths) * max(lengths) > 2 * sum(lengths)
    forget(agent)
    backbone = agent.policy.backbone
    before = agent.policy.tokens_forwarded
    known = backbone.prefill(trees)
    assert [sum(map(len, of_tree.history)) for of_tree in known] == lengths
    assert agent.policy.tokens_forwarded - before <= 1.1 * sum(lengths)
