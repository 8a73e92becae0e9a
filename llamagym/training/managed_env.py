"""Wrapper of every environment that the library steps: checks returned values, replays actions, pauses it.

A vector environment merges the infos of all environments into one dictionary, so the wrapper packs each info into one
object. The functions at the end unpack them.
"""

from __future__ import annotations

import logging
import math
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from ..errors import ConfigError, excerpt
from ..options import as_number
from .env_processes import RemoteError, with_env_number

logger = logging.getLogger(__name__)

# Options of a reset: the actions to replay after it, by the environment's number.
REPLAY_OPTION = "llamagym_replay"
# Options of a reset: the numbers of the environments to pause.
PAUSE_OPTION = "llamagym_pause"
# Spaces whose elements are numbers.
_NUMBERS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class ManagedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wraps one of several environments: knows its number, checks returned values, replays actions after a reset.

    A vector environment steps all its environments. One that a reset has paused ignores steps until its next reset: it
    returns its last observation, no reward and an empty info.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        number: int,
        in_child: bool,
        stays_open: bool = False,
        close_timeout: float | None = None,
    ) -> None:
        """Wraps an environment.

        Args:
            env: The environment.
            number: Its number.
            in_child: Whether it runs in a worker process.
            stays_open: Whether closing the wrapper leaves the environment open, since it is the caller's.
            close_timeout: Seconds that its close() may take; None sets no limit.
        """
        super().__init__(env)
        self._number = number
        self._in_child = in_child
        self._stays_open = stays_open
        self._close_timeout = close_timeout
        self._observation: Any = None
        self._is_paused = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets the environment and replays the actions in `options`; or pauses it if `options` say so."""
        env_options = dict(options or {})
        actions = env_options.pop(REPLAY_OPTION, {}).get(self._number, [])
        self._is_paused = self._number in env_options.pop(PAUSE_OPTION, ())
        if self._is_paused and self._observation is not None:
            return self._observation, {}
        with self._numbered_errors():
            returned: Any = self.env.reset(seed=seed, options=env_options or None)
            if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
                raise _invalid_return("reset", returned, "(observation, info)")
            observation, info = returned
            _require_in_space(self.observation_space, observation)
            for action in actions:
                observation, *_, info = self._checked_step(action)
        self._observation = observation
        return observation, pack_info(info)

    def step(self, action: Any) -> Any:
        """Steps the environment unless it is paused; rejects invalid returned values."""
        if self._is_paused:
            return self._observation, 0.0, False, False, {}
        with self._numbered_errors():
            self._observation, *outcome, info = self._checked_step(action)
        return self._observation, *outcome, pack_info(info)

    def close(self) -> None:
        """Closes the environment, unless it is the caller's. An error is logged, since the run has its results."""
        if self._stays_open:
            return
        if self._close_timeout is None:
            self._close_env()
            return
        # A thread cannot be killed, but a daemon does not keep the program from ending.
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
        except (Exception, SystemExit) as error:  # a user's environment may raise anything
            if self._in_child:
                raise
            logger.warning("Environment %d raised %r in close(). What it returned is kept.", self._number, error)

    def _checked_step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        returned: Any = self.env.step(action)
        if isinstance(returned, tuple) and len(returned) == 5:
            observation, *numbers, info = returned
            reward, terminated, truncated = map(as_number, numbers)
            if not math.isnan(reward) and {terminated, truncated} <= {0.0, 1.0} and isinstance(info, dict):
                _require_in_space(self.observation_space, observation)
                return observation, reward, bool(terminated), bool(truncated), info
        raise _invalid_return("step", returned, "(observation, reward, terminated, truncated, info)")

    @contextmanager
    def _numbered_errors(self) -> Iterator[None]:
        """While open, errors carry the environment's number, also to the main process."""
        try:
            yield
        except Exception as error:
            if self._in_child:
                raise RemoteError.pack(error, self._number) from None
            numbered = with_env_number(error, self._number)
            if numbered is not error:
                raise numbered from error
            raise


def _require_in_space(space: gymnasium.Space[Any], observation: Any) -> None:
    """Rejects an observation that a vector environment would change silently.

    Raises:
        ConfigError: It has parts that its space lacks, or numbers beyond the space's type.
    """
    lacking = []
    for path, part_space, part in _parts(space, observation, "observation"):
        if part_space is None:
            lacking.append(path)
        elif isinstance(part_space, _NUMBERS) and not _can_hold(part_space.dtype, part):
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
    """Yields the path, space and value of each part of an observation; None as space where the space lacks the part."""
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


def _can_hold(dtype: Any, numbers: Any) -> bool:
    """Whether a type can hold these numbers, up to rounding; True for other values, which Gymnasium rejects."""
    if getattr(numbers, "dtype", None) == dtype:
        return True
    try:
        values = np.asarray(numbers)
    except ValueError:  # lists of different lengths
        return True
    if values.dtype == dtype or values.dtype.kind not in "iuf" or not np.can_cast(values.dtype, dtype, "same_kind"):
        return True
    with np.errstate(over="ignore"):
        converted = values.astype(dtype)
    if dtype.kind == "f":
        return bool((np.isfinite(converted) == np.isfinite(values)).all())
    return bool((converted == values).all())


def _invalid_return(method: str, returned: Any, expected: str) -> ConfigError:
    """Returns an error for a method of an environment that returned something invalid."""
    return ConfigError(
        f"The environment's {method}() returned {returned!r}. Return {expected}, as gymnasium.Env says: one number as "
        "the reward, True or False for the two flags, a dictionary as info."
    )


Info = dict[str, Any]

# The only key that our environments give a vector environment; its value is the whole info.
_INFO_KEY = "llamagym_info"


class _PackedInfo:
    """An info as one object, since the values of several environments may not fit into one array."""

    def __init__(self, info: Info, unpicklable: Sequence[str] = ()) -> None:
        self.info = info
        # Names of values that could not be sent from another process.
        self.unpicklable = unpicklable

    def __reduce__(self) -> tuple[type[_PackedInfo], tuple[Info, list[str]]]:
        kept = {name: value for name, value in self.info.items() if _is_picklable((name, value))}
        unpicklable = [str(name) for name in self.info if name not in kept]
        return _PackedInfo, (kept, unpicklable)


def pack_info(info: Info) -> Info:
    """Packs an info so that it passes through a vector environment unchanged; `unpack_infos` unpacks it."""
    return {_INFO_KEY: _PackedInfo(info)}


def unpack_infos(infos: Mapping[str, Any] | Sequence[Info], count: int) -> list[Info]:
    """Returns the info of each environment in a vector environment; empty where it had none.

    Args:
        infos: Infos as the vector environment returned them.
        count: Number of environments.

    >>> unpack_infos({"lives": np.array([3, 0]), "_lives": np.array([True, False])}, 2) == [{"lives": 3}, {}]
    True
    """
    if not isinstance(infos, Mapping):
        # Gymnasium's wrapper DictInfoToList returns such a list.
        return [dict(info) for info in infos]
    unpacked: list[Info] = [{} for _ in range(count)]
    masks = {f"_{name}" for name in infos}
    for name, values in infos.items():
        if name in masks:
            continue
        per_env = unpack_infos(values, count) if isinstance(values, Mapping) else values
        is_present = infos.get(f"_{name}", np.ones(count, dtype=bool))
        for index in np.flatnonzero(is_present).tolist():
            if name == _INFO_KEY:
                unpacked[index] = per_env[index].info
            else:
                unpacked[index][name] = per_env[index]
    return unpacked


def unpicklable_names(infos: Mapping[str, Any] | Sequence[Info]) -> set[str]:
    """Returns the names of values that could not be sent from an environment's process."""
    packed = infos.get(_INFO_KEY, ()) if isinstance(infos, Mapping) else ()
    return {name for info in packed if info is not None for name in info.unpicklable}


def check_names_of_same_step(infos: Sequence[Info]) -> None:
    """Rejects infos of a reset that would replace an episode's last observation and info in autoreset mode SAME_STEP.

    Args:
        infos: One per environment.

    Raises:
        ConfigError: One has a name that Gymnasium uses.
    """
    names = [name for name in ("final_obs", "final_info") if any(name in info for info in infos)]
    if names:
        raise ConfigError(
            f"The environment's reset() returns {' and '.join(names)} as info. In the autoreset mode SAME_STEP "
            "Gymnasium uses these names for an episode's last observation and info. Rename them, or pass "
            "autoreset_mode=AutoresetMode.DISABLED to the vector environment."
        )


def restore_final_values(observations: list[Any], infos: list[Info], ended: Sequence[bool]) -> None:
    """Replaces the next episode's first observation and info, which SAME_STEP returns, by the ended episode's last.

    Args:
        observations: One per environment; changed in place.
        infos: One per environment; changed in place.
        ended: True where the environment's episode has ended.
    """
    for index, has_ended in enumerate(ended):
        if has_ended:
            info = infos[index]
            observations[index] = info["final_obs"]
            infos[index] = info["final_info"]


def _is_picklable(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # an object's own __reduce__ may raise anything
        return False
    return True
