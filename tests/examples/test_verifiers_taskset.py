"""An environment of verifiers plays and rewards episodes of a served agent."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from llamagym.agent.agent import collector_of
from llamagym.serving import ChatAgent
from tests.helpers.agents import make_agent
from tests.helpers.serving import served

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("uv") is None, reason="harnesses of verifiers are started by uv"),
]
example = pytest.importorskip("verifiers_taskset", reason="verifiers is not installed", exc_type=ImportError)


def test_rollouts_are_episodes_with_their_rewards(monkeypatch):
    monkeypatch.setattr(example, "ROLLOUTS_AT_ONCE", 4)
    agent = make_agent(ChatAgent, generate={"max_new_tokens": 3}, ppo={"batch_size": 1000})
    with served(agent) as client:
        rewards = asyncio.run(example.play("verifiers_taskset", client.url, 20))
        episodes = collector_of(agent).buffer
        assert len(episodes) == len(rewards) == 20
        assert sum(episode.total_reward for episode in episodes) == sum(rewards)
        prompts = [agent.tokenizer.decode(episode.turns[0].prompt.ids) for episode in episodes]
        assert sum("What is 0 plus 0?" in prompt for prompt in prompts) == 4
        assert all("Answer with one digit." in prompt for prompt in prompts)
        # Rollouts of one task are a group.
        groups: dict[object, set[str]] = {}
        for episode, prompt in zip(episodes, prompts, strict=True):
            groups.setdefault(episode.group, set()).add(prompt)
        assert len(groups) == 5
        assert all(len(shown) == 1 for shown in groups.values())
