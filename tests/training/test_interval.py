"""`EvaluationResult.interval`: how often it covers the true mean, and its limits."""

from __future__ import annotations

import json

import numpy as np
import pytest

from llamagym import EvaluationResult
from scripts.reliability.interval_coverage import DISTRIBUTIONS, coverage
from tests.helpers import ROOT

RESULT = ROOT / "scripts/reliability/results/interval_coverage.json"


def covered(name: str, episodes: int, repetitions: int = 300) -> float:
    return coverage(DISTRIBUTIONS[name], episodes, repetitions, np.random.default_rng(0))[0]


@pytest.mark.parametrize(
    ("name", "episodes", "least"),
    [
        ("normal", 5, 0.92),
        ("exponential", 20, 0.9),
        ("Blackjack", 20, 0.92),
        ("success 0.9", 5, 0.9),
        ("success 0.9", 20, 0.92),
        ("success 0.99", 20, 0.92),
        ("won or lost, 0.95", 64, 0.88),
    ],
)
def test_interval_has_its_nominal_coverage(name, episodes, least):
    assert covered(name, episodes) >= least


def test_interval_cannot_cover_rare_extreme_returns():
    """As documented: the interval does not account for returns that were never observed."""
    assert covered("heavy tail: 100 in one of 50", 20, 100) < 0.5


def test_two_returns_are_not_treated_as_the_only_values():
    assert covered("normal", 2) >= 0.9


def test_a_single_episode_has_no_interval():
    assert np.isnan(EvaluationResult([1.0]).interval).all()


def test_equal_returns_have_no_width_unless_they_are_successes_or_failures():
    assert EvaluationResult([-200.7] * 64).interval == pytest.approx((-200.7, -200.7))
    low, high = EvaluationResult([1.0] * 64).interval
    assert 0.9 < low < 0.95
    assert high == pytest.approx(1.0)
    assert EvaluationResult([0.0] * 64).interval == pytest.approx((0.0, 1 - low))


def test_the_interval_of_two_values_is_a_scaled_wilson_interval():
    low, high = EvaluationResult([1.0] * 9 + [0.0]).interval
    shifted = EvaluationResult([5.0] * 9 + [-5.0]).interval
    assert shifted == pytest.approx((10 * low - 5, 10 * high - 5))
    assert 0 < low < 0.9 < high < 1


def test_the_committed_coverage_matches_the_documentation():
    measured = json.loads(RESULT.read_text())["measured"]
    assert set(measured) == set(DISTRIBUTIONS)
    for name, by_episodes in measured.items():
        # Where all are won, nothing says what losing costs: 4 of 100 times in "won or lost".
        if not name.startswith("heavy tail"):
            assert by_episodes["64"]["coverage"] >= 0.89, name
