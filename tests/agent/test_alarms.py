"""Alarms: each fires once on a history made for it, and none on the statistics of runs that learned."""

from __future__ import annotations

import json
import logging
import math

import gymnasium as gym
import numpy as np
import pytest
import torch

from llamagym import train
from llamagym.agent.agent import collector_of
from llamagym.agent.alarms import Alarms, Settings
from tests.helpers import ROOT
from tests.helpers.agents import ChoiceAgent, make_agent

RESULTS = ROOT / "scripts/benchmarks/learning/results"
# Statistics of an update of a run that goes well.
WELL = {
    "return_mean": -0.2,
    "return_std": 0.9,
    "entropy": 0.4,
    "approx_kl": 0.01,
    "explained_variance": 0.2,
    "invalid_rate": 0.01,
    "commonest_reply": 0.6,
    "ratio_error": 2e-5,
    "turns": 2048.0,
    "deciding_turns": 2048.0,
    "stopped_early": 0.0,
    "episodes": 1500.0,
}


def fired(history, **options):
    """Returns the alarms of a history, with the update at which each fired."""
    alarms = Alarms(Settings(**options))
    return [(update, text) for update, stats in enumerate(history) for text in alarms.check(stats)]


def repeated(updates=20, **changes):
    """Returns a history of a run that goes well except for `changes`: numbers, or functions of the update."""
    return [
        WELL | {name: value(update) if callable(value) else value for name, value in changes.items()}
        for update in range(updates)
    ]


def without(history, *names):
    return [{name: value for name, value in stats.items() if name not in names} for stats in history]


# History with a fault, update at which the alarm fires, its beginning, and a part of its advice.
WRONG = {
    "same reply": (repeated(commonest_reply=1.0), 0, "100.0% of all replies", "entropy_coef"),
    "certain": (repeated(entropy=0.009), 9, "entropy is 0.009 nats", "entropy_coef"),
    "equal returns": (repeated(return_std=0.0, return_mean=0.0), 0, "all 1500 episodes returned the same", "easier"),
    "invalid": (repeated(invalid_rate=0.3), 0, "30% of the replies name no action", "response_prefix"),
    "invalid climbs": (
        repeated(invalid_rate=lambda update: 0.004 * update),
        9,
        "invalid_rate climbed to 2.8%",
        "init_kl_coef",
    ),
    "kl": (
        repeated(approx_kl=lambda update: 0.24 if update == 7 else 0.01),
        7,
        "approx_kl jumped to 0.24",
        "target_kl",
    ),
    "undone": (
        repeated(stopped_early=1.0),
        18,
        "in 19 of the last 19 updates with information a step led beyond",
        "Raise target_kl",
    ),
    "critic": (repeated(explained_variance=0.001), 9, "explained_variance", "Show in the observation"),
    "critic misleads": (repeated(explained_variance=-0.5), 9, "explained_variance", "Show in the observation"),
    "ratio": (repeated(ratio_error=0.02), 0, "ratio_error is 0.02", "report this"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_each_fault_fires_its_alarm_once_with_advice(fault):
    history, update, opening, move = WRONG[fault]
    alarms = fired(history)
    assert [when for when, _ in alarms] == [update]
    assert alarms[0][1].startswith(opening)
    assert move in alarms[0][1]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_alarm_fires_on_runs_that_learned(seed):
    curve = json.loads((RESULTS / f"blackjack-seed{seed}.json").read_text())["curve"]
    assert len(curve) > 30
    # The curve has six of the statistics; the others are those of a run that goes well, so that every rule applies.
    assert fired([WELL | point for point in curve]) == []
    assert fired(curve) == []


@pytest.mark.parametrize(
    "history",
    [
        repeated(),
        # A policy may become certain while the return rises, and small batches agree by chance.
        repeated(entropy=0.001, return_mean=lambda update: 0.1 * update),
        repeated(commonest_reply=1.0, deciding_turns=8.0),
        repeated(return_std=0.0, episodes=4.0),
        # A format that is being learned: only its start is a fault.
        repeated(invalid_rate=lambda update: max(0.09 - 0.01 * update, 0.0)),
        # Statistics that are not defined: explained variance of constant returns, ratio without fresh turns.
        repeated(explained_variance=math.nan, ratio_error=math.nan),
        # An algorithm without a critic.
        without(repeated(), "explained_variance", "commonest_reply"),
    ],
    ids=str,
)
def test_no_alarm_fires_without_a_fault(history):
    assert fired(history) == []


def test_alarm_fires_again_only_after_it_ceased():
    history = repeated(approx_kl=lambda update: 0.2 if update in (2, 3, 4, 8, 9) else 0.01)
    assert [update for update, _ in fired(history)] == [2, 8]


def test_half_precision_has_a_larger_ratio_tolerance():
    assert fired(repeated(ratio_error=0.3), dtype=torch.bfloat16) == []
    assert len(fired(repeated(ratio_error=0.6), dtype=torch.bfloat16)) == 1


class Constant(gym.Env):
    """Every action earns 1; one step an episode."""

    observation_space = gym.spaces.Discrete(1)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.int64(0), {}

    def step(self, action):
        return np.int64(0), 1.0, True, False, {}


class YesAgent(ChoiceAgent):
    choices = ("yes",)


def test_training_logs_an_alarm_once(caplog):
    agent = make_agent(YesAgent, context="turn", ppo={"batch_size": 32, "mini_batch_size": 32})
    with caplog.at_level(logging.WARNING, logger="llamagym"):
        result = train(agent, Constant, episodes=96, num_envs=32, seed=0)
    # With a single choice the policy cannot have collapsed.
    assert all(math.isnan(update["commonest_reply"]) for update in result.updates)
    said = [record.getMessage() for record in caplog.records if record.name == "llamagym.agent.collector"]
    assert len(said) == 1
    assert said[0].startswith("all 32 episodes returned the same")


def test_suggests_only_options_that_are_not_set():
    collapsed = repeated(commonest_reply=1.0, deciding_turns=128.0)
    (_, text), *_ = fired(collapsed, target_kl=0.03)
    assert text.endswith("Start again with a larger batch_size, or a higher entropy_coef.")
    (_, text), *_ = fired(repeated(commonest_reply=1.0), calibrates_choices=False)
    assert text.endswith("Start again with calibrate_choices=True, target_kl=0.03, or a higher entropy_coef.")
    (_, text), *_ = fired(repeated(approx_kl=0.3), target_kl=0.03)
    assert text.endswith("Lower learning_rate or ppo_epochs.")
    (_, text), *_ = fired(repeated(invalid_rate=0.3), has_prefix=True)
    assert "response_prefix" not in text
    (_, text), *_ = fired(repeated(skipped_steps=1.0), dtype=torch.bfloat16)
    assert text.endswith("or load the model with dtype='float32'.")


def test_alarms_have_the_agents_settings():
    agent = make_agent(ChoiceAgent, response_prefix="I ", ppo={"target_kl": 0.05, "value_learning_rate": 0.1})
    settings = collector_of(agent).alarms.settings
    assert (settings.target_kl, settings.has_prefix, settings.sets_critic) == (0.05, True, True)


@pytest.mark.parametrize(("algorithm", "move"), [("ppo", " or ppo_epochs"), ("grpo", " or epochs"), ("reinforce", "")])
def test_suggests_only_options_of_the_algorithm(algorithm, move):
    agent = make_agent(ChoiceAgent, algorithm=algorithm, **{algorithm: {"target_kl": 0.03}})
    (text,) = collector_of(agent).alarms.check({"approx_kl": 0.3})
    assert text.endswith(f"Lower learning_rate{move}.")


def test_does_not_suggest_calibration_for_free_text():
    alarms = Alarms(Settings(calibrates_choices=False))
    (text,) = alarms.check({"commonest_reply": 1.0, "deciding_turns": 2048.0}, offers_choices=False)
    assert "calibrate_choices" not in text


def test_settings_record_whether_critic_options_were_passed():
    assert not collector_of(make_agent(ChoiceAgent)).alarms.settings.sets_critic
    assert collector_of(make_agent(ChoiceAgent, ppo={"cliprange_value": 0.3})).alarms.settings.sets_critic


def test_counts_undone_updates_among_informative_ones():
    alternating = [{"stopped_early": float(update % 2), "flat_batch": float(not update % 2)} for update in range(40)]
    assert [text.startswith("in 19 of the last 19") for _, text in fired(alternating)] == [True]
