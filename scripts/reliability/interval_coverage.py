"""Measures the coverage of `EvaluationResult.interval`, a nominal 95 % interval, by simulation.

python -m scripts.reliability.interval_coverage [--repetitions 500] [--seed 0]

Returns are drawn from distributions with a known mean. The share of intervals that contain it and the intervals' median
width go to results/interval_coverage.json. With 500 repetitions a coverage of 0.95 has a standard error of 0.01.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llamagym import EvaluationResult

HERE = Path(__file__).resolve().parent
EPISODES = (2, 5, 20, 64, 200)
BLACKJACK = ([-1.0, 0.0, 1.0, 1.5], [0.48, 0.09, 0.385, 0.045])

Rng = np.random.Generator


class Returns(NamedTuple):
    """A distribution of returns: a function that draws a number of them, and their mean."""

    draw: Callable[[Rng, int], np.ndarray]
    mean: float


def successes(probability: float) -> Returns:
    """Returns of 1 with a probability, else 0."""
    return Returns(lambda rng, count: (rng.random(count) < probability).astype(float), probability)


DISTRIBUTIONS = {
    "normal": Returns(lambda rng, count: rng.normal(size=count), 0.0),
    "uniform": Returns(lambda rng, count: rng.uniform(size=count), 0.5),
    "exponential": Returns(lambda rng, count: rng.exponential(size=count), 1.0),
    "Blackjack": Returns(lambda rng, count: rng.choice(BLACKJACK[0], size=count, p=BLACKJACK[1]), -0.0275),
    "success 0.5": successes(0.5),
    "success 0.9": successes(0.9),
    "success 0.99": successes(0.99),
    "won or lost, 0.95": Returns(lambda rng, count: np.where(rng.random(count) < 0.95, 1.0, -1.0), 0.9),
    "equal": Returns(lambda rng, count: np.full(count, -200.7), -200.7),
    "heavy tail: Pareto 2.5": Returns(lambda rng, count: rng.pareto(2.5, size=count), 1 / 1.5),
    "heavy tail: lognormal, sigma 2": Returns(lambda rng, count: rng.lognormal(0.0, 2.0, size=count), float(np.exp(2))),
    "heavy tail: 100 in one of 50": Returns(
        lambda rng, count: np.where(rng.random(count) < 0.02, 100.0, 0.1 * rng.normal(size=count)), 2.0
    ),
}


def coverage(returns: Returns, count: int, repetitions: int, rng: Rng) -> tuple[float, float]:
    """The share of intervals that contain the mean, and their median width.

    Args:
        returns: The distribution.
        count: Number of episodes per interval.
        repetitions: Number of intervals.
        rng: The random generator.
    """
    intervals = [EvaluationResult(returns.draw(rng, count).tolist()).interval for _ in range(repetitions)]
    # The interval of equal returns has no width; compare up to rounding.
    holds = [low - 1e-9 <= returns.mean <= high + 1e-9 for low, high in intervals]
    return sum(holds) / repetitions, statistics.median(high - low for low, high in intervals)


def main() -> None:
    """Measure all distributions and write the result."""
    # Tests import this module without the benchmarks on the path.
    sys.path.insert(0, str(HERE.parent / "benchmarks"))
    from common import setting

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    measured: dict[str, dict[str, dict[str, float]]] = {}
    for name, returns in DISTRIBUTIONS.items():
        measured[name] = {}
        for count in EPISODES:
            share, width = coverage(returns, count, args.repetitions, rng)
            measured[name][str(count)] = {"coverage": round(share, 3), "median_width": round(width, 3)}
        print(name, *(f"{count}: {cell['coverage']:.3f}" for count, cell in measured[name].items()), flush=True)
    options = f"--repetitions {args.repetitions} --seed {args.seed}"
    result = {
        "command": f"python -m scripts.reliability.interval_coverage {options}",
        **setting(),
        "what": "share of 95 % intervals that hold the true mean, by distribution and number of episodes",
        "measured": measured,
    }
    (HERE / "results" / "interval_coverage.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
