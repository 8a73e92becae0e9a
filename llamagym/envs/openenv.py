"""OpenEnv's environments in Gymnasium's terms: one in this process, or one behind a server's address.

OpenEnv (https://github.com/meta-pytorch/OpenEnv) types observations and actions by environment and says `done` alone.
Here both are text, by two functions of the caller's, and an environment that tells a limit from an ending does so in a
field of its observation, `truncated`. (A server passes on no metadata.)
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from ..errors import ConfigError, needs

_TEXT = gymnasium.spaces.Text(100_000, min_length=0, charset=string.printable)
# Of every observation of OpenEnv's; what is left is the environment's own.
_COMMON = {"done", "reward", "metadata", "truncated"}


def as_json(observation: Mapping[str, Any]) -> str:
    """An observation's fields as a line of JSON."""
    return json.dumps(observation, ensure_ascii=False, default=str)


class OpenEnv(gymnasium.Env[str, str]):
    """An environment of OpenEnv's; strings in, strings out."""

    def __init__(
        self, source: Any, to_action: Callable[[str], Any], to_text: Callable[[Mapping[str, Any]], str] = as_json
    ) -> None:
        """Connect, or take an environment that is here.

        Args:
            source: A server's address, such as "http://localhost:8000", or an `openenv` Environment.
            to_action: Makes the environment's action of a reply: an object of its action's class, or for a server a
                dictionary of its fields.
            to_text: Makes text of an observation's fields, without `done`, `reward`, `truncated` and `metadata`.

        Raises:
            ConfigError: openenv is not installed, or the server does not answer.
        """
        self.observation_space = self.action_space = _TEXT
        self._to_action, self._to_text = to_action, to_text
        self._env = _connected(source) if isinstance(source, str) else source

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode; the seed is passed on."""
        super().reset(seed=seed)
        text, _, _, _, info = self._read(self._env.reset(seed=seed, **(options or {})))
        return text, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an action."""
        return self._read(self._env.step(self._to_action(action)))

    def close(self) -> None:
        """Close the connection, or the environment if it can be closed."""
        close = getattr(self._env, "close", None)
        if close is not None:
            close()

    def _read(self, result: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        # A client wraps the fields of an observation; an environment returns them as a pydantic model.
        fields = dict(result.observation) if hasattr(result, "observation") else result.model_dump()
        info = dict(fields.get("metadata") or {})
        truncated = bool(fields.get("truncated"))
        text = self._to_text({name: value for name, value in fields.items() if name not in _COMMON})
        return text, float(result.reward or 0.0), bool(result.done) and not truncated, truncated, info


def _connected(address: str) -> Any:
    with needs("openenv", address):
        from openenv.core.generic_client import GenericEnvClient
    client = GenericEnvClient(base_url=address).sync()
    try:
        return client.connect()
    except Exception as error:  # whatever the network says
        raise ConfigError(f"No OpenEnv server answers at {address}: {error}. Start it, or mend the address.") from error
