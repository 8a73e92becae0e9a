"""Combinations of parameters in which every pair of values occurs, instead of all combinations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any


def pairwise(axes: Mapping[str, Iterable[Any]]) -> tuple[list[dict[str, Any]], int]:
    """Rows in which any two values of different axes meet.

    Most faults need one value or two together (Kuhn, Wallace and Gallo 2004, https://doi.org/10.1109/TSE.2004.24).
    Greedy and deterministic. The first rows hold every value at least once.

    Args:
        axes: Values by the name of their axis.

    Returns:
        The rows, and how many of the first ones hold every single value.
    """
    rows = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    values, pairs = _met_in(rows, 1), _met_in(rows, min(2, len(axes)))
    chosen: list[dict[str, Any]] = []
    enough = 0
    while pairs:
        # Until every value has occurred, rows with the most new values come first.
        best = max(rows, key=lambda row: (len(_met_in([row], 1) & values), len(_met_in([row], 2) & pairs)))
        chosen.append(best)
        rows.remove(best)
        enough = len(chosen) if values else enough
        values -= _met_in([best], 1)
        pairs -= _met_in([best], min(2, len(axes)))
    return chosen, enough


def _met_in(rows: list[dict[str, Any]], size: int) -> set[tuple[Any, ...]]:
    """All combinations of so many values, each with the name of its axis, that occur together in a row."""
    return {
        combination
        for row in rows
        for combination in itertools.combinations(((n, id(v)) for n, v in row.items()), size)
    }
