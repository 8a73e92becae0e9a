"""One of several copies of an environment: knows its number, checks what is returned, replays actions at a reset."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from ..errors import ConfigError, excerpt
from ..options import as_number
from .env_errors import RemoteError, with_env_number
from .infos import pack_info

logger = logging.getLogger(__name__)

# The options of a reset that say which actions to play again, and which copies are to rest.
REPLAY_OPTION, PAUSE_OPTION = "llamagym_replay", "llamagym_rest"
# Spaces whose elements are numbers.
_NUMBERS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class ManagedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
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
        actions = others.pop(REPLAY_OPTION, {}).get(self._number, [])
        self._rests = self._number in others.pop(PAUSE_OPTION, ())
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
        return observation, pack_info(info)

    def step(self, action: Any) -> Any:
        """Step, unless it rests; an error is with_env_number with the copy's number."""
        if self._rests:
            return self._observation, 0.0, False, False, {}
        with self._marked():
            self._observation, *outcome, info = self._stepped(action)
        return self._observation, *outcome, pack_info(info)

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
            if (known := with_env_number(error, self._number)) is not error:
                raise known from error
            raise


def _require_in_space(space: gymnasium.Space[Any], observation: Any) -> None:
    """Reject an observation that a vector environment would change silently.

    Raises:
        ConfigError: It has parts that its space lacks, or numbers beyond the space's type.
    """
    lacking = []
    for path, part_space, part in _parts(space, observation, "observation"):
        if part_space is None:
            lacking.append(path)
        elif isinstance(part_space, _NUMBERS) and not _holds(part_space.dtype, part):
            raise ConfigError(
                f"{path} is {excerpt(part)}, which the type {part_space.dtype} of its space cannot hold. Give the "
                "space a larger type (dtype)."
            )
    if lacking:
        raise ConfigError(
            f"The observation_space lacks {', '.join(lacking)}, which the environment returned. Add them to the space, "
            "or return them as info."
        )


def _parts(
    space: gymnasium.Space[Any], observation: Any, path: str
) -> Iterator[tuple[str, gymnasium.Space[Any] | None, Any]]:
    """The parts of an observation with their paths and spaces; None where the space lacks one."""
    if isinstance(space, spaces.Dict) and isinstance(observation, Mapping):
        items = [(key, space.spaces.get(key), part) for key, part in observation.items()]
    elif isinstance(space, spaces.Tuple) and _is_sequence(observation):
        pairs = zip_longest(space.spaces, observation)
        items = [(index, part_space, part) for index, (part_space, part) in enumerate(pairs)]
    else:
        yield path, space, observation
        return
    for key, part_space, part in items:
        inner = f"{path}[{key!r}]"
        if part_space is None:
            yield inner, None, part
        else:
            yield from _parts(part_space, part, inner)


def _is_sequence(observation: Any) -> bool:
    """Whether an observation has parts by their positions."""
    if isinstance(observation, np.ndarray):
        return observation.ndim > 0
    return isinstance(observation, (tuple, list))


def _holds(dtype: Any, numbers: Any) -> bool:
    """Whether a type has these numbers, up to rounding; True for other values, which Gymnasium rejects."""
    if getattr(numbers, "dtype", None) == dtype:
        return True
    try:
        values = np.asarray(numbers)
    except ValueError:  # lists of different lengths
        return True
    if values.dtype == dtype or values.dtype.kind not in "iuf" or not np.can_cast(values.dtype, dtype, "same_kind"):
        return True
    with np.errstate(over="ignore"):
        received = values.astype(dtype)
    if dtype.kind == "f":
        return bool((np.isfinite(received) == np.isfinite(values)).all())
    return bool((received == values).all())


def _strange(method: str, returned: Any, expected: str) -> ConfigError:
    return ConfigError(
        f"The environment's {method}() returned {returned!r}. Return {expected}, as gymnasium.Env says: one number as "
        "the reward, True or False for the two flags, a dictionary as info."
    )
