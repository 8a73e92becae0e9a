"""The mathematics against hand-computed numbers and slow independent loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamagym.learners.losses import (
    clipped_surrogate,
    clipped_value_loss,
    explained_variance,
    gae,
    kl_estimate,
    masked_mean,
    masked_var,
    masked_whiten,
)
from llamagym.policy.choices import entropy_from_logits


def slow_advantage(rewards: list[float], values: list[float], final: float, gamma: float, lam: float) -> list[float]:
    """GAE as the explicit double sum of the paper's equation 16."""
    n = len(rewards)
    following = [*values[1:], final]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


@pytest.mark.numerical
@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(-2, 2),
    st.integers(0, 3),
)
def test_gae_is_the_papers_double_sum_with_any_padding(steps, gamma, lam, final, padding):
    rewards, values = [r for r, _ in steps], [v for _, v in steps]
    n = len(steps)
    mask = torch.tensor([[True] * n + [False] * padding])
    padded_rewards = torch.tensor([rewards + [99.0] * padding], dtype=torch.float64)
    padded_values = torch.tensor([values + [99.0] * padding], dtype=torch.float64)
    final_values = torch.tensor([final], dtype=torch.float64)
    advantages, returns = gae(padded_rewards, padded_values, mask, gamma, lam, final_values)
    expected = slow_advantage(rewards, values, final, gamma, lam)
    assert advantages[0, :n].tolist() == pytest.approx(expected, abs=1e-9)
    assert returns[0, :n].tolist() == pytest.approx([a + v for a, v in zip(expected, values, strict=True)], abs=1e-9)
    assert not advantages[0, n:].any()


def test_gae_bootstraps_only_from_the_final_value():
    reward, value, mask = torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.bool)
    advantages, _ = gae(reward, value, mask, gamma=0.9, lam=1.0, final_values=torch.tensor([0.0, 10.0]))
    assert advantages[:, 0].tolist() == pytest.approx([0.0, 9.0])


def test_whitening_ignores_what_is_masked():
    values = torch.tensor([1.0, 2.0, 3.0, 1e6])
    mask = torch.tensor([True, True, True, False])
    assert masked_mean(values, mask).item() == 2.0
    assert masked_var(values, mask).item() == 1.0
    assert masked_whiten(values, mask)[:3].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)
    assert masked_whiten(values, mask, shift_mean=False)[:3].tolist() == pytest.approx([1.0, 2.0, 3.0], abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [(1.5, 1.0, -1.2, 1.0), (1.5, -1.0, 1.5, 0.0), (0.5, 1.0, -0.5, 0.0), (0.5, -1.0, 0.8, 1.0), (1.1, 1.0, -1.1, 0.0)],
)
def test_surrogate_is_pessimistic_in_all_four_corners(ratio, advantage, loss, clipped):
    logprobs = torch.tensor([[math.log(ratio), 5.0]])
    mask = torch.tensor([[True, False]])
    result = clipped_surrogate(logprobs, torch.zeros(1, 2), torch.full((1, 2), advantage), mask, 0.2)
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert result.clip_fraction.item() == clipped
    assert result.approx_kl.item() == pytest.approx(0.5 * math.log(ratio) ** 2, rel=1e-5)


def test_surrogate_has_no_gradient_where_it_is_clipped():
    logprobs = torch.tensor([[math.log(1.5), math.log(1.1)]], requires_grad=True)
    ones = torch.ones(1, 2)
    clipped_surrogate(logprobs, torch.zeros(1, 2), ones, ones.bool(), 0.2).loss.backward()
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, -0.55], abs=1e-6)


def test_value_loss_takes_the_worse_of_clipped_and_unclipped():
    values, old, returns = torch.tensor([1.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])
    result = clipped_value_loss(values, old, returns, torch.tensor([True, True]), clip_range=0.2)
    # First: clipped to 0.2, (0.2 - 1)^2 = 0.64 > 0. Second: 0.1 stays, 0.81. Half the mean: 0.3625.
    assert result.loss.item() == pytest.approx(0.3625)
    assert result.clip_fraction.item() == 0.5


@pytest.mark.numerical
def test_kl_estimators_on_a_distribution():
    policy, reference = torch.tensor([0.7, 0.3]), torch.tensor([0.4, 0.6])
    exact = (policy * (policy / reference).log()).sum().item()
    for estimator in ("k1", "k3"):
        mean = (policy * kl_estimate(policy.log(), reference.log(), estimator)).sum().item()
        assert mean == pytest.approx(exact, rel=1e-5)
    # Whichever of the two is drawn.
    assert kl_estimate(policy.log(), reference.log(), "binary").tolist() == pytest.approx([exact, exact], rel=1e-5)
    assert kl_estimate(policy.log(), reference.log(), "k3").min() >= 0
    assert kl_estimate(policy.log(), reference.log(), "abs").tolist() == pytest.approx(
        [math.log(7 / 4), math.log(2)], rel=1e-5
    )


@pytest.mark.numerical
def test_binary_kl_is_a_lower_bound_and_limits_rare_samples():
    policy, reference = torch.tensor([0.6, 0.3999, 0.0001]), torch.tensor([0.5, 0.45, 0.05])
    exact = (policy * (policy / reference).log()).sum().item()
    binary = kl_estimate(policy.log(), reference.log(), "binary")
    assert 0 < (policy * binary).sum().item() <= exact
    assert binary.max().item() < 2 * exact
    assert kl_estimate(policy.log(), reference.log(), "k2").max().item() > 200 * exact


def test_binary_kl_is_finite_at_probability_one():
    certain, likely, never = torch.tensor([0.0]), torch.tensor([-0.1]), torch.tensor([-torch.inf])
    assert kl_estimate(certain, certain, "binary").item() == 0.0
    assert kl_estimate(certain, likely, "binary").item() == pytest.approx(0.1, rel=1e-4)
    assert 1.0 < kl_estimate(likely, certain, "binary").item() < math.inf
    assert kl_estimate(likely, never, "binary").item() == math.inf
    assert math.isnan(kl_estimate(likely, torch.tensor([math.nan]), "binary").item())


def test_entropy_of_uniform_and_certain():
    assert entropy_from_logits(torch.zeros(4)).item() == pytest.approx(math.log(4))
    assert entropy_from_logits(torch.tensor([0.0, -torch.inf])).item() == 0.0


def test_explained_variance():
    targets = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(targets + 5.0, targets) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(3), targets) == pytest.approx(0.0)
    assert math.isnan(explained_variance(torch.zeros(3), torch.ones(3)))


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="share one shape"):
        masked_mean(torch.zeros(2), torch.ones(3, dtype=torch.bool))
