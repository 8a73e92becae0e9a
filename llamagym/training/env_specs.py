"""Makes further environments from the spec of a user's environment, and finds the attributes that these lack."""

from __future__ import annotations

import copy
import glob
import logging
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from ..errors import ConfigError
from .managed_env import ManagedEnv

logger = logging.getLogger(__name__)

# Attributes that differ between equal environments: random number generators and Gymnasium's caches.
_IGNORED_ATTRIBUTES = {"_np_random", "_np_random_seed", "env", "_cached_spec"}
_VIDEO_WRAPPER = "RecordVideo"
# Gymnasium's wrappers that only record or check.
_RECORDING_WRAPPERS = ("OrderEnforcing", "PassiveEnvChecker", "RecordEpisodeStatistics", _VIDEO_WRAPPER)
# Levels of environments inside environments that are compared.
_INNER_LEVELS = 3
# Seconds that an environment made for a comparison may take to close.
_CLOSE_S = 5.0


def can_recreate(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether an environment's spec holds all that is needed to make it again, with its wrappers."""
    # Gymnasium knows the arguments of wrappers that derive from gymnasium.utils.RecordConstructorArgs only.
    return env.spec is not None and all(wrapper.kwargs is not None for wrapper in env.spec.additional_wrappers)


def maker_from_spec(env: gymnasium.Env[Any, Any], number: int) -> Callable[[], gymnasium.Env[Any, Any]]:
    """Returns a function that makes an environment like `env`.

    For number 0 alone, the first call logs lost attributes, and the environment keeps RecordVideo.
    """
    is_first = number == 0

    def recreate() -> gymnasium.Env[Any, Any]:
        nonlocal is_first
        recreated = make_from_spec(env, records_video=number == 0)
        lost = _lost_attributes(env, recreated) if is_first else []
        if lost:
            logger.warning(
                "Several environments are made from the spec of %s, and its attributes %s are not the same in them. "
                "Pass a function that makes it and sets them, or num_envs=1 to use it itself.",
                env,
                ", ".join(lost),
            )
        is_first = False
        return recreated

    return recreate


def make_from_spec(
    env: gymnasium.Env[Any, Any], records_video: bool = False, **options: Any
) -> gymnasium.Env[Any, Any]:
    """Makes an environment like `env`; RecordVideo is left out unless `records_video`."""
    try:
        spec = copy.deepcopy(env.spec)
        assert spec is not None
        wrappers = []
        for wrapper in spec.additional_wrappers:
            if wrapper.name != _VIDEO_WRAPPER:
                wrappers.append(wrapper)
            elif records_video:
                wrappers.append(replace(wrapper, kwargs=_without_overwriting(wrapper.kwargs or {})))
        spec.additional_wrappers = tuple(wrappers)
        with _ignored_overwriting():
            return gymnasium.make(spec, **options)
    except (gymnasium.error.Error, AttributeError, ImportError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{env} cannot be made again from its spec: {error} Pass a function that makes it, or num_envs=1 to use it "
            "itself."
        ) from error


@contextmanager
def _ignored_overwriting() -> Iterator[None]:
    """While open, Gymnasium does not warn of videos that would be overwritten, since none are."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Overwriting existing videos")
        yield


def without_video(source: Any) -> Any:
    """Returns the source of environments that record no videos; one that records none itself stays as it is.

    Args:
        source: As `env` of `train`: an id, an environment, a function that makes one, or a vector environment.
    """
    if isinstance(source, gymnasium.Env):
        records_video = any(map(_is_video_wrapper, wrapper_chain(source)))
        return partial(make_from_spec, source) if records_video and can_recreate(source) else source
    if isinstance(source, (str, VectorEnv)):
        return source

    def make() -> gymnasium.Env[Any, Any]:
        with _ignored_overwriting():
            env = source()
        return _remove_video_wrapper_(env)

    return make


def _remove_video_wrapper_(env: Any) -> Any:
    """Removes RecordVideo from an environment's wrappers, in place, and returns the environment without it."""
    if not isinstance(env, gymnasium.Wrapper):
        return env
    env.env = _remove_video_wrapper_(env.env)
    return env.env if _is_video_wrapper(env) else env


def _is_video_wrapper(layer: Any) -> bool:
    return is_recording_wrapper(layer) and type(layer).__name__ == _VIDEO_WRAPPER


def _without_overwriting(options: dict[str, Any]) -> dict[str, Any]:
    """Returns RecordVideo's options with an unused file prefix, so that earlier videos are kept."""
    prefix = options["name_prefix"]
    free = prefix
    number = 1
    while any(Path(options["video_folder"]).glob(f"{glob.escape(free)}-*")):
        number += 1
        free = f"{prefix}-{number}"
    return {**options, "name_prefix": free}


def _lost_attributes(env: gymnasium.Env[Any, Any], recreated: gymnasium.Env[Any, Any]) -> list[str]:
    """Returns names of attributes of `env` or its wrappers that an environment from its spec lacks after a reset."""
    different = _differences(env, recreated)
    if not different:
        return []
    # An attribute is not lost if, after reset(), it does not matter whether it was set before. The third environment
    # shows random differences.
    patched = make_from_spec(env)
    fresh = make_from_spec(env)
    other = make_from_spec(env)
    try:
        return _differences_after_reset(env, different, patched, fresh, other)
    except Exception:  # a user's reset() may raise anything; the run's own reset shows it
        return list(dict.fromkeys(name for _, name in different))
    finally:
        for each in (patched, fresh, other):
            ManagedEnv(each, 0, in_child=False, close_timeout=_CLOSE_S).close()


def _differences_after_reset(
    env: gymnasium.Env[Any, Any],
    different: list[tuple[int, str]],
    patched: gymnasium.Env[Any, Any],
    fresh: gymnasium.Env[Any, Any],
    other: gymnasium.Env[Any, Any],
) -> list[str]:
    """Returns the `different` attributes whose values in `env` still matter after a reset.

    `patched`, `fresh` and `other` are made from its spec. Only `patched` gets the values of `env` before its reset;
    differences between `fresh` and `other` are random.
    """
    values = [vars(layer) for layer in _compared_layers(env)]
    patched_values = [vars(layer) for layer in _compared_layers(patched)]
    uncopied = []
    for index, name in different:
        try:
            patched_values[index][name] = copy.deepcopy(values[index][name])
        except Exception:  # a connection; and a user's class may raise anything
            uncopied.append((index, name))
    before = [dict(vars(layer)) for layer in _compared_layers(fresh)]
    for each in (patched, fresh, other):
        each.reset(seed=0)
    after = [vars(layer) for layer in _compared_layers(fresh)]
    random_differences = _differences(other, fresh)
    lost = []
    for attribute in _differences(patched, fresh):
        if attribute in different and attribute not in random_differences:
            lost.append(attribute)
    for index, name in uncopied:
        if after[index].get(name) is before[index].get(name):
            lost.append((index, name))
    return list(dict.fromkeys(name for _, name in lost))


def _differences(
    env: gymnasium.Env[Any, Any], other: gymnasium.Env[Any, Any], levels: int = _INNER_LEVELS
) -> list[tuple[int, str]]:
    """Returns attributes of `env` that `other` lacks or has with other values: index in `_compared_layers`, name.

    Args:
        env: The environment.
        other: The other environment.
        levels: Levels of environments inside it that are compared.
    """
    different = []
    for index, (layer, other_layer) in enumerate(zip(_compared_layers(env), _compared_layers(other), strict=False)):
        others = vars(other_layer)
        for name, value in vars(layer).items():
            is_same = name in _IGNORED_ATTRIBUTES or (name in others and _is_alike(value, others[name], levels))
            if not is_same:
                different.append((index, name))
    return different


def is_recording_wrapper(wrapper: Any) -> bool:
    """Whether a wrapper is one of Gymnasium's that do not change what an environment does."""
    return type(wrapper).__module__.startswith("gymnasium.wrappers") and type(wrapper).__name__ in _RECORDING_WRAPPERS


def _compared_layers(env: Any) -> list[Any]:
    """Returns the wrappers that change what an environment does, from the outside in, and the innermost environment."""
    return [layer for layer in wrapper_chain(env) if not is_recording_wrapper(layer)]


def wrapper_chain(env: Any) -> Iterator[Any]:
    """Yields the environment's wrappers from the outside in, then the innermost environment."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def _is_alike(value: Any, other: Any, levels: int) -> bool:
    """Whether two values are the same, as far as it can be determined."""
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
    except Exception:  # arrays of several numbers; and a user's class may raise anything
        pass
    try:
        return pickle.dumps(value) == pickle.dumps(other)
    except Exception:  # it cannot be pickled, so only its type can be compared
        return type(value) is type(other) and not callable(value)


def _is_same_function(function: FunctionType, other: FunctionType) -> bool:
    """Whether two functions have the same code and bound values; of bound environments, only the classes count."""
    if function is other:
        return True
    if function.__code__ != other.__code__:
        return False
    values = _bound_values(function)
    other_values = _bound_values(other)
    return len(values) == len(other_values) and all(map(_is_same_value, values, other_values))


def _bound_values(function: FunctionType) -> list[Any]:
    """Returns a function's default values and the assigned variables of its closure."""
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def _is_same_value(value: Any, other: Any) -> bool:
    # Only the code of functions is compared, since they may refer to each other or to themselves.
    if isinstance(value, FunctionType) and isinstance(other, FunctionType):
        return value.__code__ == other.__code__
    return _is_alike(value, other, levels=0)
