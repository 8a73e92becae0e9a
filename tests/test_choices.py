"""Scores of choices, whole or by their length: against the model's own forward pass over one string at a time."""

from __future__ import annotations

import pytest
import torch

from llamagym import ConfigError
from tests.agents import WordAgent, make_agent
from tests.test_invariants import plain_logprobs
from tests.tiny import FAMILIES

pytestmark = pytest.mark.equivalence

# Of log-probabilities: of sums of up to 35 tokens', computed in another order.
TOLERANCE = 1e-3
# How long a choice is, by the normalisation's definition.
LENGTH = {
    "none": lambda agent, choice: 1,
    "token": lambda agent, choice: len(agent.tokenizer(choice, add_special_tokens=False)["input_ids"]),
    "word": lambda agent, choice: choice.count(" ") + 1,
}
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


def slow_scores(agent, observation, normalization):
    """Log-likelihood of each choice by its length: a pass of the bare model over prompt and choice for each."""
    template, tokenizer = agent.chat_template, agent.tokenizer
    prompt = template.first_prompt("Say something.", f"Observation {observation}")
    scores = []
    for choice in agent.get_action_choices(observation):
        ids = tokenizer(choice, add_special_tokens=False)["input_ids"]
        following = plain_logprobs(agent, [*prompt, *ids], len(prompt) - 1)
        total = sum(following[len(prompt) - 1 + i, token].item() for i, token in enumerate(ids))
        scores.append(total / LENGTH[normalization](agent, choice))
    return torch.tensor(scores)


def log_probabilities(agent, observations):
    """What the policy makes of the choices of each observation, all in one batch."""
    contexts = [
        agent.new_conversation().observe(f"Observation {observation}", choices=agent.get_action_choices(observation))
        for observation in observations
    ]
    return agent.policy.choice_logprobs(contexts)


@pytest.mark.parametrize("activated", [True, False])
@pytest.mark.parametrize("normalization", LENGTH)
@pytest.mark.parametrize("family", FAMILIES)
def test_choices_are_chosen_by_likelihood_and_length(family, normalization, activated):
    options = {"calibrate_choices": False, "choice_normalization": normalization, "generate": {"temperature": 1.3}}
    agent = make_agent(OfferAgent, family, activated, **options)
    for observation, logprobs in zip(OFFERS, log_probabilities(agent, OFFERS), strict=True):
        wanted = (slow_scores(agent, observation, normalization) / 1.3).log_softmax(0)
        assert logprobs.tolist() == pytest.approx(wanted.tolist(), abs=TOLERANCE)


def test_normalizations_differ():
    none, token, word = (
        log_probabilities(make_agent(OfferAgent, calibrate_choices=False, choice_normalization=normalization), ["a"])[0]
        for normalization in LENGTH
    )
    assert min((a - b).abs().max() for a, b in ((none, token), (none, word), (token, word))) > 50 * TOLERANCE


@pytest.mark.parametrize("normalization", LENGTH)
def test_hundreds_of_choices_beside_few(normalization):
    options = {"calibrate_choices": False, "choice_normalization": normalization, "context": "turn"}
    agent = make_agent(OfferAgent, **options)
    assert len(MANY) == 300
    for observation, logprobs in zip(("many", "bb"), log_probabilities(agent, ["many", "bb"]), strict=True):
        wanted = slow_scores(agent, observation, normalization).log_softmax(0)
        assert logprobs.tolist() == pytest.approx(wanted.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("normalization", LENGTH)
def test_the_prior_is_the_mean_of_the_same_score(normalization):
    agent = make_agent(OfferAgent, choice_normalization=normalization)
    agent.act_batch(list(OFFERS))
    sums = {}
    with agent.policy.model.pretrained_model.disable_adapter():
        for observation, offered in OFFERS.items():
            for choice, score in zip(offered, slow_scores(agent, observation, normalization).tolist(), strict=True):
                sums.setdefault(tuple(agent.tokenizer(choice)["input_ids"]), []).append(score)
    assert set(agent.policy.choice_prior) == set(sums)
    for ids, scores in sums.items():
        assert agent.policy.choice_prior[ids] == pytest.approx(sum(scores) / len(scores), abs=1e-3)


@pytest.mark.parametrize("activated", [True, False])
@pytest.mark.parametrize("normalization", LENGTH)
def test_what_is_sampled_is_what_is_trained(normalization, activated):
    ppo = {"batch_size": 8, "mini_batch_size": 8, "ppo_epochs": 1}
    agent = make_agent(OfferAgent, "smollm", activated, choice_normalization=normalization, ppo=ppo)
    stats = {}
    for observation in [*OFFERS, *OFFERS]:
        agent.act(observation)
        agent.assign_reward(float(len(observation)))
        stats |= agent.terminate_episode()
    assert stats["ratio_error"] < 2e-4
    assert stats["grad_norm"] > 0


def test_an_unknown_normalization_is_refused():
    with pytest.raises(ConfigError, match=r"choice_normalization='words'\. Did you mean 'word'"):
        make_agent(OfferAgent, choice_normalization="words")
