"""Checks the state of a training loop in a checkpoint, before anything uses it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import CheckpointError
from ..options import shortened

# Upper bound for counts; fits in int64.
_LARGEST = 2**62


def check_loop_state(loop: Mapping[str, Any], num_envs: int, starts_again: bool) -> None:
    """Rejects a loop's state that lacks a part, or has one of another type or length.

    Args:
        loop: The state that `load_checkpoint` returned.
        num_envs: Number of environments that are resumed.
        starts_again: Whether their episodes start again, since they are other environments.

    Raises:
        CheckpointError: A part is missing or invalid; the message names it.
    """
    _check_run(loop)
    require_part(_is_list(loop, "tracker"), loop, "tracker", "a list")
    callbacks = loop.get("callbacks")
    states = callbacks.get("callbacks") if isinstance(callbacks, Mapping) else None
    is_valid = isinstance(states, list) and all(map(_is_callback, states))
    require_part(is_valid, loop, "callbacks", "names and states")
    play = loop.get("play")
    if not isinstance(play, Mapping):
        raise _invalid_part(loop, "play", "a dictionary")
    _check_play(play, num_envs, starts_again)


def _check_run(loop: Mapping[str, Any]) -> None:
    """Checks the state that `Run.load_state_dict` uses."""
    require_part(is_count(loop.get("turns")), loop, "turns", "a count")
    require_part(_is_number(loop.get("seconds")), loop, "seconds", "a finite number")
    require_part(_is_list(loop, "returns") and all(map(is_real, loop["returns"])), loop, "returns", "numbers")
    episodes = len(loop["returns"])
    is_valid = _is_list(loop, "updates") and all(map(_are_statistics, loop["updates"]))
    require_part(is_valid, loop, "updates", "statistics")
    is_valid = _is_list(loop, "successes", episodes) and all(map(_is_flag_or_none, loop["successes"]))
    require_part(is_valid, loop, "successes", f"{episodes} flags")
    uncounted = loop.get("uncounted", -1)
    require_part(is_count(uncounted) and uncounted <= episodes, loop, "uncounted", f"a count up to {episodes}")
    progress = loop.get("progress_at_batch_start", -1)
    require_part(_is_number(progress) and 0 <= progress <= 1, loop, "progress_at_batch_start", "a number from 0 to 1")
    require_part(_is_budget(loop.get("budget")), loop, "budget", "limits, what was used before, and a flag")


def _check_play(play: Mapping[str, Any], num_envs: int, starts_again: bool) -> None:
    """Checks the state that `Play.resume` uses."""
    require = partial(require_part, where="play/")
    base_seed = play.get("base_seed")
    is_valid = isinstance(base_seed, int) and not isinstance(base_seed, bool) and base_seed >= 0
    require(is_valid, play, "base_seed", "a seed")
    require(is_count(play.get("ranks")), play, "ranks", "a count")
    require(is_count(play.get("next_group")), play, "next_group", "a count")
    # With other environments, list lengths may differ.
    length = None if starts_again else num_envs
    require(_is_list(play, "groups", length) and all(map(is_count, play["groups"])), play, "groups", "counts")
    is_valid = _is_list(play, "actions", length) and all(isinstance(each, (list, dict)) for each in play["actions"])
    require(is_valid, play, "actions", "the actions of each environment")
    is_valid = _is_list(play, "texts", length) and all(map(_is_text_or_none, play["texts"]))
    require(is_valid, play, "texts", "a text for each environment")
    is_valid = _are_choices(play.get("choices"), len(play["texts"]))
    require(is_valid, play, "choices", "lists of choices, and an index for each environment")
    # Only the environments of a caller, which cannot replay actions, have the beginnings of their episodes.
    first = play.get("first")
    is_valid = "first" in play and (first is None or _are_beginnings(first, len(play["texts"])))
    require(is_valid, play, "first", "texts and choices, or None")
    is_valid = _is_list(play, "to_pause", length)
    is_valid = is_valid and all(isinstance(each, bool) for each in play["to_pause"])
    require(is_valid, play, "to_pause", "a flag for each environment")


def require_part(is_valid: bool, state: Mapping[str, Any], name: str, expected: str, where: str = "") -> None:
    """Rejects a part of a state that is missing or invalid.

    Args:
        is_valid: Whether the part is valid.
        state: The state.
        name: Name of the part.
        expected: Description of a valid part.
        where: Path of the state in the training loop's state, with a slash at its end.

    Raises:
        CheckpointError: The part is not valid.
    """
    if not is_valid:
        raise _invalid_part(state, name, expected, where)


def _invalid_part(state: Mapping[str, Any], name: str, expected: str, where: str = "") -> CheckpointError:
    found = shortened(state[name]) if name in state else "nothing"
    return CheckpointError(f"The state of the training loop has {found} at {where + name!r}; expected {expected}.")


def _is_list(state: Mapping[str, Any], name: str, length: int | None = None) -> bool:
    value = state.get(name)
    return isinstance(value, list) and length in (None, len(value))


def is_count(value: object) -> bool:
    """Whether a value is an int from 0 to 2**62 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def is_real(value: object) -> bool:
    """Whether a value is a number that a float can hold, finite or not."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**1000
    return isinstance(value, float)


def _is_number(value: Any) -> bool:
    return is_real(value) and math.isfinite(value)


def _is_flag_or_none(value: object) -> bool:
    return value is None or isinstance(value, bool)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _are_statistics(stats: object) -> bool:
    """Whether these are the statistics of an update; each has a mean return."""
    if not isinstance(stats, Mapping) or not is_real(stats.get("return_mean")):
        return False
    return all(isinstance(value, (str, bool)) or is_real(value) for value in stats.values())


def _is_callback(entry: object) -> bool:
    """Whether this is the name of a callback and its state; None as the state if it could not be saved."""
    if not isinstance(entry, Sequence) or len(entry) != 2:
        return False
    name, state = entry
    return isinstance(name, str) and (state is None or isinstance(state, dict))


def _is_budget(budget: object) -> bool:
    if not isinstance(budget, Mapping) or not isinstance(budget.get("is_finished"), bool):
        return False
    limits = budget.get("limits")
    before = budget.get("before")
    if not isinstance(limits, Mapping) or not isinstance(before, Mapping):
        return False
    names = {"episodes", "turns", "minutes"}
    if limits.keys() != names or before.keys() != names:
        return False
    are_limits = all(value is None or _is_number(value) for value in limits.values())
    return are_limits and all(map(_is_number, before.values()))


def _are_beginnings(first: object, length: int) -> bool:
    """Whether these are the text and the choices that each environment's episode began with."""
    if not isinstance(first, Mapping) or not _is_list(first, "texts", length):
        return False
    are_texts = all(isinstance(text, str) for text in first["texts"])
    return are_texts and _are_choices(first.get("choices"), length)


def _are_choices(choices: object, length: int | None) -> bool:
    """Whether these are distinct lists of choices, and the index of each environment's list."""
    if not isinstance(choices, Mapping) or not _is_list(choices, "lists") or not _is_list(choices, "indices", length):
        return False
    for offered in choices["lists"]:
        if offered is not None and not (isinstance(offered, list) and all(isinstance(text, str) for text in offered)):
            return False
    count = len(choices["lists"])
    return all(index is None or (is_count(index) and index < count) for index in choices["indices"])
