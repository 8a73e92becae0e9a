"""The combinations that tests with many parameters run in."""

from __future__ import annotations

import itertools

from tests.helpers.pairwise import pairwise

AXES = {
    "family": ["a", "b", "c", "d", "e", "f", "g"],
    "is_shared": [True, False],
    "dtype": ["x", "y"],
    "length": [1, 5],
}


def test_every_pair_of_values_occurs():
    rows, _ = pairwise(AXES)
    for one, other in itertools.combinations(AXES, 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(AXES[one], AXES[other]))
    assert len(rows) == 14


def test_the_first_rows_hold_every_value_once():
    rows, enough = pairwise(AXES)
    assert enough == 7
    for axis, values in AXES.items():
        assert {row[axis] for row in rows[:enough]} == set(values)


def test_one_axis_is_all_of_its_values():
    assert pairwise({"kind": ["a", "b"]}) == ([{"kind": "a"}, {"kind": "b"}], 2)
