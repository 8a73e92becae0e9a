"""OpenEnv environments through Gymnasium, in this process and on a server, with the real package."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from llamagym import evaluate
from llamagym.envs.openenv import OpenEnv
from llamagym.errors import ConfigError
from tests.helpers.agents import WordAgent, make_agent

pytest.importorskip("openenv.core", reason="needs the extra openenv")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

from openenv.core.env_server.interfaces import Environment  # noqa: E402
from openenv.core.env_server.types import Action, Observation, State  # noqa: E402


class Word(Action):
    word: str


class Heard(Observation):
    said: str
    truncated: bool = False


class Parrot(Environment[Word, Heard, State]):
    """Rewards the word of its first observation; ends after three tries."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        self.secret, self.tries = ("left", "right")[(seed or 0) % 2], 0
        return Heard(said=self.secret)

    def step(self, action: Word, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        self.tries += 1
        right = action.word == self.secret
        cut = self.tries == 3 and not right
        return Heard(said=action.word, reward=float(right), done=right or cut, truncated=cut)

    @property
    def state(self) -> State:
        return State(step_count=self.tries)


def play(env: OpenEnv) -> None:
    assert env.reset(seed=1) == ('{"said": "right"}', {})
    assert env.step("left") == ('{"said": "left"}', 0.0, False, False, {})
    assert env.step("right")[1:4] == (1.0, True, False)
    env.reset(seed=0)
    assert [env.step("no")[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]


def test_wraps_an_environment_in_this_process():
    play(OpenEnv(Parrot(), lambda reply: Word(word=reply)))


def test_to_text_formats_observations():
    env = OpenEnv(Parrot(), lambda reply: Word(word=reply), lambda fields: f"It says {fields['said']}.")
    assert env.reset(seed=0)[0] == "It says left."


def test_an_agent_plays_several_environments():
    class Repeater(WordAgent):
        def get_action_choices(self, observation):
            return ["left", "right"]

    result = evaluate(
        make_agent(Repeater), lambda: OpenEnv(Parrot(), lambda reply: Word(word=reply)), episodes=4, num_envs=2, seed=0
    )
    assert set(result.returns) <= {0.0, 1.0}


def test_connects_to_a_server():
    uvicorn = pytest.importorskip("uvicorn")
    from openenv.core.env_server.http_server import create_fastapi_app

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_fastapi_app(Parrot, Word, Heard)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.05)
        env = OpenEnv(f"http://127.0.0.1:{port}", lambda reply: {"word": reply})
        play(env)
        env.close()
    finally:
        server.should_exit = True
        thread.join(timeout=30)


def test_error_names_an_unreachable_server():
    with pytest.raises(ConfigError, match=r"No OpenEnv server answers at http://127\.0\.0\.1:9"):
        OpenEnv("http://127.0.0.1:9", lambda reply: {"word": reply})
