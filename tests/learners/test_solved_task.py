"""A solved task stays solved: 200 more updates at three times the default learning rate, without a bound on the KL.

Most batches of a solved task hold no wrong action. What is left of their advantages is the critic's error, which must
not be scaled to full steps.
"""

from __future__ import annotations

from typing import Any

import pytest

from llamagym.learners import advantages
from tests.helpers.agents import ChoiceAgent, make_agent

BATCH = 32
# The best choice for each observation.
BEST = {0: 0, 1: 1}
LEARNERS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo with a gradient critic": {"critic": "gradient"},
    "grpo": {"epochs": 4, "group_size": BATCH // 2},
    "grpo with the other baseline": {"epochs": 4, "group_size": BATCH // 2, "baseline": "leave_one_out"},
    "reinforce": {},
}


def lowest_probability(name: str, updates: int) -> float:
    """The least probability of the best choice, for any observation, in the updates that follow the solution."""
    algorithm = name.split()[0]
    options = {"batch_size": BATCH, "warmup_steps": 1, "learning_rate": 3e-3, "target_kl": None, **LEARNERS[name]}
    agent = make_agent(ChoiceAgent, context="turn", algorithm=algorithm, seed=0, **{algorithm: options})
    observations = [number % len(BEST) for number in range(BATCH)]
    lowest = 1.0
    after: int | None = None
    for update in range(400):
        actions = agent.act_batch(list(map(str, observations)))
        agent.assign_rewards([float(action == BEST[of]) for action, of in zip(actions, observations, strict=True)])
        groups = [(update, of) for of in observations] if algorithm == "grpo" else None
        agent.terminate_episodes(range(BATCH), groups=groups)
        offers = agent.action_probabilities(list(map(str, BEST)))
        probability = min(list(offer.values())[best] for offer, best in zip(offers, BEST.values(), strict=True))
        if after is None and probability > 0.97:
            after = 0
        elif after is not None:
            after += 1
            lowest = min(lowest, probability)
            if after == updates:
                return lowest
    raise AssertionError(f"not solved, the best choice has a probability of {probability:.2f}")


@pytest.mark.long
@pytest.mark.parametrize("name", LEARNERS)
def test_a_solved_task_stays_solved(name):
    assert lowest_probability(name, 200) > 0.7


@pytest.mark.long
def test_without_lower_bounds_a_solved_task_is_unlearned(monkeypatch):
    """The negative control: advantages at unit variance, however little the returns differ."""
    monkeypatch.setattr(advantages, "_MIN_SHARE_OF_DEVIATION", 0.0)
    monkeypatch.setattr(advantages, "_MIN_SHARE_OF_SPREAD", 0.0)
    monkeypatch.setattr(advantages.Information, "is_in", lambda *_: True)
    assert lowest_probability("ppo", 200) < 0.1
