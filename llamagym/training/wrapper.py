"""One of several copies of an environment: knows its number, checks what is returned, replays actions at a reset."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium

from ..errors import ConfigError
from ..options import as_number
from .copy_errors import RemoteError, mark
from .infos import whole

# The options of a reset that say which actions to play again, and which copies are to rest.
REPLAY, REST = "llamagym_replay", "llamagym_rest"


class Copy(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One of several copies: knows its number, and plays recorded actions again when it is asked to at a reset.

    Copies are stepped all at once. One that a reset lets rest does nothing at a step; its episode has ended, and its
    next one begins with the next reset.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], number: int, in_child: bool) -> None:
        """Wrap the copy with this number, in a process of its own or not."""
        super().__init__(env)
        self._number, self._in_child = number, in_child
        self._observation: Any = None
        self._rests = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset, then play again what the options say for this copy; or let it rest."""
        others = dict(options or {})
        actions = others.pop(REPLAY, {}).get(self._number, [])
        self._rests = self._number in others.pop(REST, ())
        if self._rests and self._observation is not None:
            return self._observation, {}
        with self._marked():
            returned: Any = self.env.reset(seed=seed, options=others or None)
            if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
                raise _strange("reset", returned, "(observation, info)")
            observation, info = returned
            for action in actions:
                observation, *_, info = self._stepped(action)
        self._observation = observation
        return observation, whole(info)

    def step(self, action: Any) -> Any:
        """Step, unless it rests; an error is marked with the copy's number."""
        if self._rests:
            return self._observation, 0.0, False, False, {}
        with self._marked():
            self._observation, *outcome, info = self._stepped(action)
        return self._observation, *outcome, whole(info)

    def _stepped(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        returned: Any = self.env.step(action)
        if isinstance(returned, tuple) and len(returned) == 5:
            observation, *numbers, info = returned
            reward, terminated, truncated = map(as_number, numbers)
            if not math.isnan(reward) and {terminated, truncated} <= {0.0, 1.0} and isinstance(info, dict):
                return observation, reward, bool(terminated), bool(truncated), info
        raise _strange("step", returned, "(observation, reward, terminated, truncated, info)")

    @contextmanager
    def _marked(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            mark(error, self._number)
            if self._in_child:
                raise RemoteError.carry(error) from None
            raise


def _strange(method: str, returned: Any, expected: str) -> ConfigError:
    return ConfigError(
        f"The environment's {method}() returned {returned!r}. Return {expected}, as gymnasium.Env says: one number as "
        "the reward, True or False for the two flags, a dictionary as info."
    )
