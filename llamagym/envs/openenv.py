"""Wraps OpenEnv environments for Gymnasium, in this process or on a server.

OpenEnv (https://github.com/meta-pytorch/OpenEnv) has typed observations and actions per environment, and only `done`.
Here both are text, converted by two functions that the caller passes. An environment can report a truncation in a field
`truncated` of its observation, since a server does not pass on metadata.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from ..errors import ConfigError, needs

_TEXT = gymnasium.spaces.Text(100_000, min_length=0, charset=string.printable)
# Fields of every OpenEnv observation; the other fields are the environment's own.
_COMMON_FIELDS = {"done", "reward", "metadata", "truncated"}


def as_json(observation: Mapping[str, Any]) -> str:
    """Returns the fields of an observation as a line of JSON."""
    return json.dumps(observation, ensure_ascii=False, default=str)


class OpenEnv(gymnasium.Env[str, str]):
    """An OpenEnv environment whose observations and actions are strings."""

    def __init__(
        self, source: Any, to_action: Callable[[str], Any], to_text: Callable[[Mapping[str, Any]], str] = as_json
    ) -> None:
        """Connects to a server, or wraps an environment.

        Args:
            source: Address of a server, such as "http://localhost:8000", or an `openenv` Environment.
            to_action: Converts a reply to an action: an object of the environment's action class, or for a server a
                dictionary of its fields.
            to_text: Converts an observation's fields to text, without `done`, `reward`, `truncated` and `metadata`.

        Raises:
            ConfigError: openenv is not installed, or the server does not answer.
        """
        self.observation_space = self.action_space = _TEXT
        self._to_action = to_action
        self._to_text = to_text
        self._env = _connect(source) if isinstance(source, str) else source

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode; the seed is passed on."""
        super().reset(seed=seed)
        text, _, _, _, info = self._convert(self._env.reset(seed=seed, **(options or {})))
        return text, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes an action."""
        return self._convert(self._env.step(self._to_action(action)))

    def close(self) -> None:
        """Closes the connection, or the environment if it has a method `close`."""
        close = getattr(self._env, "close", None)
        if close is not None:
            close()

    def _convert(self, result: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Converts a result of OpenEnv to Gymnasium's five values."""
        # A client returns a result with an observation's fields, an environment returns a pydantic model.
        fields = dict(result.observation) if hasattr(result, "observation") else result.model_dump()
        info = dict(fields.get("metadata") or {})
        truncated = bool(fields.get("truncated"))
        text = self._to_text({name: value for name, value in fields.items() if name not in _COMMON_FIELDS})
        return text, float(result.reward or 0.0), bool(result.done) and not truncated, truncated, info


def _connect(address: str) -> Any:
    with needs("openenv", address):
        from openenv.core.generic_client import GenericEnvClient
    client = GenericEnvClient(base_url=address).sync()
    try:
        return client.connect()
    except Exception as error:  # clients raise many types of network errors
        raise ConfigError(f"No OpenEnv server answers at {address}: {error}. Start it, or fix the address.") from error
