"""Batches without information change no policy parameter, and a solved task stays solved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from llamagym.learners.advantages import Information, Returns, Whitening
from llamagym.text.episode import Episode
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, make_agent
from tests.learners.test_kl import offering
from tests.learners.test_replay import episode

# Learners by the options that select them. All of them take full steps from the first one on.
LEARNERS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo_gradient": {"ppo": {"critic": "gradient"}},
    "ppo_kl": {"ppo": {"init_kl_coef": 0.1}},
    "ppo_kl_loss": {"ppo": {"init_kl_coef": 0.1, "kl_placement": "loss"}},
    "ppo_raw": {"ppo": {"whiten_advantages": False}},
    "grpo": {"algorithm": "grpo"},
    "grpo_leave_one_out": {"algorithm": "grpo", "grpo": {"baseline": "leave_one_out", "whiten_advantages": True}},
    "reinforce": {"algorithm": "reinforce"},
    "reinforce_raw": {"algorithm": "reinforce", "reinforce": {"whiten_advantages": False}},
    "replay": {"replay_config_dict": {"learning_rate": 1e-3}},
}


def learner_agent(kind: type[Any], name: str) -> Any:
    options = dict(LEARNERS[name])
    algorithm = options.get("algorithm", "ppo")
    defaults = {"batch_size": 16, "warmup_steps": 1, "learning_rate": 1e-3, "target_kl": 0.03, "entropy_coef": 0.02}
    if algorithm == "grpo":
        defaults["group_size"] = 4
    return make_agent(kind, context="turn", **{**options, algorithm: {**defaults, **options.get(algorithm, {})}})


def play(agent: Any, updates: int, reward: Callable[[Any, int], float], turns: int = 2) -> Iterator[dict[str, float]]:
    """Updates on eight episodes of a few turns each; the reward depends on an action and the number of its turn."""
    for _ in range(updates):
        for turn in range(turns):
            actions = agent.act_batch([f"{turn}"] * 8)
            agent.assign_rewards([reward(action, turn) for action in actions])
        yield agent.terminate_episodes(range(8))


def policy_of(agent: Any) -> list[torch.Tensor]:
    return [w.detach().clone() for w in agent.policy.model.pretrained_model.parameters() if w.requires_grad]


def has_moved(agent: Any, before: list[torch.Tensor]) -> bool:
    return not all(map(torch.equal, policy_of(agent), before))


def by_action(action: int, turn: int) -> float:
    return float(action == 0)


def by_length(reply: str, turn: int) -> float:
    return float(len(reply) % 3)


@pytest.mark.pairwise(
    name=list(LEARNERS), kind=[ChoiceAgent, WordAgent], reward=[lambda _, turn: 0.0, lambda _, turn: 1.0 + turn]
)
def test_equal_returns_keep_the_policy(name, kind, reward):
    agent = learner_agent(kind, name)
    first = next(play(agent, 1, reward))
    # The first batch also points a fresh adapter at what differs between observations.
    before = policy_of(agent)
    for stats in (first, *play(agent, 5, reward)):
        assert stats["flat_batch"] == 1.0
        assert (stats["optimizer_steps"] == 0.0) == (name != "ppo_gradient")
        assert stats["entropy"] > 0.0
    assert not has_moved(agent, before)
    # The control: the same agent moves where returns differ.
    stats = list(play(agent, 2, by_action if kind is ChoiceAgent else by_length))[-1]
    assert stats["flat_batch"] == 0.0
    assert has_moved(agent, before)


@pytest.mark.long
@pytest.mark.pairwise(name=list(LEARNERS), kind=[ChoiceAgent, WordAgent], constant=[0.0, 1.0])
def test_fifty_batches_of_equal_returns_keep_the_policy(name, kind, constant):
    agent = learner_agent(kind, name)
    list(play(agent, 1, lambda _, turn: constant))
    before = policy_of(agent)
    list(play(agent, 49, lambda _, turn: constant))
    assert not has_moved(agent, before)


def test_a_critic_learns_from_equal_returns():
    agent = learner_agent(ChoiceAgent, "ppo")
    list(play(agent, 6, lambda _, turn: 1.0, turns=1))
    critic = agent.policy.read_critic([actor_of(agent).new_conversation().observe("Observation 0")])
    assert critic.values.item() == pytest.approx(1.0, abs=0.05)


def test_statistics_of_a_flat_batch_report_no_policy_step():
    agent = learner_agent(ChoiceAgent, "ppo_gradient")
    stats = list(play(agent, 2, lambda _, turn: 1.0))[-1]
    assert stats["optimizer_steps"] > 0
    assert (stats["flat_batch"], stats["step_share"], stats["learning_rate"]) == (1.0, 0.0, 0.0)


def lasting(turns: int, terminated: bool, reward: float = 1.0) -> Episode:
    """An episode of so many turns with equal rewards; unfinished unless it was terminated."""
    (turn,) = episode(reward).turns
    return Episode((turn,) * turns, terminated=terminated, truncated=False)


def returns_of(*episodes: Any, gamma: float = 1.0) -> Returns:
    return Returns(episodes, gamma)


def test_episodes_that_earned_the_same_at_each_turn_hold_no_information():
    information = Information()
    equal = [episode(-200.7), episode(-200.7)]
    assert not information.is_in(returns_of(*equal), equal)
    different = [episode(-200.7), episode(-200.6)]
    assert information.is_in(returns_of(*different), different)
    assert not information.is_in(returns_of(*equal), equal)


def test_rounding_of_rewards_is_not_information():
    same = [episode(0.1), episode(1e6 + 0.1 - 1e6), episode(0.1 * 3 / 3)]
    assert len({one.total_reward for one in same}) > 1
    assert not Information().is_in(returns_of(*same), same)
    different = [*same, episode(0.1 + 1e-6)]
    assert Information().is_in(returns_of(*different), different)


def test_a_single_episode_is_compared_with_earlier_batches():
    information = Information()
    for total, holds in ((1.0, False), (1.0, False), (0.0, True), (0.0, True)):
        single = [episode(total)]
        assert information.is_in(returns_of(*single), single) == holds
    # What is long past tells nothing about this policy.
    for _ in range(30):
        latest = information.is_in(returns_of(*single), single)
    assert not latest


def test_the_critic_s_error_on_single_episodes_of_equal_returns_is_not_scaled_to_unit_variance():
    whiten, mask = Whitening(), torch.ones(1, 1, dtype=torch.bool)
    for total in [0.0, 2.0] * 5:
        whiten(torch.tensor([[total - 1.0]]), mask, returns_of(episode(total)))
    # More than half of the deviations that are remembered.
    for _ in range(12):
        advantage = whiten(torch.tensor([[1e-3]]), mask, returns_of(episode(2.0)))
    assert advantage.abs().max() < 0.05


def test_outliving_a_terminated_episode_is_information():
    """Every turn earns 1, so that only the lengths of the episodes tell actions apart."""
    fallen = lasting(2, terminated=True)
    for lengths, holds in (([2, 2], False), ([1, 2], False), ([3, 2], True)):
        batch = [fallen, *(lasting(length, terminated=False) for length in lengths)]
        assert Information().is_in(returns_of(*batch), batch) == holds
    # To be cut off by a time limit is nobody's merit.
    batch = [replace(fallen, terminated=False, truncated=True), lasting(3, terminated=False)]
    assert not Information().is_in(returns_of(*batch), batch)
    # Later turns that earn nothing were worth nothing.
    batch = [lasting(2, terminated=True, reward=0.0), lasting(3, terminated=False, reward=0.0)]
    assert not Information().is_in(returns_of(*batch), batch)


def test_advantages_are_not_scaled_beyond_what_the_spread_of_returns_supports():
    whiten, mask = Whitening(), torch.ones(1, 4, dtype=torch.bool)
    error_of_critic = 1e-3 * torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    spread = returns_of(episode(0.0), episode(2.0))
    assert spread.spread == pytest.approx(1.0)
    assert whiten(error_of_critic, mask, spread).abs().max() < 0.03
    # Rounding of returns of a million is not scaled to 1 either.
    large = returns_of(episode(1e6), episode(1e6))
    assert Whitening()(0.01 * error_of_critic, mask, large).abs().max() < 1e-4


def test_the_scale_of_advantages_follows_a_lasting_change_within_tens_of_updates():
    whiten, mask = Whitening(), torch.ones(1, 4, dtype=torch.bool)
    varied = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    wide, narrow = returns_of(episode(0.0), episode(2.0)), returns_of(episode(0.0), episode(0.02))
    for _ in range(50):
        whiten(varied, mask, wide)
    scales = [whiten(0.01 * varied, mask, narrow).std().item() for _ in range(20)]
    assert scales[0] < 0.1
    assert scales[-1] == pytest.approx(1.0, rel=1e-3)
    # Outliers do not change it.
    for _ in range(3):
        whiten(1e6 * varied, mask, wide)
    assert whiten(0.01 * varied, mask, narrow).std().item() == pytest.approx(1.0, rel=1e-3)


def test_a_single_turn_has_an_advantage():
    whiten, mask = Whitening(), torch.tensor([[True, False]])
    advantages = whiten(torch.tensor([[-3.0, 7.0]]), mask, returns_of(episode(0.0), episode(2.0)))
    assert advantages.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_returns_that_differ_only_after_the_last_decision_hold_no_information(algorithm):
    """Equal returns of the turn that decides, earned at different turns, of which the second leaves no choice."""
    options = {"ppo": {"whiten_advantages": False}, "grpo": {"group_size": 2}}[algorithm]
    agent = offering(("left", "right"), algorithm, gamma=1.0, batch_size=8, **options)
    before = policy_of(agent)
    agent.act_batch(["x"] * 4)
    agent.assign_rewards([0.0, 1.0, 0.0, 2.0])
    agent.act_batch(["forced"] * 4)
    agent.assign_rewards([1.0, 0.0, 2.0, 0.0])
    # Both groups earned equal returns, 1 and 2; without groups these differ.
    groups = ["a", "a", "b", "b"] if algorithm == "grpo" else None
    stats = agent.terminate_episodes(range(4), groups=groups)
    if algorithm == "grpo":
        assert stats["flat_batch"]
        assert not has_moved(agent, before)
    assert [advantages[1] for advantages in agent.learner.advantages] == [0.0] * 4
