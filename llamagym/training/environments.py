"""Copies of an environment, stepped at once in this process or, with a time limit, in processes of their own.

The state of an episode under way is its reset seed and its actions: played again, they lead to the same state wherever
an environment depends on its seed and on nothing else. So every such environment can be resumed, whether it offers to
be saved or not.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from ..errors import ConfigError, EnvironmentTimeoutError
from ..options import as_json, as_number
from .copy_errors import RemoteError, failed_copy, mark, unpacked
from .infos import Info, put_finals, split, whole

_Single = str | gymnasium.Env | Callable[[], gymnasium.Env]
EnvSource = _Single | VectorEnv

# More gain little.
_COPIES = 64
# The option of a reset that says which actions to play again.
_REPLAY = "llamagym_replay"
# What arrays raise at a value that they cannot hold.
_MISFIT = (TypeError, ValueError, OverflowError, LookupError, AttributeError, AssertionError)


class Copy(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One of several copies: knows its number, and plays recorded actions again when it is asked to at a reset."""

    def __init__(self, env: gymnasium.Env[Any, Any], number: int, in_child: bool) -> None:
        """Wrap the copy with this number, in a process of its own or not."""
        super().__init__(env)
        self._number, self._in_child = number, in_child

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset, then play again what the options say for this copy."""
        rest = dict(options or {})
        actions = rest.pop(_REPLAY, {}).get(self._number, [])
        with self._marked():
            returned: Any = self.env.reset(seed=seed, options=rest or None)
            if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
                raise _strange("reset", returned, "(observation, info)")
            observation, info = returned
            for action in actions:
                observation, *_, info = self._stepped(action)
        return observation, whole(info)

    def step(self, action: Any) -> Any:
        """Step; an error is marked with the copy's number."""
        with self._marked():
            *stepped, info = self._stepped(action)
        return *stepped, whole(info)

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


class Copies:
    """Copies of an environment, told apart by their numbers.

    Attributes:
        count: How many there are.
        spec_id: The id that Gymnasium made them by; None if it did not make them.
        action_space: Of each.
        can_replay: Whether episodes can be played again: the copies are of our own making.
    """

    def __init__(
        self, envs: VectorEnv, timeout: float | None = None, spec_id: str | None = None, can_replay: bool = True
    ) -> None:
        """Step `envs`, each step and reset within `timeout` seconds if they run in processes of their own."""
        self._envs, self._timeout = envs, timeout
        self.count, self.spec_id, self.can_replay = envs.num_envs, spec_id, can_replay
        self.action_space: gymnasium.Space[Any] = envs.single_action_space

    def reset(
        self,
        seeds: Sequence[int],
        which: np.ndarray[Any, Any] | None = None,
        replay: dict[int, list[Any]] | None = None,
    ) -> tuple[list[Any], list[Info]]:
        """Reset some copies, by default all.

        Args:
            seeds: One per copy.
            which: The copies to reset, bool (count,).
            replay: Actions to play again after the reset, by copy.

        Returns:
            Each copy's observation; and its info, empty where it was not reset.
        """
        options: dict[str, Any] = {} if which is None else {"reset_mask": which}
        if replay:
            options[_REPLAY] = replay
        if isinstance(self._envs, AsyncVectorEnv):
            self._envs.reset_async(seed=list(seeds), options=options or None)
            longest = max(map(len, replay.values())) if replay else 0
            with self._observed():
                observations, infos = self._within(self._envs.reset_wait, steps=1 + longest)
        else:
            with self._observed():
                observations, infos = self._envs.reset(seed=list(seeds), options=options or None)  # type: ignore[arg-type]
        return list(iterate(self._envs.observation_space, observations)), split(infos, self.count)

    def step(self, actions: Sequence[Any]) -> tuple[list[Any], Any, Any, Any, list[Info]]:
        """Take an action in each copy.

        Returns:
            Observations, the last one where an episode has ended; rewards, float (count,); terminated and truncated,
            bool (count,); infos.

        Raises:
            EnvironmentTimeoutError: A copy did not answer in time; all of them have been stopped.
        """
        with _fitting(self.action_space, f"The agent's actions {actions!r}"):
            empty = create_empty_array(self.action_space, self.count)
            batch = concatenate(self.action_space, actions, empty)  # type: ignore[arg-type]
        with self._observed():
            if isinstance(self._envs, AsyncVectorEnv):
                self._envs.step_async(batch)
                observations, *outcomes, infos = self._within(self._envs.step_wait)
            else:
                observations, *outcomes, infos = self._envs.step(batch)
        seen, said = list(iterate(self._envs.observation_space, observations)), split(infos, self.count)
        put_finals(seen, said)
        return seen, *outcomes, said

    def saved_actions(self, actions: Sequence[Any]) -> Any:
        """Actions as JSON holds them."""
        return as_json(self.action_space.to_jsonable(list(actions)))

    def actions_from(self, saved: Any) -> list[Any]:
        """The actions that `saved_actions` gave."""
        return list(self.action_space.from_jsonable(saved))

    def close(self, at_once: bool = False) -> None:
        """Close all copies, unless they are; `at_once` those as well that are in the middle of a step."""
        if self._envs.closed:
            return
        if not isinstance(self._envs, AsyncVectorEnv):
            self._envs.close()
            return
        with warnings.catch_warnings():
            # That a step is pending is known.
            warnings.simplefilter("ignore")
            self._envs.close(terminate=at_once, timeout=self._timeout)

    def _observed(self) -> AbstractContextManager[None]:
        return _fitting(self._envs.single_observation_space, "The environment's observations")

    def _within(self, wait: Callable[..., Any], steps: int = 1) -> Any:
        """Wait for so many steps at most, of which a reset is one."""
        assert isinstance(self._envs, AsyncVectorEnv)
        limit = None if self._timeout is None else steps * self._timeout
        try:
            with unpacked():
                return wait(timeout=limit)
        except multiprocessing.TimeoutError as error:
            late = [number for number, pipe in enumerate(self._envs.parent_pipes) if not pipe.poll(0)]
            self.close(at_once=True)
            raise EnvironmentTimeoutError(
                f"Copies {late} of the environment did not answer within {limit} seconds (env_timeout={self._timeout} "
                "for each step), and all copies have been stopped. Look for what they wait for, or pass a longer "
                "env_timeout."
            ) from error


def _strange(method: str, returned: Any, expected: str) -> ConfigError:
    return ConfigError(
        f"The environment's {method}() returned {returned!r}. Return {expected}, as gymnasium.Env says: one number as "
        "the reward, True or False for the two flags, a dictionary as info."
    )


@contextmanager
def _fitting(space: gymnasium.Space[Any], what: str) -> Iterator[None]:
    """While open, values are put into arrays of a space; an error says that they do not fit."""
    try:
        yield
    except _MISFIT as error:
        if failed_copy(error) is not None:
            raise
        raise ConfigError(
            f"{what} do not fit {space}: {error}. Mend the environment's space, or what does not fit."
        ) from error


def copies_for(env: EnvSource, wanted: int | None = None, group_size: int = 1) -> int:
    """How many copies to act in at once.

    Where nothing is said that is 64 in whole groups, the one that cannot be copied, or those of a vector environment.

    Raises:
        ConfigError: `env` is a vector environment of another number of copies.
    """
    if isinstance(env, VectorEnv):
        if wanted not in (None, env.num_envs):
            raise ConfigError(f"num_envs={wanted}, but {env} has {env.num_envs} environments. Leave num_envs out.")
        return int(env.num_envs)
    if wanted is not None:
        return wanted
    if isinstance(env, gymnasium.Env) and env.spec is None:
        return 1
    return max(group_size, _COPIES // group_size * group_size)


@contextmanager
def opened(env: EnvSource, count: int, timeout: float | None = None) -> Iterator[Copies]:
    """Copies of an environment, closed afterwards; one that the caller made is left open.

    Args:
        env: An environment's id, an environment, a function that makes one, or a ready vector environment.
        count: How many.
        timeout: Seconds that a step may take; None runs the copies in this process, without a limit.

    Raises:
        ConfigError: `env` cannot be copied, or is a vector environment that cannot be used.
    """
    if isinstance(env, VectorEnv):
        _check_vector(env, timeout)
        yield Copies(env, spec_id=env.spec.id if env.spec else None, can_replay=False)
        return
    ids: list[str | None] = []
    makers = [_numbered(make, number, timeout is not None, ids) for number, make in enumerate(_makers(env, count))]
    envs: SyncVectorEnv | AsyncVectorEnv
    if timeout is None:
        envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    else:
        # Observations of any space travel through pipes, not all can be shared.
        envs = AsyncVectorEnv(makers, shared_memory=False, autoreset_mode=AutoresetMode.DISABLED)
    copies, failed = Copies(envs, timeout, ids[0]), True
    try:
        yield copies
        failed = False
    finally:
        is_callers = timeout is None and isinstance(env, gymnasium.Env) and count == 1
        if not is_callers:
            copies.close(at_once=failed)


def _check_vector(env: VectorEnv, timeout: float | None) -> None:
    """Refuse vector environments that cannot be reset one by one, or not be timed."""
    if not isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
        raise ConfigError(
            f"{env} is a {type(env.unwrapped).__name__}, whose environments cannot be reset one by one. Pass a "
            "SyncVectorEnv or AsyncVectorEnv, or the environment's id, and it will be copied."
        )
    if env.closed:
        raise ConfigError(f"{env} is closed. Make it anew.")
    if timeout is not None:
        raise ConfigError(
            "env_timeout is for copies that are made here. Pass the environment's id or a function that makes one "
            "instead of a vector environment, or leave env_timeout out."
        )


def _numbered(
    make: Callable[[], gymnasium.Env[Any, Any]], number: int, in_child: bool, ids: list[str | None]
) -> Callable[[], Copy]:
    """A function that makes a copy with this number, and adds its id, if it has one, to `ids`."""
    parent = os.getpid()

    def made() -> Copy:
        # A copy is made in the parent as well, to look at its spaces.
        if in_child and os.getpid() != parent:
            # A terminal sends Ctrl-C to all processes; what it means is for the parent to say.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        env = make()
        if not isinstance(env, gymnasium.Env):
            raise ConfigError(f"env() made {env!r}, which is no environment. Pass a function that makes one.")
        for name in ("observation_space", "action_space"):
            if not isinstance(space := getattr(env, name, None), gymnasium.Space):
                raise ConfigError(f"The {name} of {env} is {space!r}. Give it one of gymnasium.spaces.")
        ids.append(getattr(env.unwrapped.spec, "id", None))
        return Copy(env, number, in_child)

    return made


def _makers(env: _Single, count: int) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
    if isinstance(env, str):
        return [lambda: _registered(env)] * count
    if not isinstance(env, gymnasium.Env):
        return [env] * count
    spec = env.spec
    if count == 1:
        return [lambda: env]
    if spec is None:
        raise ConfigError(
            f"{count} copies of {env} are wanted, but it was not made by gymnasium.make() and has no spec to copy. "
            "Pass a function that makes one."
        )
    return [lambda: gymnasium.make(copy.deepcopy(spec))] * count


def _registered(name: str) -> gymnasium.Env[Any, Any]:
    try:
        return gymnasium.make(name)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ConfigError(
            f"env={name!r} cannot be made: {error} Pass an id that gymnasium.make() knows, or a function that makes "
            "the environment."
        ) from error
