"""Groups of equal environments that are stepped together, in this process or in worker processes.

The state of a running episode is its reset seed and its actions: replaying them leads to the same state if the
environment depends on nothing else. So every such environment can be resumed, whether or not it can be saved.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from ..errors import ConfigError, EnvironmentTimeoutError, LlamaGymError, reason_of
from ..options import as_json, shortened
from .env_processes import ProcessEnvs, exit_with_parent, lead_group, raise_remote_errors, report_lost_processes
from .env_specs import can_recreate, is_recording_wrapper, maker_from_spec, without_video, wrapper_chain
from .managed_env import (
    PAUSE_OPTION,
    REPLAY_OPTION,
    Info,
    ManagedEnv,
    check_names_of_same_step,
    restore_final_values,
    unpack_infos,
    unpicklable_names,
)

logger = logging.getLogger(__name__)

EnvSource = str | gymnasium.Env | VectorEnv | Callable[[], gymnasium.Env]

# Default number of environments; more gain little.
_DEFAULT_NUM_ENVS = 64
# Prefix of the modules of Gymnasium that put values into arrays of a space.
_ARRAY_MODULES = "gymnasium.vector.utils."


class EnvGroup:
    """Environments that are stepped together, each known by its number.

    Attributes:
        count: Number of environments.
        rows: Their numbers, as a slice.
        identity: What distinguishes the environment from others: its class, its spaces, how Gymnasium made it.
        action_space: Action space of each environment.
        can_replay: Whether `open_envs` made the environments, so that they can replay actions and be paused.
    """

    def __init__(
        self,
        envs: VectorEnv,
        timeout: float | None = None,
        identity: Mapping[str, str] | None = None,
        can_replay: bool = True,
        first: int = 0,
    ) -> None:
        """Wraps `envs`, numbered from `first`; worker processes have `timeout` seconds for a step or reset."""
        self._envs = envs
        self._timeout = timeout
        self.count = envs.num_envs
        self.identity = dict(identity or {})
        self.can_replay = can_replay
        self.rows = slice(first, first + envs.num_envs)
        self._batch: Any = None
        # Then a step that ends an episode returns the next episode's first observation.
        self._resets_in_step = envs.unwrapped.autoreset_mode == AutoresetMode.SAME_STEP  # type: ignore[attr-defined]
        # Names in infos that have been logged as unpicklable.
        self._logged_names: set[str] = set()
        self.action_space: gymnasium.Space[Any] = envs.single_action_space

    def reset(
        self,
        seeds: Sequence[int],
        which: np.ndarray[Any, Any] | None = None,
        replay: dict[int, list[Any]] | None = None,
        pause: Sequence[int] = (),
    ) -> tuple[list[Any], list[Info]]:
        """Resets some environments, by default all.

        Args:
            seeds: One per environment; unused where it is not reset.
            which: The environments to reset, bool (count,).
            replay: Actions to replay after the reset, by the environment's number.
            pause: Numbers of environments in `which` that are paused until their next reset.

        Returns:
            Observation and info of each environment; the info is empty where it was not reset.
        """
        options: dict[str, Any] = {}
        if which is not None:
            options["reset_mask"] = which
        if replay:
            options[REPLAY_OPTION] = replay
        if pause:
            options[PAUSE_OPTION] = pause
        if isinstance(self._envs, AsyncVectorEnv):
            longest = max(map(len, replay.values())) if replay else 0
            with self._explained_errors():
                self._envs.reset_async(seed=list(seeds), options=options or None)
                batch, merged_infos = self._wait(self._envs.reset_wait, steps=1 + longest)
        else:
            with _explain_space_errors(self._envs.single_observation_space, "The environment's observations"):
                batch, merged_infos = self._envs.reset(seed=list(seeds), options=options or None)  # type: ignore[arg-type]
        infos = self._unpack_infos(merged_infos)
        if self._resets_in_step:
            check_names_of_same_step(infos)
        return list(iterate(self._envs.observation_space, batch)), infos

    def send(self, actions: Sequence[Any]) -> None:
        """Sends an action to each environment; worker processes step meanwhile, others when `receive` is called."""
        with _explain_space_errors(self.action_space, f"The agent's actions {actions!r}"):
            self._batch = self._stacked(actions)
        if isinstance(self._envs, AsyncVectorEnv):
            with self._explained_errors():
                self._envs.step_async(self._batch)

    def receive(self) -> tuple[list[Any], Any, Any, Any, list[Info]]:
        """Returns the results of the actions that were sent last.

        Returns:
            Observations, the last one where an episode has ended; rewards, float (count,); terminated and truncated,
            bool (count,); infos.

        Raises:
            EnvironmentTimeoutError: An environment did not answer in time; all of them have been stopped.
        """
        with self._explained_errors():
            if isinstance(self._envs, AsyncVectorEnv):
                batch, rewards, terminated, truncated, merged_infos = self._wait(self._envs.step_wait)
            else:
                batch, rewards, terminated, truncated, merged_infos = self._envs.step(self._batch)
        observations = list(iterate(self._envs.observation_space, batch))
        infos = self._unpack_infos(merged_infos)
        if self._resets_in_step:
            restore_final_values(observations, infos, terminated | truncated)
        return observations, rewards, terminated, truncated, infos

    def _stacked(self, actions: Sequence[Any]) -> Any:
        """Returns actions as arrays of the action space."""
        empty = create_empty_array(self.action_space, len(actions))
        return concatenate(self.action_space, actions, empty)  # type: ignore[arg-type]

    def saved_actions(self, actions: Sequence[Any]) -> Any:
        """Returns actions in a form that JSON can hold."""
        return as_json(self.action_space.to_jsonable(list(actions)))

    def actions_from(self, saved: Any) -> list[Any]:
        """Returns the actions that `saved_actions` saved; any error means that they are damaged."""
        # NumPy would truncate floats.
        if isinstance(self.action_space, gymnasium.spaces.Discrete) and not all(
            isinstance(each, int) for each in saved
        ):
            raise TypeError("expected integers")
        actions = list(self.action_space.from_jsonable(saved))
        if actions:
            # Check them as `send` does: with NumPy 1, environments take an array of one number for a number.
            self._stacked(actions)
        return actions

    def close(self, at_once: bool = False) -> None:
        """Closes all environments, unless they are closed.

        Args:
            at_once: Whether worker processes get a moment only, since one may hang in a step.
        """
        if isinstance(self._envs, ProcessEnvs):
            self._envs.close(terminate=at_once, timeout=self._timeout)
        else:
            self._envs.close()

    def _unpack_infos(self, infos: Any) -> list[Info]:
        """Returns the info of each environment; names that worker processes could not send are logged once."""
        new_names = unpicklable_names(infos) - self._logged_names
        if new_names:
            self._logged_names |= new_names
            logger.warning(
                "The infos %s cannot be pickled, so they do not arrive from the environments' processes. Return plain "
                "values, or leave env_timeout and overlap out.",
                sorted(new_names),
            )
        return unpack_infos(infos, self.count)

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """While open, errors name observations that do not fit their space, and environments whose process was lost."""
        space = self._envs.single_observation_space
        with (
            _explain_space_errors(space, "The environment's observations"),
            report_lost_processes(self._envs, self.rows.start),
        ):
            yield

    def _wait(self, wait: Callable[..., Any], steps: int = 1) -> Any:
        """Calls `wait` with the time limit of so many steps; a reset counts as one.

        Raises:
            EnvironmentTimeoutError: The time is over; all environments have been stopped.
        """
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
                f"Environments {late} did not answer within {limit} seconds (env_timeout={self._timeout} for each "
                "step), and all environments have been stopped. Look for what they wait for, or pass a longer "
                "env_timeout."
            ) from error


@contextmanager
def _explain_space_errors(space: gymnasium.Space[Any], subject: str) -> Iterator[None]:
    """While open, replaces an error of putting values into arrays of a space by a ConfigError that says so.

    Errors of the environments in a caller's vector environment pass unchanged: other modules raise them.
    """
    try:
        yield
    except Exception as error:
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not any(module.startswith(_ARRAY_MODULES) for module in modules):
            raise
        raise ConfigError(
            f"{subject} do not fit {space}: {error}. Fix the environment's space, or what does not fit."
        ) from error


def resolve_num_envs(env: EnvSource, num_envs: int | None = None, group_size: int = 1) -> int:
    """Returns the number of environments to step together.

    Args:
        env: The environment, or how to make it.
        num_envs: The user's choice. None: 64, rounded down to whole groups; 1 if the environment cannot be made again;
            the number in a vector environment.
        group_size: Number of environments in a group.

    Raises:
        ConfigError: `env` is a vector environment with another number of environments.
    """
    if isinstance(env, VectorEnv):
        if num_envs not in (None, env.num_envs):
            raise ConfigError(f"num_envs={num_envs}, but {env} has {env.num_envs} environments. Leave num_envs out.")
        return int(env.num_envs)
    if num_envs is not None:
        return num_envs
    if isinstance(env, gymnasium.Env) and not can_recreate(env):
        return 1
    return max(group_size, _DEFAULT_NUM_ENVS // group_size * group_size)


def require_env_timeout(env_timeout: float | None) -> None:
    """Rejects a time limit that is not a positive number of seconds.

    Raises:
        ConfigError: It is not.
    """
    if env_timeout is not None and not 0 < env_timeout < math.inf:
        raise ConfigError(f"env_timeout={env_timeout}. Pass a positive number of seconds, or None for no limit.")


@contextmanager
def open_envs(
    env: EnvSource, counts: Sequence[int], timeout: float | None = None, in_processes: bool = False
) -> Iterator[list[EnvGroup]]:
    """Opens groups of environments that are stepped separately; closes those that it made at the end.

    Of the environments made here, only the first records videos.

    Args:
        env: An environment's id, an environment, a function that makes one, or a vector environment, which becomes the
            only group.
        counts: Number of environments in each group.
        timeout: Seconds that a step may take; None sets no limit.
        in_processes: Whether environments run in worker processes; they always do with a `timeout`.

    Raises:
        ConfigError: `env` cannot be made several times, or is a vector environment that cannot be used.
    """
    in_processes |= timeout is not None
    if isinstance(env, VectorEnv):
        _check_vector_env(env, in_processes)
        identity = _identity(env.spec, env.single_observation_space, env.single_action_space)
        if isinstance(env.unwrapped, SyncVectorEnv):
            identity |= _class_and_wrappers(env.unwrapped.envs[0])
        yield [EnvGroup(env, identity=identity, can_replay=False)]
        return
    identities: list[dict[str, str]] = []
    makers = _env_makers(env, sum(counts))
    is_callers = isinstance(env, gymnasium.Env) and len(makers) == 1
    managed_makers = [
        _managed_maker(make, number, is_callers, identities, timeout) for number, make in enumerate(makers)
    ]
    groups: list[EnvGroup] = []
    first = 0
    failed = True

    def close(group: EnvGroup) -> None:
        group.close(at_once=failed)

    with ExitStack() as stack:
        for count in counts:
            envs = _make_vector_env(managed_makers[first : first + count], in_processes, first)
            group = EnvGroup(envs, timeout, identities[0], first=first)
            groups.append(group)
            stack.callback(close, group)
            first += count
        yield groups
        failed = False


def _make_vector_env(makers: list[Callable[[], ManagedEnv]], in_processes: bool, first: int) -> VectorEnv:
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


def _check_vector_env(env: VectorEnv, in_processes: bool) -> None:
    """Rejects a vector environment that cannot be reset one by one, is closed, or should run in worker processes."""
    if not isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
        raise ConfigError(
            f"{env} is a {type(env.unwrapped).__name__}, whose environments cannot be reset one by one. Pass a "
            "SyncVectorEnv or AsyncVectorEnv, or the environment's id."
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
            "env_timeout and overlap do not work with a vector environment, whose environments exist already. Pass the "
            "environment's id or a function that makes one, or leave them out."
        )


def _forgets_resets(env: VectorEnv) -> bool:
    """Whether a vector environment resets an environment after an episode's end even if it has been reset meanwhile.

    Gymnasium's worker records a reset only where it writes into shared memory.
    """
    return isinstance(env, AsyncVectorEnv) and not env.shared_memory and env.autoreset_mode == AutoresetMode.NEXT_STEP


def _managed_maker(
    make: Callable[[], gymnasium.Env[Any, Any]],
    number: int,
    is_callers: bool,
    identities: list[dict[str, str]],
    timeout: float | None,
) -> Callable[[], ManagedEnv]:
    """Returns a function that makes and wraps environment `number`, and appends its identity to `identities`."""
    parent = os.getpid()

    def make_managed() -> ManagedEnv:
        # Gymnasium makes one in the parent as well, for its spaces.
        in_child = os.getpid() != parent
        if in_child:
            # A terminal sends Ctrl-C to all processes, but only the parent decides what it means.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            # The caller's handler is for the parent only.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            lead_group()
            exit_with_parent()
        env = make()
        if not isinstance(env, gymnasium.Env):
            raise ConfigError(f"env() returned {env!r}, expected a gymnasium.Env. Pass a function that makes one.")
        for name in ("observation_space", "action_space"):
            space = getattr(env, name, None)
            if not isinstance(space, gymnasium.Space):
                raise ConfigError(f"The {name} of {env} is {space!r}. Give it one of gymnasium.spaces.")
        with warnings.catch_warnings():
            # Gymnasium warns of a wrapper whose arguments cannot be copied; the spec without it is sufficient.
            warnings.simplefilter("ignore")
            spec = env.spec or env.unwrapped.spec
        identity = _identity(spec, env.observation_space, env.action_space)
        identities.append(_class_and_wrappers(env) | identity)
        return ManagedEnv(
            env,
            number,
            in_child=in_child,
            stays_open=is_callers and not in_child,
            # The parent limits the time of its worker processes itself.
            close_timeout=None if in_child else timeout,
        )

    return make_managed


def _identity(
    spec: EnvSpec | None, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
) -> dict[str, str]:
    """Returns what distinguishes an environment: its spaces and, if Gymnasium made it, its id and options."""
    identity = {"observation_space": str(observation_space), "action_space": str(action_space)}
    if spec is not None:
        options = {"max_episode_steps": spec.max_episode_steps, **spec.kwargs}
        # Rendering does not change what an environment does.
        options.pop("render_mode", None)
        described = {name: _described(options[name]) for name in sorted(options)}
        identity |= {"id": spec.id, "options": str(described)}
    return identity


def _class_and_wrappers(env: gymnasium.Env[Any, Any]) -> dict[str, str]:
    """Returns the names of an environment's class and of its wrappers, except recording ones, with their arguments."""
    wrappers = []
    for wrapper in wrapper_chain(env):
        if not isinstance(wrapper, gymnasium.Wrapper) or is_recording_wrapper(wrapper):
            continue
        arguments = getattr(wrapper, "_saved_kwargs", {})
        described = ", ".join(f"{name}={_described(arguments[name])!r}" for name in sorted(arguments))
        wrappers.append(f"{type(wrapper).__name__}({described})")
    return {"class": type(env.unwrapped).__name__, "wrappers": ", ".join(wrappers)}


def _described(option: Any) -> Any:
    """Returns an option as JSON; for other objects the name of their class, since their repr may hold an address."""
    plain = as_json(option)
    try:
        json.dumps(plain)
    except (TypeError, ValueError):
        return type(option).__name__
    return plain


def _env_makers(
    env: str | gymnasium.Env | Callable[[], gymnasium.Env], count: int
) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
    """Returns `count` functions that make an environment each; rejects one that cannot be made several times."""
    if isinstance(env, str):
        return [lambda: make_env(env)] * count
    if not isinstance(env, gymnasium.Env):
        return [env, *[without_video(env)] * (count - 1)]
    if count == 1:
        return [lambda: env]
    if not can_recreate(env):
        raise ConfigError(
            f"{count} environments like {env} are wanted, but it was not made by gymnasium.make(), or has a wrapper "
            "that does not record its arguments (gymnasium.utils.RecordConstructorArgs). Pass a function that makes "
            "one, or num_envs=1."
        )
    return [maker_from_spec(env, number) for number in range(count)]


def make_env(name: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """Makes the environment that is registered in Gymnasium under an id.

    Raises:
        ConfigError: The id is unknown, a package is missing, or the environment cannot be constructed.
    """
    try:
        if name.count(":") > 1:
            raise gymnasium.error.NameNotFound("an id has one colon at most, after the module.")
        return gymnasium.make(name, **options)
    except LlamaGymError:
        raise
    except Exception as error:  # a module or a constructor may raise anything
        reason = error if isinstance(error, (gymnasium.error.Error, ImportError)) else f"{reason_of(error)}."
        raise ConfigError(
            f"env={shortened(name)} cannot be made: {reason} Pass an id that gymnasium.make() knows, or a function "
            "that makes the environment."
        ) from error
