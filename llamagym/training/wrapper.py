"""One of several copies of an environment: knows its number, checks what is returned, replays actions at a reset."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gymnasium
from gymnasium import spaces

from ..errors import ConfigError
from ..options import as_number
from .copy_errors import RemoteError, marked
from .infos import whole

logger = logging.getLogger(__name__)

# The options of a reset that say which actions to play again, and which copies are to rest.
REPLAY, REST = "llamagym_replay", "llamagym_rest"


class Copy(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One of several copies: knows its number, and plays recorded actions again when it is asked to at a reset.

    Copies are stepped all at once. One that a reset lets rest does nothing at a step; its episode has ended, and its
    next one begins with the next reset.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        number: int,
        in_child: bool,
        stays_open: bool = False,
        close_timeout: float | None = None,
    ) -> None:
        """Wrap an environment.

        Args:
            env: The environment.
            number: Its number.
            in_child: Whether it runs in a process of its own.
            stays_open: Whether closing the wrapper leaves it open, since it is the caller's.
            close_timeout: Seconds that its close() may take; None sets no limit.
        """
        super().__init__(env)
        self._number, self._in_child, self._stays_open = number, in_child, stays_open
        self._close_timeout = close_timeout
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
            _require_in_space(self.observation_space, observation)
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

    def close(self) -> None:
        """Close the environment, unless it is the caller's. An error is logged: what it returned before is kept."""
        if self._stays_open:
            return
        if self._close_timeout is None:
            self._close_env()
            return
        # A thread cannot be ended, but it can be left behind: a daemon does not keep the program from ending.
        closing = threading.Thread(target=self._close_env, daemon=True)
        closing.start()
        closing.join(self._close_timeout)
        if closing.is_alive():
            logger.error(
                "Environment %d did not close in this process within %s seconds (env_timeout). It is left open.",
                self._number,
                self._close_timeout,
            )

    def _close_env(self) -> None:
        try:
            self.env.close()
        except (Exception, SystemExit) as error:  # whatever a user's environment raises
            if self._in_child:
                raise
            logger.warning("Environment %d raised %r in close(). What it returned is kept.", self._number, error)

    def _stepped(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        returned: Any = self.env.step(action)
        if isinstance(returned, tuple) and len(returned) == 5:
            observation, *numbers, info = returned
            reward, terminated, truncated = map(as_number, numbers)
            if not math.isnan(reward) and {terminated, truncated} <= {0.0, 1.0} and isinstance(info, dict):
                _require_in_space(self.observation_space, observation)
                return observation, reward, bool(terminated), bool(truncated), info
        raise _strange("step", returned, "(observation, reward, terminated, truncated, info)")

    @contextmanager
    def _marked(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._in_child:
                raise RemoteError.carry(error, self._number) from None
            if (known := marked(error, self._number)) is not error:
                raise known from error
            raise


def _require_in_space(space: gymnasium.Space[Any], observation: Any) -> None:
    """Reject an observation with parts that its space lacks: vector environments would drop them silently.

    Raises:
        ConfigError: There are such parts.
    """
    if parts := list(_parts_beyond(space, observation, "observation")):
        raise ConfigError(
            f"The observation_space lacks {', '.join(parts)}, which the environment returned. Add them to the space, "
            "or return them as info."
        )


def _parts_beyond(space: gymnasium.Space[Any], observation: Any, path: str) -> Iterator[str]:
    """The parts of an observation that its space lacks."""
    if isinstance(space, spaces.Dict) and isinstance(observation, Mapping):
        for key, part in observation.items():
            inner = f"{path}[{key!r}]"
            if key in space.spaces:
                yield from _parts_beyond(space.spaces[key], part, inner)
            else:
                yield inner
    elif isinstance(space, spaces.Tuple) and isinstance(observation, (tuple, list)):
        for index, part in enumerate(observation):
            inner = f"{path}[{index}]"
            if index < len(space.spaces):
                yield from _parts_beyond(space.spaces[index], part, inner)
            else:
                yield inner


def _strange(method: str, returned: Any, expected: str) -> ConfigError:
    return ConfigError(
        f"The environment's {method}() returned {returned!r}. Return {expected}, as gymnasium.Env says: one number as "
        "the reward, True or False for the two flags, a dictionary as info."
    )
