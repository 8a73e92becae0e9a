"""Environments made again from the spec of one that a user made, and what such a copy does not have."""

from __future__ import annotations

import copy
import logging
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

import gymnasium
import numpy as np

from ..errors import ConfigError
from .managed_env import ManagedEnv

logger = logging.getLogger(__name__)

# Attributes that differ between equal environments: generators of random numbers, and what Gymnasium caches.
_UNCOMPARED = {"_np_random", "_np_random_seed", "env", "_cached_spec"}
# Gymnasium's wrappers that record what happens and change nothing in it.
_RECORDERS = ("OrderEnforcing", "PassiveEnvChecker", "RecordEpisodeStatistics", "RecordVideo")
# How many levels of environments inside environments are compared.
_INNER_LEVELS = 3
# Seconds that an environment made for a comparison has to close.
_CLOSE_S = 5.0


def can_recreate(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether an environment has a spec that says how it was made, its wrappers included."""
    # A wrapper that does not record its arguments (gymnasium.utils.RecordConstructorArgs) cannot be made again.
    return env.spec is not None and all(wrapper.kwargs is not None for wrapper in env.spec.additional_wrappers)


def recreate_from_spec(env: gymnasium.Env[Any, Any]) -> Callable[[], gymnasium.Env[Any, Any]]:
    """A function that makes an environment like `env`; its first call logs which attributes a copy does not have."""
    is_first = True

    def copied() -> gymnasium.Env[Any, Any]:
        nonlocal is_first
        made = _made_from_spec(env)
        lost = _lost_attributes(env, made) if is_first else []
        if lost:
            logger.warning(
                "Several environments are made from the spec of %s, and its attributes %s are not the same in them. "
                "Pass a function that makes it and sets them, or num_envs=1 to use it itself.",
                env,
                ", ".join(lost),
            )
        is_first = False
        return made

    return copied


def _made_from_spec(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    try:
        return gymnasium.make(copy.deepcopy(env.spec))  # type: ignore[arg-type]
    except (gymnasium.error.Error, AttributeError, ImportError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{env} cannot be made again from its spec: {error} Pass a function that makes it, or num_envs=1 to use it "
            "itself."
        ) from error


def _lost_attributes(env: gymnasium.Env[Any, Any], made: gymnasium.Env[Any, Any]) -> list[str]:
    """Names of attributes, of an environment or its wrappers, that an environment from its spec lacks after a reset."""
    different = _differences(env, made)
    if not different:
        return []
    # An attribute is not lost if, after reset(), setting it beforehand made no difference. A third environment shows
    # random differences.
    given, fresh, other = (_made_from_spec(env) for _ in range(3))
    try:
        return _differences_after_reset(env, different, given, fresh, other)
    except Exception:  # whatever a user's reset() raises; the run's own reset shows it
        return list(dict.fromkeys(name for _, name in different))
    finally:
        for each in (given, fresh, other):
            ManagedEnv(each, 0, in_child=False, close_timeout=_CLOSE_S).close()


def _differences_after_reset(
    env: gymnasium.Env[Any, Any],
    different: list[tuple[int, str]],
    given: gymnasium.Env[Any, Any],
    fresh: gymnasium.Env[Any, Any],
    other: gymnasium.Env[Any, Any],
) -> list[str]:
    """Names of attributes that differ between `given`, with the values of `env`, and `fresh`, but not by chance."""
    values = [vars(layer) for layer in wrapper_chain(env)]
    given_values = [vars(layer) for layer in wrapper_chain(given)]
    uncopied = []
    for index, name in different:
        try:
            given_values[index][name] = copy.deepcopy(values[index][name])
        except Exception:  # a connection, or whatever a user's class raises
            uncopied.append((index, name))
    before = [dict(vars(layer)) for layer in wrapper_chain(fresh)]
    for each in (given, fresh, other):
        each.reset(seed=0)
    after = [vars(layer) for layer in wrapper_chain(fresh)]
    by_chance = _differences(other, fresh)
    lost = [place for place in _differences(given, fresh) if place in different and place not in by_chance]
    for index, name in uncopied:
        if after[index].get(name) is before[index].get(name):
            lost.append((index, name))
    return list(dict.fromkeys(name for _, name in lost))


def _differences(
    env: gymnasium.Env[Any, Any], other: gymnasium.Env[Any, Any], levels: int = _INNER_LEVELS
) -> list[tuple[int, str]]:
    """Attributes that another environment lacks or has with other values: the wrapper's number and the name.

    Args:
        env: The environment, whose wrappers are numbered from the outside in, itself the last.
        other: The other environment.
        levels: Levels of environments inside it that are compared.
    """
    different = []
    for index, (layer, other_layer) in enumerate(zip(wrapper_chain(env), wrapper_chain(other), strict=False)):
        if is_recording_wrapper(layer):
            continue
        others = vars(other_layer)
        for name, value in vars(layer).items():
            is_same = name in _UNCOMPARED or (name in others and _is_alike(value, others[name], levels))
            if not is_same:
                different.append((index, name))
    return different


def is_recording_wrapper(wrapper: Any) -> bool:
    """Whether a wrapper is one of Gymnasium's that change nothing in the environment."""
    return type(wrapper).__module__.startswith("gymnasium.wrappers") and type(wrapper).__name__ in _RECORDERS


def wrapper_chain(env: Any) -> Iterator[Any]:
    """The environment's wrappers from the outside in, then itself."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def _is_alike(value: Any, other: Any, levels: int) -> bool:
    """Whether two values are the same, as far as can be known."""
    if isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
        return True
    if isinstance(value, gymnasium.Env):
        return type(value) is type(other) and (levels == 0 or not _differences(value, other, levels - 1))
    if isinstance(value, MethodType):
        return isinstance(other, MethodType) and value.__func__ is other.__func__
    if isinstance(value, FunctionType):
        return isinstance(other, FunctionType) and _is_same_function(value, other)
    try:
        if value == other:
            return True
    except Exception:  # arrays of several numbers, and whatever a user's class raises
        pass
    try:
        return pickle.dumps(value) == pickle.dumps(other)
    except Exception:  # it cannot be pickled, so that only its type tells
        return type(value) is type(other) and not callable(value)


def _is_same_function(function: FunctionType, other: FunctionType) -> bool:
    """Whether two functions have the same code and bound values; environments in them are compared elsewhere."""
    if function is other:
        return True
    if function.__code__ != other.__code__:
        return False
    values = _bound_values(function)
    other_values = _bound_values(other)
    return len(values) == len(other_values) and all(map(_is_same_value, values, other_values))


def _bound_values(function: FunctionType) -> list[Any]:
    """A function's default values and the values of its closure, without variables that are not assigned yet."""
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def _is_same_value(value: Any, other: Any) -> bool:
    # Functions by their code alone, since they may refer to each other or to themselves.
    if isinstance(value, FunctionType) and isinstance(other, FunctionType):
        return value.__code__ == other.__code__
    return _is_alike(value, other, levels=0)
