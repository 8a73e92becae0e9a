"""Infos of environments in vector environments, which merge the infos of all environments into one dictionary."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError

Info = dict[str, Any]

# The only key that our environments give a vector environment; its value is the whole info.
_KEY = "llamagym_info"


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
    return {_KEY: _PackedInfo(info)}


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
            if name == _KEY:
                unpacked[index] = per_env[index].info
            else:
                unpacked[index][name] = per_env[index]
    return unpacked


def unpicklable_names(infos: Mapping[str, Any] | Sequence[Info]) -> set[str]:
    """Returns the names of values that could not be sent from an environment's process."""
    packed = infos.get(_KEY, ()) if isinstance(infos, Mapping) else ()
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
    """Puts an ended episode's last observation and info in place of the next episode's first ones.

    A vector environment in autoreset mode SAME_STEP returns the latter.

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
