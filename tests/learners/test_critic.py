"""The critic in closed form: against exact values and slow loops, and no episode in its own values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llamagym import ConfigError, PPOConfig
from llamagym.learners.losses import gae
from llamagym.learners.lstd import Values, fit, normal_equations, split
from llamagym.models.value_head import ValueHead
from tests.helpers.agents import ChoiceAgent, actor_of, make_agent

LENGTHS = [3, 1, 5, 2]


def a_batch(size: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    turns = sum(LENGTHS)
    rows = torch.randn(turns, size, generator=rng, dtype=torch.double)
    finals = torch.randn(len(LENGTHS), size, generator=rng, dtype=torch.double)
    # The last episode terminated.
    finals[-1] = 0.0
    return rows, torch.randn(turns, generator=rng), finals


@pytest.mark.numerical
@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
def test_normal_equations_equal_those_of_slow_loops(lam):
    rows, rewards, finals = a_batch()
    # Only so are the loops exact: the equations' sums run in float64.
    rewards = rewards.double()
    gamma = 0.9
    matrix, target = torch.zeros(4, 4, dtype=torch.double), torch.zeros(4, dtype=torch.double)
    start = 0
    for length, after in zip(LENGTHS, finals, strict=True):
        trace = torch.zeros(4, dtype=torch.double)
        for turn in range(start, start + length):
            trace = gamma * lam * trace + rows[turn]
            is_last = turn == start + length - 1
            following = after if is_last else rows[turn + 1]
            matrix += torch.outer(trace, rows[turn] - gamma * following)
            target += trace * rewards[turn]
        start += length
    system = normal_equations(rows, LENGTHS, rewards, finals, gamma, lam)
    torch.testing.assert_close(system, torch.cat([matrix, target[:, None]], dim=1))


@pytest.mark.numerical
@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
def test_a_solution_has_zero_mean_td_error(lam):
    rows, rewards, finals = a_batch()
    system = normal_equations(rows, LENGTHS, rewards, finals, 0.9, lam)
    weights = torch.linalg.solve(system[:, :-1], system[:, -1])
    values = rows @ weights
    width = max(LENGTHS)
    real = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    padded = {name: torch.zeros(len(LENGTHS), width) for name in ("rewards", "values")}
    padded["rewards"][real], padded["values"][real] = rewards, values.float()
    advantages, _ = gae(padded["rewards"], padded["values"], real, 0.9, lam, (finals @ weights).float())
    torch.testing.assert_close(rows.float().T @ advantages[real], torch.zeros(4), atol=1e-4, rtol=0)


def fitted(rewards: torch.Tensor, episodes: int = 400) -> tuple[ValueHead, torch.Tensor]:
    """A head fitted to episodes through three states, told apart by one feature each."""
    head = ValueHead(3)
    features = torch.eye(3).repeat(episodes, 1)
    return head, fit_terminated(head, features, [3] * episodes, rewards, 0.5, 0.95).of_turns


def fit_terminated(
    head: ValueHead, features: torch.Tensor, lengths: list[int], rewards: torch.Tensor, gamma: float, lam: float
) -> Values:
    """A fit to episodes that all terminated, in halves by the parity of their index."""
    count = len(lengths)
    finals, bootstrapped = torch.zeros(count, features.shape[1]), torch.zeros(count, dtype=torch.bool)
    return fit(head, features, lengths, rewards, finals, bootstrapped, torch.arange(count) % 2, gamma, lam)


def test_values_of_any_size_are_found_in_one_fit():
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
            values.append(fit_terminated(ValueHead(300), features, [20] * 10, rewards, 0.9, 0.95).of_turns)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(*values)


def test_values_of_an_episode_do_not_depend_on_its_rewards():
    rewards = torch.zeros(12)
    _, before = fitted(rewards, episodes=4)
    rewards[2] = 10.0
    _, after = fitted(rewards, episodes=4)
    moved = (before != after).reshape(4, 3).any(dim=1)
    assert moved.tolist() == [False, True, False, True]


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, -0.2, 0.05), (0.9, 0.2, 0.9)])
def test_noise_hardly_moves_the_weights(share, least, most):
    """Rewards that depend on one of 200 features by this share of their variance, the rest is luck: 300 turns."""
    rng = torch.Generator().manual_seed(0)
    features, luck = torch.randn(300, 200, generator=rng), torch.randn(300, generator=rng)
    rewards = 5.0 + share**0.5 * features[:, 0] + (1 - share) ** 0.5 * luck
    head = ValueHead(200)
    values = fit_terminated(head, features, [1] * 300, rewards, 1.0, 0.95).of_turns
    assert least < 1 - (values - rewards).square().mean() / rewards.var() < most
    # Least squares without a penalty would fit the noise.
    unregularized = torch.linalg.lstsq(features, rewards - 5.0).solution.norm()
    assert head.summary.weight.norm() < (0.2 if share == 0 else 1.0) * unregularized
    assert head.summary.bias.item() == pytest.approx(5.0, abs=0.3)


def test_weights_stay_near_the_previous_ones_with_little_data():
    head = ValueHead(3)
    with torch.no_grad():
        head.summary.weight.fill_(2.0)
    values = fit_terminated(head, torch.eye(3)[:1], [1], torch.tensor([7.0]), 0.9, 0.95).of_turns
    # A single episode has no other half.
    assert values.tolist() == [2.0]
    # Only the constant follows: four turns hold it, and one says 7.
    assert head(torch.eye(3)[:1]).item() == pytest.approx(3.0, abs=0.01)


def test_ppo_with_lstd_takes_no_gradient_steps_on_the_value_head():
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


def test_rejects_an_unknown_critic():
    with pytest.raises(ConfigError, match="lstd"):
        make_agent(ChoiceAgent, ppo={"critic": "lsdt"})


def test_values_are_finite_where_features_repeat():
    head = ValueHead(2)
    values = fit_terminated(head, torch.ones(6, 2), [1] * 6, torch.arange(6.0), 1.0, 1.0).of_turns
    assert np.isfinite(values.numpy()).all()


def test_alternating_sorts_of_episodes_are_valued_by_their_own_sort():
    """Two starts alternate, as in the environments of a vector; one earns 1,000, the other 1,100."""
    count = 64
    kinds = torch.arange(count) % 2
    features, rewards = torch.eye(2)[kinds], 1000.0 + 100.0 * kinds
    finals, bootstrapped = torch.zeros(count, 2), torch.zeros(count, dtype=torch.bool)
    halves = split(kinds.tolist(), np.random.default_rng(0))
    for kind in (0, 1):
        assert halves[kinds == kind].sum() == count // 4

    def error(halves: torch.Tensor) -> float:
        fitted = fit(ValueHead(2), features, [1] * count, rewards, finals, bootstrapped, halves, 1.0, 0.95)
        return (fitted.of_turns - rewards).abs().max().item()

    assert error(halves) < 15.0
    # The control: halves that hold one kind each value it by the other.
    assert error(kinds) > 80.0


def test_halves_are_seeded_and_share_every_start_evenly():
    starts = ["a"] * 5 + ["b"] * 4 + ["c"]
    halves = split(starts, np.random.default_rng(1))
    assert torch.equal(halves, split(starts, np.random.default_rng(1)))
    assert halves.sum() == 5
    assert halves[5:9].sum() == 2
    assert halves[:5].sum() in (2, 3)


@pytest.mark.parametrize("critic", ["lstd", "gradient"])
def test_final_values_come_from_the_same_critic_as_all_others(critic):
    """Each turn earns 1 and is cut off, and the critic knows the value exactly: then no advantage is left.

    With another critic's estimate after the cut, all advantages would be off by the discounted difference.
    """
    options = {"batch_size": 8, "gamma": 0.5, "critic": critic, "learning_rate": 0.0, "whiten_advantages": False}
    agent = make_agent(ChoiceAgent, context="turn", ppo=options)
    advantages = []
    agent.learner._scaled = lambda values, mask, episodes: (advantages.append(values[mask]), values)[1]
    for _ in range(12):
        agent.act_batch(["x"] * 8)
        agent.assign_rewards([1.0] * 8)
        agent.terminate_episodes(range(8), [True] * 8, ["x"] * 8)
    value = agent.policy.read_critic([actor_of(agent).new_conversation().observe("Observation x")]).values.item()
    # What a turn earns and what it leads to, valued by the same critic as the turn itself.
    assert advantages[0].abs().max() < 3.0
    if critic == "lstd":
        assert value == pytest.approx(2.0, abs=0.01)
        assert advantages[-1].abs().max() < 0.02
    else:
        # It is still on its way to 2, and equally far from it in all turns.
        expected = 1.0 + 0.5 * value - value
        assert advantages[-1].tolist() == pytest.approx([expected] * 8, abs=0.05)


@pytest.mark.parametrize("option", ["value_learning_rate", "cliprange_value"])
def test_rejects_options_of_gradient_steps_for_a_critic_that_is_solved_for(option):
    with pytest.raises(ConfigError, match=f"{option}=0.1 has no effect with critic='lstd'"):
        PPOConfig(critic="lstd", **{option: 0.1})
