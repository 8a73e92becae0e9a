"""What environments say as info, on its way through vector environments, which make one dictionary of many."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError

Info = dict[str, Any]

# Under which a copy's info travels as one object.
_KEY = "llamagym_info"


class _Whole:
    """An info as it is: those of several copies may differ in what one array cannot hold."""

    def __init__(self, info: Info, lost: Sequence[str] = ()) -> None:
        self.info = info
        # Names of what could not be sent from another process.
        self.lost = lost

    def __reduce__(self) -> tuple[type[_Whole], tuple[Info, list[str]]]:
        kept = {name: value for name, value in self.info.items() if _is_picklable((name, value))}
        lost = [str(name) for name in self.info if name not in kept]
        return _Whole, (kept, lost)


def pack_info(info: Info) -> Info:
    """An info that `unpack_infos` gives back as it was."""
    return {_KEY: _Whole(info)}


def unpack_infos(infos: Mapping[str, Any] | Sequence[Info], count: int) -> list[Info]:
    """Each copy's info, out of a vector environment's; empty for those that said nothing.

    >>> unpack_infos({"lives": np.array([3, 0]), "_lives": np.array([True, False])}, 2) == [{"lives": 3}, {}]
    True
    """
    if not isinstance(infos, Mapping):
        # As gymnasium's wrapper DictInfoToList makes them.
        return [dict(info) for info in infos]
    said: list[Info] = [{} for _ in range(count)]
    masks = {f"_{name}" for name in infos}
    for name, values in infos.items():
        if name in masks:
            continue
        parts = unpack_infos(values, count) if isinstance(values, Mapping) else values
        is_there = infos.get(f"_{name}", np.ones(count, dtype=bool))
        for index in np.flatnonzero(is_there).tolist():
            if name == _KEY:
                said[index] = parts[index].info
            else:
                said[index][name] = parts[index]
    return said


def unpicklable_names(infos: Mapping[str, Any] | Sequence[Info]) -> set[str]:
    """Names of what could not be sent from an environment's process."""
    sent = infos.get(_KEY, ()) if isinstance(infos, Mapping) else ()
    return {name for info in sent if info is not None for name in info.lost}


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
    """Put an episode's last observation and info where a vector environment gives the next episode's first ones.

    Args:
        observations: One per environment.
        infos: One per environment.
        ended: Whether the environment's episode has ended.
    """
    for index, has_ended in enumerate(ended):
        if has_ended:
            info = infos[index]
            observations[index], infos[index] = info["final_obs"], info["final_info"]


def _is_picklable(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # an object's own __reduce__ may raise anything
        return False
    return True
