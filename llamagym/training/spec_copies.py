"""Environments made again from the spec of one that a user made, and what such a copy does not have."""

from __future__ import annotations

import copy
import logging
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np

from ..errors import ConfigError

logger = logging.getLogger(__name__)

# Set by a reset, and different in each environment.
_RANDOM_STATE = {"_np_random", "_np_random_seed"}


def can_be_copied(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether an environment has a spec that says how it was made, its wrappers included."""
    # A wrapper that does not record its arguments (gymnasium.utils.RecordConstructorArgs) cannot be made again.
    return env.spec is not None and all(wrapper.kwargs is not None for wrapper in env.spec.additional_wrappers)


def copier(env: gymnasium.Env[Any, Any]) -> Callable[[], gymnasium.Env[Any, Any]]:
    """A function that makes an environment like `env`; its first call logs which attributes a copy does not have."""
    spec = env.spec
    is_first = True

    def copied() -> gymnasium.Env[Any, Any]:
        nonlocal is_first
        try:
            made = gymnasium.make(copy.deepcopy(spec))  # type: ignore[arg-type]
        except (gymnasium.error.Error, AttributeError, ImportError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{env} cannot be made again from its spec: {error} Pass a function that makes it, or num_envs=1 to "
                "use it itself."
            ) from error
        lost = _different_attributes(env, made) if is_first else []
        if lost:
            # What a reset sets anyway is not lost.
            set_by_reset = _set_by_reset(made)
            lost = [name for name in lost if name not in set_by_reset]
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


def _different_attributes(env: gymnasium.Env[Any, Any], made: gymnasium.Env[Any, Any]) -> list[str]:
    """Names of attributes, of an environment or its wrappers, that a copy does not have or has with other values."""
    names: dict[str, None] = {}
    for one, other in zip(_layers(env), _layers(made), strict=False):
        others = vars(other)
        is_gymnasium = type(one).__module__.startswith("gymnasium.wrappers")
        for name, value in vars(one).items():
            # Gymnasium's own wrappers count steps.
            is_same = name in others and (is_gymnasium or _is_alike(value, others[name]))
            if not is_same and name not in _RANDOM_STATE:
                names[name] = None
    return list(names)


def _set_by_reset(env: gymnasium.Env[Any, Any]) -> set[str]:
    """Names of attributes, of an environment or its wrappers, that a reset sets to something else."""
    before = [dict(vars(layer)) for layer in _layers(env)]
    try:
        env.reset()
    except Exception:  # the run's own reset shows what is wrong
        return set()
    changed: set[str] = set()
    for old, layer in zip(before, _layers(env), strict=True):
        changed |= {name for name, value in vars(layer).items() if name not in old or old[name] is not value}
    return changed


def _layers(env: Any) -> Iterator[Any]:
    """The environment's wrappers from the outside in, then itself."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def _is_alike(value: Any, other: Any) -> bool:
    """Whether two values are the same, as far as can be known."""
    if isinstance(value, np.random.Generator | np.random.RandomState | random.Random | gymnasium.Env):
        return True
    try:
        if value == other:
            return True
    except Exception:  # arrays of several numbers, and whatever a user's class raises
        pass
    try:
        return pickle.dumps(value) == pickle.dumps(other)
    except Exception:
        return type(value) is type(other) and not callable(value)
