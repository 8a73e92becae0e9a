"""EnvGroup of an environment, stepped at once in this process or in processes of their own.

The state of an episode under way is its reset seed and its actions: played again, they lead to the same state wherever
an environment depends on its seed and on nothing else. So every such environment can be resumed, whether it offers to
be saved or not.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from ..errors import ConfigError, EnvironmentTimeoutError, LlamaGymError
from ..options import as_json, shortened
from ..saving.atomic import reason_of
from .env_errors import raise_remote_errors
from .env_processes import ProcessEnvs, exit_with_parent, lead_group, report_lost_processes
from .env_specs import can_recreate, is_recording_wrapper, recreate_from_spec, wrapper_chain
from .infos import Info, check_names_of_same_step, restore_final_values, unpack_infos, unpicklable_names
from .managed_env import PAUSE_OPTION, REPLAY_OPTION, ManagedEnv

logger = logging.getLogger(__name__)

EnvSource = str | gymnasium.Env | VectorEnv | Callable[[], gymnasium.Env]

# More gain little.
_COPIES = 64
# Gymnasium's functions that put values into arrays of a space.
_ARRAY_FUNCTIONS = "gymnasium.vector.utils."


class EnvGroup:
    """EnvGroup of an environment, told apart by their numbers.

    Attributes:
        count: How many there are.
        rows: Their numbers.
        identity: What tells the environment from others: its class, its spaces, and how Gymnasium made it.
        action_space: Of each.
        can_replay: Whether the copies are of our own making: episodes can be played again, and copies can rest.
    """

    def __init__(
        self,
        envs: VectorEnv,
        timeout: float | None = None,
        identity: Mapping[str, str] | None = None,
        can_replay: bool = True,
        first: int = 0,
    ) -> None:
        """Step `envs`, numbered from `first` on, each step and reset within `timeout` seconds if in other processes."""
        self._envs, self._timeout = envs, timeout
        self.count, self.identity, self.can_replay = envs.num_envs, dict(identity or {}), can_replay
        self.rows = slice(first, first + envs.num_envs)
        self._batch: Any = None
        # Such a vector environment returns the next episode's first observation where an episode has ended.
        self._resets_in_step = envs.unwrapped.autoreset_mode == AutoresetMode.SAME_STEP  # type: ignore[attr-defined]
        # Names in infos that have been logged as lost.
        self._lost: set[str] = set()
        self.action_space: gymnasium.Space[Any] = envs.single_action_space

    def reset(
        self,
        seeds: Sequence[int],
        which: np.ndarray[Any, Any] | None = None,
        replay: dict[int, list[Any]] | None = None,
        rest: Sequence[int] = (),
    ) -> tuple[list[Any], list[Info]]:
        """Reset some copies, by default all.

        Args:
            seeds: One per copy; that of a copy that is not reset means nothing.
            which: The copies to reset, bool (count,).
            replay: Actions to play again after the reset, by the copy's number.
            rest: Numbers of copies that are not reset but rest until they are.

        Returns:
            Each copy's observation; and its info, empty where it was not reset.
        """
        options: dict[str, Any] = {} if which is None else {"reset_mask": which}
        if replay:
            options[REPLAY_OPTION] = replay
        if rest:
            options[PAUSE_OPTION] = rest
        if isinstance(self._envs, AsyncVectorEnv):
            longest = max(map(len, replay.values())) if replay else 0
            with self._observed(), self._named_if_lost():
                self._envs.reset_async(seed=list(seeds), options=options or None)
                observations, infos = self._within(self._envs.reset_wait, steps=1 + longest)
        else:
            with self._observed():
                observations, infos = self._envs.reset(seed=list(seeds), options=options or None)  # type: ignore[arg-type]
        said = self._split(infos)
        if self._resets_in_step:
            check_names_of_same_step(said)
        return list(iterate(self._envs.observation_space, observations)), said

    def send(self, actions: Sequence[Any]) -> None:
        """Take an action in each copy; those in processes of their own step while this one goes on."""
        with _fitting(self.action_space, f"The agent's actions {actions!r}"):
            self._batch = self._stacked(actions)
        if isinstance(self._envs, AsyncVectorEnv):
            with self._observed(), self._named_if_lost():
                self._envs.step_async(self._batch)

    def receive(self) -> tuple[list[Any], Any, Any, Any, list[Info]]:
        """What came of the actions that were sent last.

        Returns:
            Observations, the last one where an episode has ended; rewards, float (count,); terminated and truncated,
            bool (count,); infos.

        Raises:
            EnvironmentTimeoutError: A copy did not answer in time; all of them have been stopped.
        """
        with self._observed(), self._named_if_lost():
            if isinstance(self._envs, AsyncVectorEnv):
                observations, rewards, terminated, truncated, infos = self._within(self._envs.step_wait)
            else:
                observations, rewards, terminated, truncated, infos = self._envs.step(self._batch)
        seen, said = list(iterate(self._envs.observation_space, observations)), self._split(infos)
        if self._resets_in_step:
            restore_final_values(seen, said, terminated | truncated)
        return seen, rewards, terminated, truncated, said

    def _stacked(self, actions: Sequence[Any]) -> Any:
        """Actions as arrays of the action space."""
        empty = create_empty_array(self.action_space, len(actions))
        return concatenate(self.action_space, actions, empty)  # type: ignore[arg-type]

    def saved_actions(self, actions: Sequence[Any]) -> Any:
        """Actions as JSON holds them."""
        return as_json(self.action_space.to_jsonable(list(actions)))

    def actions_from(self, saved: Any) -> list[Any]:
        """The actions that `saved_actions` returned; any error means that they are damaged."""
        # NumPy would truncate floats.
        if isinstance(self.action_space, gymnasium.spaces.Discrete) and not all(
            isinstance(each, int) for each in saved
        ):
            raise TypeError("expected integers")
        actions = list(self.action_space.from_jsonable(saved))
        if actions:
            # As the agent's actions are checked: environments on NumPy 1 take an array with one number for a number.
            self._stacked(actions)
        return actions

    def close(self, at_once: bool = False) -> None:
        """Close all environments, unless they are closed.

        Args:
            at_once: Whether processes are given a moment only, since one may hang in a step.
        """
        if isinstance(self._envs, ProcessEnvs):
            self._envs.close(terminate=at_once, timeout=self._timeout)
        else:
            self._envs.close()

    def _split(self, infos: Any) -> list[Info]:
        """Each copy's info. What could not be sent from another process is logged once."""
        lost = unpicklable_names(infos) - self._lost
        if lost:
            self._lost |= lost
            logger.warning(
                "The infos %s cannot be pickled, so they do not arrive from the environments' processes. Return plain "
                "values, or leave env_timeout and overlap out.",
                sorted(lost),
            )
        return unpack_infos(infos, self.count)

    def _named_if_lost(self) -> AbstractContextManager[None]:
        return report_lost_processes(self._envs, self.rows.start)

    def _observed(self) -> AbstractContextManager[None]:
        return _fitting(self._envs.single_observation_space, "The environment's observations")

    def _within(self, wait: Callable[..., Any], steps: int = 1) -> Any:
        """Wait for so many steps at most, of which a reset is one."""
        assert isinstance(self._envs, AsyncVectorEnv)
        limit = None if self._timeout is None else steps * self._timeout
        try:
            with raise_remote_errors():
                return wait(timeout=limit)
        except multiprocessing.TimeoutError as error:
            pipes = enumerate(self._envs.parent_pipes, self.rows.start)
            late = [number for number, pipe in pipes if not pipe.poll(0)]
            self.close(at_once=True)
            raise EnvironmentTimeoutError(
                f"EnvGroup {late} of the environment did not answer within {limit} seconds (env_timeout={self._timeout} "
                "for each step), and all copies have been stopped. Look for what they wait for, or pass a longer "
                "env_timeout."
            ) from error


@contextmanager
def _fitting(space: gymnasium.Space[Any], what: str) -> Iterator[None]:
    """While open, an error of putting values into arrays of a space says that they do not fit.

    Errors of the environments of a caller's vector environment pass: they are raised elsewhere.
    """
    try:
        yield
    except Exception as error:
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not any(module.startswith(_ARRAY_FUNCTIONS) for module in modules):
            raise
        raise ConfigError(
            f"{what} do not fit {space}: {error}. Fix the environment's space, or what does not fit."
        ) from error


def resolve_num_envs(env: EnvSource, wanted: int | None = None, group_size: int = 1) -> int:
    """How many copies to act in at once.

    Default: 64 rounded down to whole groups; 1 if the environment cannot be copied; a vector environment's own number.

    Raises:
        ConfigError: `env` is a vector environment of another number of copies.
    """
    if isinstance(env, VectorEnv):
        if wanted not in (None, env.num_envs):
            raise ConfigError(f"num_envs={wanted}, but {env} has {env.num_envs} environments. Leave num_envs out.")
        return int(env.num_envs)
    if wanted is not None:
        return wanted
    if isinstance(env, gymnasium.Env) and not can_recreate(env):
        return 1
    return max(group_size, _COPIES // group_size * group_size)


@contextmanager
def open_envs(
    env: EnvSource, counts: Sequence[int], timeout: float | None = None, in_processes: bool = False
) -> Iterator[list[EnvGroup]]:
    """EnvGroup of an environment, in parts that are stepped apart; closed afterwards, but for one that the caller made.

    Args:
        env: An environment's id, an environment, a function that makes one, or a ready vector environment.
        counts: How many, in each part.
        timeout: Seconds that a step may take; None sets no limit.
        in_processes: Whether copies run in processes of their own, as they do with a limit, or in this one.

    Raises:
        ConfigError: `env` cannot be copied, or is a vector environment that cannot be used.
    """
    in_processes |= timeout is not None
    if isinstance(env, VectorEnv):
        _check_vector(env, in_processes)
        identity = _identity(env.spec, env.single_observation_space, env.single_action_space)
        if isinstance(env.unwrapped, SyncVectorEnv):
            identity |= _class_and_wrappers(env.unwrapped.envs[0])
        yield [EnvGroup(env, identity=identity, can_replay=False)]
        return
    identities: list[dict[str, str]] = []
    makers = _makers(env, sum(counts))
    is_callers = isinstance(env, gymnasium.Env) and len(makers) == 1
    made = [_numbered(make, number, is_callers, identities, timeout) for number, make in enumerate(makers)]
    parts: list[EnvGroup] = []
    failed = True
    with ExitStack() as stack:
        for count in counts:
            first = parts[-1].rows.stop if parts else 0
            envs = _vector(made[first : first + count], in_processes, first)
            copies = EnvGroup(envs, timeout, identities[0], first=first)
            parts.append(copies)
            stack.callback(lambda part: part.close(at_once=failed), copies)
        yield parts
        failed = False


def _vector(makers: list[Callable[[], ManagedEnv]], in_processes: bool, first: int) -> VectorEnv:
    if in_processes:
        return ProcessEnvs(makers, first)
    envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    try:
        _require_distinct(envs)
    except ConfigError:
        envs.close()
        raise
    return envs


def _require_distinct(envs: SyncVectorEnv) -> None:
    """Rejects a vector environment that contains the same environment twice.

    Raises:
        ConfigError: Two of its environments are the same object.
    """
    distinct = {id(env.unwrapped) for env in envs.envs}
    if len(distinct) < len(envs.envs):
        raise ConfigError(
            f"{len(envs.envs)} environments were made, and several of them are the same object, "
            f"{envs.envs[0].unwrapped}: expected {len(envs.envs)} objects, got {len(distinct)}. Pass a function that "
            "makes a new environment at each call, or num_envs=1."
        )


def _check_vector(env: VectorEnv, in_processes: bool) -> None:
    """Refuse vector environments that cannot be reset one by one, and what is for copies that are made here."""
    if not isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
        raise ConfigError(
            f"{env} is a {type(env.unwrapped).__name__}, whose environments cannot be reset one by one. Pass a "
            "SyncVectorEnv or AsyncVectorEnv, or the environment's id, and it will be copied."
        )
    if env.closed:
        raise ConfigError(f"{env} is closed. Make it again.")
    if isinstance(env.unwrapped, SyncVectorEnv):
        _require_distinct(env.unwrapped)
    if _forgets_resets(env.unwrapped):
        raise ConfigError(
            f"{env} has shared_memory=False and the autoreset mode NEXT_STEP. Gymnasium then resets an environment "
            "again at the first step after a reset, without a seed, and drops the action. Pass "
            "autoreset_mode=AutoresetMode.DISABLED to it, or shared_memory=True."
        )
    if in_processes:
        raise ConfigError(
            "env_timeout and overlap are for copies that are made here. Pass the environment's id or a function that "
            "makes one instead of a vector environment, or leave them out."
        )


def _forgets_resets(env: VectorEnv) -> bool:
    """Whether a vector environment resets an environment after an episode's end even if it has been reset meanwhile.

    Gymnasium's worker takes note of a reset only where it writes into shared memory.
    """
    return isinstance(env, AsyncVectorEnv) and not env.shared_memory and env.autoreset_mode == AutoresetMode.NEXT_STEP


def _numbered(
    make: Callable[[], gymnasium.Env[Any, Any]],
    number: int,
    is_callers: bool,
    identities: list[dict[str, str]],
    timeout: float | None,
) -> Callable[[], ManagedEnv]:
    """A function that makes the environment with this number, and adds its identity to `identities`."""
    parent = os.getpid()

    def make_env() -> ManagedEnv:
        # One is made in the parent as well, to look at its spaces.
        is_here = os.getpid() == parent
        if not is_here:
            # A terminal sends Ctrl-C to all processes; what it means is for the parent to say.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            # The caller's handler is for the parent.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            lead_group()
            exit_with_parent()
        env = make()
        if not isinstance(env, gymnasium.Env):
            raise ConfigError(f"env() made {env!r}, which is no environment. Pass a function that makes one.")
        for name in ("observation_space", "action_space"):
            if not isinstance(space := getattr(env, name, None), gymnasium.Space):
                raise ConfigError(f"The {name} of {env} is {space!r}. Give it one of gymnasium.spaces.")
        with warnings.catch_warnings():
            # Of a wrapper whose arguments cannot be copied; the spec without it will do.
            warnings.simplefilter("ignore")
            spec = env.spec or env.unwrapped.spec
        identity = _identity(spec, env.observation_space, env.action_space)
        identities.append(_class_and_wrappers(env) | identity)
        return ManagedEnv(
            env,
            number,
            in_child=not is_here,
            stays_open=is_callers and is_here,
            # The parent limits the time of other processes itself.
            close_timeout=timeout if is_here else None,
        )

    return made


def _identity(
    spec: EnvSpec | None, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
) -> dict[str, str]:
    """What tells an environment from others: its spaces and, if Gymnasium made it, its id and options."""
    identity = {"observation_space": str(observation_space), "action_space": str(action_space)}
    if spec is not None:
        options = {"max_episode_steps": spec.max_episode_steps, **spec.kwargs}
        # How an environment is drawn changes nothing in it.
        options.pop("render_mode", None)
        identity |= {"id": spec.id, "options": str({name: _described(options[name]) for name in sorted(options)})}
    return identity


def _class_and_wrappers(env: gymnasium.Env[Any, Any]) -> dict[str, str]:
    """Names of an environment's class and of the wrappers that may change what it does, with recorded arguments."""
    wrappers = []
    for wrapper in wrapper_chain(env):
        if not isinstance(wrapper, gymnasium.Wrapper) or is_recording_wrapper(wrapper):
            continue
        arguments = getattr(wrapper, "_saved_kwargs", {})
        described = ", ".join(f"{name}={_described(arguments[name])!r}" for name in sorted(arguments))
        wrappers.append(f"{type(wrapper).__name__}({described})")
    return {"class": type(env.unwrapped).__name__, "wrappers": ", ".join(wrappers)}


def _described(option: Any) -> Any:
    """An option as it reads in every process; an object by its type, since its text may hold an address."""
    plain = as_json(option)
    try:
        json.dumps(plain)
    except (TypeError, ValueError):
        return type(option).__name__
    return plain


def _makers(
    env: str | gymnasium.Env | Callable[[], gymnasium.Env], count: int
) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
    if isinstance(env, str):
        return [lambda: make_env(env)] * count
    if not isinstance(env, gymnasium.Env):
        return [env] * count
    if count == 1:
        return [lambda: env]
    if not can_recreate(env):
        raise ConfigError(
            f"{count} environments like {env} are wanted, but it was not made by gymnasium.make(), or has a wrapper "
            "that does not record its arguments (gymnasium.utils.RecordConstructorArgs). Pass a function that makes "
            "one, or num_envs=1."
        )
    return [recreate_from_spec(env)] * count


def make_env(name: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """The environment that `gymnasium.make` knows by an id, with options for it.

    Raises:
        ConfigError: It knows none, a package of it is not installed, or the environment cannot be constructed.
    """
    try:
        if name.count(":") > 1:
            raise gymnasium.error.NameNotFound("an id has one colon at most, after the module.")
        return gymnasium.make(name, **options)
    except LlamaGymError:
        raise
    except Exception as error:  # whatever a module or a constructor raises
        reason = error if isinstance(error, (gymnasium.error.Error, ImportError)) else f"{reason_of(error)}."
        raise ConfigError(
            f"env={shortened(name)} cannot be made: {reason} Pass an id that gymnasium.make() knows, or a function "
            "that makes the environment."
        ) from error
