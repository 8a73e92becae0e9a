"""Probabilities of choices: token by token against the model's own forward pass, among what the choices allow."""

from __future__ import annotations

import math

import pytest
import torch

from llamagym.conversation.chat_template import end_ids
from llamagym.engine.choice_trie import END, ChoiceTrie, turnings
from tests.agents import WordAgent, make_agent
from tests.test_invariants import plain_logprobs
from tests.tiny import FAMILIES

pytestmark = pytest.mark.equivalence

# Of log-probabilities: of sums over up to 35 tokens, computed in another order.
TOLERANCE = 1e-3
# One word and many, short and long, some beginning alike or wholly contained in another; offers of different size.
OFFERS = {
    "a": ["go", "go left", "take the old lantern from the shelf", "inventory"],
    "bb": ["go", "examine lantern"],
    "ccc": ["take the old lantern", "take the old lantern from the shelf", "x", "y", "open box"],
    "dddd": ["wait"],
}
# As a text world offers them.
MANY = [f"{verb} {thing}" for verb in ("take", "drop", "open the") for thing in map(str, range(100))]


class OfferAgent(WordAgent):
    """Offers what the observation names."""

    def get_action_choices(self, observation):
        return MANY if observation == "many" else OFFERS[observation]


def encoded(agent, observation):
    """Token ids of each choice."""
    return [
        tuple(agent.tokenizer(choice, add_special_tokens=False)["input_ids"])
        for choice in agent.get_action_choices(observation)
    ]


def at_its_start(agent):
    """The agent as a fresh adapter leaves it."""
    with torch.no_grad():
        for name, weight in agent.policy.model.named_parameters():
            if "lora_B" in name:
                weight.zero_()
    return agent


class Model:
    """What the bare model says may follow the prompt of an observation and some tokens, a pass for each."""

    def __init__(self, agent, observation):
        self._agent = agent
        self._prompt = agent.chat_template.first_prompt("Say something.", f"Observation {observation}")
        self._known = {}

    def logprob(self, path, token):
        """Of a token, or of the reply's end, among all tokens."""
        if path not in self._known:
            ids = [*self._prompt, *path]
            self._known[path] = plain_logprobs(self._agent, [*ids, 0], len(self._prompt) - 1)[len(ids) - 1]
        agent = self._agent
        closing = agent.chat_template.closing_id(end_ids(agent.policy.model.pretrained_model, agent.tokenizer))
        return self._known[path][closing if token == END else token].item()


def slow_logprobs(agent, observation, temperature=1.0, prior=None):
    """Log-probability of each choice: at each of its tokens a softmax over those that some choice goes on with."""
    model, written = Model(agent, observation), [(*ids, END) for ids in encoded(agent, observation)]
    logprobs = []
    for ids in written:
        total = 0.0
        for at, token in enumerate(ids):
            following = [other[at] for other in written if other[:at] == ids[:at]]
            if len(set(following)) == 1:
                continue
            logits = {}
            for each in set(following):
                less = prior[(*ids[:at], each)] if prior else 0.0
                count = following.count(each) if prior else 1
                logits[each] = (model.logprob(ids[:at], each) - less) / temperature + math.log(count)
            total += logits[token] - torch.tensor(list(logits.values())).logsumexp(0).item()
        logprobs.append(total)
    return logprobs


def log_probabilities(agent, observations):
    """What the policy makes of the choices of each observation, all in one batch."""
    contexts = [
        agent.new_conversation().observe(f"Observation {observation}", choices=agent.get_action_choices(observation))
        for observation in observations
    ]
    return agent.policy.choice_logprobs(contexts)


@pytest.mark.parametrize("activated", [True, False])
@pytest.mark.parametrize("calibrate", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_choices_are_written_token_by_token(family, calibrate, activated):
    agent = make_agent(OfferAgent, family, activated, calibrate_choices=calibrate, generate={"temperature": 1.3})
    for observation, logprobs in zip(OFFERS, log_probabilities(agent, OFFERS), strict=True):
        prior = agent.policy.choice_prior if calibrate else None
        assert logprobs.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
        assert logprobs.tolist() == pytest.approx(slow_logprobs(agent, observation, 1.3, prior), abs=TOLERANCE)


def test_hundreds_of_choices_beside_few():
    agent = make_agent(OfferAgent, calibrate_choices=False, context="turn")
    assert len(MANY) == 300
    for observation, logprobs in zip(("many", "bb"), log_probabilities(agent, ["many", "bb"]), strict=True):
        assert logprobs.tolist() == pytest.approx(slow_logprobs(agent, observation), abs=TOLERANCE)


def test_the_prior_is_how_likely_each_token_is_beside_the_others():
    agent = make_agent(OfferAgent)
    agent.act_batch(list(OFFERS))
    measured = {}
    with agent.policy.model.pretrained_model.disable_adapter():
        for observation in OFFERS:
            model, written = Model(agent, observation), [(*ids, END) for ids in encoded(agent, observation)]
            for path in {ids[:at] for ids in written for at in range(len(ids))}:
                following = {ids[len(path)] for ids in written if ids[: len(path)] == path}
                if len(following) > 1:
                    usual = torch.tensor([model.logprob(path, token) for token in following]).exp().mean().log().item()
                    for token in following:
                        measured.setdefault((*path, token), []).append(model.logprob(path, token) - usual)
    assert set(agent.policy.choice_prior) == set(measured)
    for path, found in measured.items():
        assert agent.policy.choice_prior[path] == pytest.approx(sum(found) / len(found), abs=1e-3)


def test_what_is_offered_late_is_measured_like_what_was_offered_first():
    """An observation that makes all commands likelier than the first ones did leaves a new one where it was."""
    agent = at_its_start(make_agent(OfferAgent, context="turn"))
    first, later = log_probabilities(agent, ["bb"])[0], log_probabilities(agent, ["a"])[0]
    assert first.exp().tolist() == pytest.approx([1 / 2] * 2, rel=1e-3)
    alone = log_probabilities(at_its_start(make_agent(OfferAgent, context="turn")), ["a"])[0]
    assert alone.exp().tolist() == pytest.approx([1 / 4] * 4, rel=1e-3)
    assert later.exp().min() > 1 / 16


def test_what_says_no_more_than_the_prior_leaves_all_choices_equally_likely():
    agent = at_its_start(make_agent(OfferAgent))
    # The prior is measured here, on this context alone.
    (logprobs,) = log_probabilities(agent, ["many"])
    assert logprobs.exp().tolist() == pytest.approx([1 / 300] * 300, rel=1e-3)


@pytest.mark.parametrize("activated", [True, False])
def test_what_is_sampled_is_what_is_trained(activated):
    ppo = {"batch_size": 8, "mini_batch_size": 8, "ppo_epochs": 1}
    agent = make_agent(OfferAgent, "smollm", activated, ppo=ppo)
    stats = {}
    for observation in [*OFFERS, *OFFERS]:
        agent.act(observation)
        agent.assign_reward(float(len(observation)))
        stats |= agent.terminate_episode()
    assert stats["ratio_error"] < 2e-4
    assert stats["grad_norm"] > 0


def test_the_entropy_along_the_ways_is_on_average_that_of_all_choices():
    agent = make_agent(OfferAgent, "llama", context="turn", seed=0)
    (logprobs,) = log_probabilities(agent, ["ccc"])
    exact = -(logprobs.exp() * logprobs).sum().item()
    agent.act_batch(["ccc"] * 400)
    segments = [agent.conversation(env).current_segment() for env in range(400)]
    with torch.no_grad():
        along = agent.policy.evaluate(segments).entropy[:, 0]
    assert along.std() > 0.01
    assert along.mean().item() == pytest.approx(exact, abs=4 * along.std().item() / 20)


def test_learning_from_a_choice_costs_what_leads_to_where_it_parts_from_others():
    agent = make_agent(OfferAgent, context="turn")
    agent.act_batch(["many"])
    policy, before = agent.policy, agent.policy.tokens_forwarded
    policy.evaluate([agent.conversation(0).current_segment()])
    # The generation prompt's end, and at most "open", " the", " " and a digit.
    assert 0 < policy.tokens_forwarded - before < 20


def test_every_choice_is_reached_and_nothing_else():
    choices = ((1, 2, 3), (1, 2), (1, 4, 5, 6), (7, 8), (9,), (1, 4, 5, 7))
    trie = ChoiceTrie.of(choices)
    ways = {}
    for choice in choices:
        ways[choice] = tuple(turnings(trie.branches, [choice])[0])
        along = trie.along(choice)
        assert along.ids == choice[: len(along.ids)]
        assert [target for _, target in turnings(along.branches, [choice])[0]] == [target for _, target in ways[choice]]
        assert all(branch.node == len(branch.path) for branch in along.branches)
    assert len(set(ways.values())) == len(choices)
    paths = {0: ()}
    for node, (token, parent) in enumerate(zip(trie.ids, trie.parents, strict=True), start=1):
        assert parent < node
        paths[node] = (*paths[parent], token)
    for branch in trie.branches:
        assert paths[branch.node] == branch.path
        following = [
            (*choice, END)[len(branch.path)] for choice in choices if choice[: len(branch.path)] == branch.path
        ]
        assert dict(zip(branch.targets, branch.counts, strict=True)) == {t: following.count(t) for t in following}
        assert len(branch.targets) > 1
    # What no branch needs is not read.
    assert sorted(paths.values()) == [(), (1,), (1, 2), (1, 4), (1, 4, 5)]
