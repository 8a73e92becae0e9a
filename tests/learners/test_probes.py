"""Every learner solves every probe, and no probe can be solved without what it is about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.probes import PROBES

# Each learner, with the agent's options that select it.
ALGORITHMS: dict[str, dict] = {"ppo": {}, "grpo": {"algorithm": "grpo"}}
# What the short run leaves out repeats the same property with another learner, or takes long.
SHORT = {"observation-ppo", "action-grpo", "discount-ppo", "truncation-ppo"}
NAMES = {
    f"{name}-{algorithm}": (PROBES[name], algorithm)
    for algorithm in ALGORITHMS
    for name in PROBES
    if algorithm == "ppo" or not PROBES[name].of_value
}
CASES = [pytest.param(*case, id=name, marks=() if name in SHORT else pytest.mark.long) for name, case in NAMES.items()]


@pytest.mark.parametrize(("probe", "algorithm"), CASES)
def test_the_probe_is_solved(probe, algorithm):
    assert probe.error(probe.tolerance, algorithm, ALGORITHMS[algorithm]) < probe.tolerance


@pytest.mark.long
@pytest.mark.parametrize("name", PROBES)
def test_the_probe_is_solved_with_the_other_critic(name):
    probe = PROBES[name]
    # Those of values have a rate for gradient steps.
    other = "lstd" if probe.of_value else "gradient"
    rates = {} if other == "gradient" else {"value_learning_rate": None, "cliprange_value": None}
    probe = replace(probe, config=probe.config | {"critic": other} | rates)
    assert probe.error(probe.tolerance, "ppo", {}) < probe.tolerance


@pytest.mark.parametrize(("probe", "algorithm"), CASES)
def test_its_negative_control_is_not(probe, algorithm):
    control = replace(probe, **probe.control)
    bound = 2 * probe.tolerance
    assert control.error_of_one(algorithm, ALGORITHMS[algorithm]) > bound


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", [name for name, probe in PROBES.items() if not probe.of_value])
def test_learning_rate_zero_solves_nothing(name, algorithm):
    # What an update did in spite of the rate would show after a few.
    resting = replace(PROBES[name], config={"learning_rate": 0.0}, updates=3)
    bound = 2 * resting.tolerance
    assert resting.error_of_one(algorithm, ALGORITHMS[algorithm]) > bound
