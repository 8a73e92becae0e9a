"""Serves an agent over HTTP, so that programs written for OpenAI's API can use and train it."""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from ipaddress import ip_address
from typing import Any

from .. import distributed
from ..agent.agent import Agent, collector_of
from ..errors import ConfigError, excerpt, needs
from ..learners.base import Stats
from ..options import check_arguments, explains_wrong_calls
from .worker import Worker

logger = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_API_KEY = re.compile("[!-~]+")
_POLL_S = 0.005
# Seconds that clients get to read their answers when the server closes.
_SHUTDOWN_S = 5


class ChatAgent(Agent):
    """An agent for programs that bring their own messages, through `serve`.

    In an environment it reads observations as they are, and its action is the reply.
    """

    def get_system_prompt(self) -> str:
        """Returns no system prompt."""
        return ""

    def format_observation(self, observation: Any) -> str:
        """Returns the observation as text."""
        return str(observation)

    def extract_action(self, response: str) -> str:
        """Returns the reply."""
        return response


@explains_wrong_calls(positional=3)
@contextmanager
def serve(
    agent: Agent,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    api_key: str | None = None,
    on_update: Callable[[Stats], None] | None = None,
) -> Iterator[str]:
    """Serves an agent as OpenAI's chat completions API while open.

        with llamagym.serve(agent) as url:
            client = openai.OpenAI(base_url=url, api_key="none")

    In training mode each call is recorded under an episode. Calls to the base URL `{url}/episodes/ID` belong to that
    episode; the headers X-Episode-Id and X-Session-ID and the field `user` name it as well. `POST
    {url}/episodes/ID/reward` and `{url}/episodes/ID/end` assign rewards and end it. A batch of ended episodes trains
    the agent; calls wait during the update.

    Args:
        agent: The agent. Its `get_system_prompt` and other methods are not called: clients send all messages.
        host: Address to listen on; by default only programs on this machine can connect.
        port: Port; 0 takes a free one.
        api_key: Key that clients must send; None for no key.
        on_update: Called with the statistics of each update, in the worker's thread, while calls wait.

    Yields:
        The base URL for clients, ending in /v1.

    Raises:
        ConfigError: Binding the address fails, an argument is invalid, several processes learn together, or FastAPI or
            uvicorn is missing.
    """
    with needs("serve", "Serving"):
        import uvicorn

        from .app import make_app
    if not isinstance(agent, Agent):
        raise ConfigError(f"agent must be an Agent, such as a ChatAgent, got a {type(agent).__name__}.")
    check_arguments(serve, {"host": host, "port": port, "api_key": api_key, "on_update": on_update})
    if distributed.world_size() > 1:
        raise ConfigError("Serving supports one process. Start the program without a launcher.")
    if api_key is not None and not _API_KEY.fullmatch(api_key):
        raise ConfigError("api_key must consist of printable ASCII characters without spaces, which a header can hold.")
    worker = Worker(collector_of(agent), on_update)
    with closing(_listen(host, port)) as listener:
        address, bound_port = listener.getsockname()[:2]
        is_loopback = ip_address(address).is_loopback
        if not is_loopback and api_key is None:
            logger.warning("Everyone who can reach %s can use this server. Pass an api_key.", host)
        hosts = {*_LOOPBACK, address} if is_loopback else ()
        app = make_app(worker, _model_name(agent), api_key, hosts)
        config = uvicorn.Config(
            app, log_level="warning", lifespan="off", ws="none", timeout_graceful_shutdown=_SHUTDOWN_S
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="llamagym-http", daemon=True)
        worker.start()
        try:
            thread.start()
            while not server.started:
                if not thread.is_alive():
                    raise ConfigError("The HTTP server did not start; the error is above.")
                time.sleep(_POLL_S)
            yield f"http://[{address}]:{bound_port}/v1" if ":" in address else f"http://{address}:{bound_port}/v1"
        finally:
            # First the work: clients whose episode ends now still get their answer.
            worker.close()
            server.should_exit = True
            thread.join()


def _listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens, so that clients can connect before the server runs."""
    if not host:
        raise ConfigError("host must not be empty. Pass '0.0.0.0' to listen on every address of this machine.")
    if not 0 <= port < 2**16:
        raise ConfigError(f"port must be an int from 0 to {2**16 - 1} (0 picks a free port), got {excerpt(port)}.")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on host {excerpt(host)}, port {port}: {error}. Choose another host or port."
        ) from error


def _model_name(agent: Agent) -> str:
    """Returns the name of the agent's base model."""
    path = str(getattr(agent.model.pretrained_model.config, "_name_or_path", ""))
    return path.rstrip("/").rpartition("/")[2] or "llamagym"
