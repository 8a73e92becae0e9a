"""The critic in closed form: against exact values and slow loops, and no episode in its own values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llamagym import ConfigError
from llamagym.learners.losses import gae
from llamagym.learners.lstd import fit, normal_equations
from llamagym.models.value_head import ValueHead
from tests.agents import ChoiceAgent, make_agent

LENGTHS = [3, 1, 5, 2]


def a_batch(size: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    turns = sum(LENGTHS)
    rows = torch.randn(turns, size, generator=rng, dtype=torch.double)
    return rows, torch.randn(turns, generator=rng), torch.randn(len(LENGTHS), generator=rng)


@pytest.mark.numerical
@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
def test_the_equations_are_those_of_slow_loops(lam):
    rows, rewards, final = a_batch()
    # Only so are the loops exact: the equations' sums run in float64.
    rewards, final = rewards.double(), final.double()
    gamma = 0.9
    matrix, target = torch.zeros(4, 4, dtype=torch.double), torch.zeros(4, dtype=torch.double)
    start = 0
    for length, after in zip(LENGTHS, final, strict=True):
        trace = torch.zeros(4, dtype=torch.double)
        for turn in range(start, start + length):
            trace = gamma * lam * trace + rows[turn]
            is_last = turn == start + length - 1
            following = torch.zeros(4, dtype=torch.double) if is_last else rows[turn + 1]
            matrix += torch.outer(trace, rows[turn] - gamma * following)
            target += trace * (rewards[turn] + (gamma * after if is_last else 0.0))
        start += length
    system = normal_equations(rows, LENGTHS, rewards, final, gamma, lam)
    torch.testing.assert_close(system, torch.cat([matrix, target[:, None]], dim=1))


@pytest.mark.numerical
@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
def test_a_solution_has_no_td_error_on_average(lam):
    rows, rewards, final = a_batch()
    system = normal_equations(rows, LENGTHS, rewards, final, 0.9, lam)
    values = rows @ torch.linalg.solve(system[:, :-1], system[:, -1])
    width = max(LENGTHS)
    real = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    padded = {name: torch.zeros(len(LENGTHS), width) for name in ("rewards", "values")}
    padded["rewards"][real], padded["values"][real] = rewards, values.float()
    advantages, _ = gae(padded["rewards"], padded["values"], real, 0.9, lam, final)
    torch.testing.assert_close(rows.float().T @ advantages[real], torch.zeros(4), atol=1e-4, rtol=0)


def fitted(rewards: torch.Tensor, episodes: int = 400) -> tuple[ValueHead, torch.Tensor]:
    """A head fitted to episodes through three states, told apart by one feature each."""
    head = ValueHead(3)
    features = torch.eye(3).repeat(episodes, 1)
    return head, fit(head, features, [3] * episodes, rewards, torch.zeros(episodes), 0.5, 0.95)


def test_values_are_found_in_one_go_whatever_their_size():
    head, values = fitted(torch.tensor([0.0, 0.0, 400.0]).repeat(400))
    assert head(torch.eye(3))[:, 0].tolist() == pytest.approx([100.0, 200.0, 400.0], rel=0.05)
    assert values[:3].tolist() == pytest.approx([100.0, 200.0, 400.0], rel=0.1)
    assert values[3:6].tolist() == pytest.approx([100.0, 200.0, 400.0], rel=0.1)


@pytest.mark.numerical
def test_values_do_not_depend_on_how_many_threads_compute_them():
    rng = torch.Generator().manual_seed(0)
    features, rewards = torch.randn(200, 300, generator=rng), torch.randn(200, generator=rng)
    values, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            values.append(fit(ValueHead(300), features, [20] * 10, rewards, torch.zeros(10), 0.9, 0.95))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(*values)


def test_an_episode_s_values_do_not_depend_on_its_own_rewards():
    rewards = torch.zeros(12)
    _, before = fitted(rewards, episodes=4)
    rewards[2] = 10.0
    _, after = fitted(rewards, episodes=4)
    moved = (before != after).reshape(4, 3).any(dim=1)
    assert moved.tolist() == [False, True, False, True]


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, -0.2, 0.05), (0.9, 0.2, 0.9)])
def test_what_cannot_be_foreseen_hardly_moves_the_weights(share, least, most):
    """Rewards that depend on one of 200 features by this share of their variance, the rest is luck: 300 turns."""
    rng = torch.Generator().manual_seed(0)
    features, luck = torch.randn(300, 200, generator=rng), torch.randn(300, generator=rng)
    rewards = 5.0 + share**0.5 * features[:, 0] + (1 - share) ** 0.5 * luck
    head = ValueHead(200)
    values = fit(head, features, [1] * 300, rewards, torch.zeros(300), 1.0, 0.95)
    assert least < 1 - (values - rewards).square().mean() / rewards.var() < most
    # Least squares alone would take the luck for a lesson.
    unregularised = torch.linalg.lstsq(features, rewards - 5.0).solution.norm()
    assert head.summary.weight.norm() < (0.2 if share == 0 else 1.0) * unregularised
    assert head.summary.bias.item() == pytest.approx(5.0, abs=0.3)


def test_with_little_data_weights_stay_near_where_they_were():
    head = ValueHead(3)
    with torch.no_grad():
        head.summary.weight.fill_(2.0)
    values = fit(head, torch.eye(3)[:1], [1], torch.tensor([7.0]), torch.zeros(1), 0.9, 0.95)
    # A single episode has no other half.
    assert values.tolist() == [2.0]
    # Only the constant follows: four turns hold it, and one says 7.
    assert head(torch.eye(3)[:1]).item() == pytest.approx(3.0, abs=0.01)


def test_ppo_learns_values_with_it_and_takes_no_gradient_steps_on_the_head():
    options = {"batch_size": 64, "mini_batch_size": 64, "gamma": 0.5, "learning_rate": 0.0}
    agent = make_agent(ChoiceAgent, context="turn", ppo=options)
    explained = []
    for _ in range(8):
        stats = {}
        while not stats:
            for turn in range(2):
                agent.act(f"turn {turn}")
                agent.assign_reward(50.0 * turn)
            stats = agent.terminate_episode()
        assert "value_loss" not in stats
        explained.append(stats["explained_variance"])
    # Of what the other half of a batch teaches, and the batches before.
    assert explained[0] < 0.5
    assert explained[-1] > 0.95
    head = list(agent.policy.model.v_head.parameters())
    assert not any(
        weight is parameter
        for group in agent.learner.optimizer.param_groups
        for weight in group["params"]
        for parameter in head
    )


def test_another_critic_is_refused():
    with pytest.raises(ConfigError, match="lstd"):
        make_agent(ChoiceAgent, ppo={"critic": "lsdt"})


def test_values_are_finite_where_features_repeat():
    head = ValueHead(2)
    values = fit(head, torch.ones(6, 2), [1] * 6, torch.arange(6.0), torch.zeros(6), 1.0, 1.0)
    assert np.isfinite(values.numpy()).all()
