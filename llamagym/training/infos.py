"""What environments say as info, on its way through vector environments, which make one dictionary of many."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Info = dict[str, Any]

# Under which a copy's info travels as one object.
_KEY = "llamagym_info"


class _Whole:
    """An info as it is: those of several copies may differ in what one array cannot hold."""

    def __init__(self, info: Info) -> None:
        self.info = info

    def __reduce__(self) -> tuple[type[_Whole], tuple[Info]]:
        # What cannot travel between processes stays behind.
        return _Whole, ({name: value for name, value in self.info.items() if _is_picklable(value)},)


def whole(info: Info) -> Info:
    """An info that `split` gives back as it was."""
    return {_KEY: _Whole(info)}


def split(infos: Mapping[str, Any] | Sequence[Info], count: int) -> list[Info]:
    """Each copy's info, out of a vector environment's; empty for those that said nothing.

    >>> split({"lives": np.array([3, 0]), "_lives": np.array([True, False])}, 2) == [{"lives": 3}, {}]
    True
    """
    if not isinstance(infos, Mapping):
        # As gymnasium's wrapper DictInfoToList makes them.
        return [dict(info) for info in infos]
    said: list[Info] = [{} for _ in range(count)]
    for name, values in infos.items():
        if name.startswith("_") and name[1:] in infos:
            continue
        parts = split(values, count) if isinstance(values, Mapping) else values
        is_there = infos.get(f"_{name}", np.ones(count, dtype=bool))
        for index in np.flatnonzero(is_there).tolist():
            if name == _KEY:
                said[index] = parts[index].info
            else:
                said[index][name] = parts[index]
    return said


def put_finals(observations: list[Any], infos: list[Info], ended: Sequence[bool]) -> None:
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
