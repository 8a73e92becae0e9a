"""Threads that share a model wait for each other, so each agent acts as it would alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from llamagym.models.lock import lock_of
from tests.helpers.agents import ChoiceAgent, WordAgent, make_agent
from tests.helpers.tiny import tiny_tokenizer

OBSERVATIONS = [f"{number} {'x' * (number % 7)}" for number in range(12)]


@pytest.fixture
def hasty():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """Results of functions that run at once; their errors are raised."""
    results: list[Any] = [None] * len(jobs)

    def run(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def said(agent: Any) -> list[Any]:
    agent.eval()
    return [agent.act_batch([observation, observation * 2]) for observation in OBSERVATIONS]


def played(agent: Any) -> list[float]:
    stats = []
    for observation in OBSERVATIONS:
        agent.act_batch([observation] * 4)
        agent.assign_rewards([1.0, 0.0, 1.0, 0.0])
        stats.append(agent.terminate_episodes(range(4))["ratio_error"])
    return stats


@pytest.mark.parametrize("kind", [ChoiceAgent, WordAgent])
def test_two_agents_on_one_model_act_at_once(kind, hasty):
    agents = [make_agent(kind)]
    for _ in range(2):
        agents.append(kind(agents[0].policy.model, tiny_tokenizer("llama"), None, {"max_new_tokens": 6}))
    expected = said(agents.pop())
    assert in_threads(*(lambda agent=agent: said(agent) for agent in agents)) == [expected] * 2


def test_one_acts_while_another_learns(hasty):
    """Every reply comes from weights between two updates: sampled and trained probabilities agree."""
    learner = make_agent(ChoiceAgent)
    other = ChoiceAgent(learner.policy.model, tiny_tokenizer("llama"), seed=1)
    errors, _ = in_threads(lambda: played(learner), lambda: said(other))
    assert max(errors) < 1e-3


def test_two_agents_on_one_model_warn_once(caplog):
    def of(agent: Any, kind: type) -> Any:
        return kind(agent.policy.model, tiny_tokenizer("llama"))

    one, _apart = make_agent(ChoiceAgent), make_agent(ChoiceAgent)
    assert "same weights" not in caplog.text
    other = of(one, WordAgent)
    assert "This WordAgent has the same model as another ChoiceAgent" in caplog.text
    assert "load the model once for each" in caplog.text
    caplog.clear()
    _third = of(other, ChoiceAgent)
    assert "same weights" not in caplog.text
    # One that takes the place of another, as where a notebook's cell runs again after `del agent`.
    model = make_agent(ChoiceAgent).policy.model
    _again = ChoiceAgent(model, tiny_tokenizer("llama"))
    assert "same weights" not in caplog.text


def test_the_lock_belongs_to_the_model():
    agents = [make_agent(ChoiceAgent) for _ in range(2)]
    other = ChoiceAgent(agents[0].policy.model, tiny_tokenizer("llama"))
    assert lock_of(agents[0].policy.model) is other.policy.lock
    assert agents[0].policy.lock is not agents[1].policy.lock
