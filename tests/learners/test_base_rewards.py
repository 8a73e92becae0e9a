"""A constant reward of all episodes, or of all episodes of one kind, does not keep an agent from learning."""

from __future__ import annotations

import random

import pytest
import torch

from llamagym.learners import lstd, ppo
from tests.helpers.agents import ChoiceAgent, make_agent

pytestmark = pytest.mark.long

BATCH = 32
MOST_UPDATES = 120


def updates_to_solve(base_of_kind: tuple[float, float], shuffles: bool, seed: int = 0) -> tuple[int, float]:
    """Updates until the best choice has a probability of 0.95 for both kinds of episodes; the first explained variance.

    Episodes have one turn. Each kind has a base return and a best choice of its own, which adds 1.
    """
    options = {"batch_size": BATCH, "learning_rate": 3e-3, "warmup_steps": 1, "gamma": 1.0, "target_kl": 0.03}
    agent = make_agent(ChoiceAgent, context="turn", seed=seed, ppo=options)
    generator = random.Random(seed)
    explained = []
    for update in range(MOST_UPDATES):
        kinds = [index % 2 for index in range(BATCH)]
        if shuffles:
            generator.shuffle(kinds)
        actions = agent.act_batch([f"{kind}" for kind in kinds])
        rewards = [base_of_kind[kind] + float(action == kind) for action, kind in zip(actions, kinds, strict=True)]
        agent.assign_rewards(rewards)
        explained.append(agent.terminate_episodes(range(BATCH))["explained_variance"])
        offers = agent.action_probabilities(["0", "1"])
        if min(list(offer.values())[kind] for kind, offer in enumerate(offers)) > 0.95:
            return update + 1, explained[0]
    return MOST_UPDATES, explained[0]


def test_the_constant_explains_a_base_return(monkeypatch):
    assert updates_to_solve((1000.0, 1000.0), shuffles=False)[0] < 70
    # The control: a fifth of it is left to the features' weights.
    monkeypatch.setattr(lstd, "PRIOR_TURNS_OF_CONSTANT", 4.0)
    assert updates_to_solve((1000.0, 1000.0), shuffles=False)[0] == MOST_UPDATES


def test_alternating_sorts_of_episodes_are_learned_as_fast_as_shuffled_ones(monkeypatch):
    def mean_of_seeds(shuffles: bool) -> tuple[float, float]:
        runs = [updates_to_solve((0.0, 10.0), shuffles, seed) for seed in (0, 1)]
        updates, explained = zip(*runs, strict=True)
        return sum(updates) / len(runs), min(explained)

    alternating, explained = mean_of_seeds(shuffles=False)
    shuffled, _ = mean_of_seeds(shuffles=True)
    assert alternating < 1.2 * shuffled
    assert explained > 0.0
    # The control: halves by the parity of the index value each kind by the other.
    monkeypatch.setattr(ppo, "split", lambda starts, rng: torch.arange(len(starts)) % 2)
    slower, explained = mean_of_seeds(shuffles=False)
    assert slower > 1.2 * alternating
    assert explained < -1.0
