"""A served tiny agent, and programs that call it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

import llamagym
from llamagym.serving import ChatAgent
from tests.helpers.agents import make_agent

# The extra serve, and a client.
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

HELLO = [{"role": "user", "content": "hello"}]


class Client:
    """A client of a served agent.

    Attributes:
        agent: The agent.
        url: The server's address.
        openai: The official client, without retries.
        updates: Statistics of the updates so far.
    """

    def __init__(self, agent: Any, url: str, updates: list[Any], api_key: str = "none") -> None:
        self.agent = agent
        self.url = url
        self.updates = updates
        self.openai = openai.OpenAI(base_url=url, api_key=api_key, max_retries=0)

    def chat(self, messages: Any = HELLO, **options: Any) -> Any:
        return self.openai.chat.completions.create(model="any", messages=messages, **options)

    def say(self, messages: list[Any], **options: Any) -> Any:
        """Appends the reply to the messages; returns its choice."""
        choice = self.chat(messages, **options).choices[0]
        messages.append(choice.message.model_dump(exclude_none=True))
        return choice

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json={} if body is None else body, timeout=60, **options)

    def reward(self, episode: str, reward: float, turn: int = -1) -> None:
        assert self.post(f"/episodes/{episode}/reward", {"reward": reward, "turn": turn}).status_code == 200

    def end(self, episode: str, **body: Any) -> Any:
        response = self.post(f"/episodes/{episode}/end", body)
        assert response.status_code == 200, response.text
        return response.json()["update"]


@contextmanager
def served(agent: Any = None, **options: Any) -> Iterator[Client]:
    """Serves an agent, by default a tiny one in training mode."""
    agent = agent or make_agent(ChatAgent, generate={"max_new_tokens": 8})
    updates: list[Any] = []
    with llamagym.serve(agent, on_update=updates.append, **options) as url:
        client = Client(agent, url, updates, options.get("api_key") or "none")
        with client.openai:
            yield client
