"""Log-probabilities, entropies and their gradients, and sums by groups, against PyTorch's own."""

from __future__ import annotations

import pytest
import torch

from llamagym.engine import likelihood
from llamagym.engine.acceleration import is_enabled
from llamagym.engine.cpu import compiling
from llamagym.engine.likelihood import logprobs_and_entropy, sums_in_groups
from llamagym.policy.choices import entropy_from_logits
from tests.helpers.rounding import assert_within_rounding

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["alone", pytest.param("threads", marks=pytest.mark.long), "plain"], autouse=True)
def way(request, monkeypatch):
    """Each implementation: compiled for one thread, for several, and PyTorch's operations."""
    monkeypatch.setattr(compiling, "MULTIPLICATIONS_PER_THREAD", 1 if request.param == "threads" else 2**62)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    if request.param == "plain":
        monkeypatch.setattr(likelihood, "likelihood_kernels", lambda _: None)
    return request.param


@pytest.mark.numerical
@pytest.mark.pairwise(vocabulary=[11, 200], impossible=[False, True], dtype=DTYPES)
def test_values_and_gradients_equal_autograd_s(vocabulary, impossible, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, vocabulary, generator=generator)
    if impossible:
        logits[:, 7] = -torch.inf
    logits = logits.to(dtype)
    targets = torch.tensor([[0, 1], [2, 2], [10, 0], [3, 4], [5, 6]])
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.3])
    picked_weights = torch.randn(5, 2, generator=generator)
    entropy_weights = torch.randn(5, generator=generator)

    def plain(leaf, targets, temperatures):
        cooled = leaf.double() / temperatures[:, None].double()
        return cooled.log_softmax(-1).gather(1, targets), entropy_from_logits(cooled)

    def outputs_and_gradient(read):
        leaf = logits.clone().requires_grad_()
        picked, entropy = read(leaf.clone(), targets, temperatures)
        ((picked * picked_weights).sum() + (entropy * entropy_weights).sum()).backward()
        return picked, entropy, leaf.grad

    *values, slope = outputs_and_gradient(logprobs_and_entropy)
    *expected, expected_slope = outputs_and_gradient(plain)
    # A sum's relative error is its logarithm's absolute one. Logits up to 25 are rounded four times, in units of one.
    terms = vocabulary + 4 * 25
    assert (logits / temperatures[:, None])[logits > -torch.inf].abs().max() < 25
    for received, wanted in zip(values, expected, strict=True):
        assert received.dtype == torch.float32
        assert_within_rounding(received, wanted.detach(), torch.float32, terms, scale=1 + wanted.detach().abs())
    assert slope.dtype == dtype
    expected_slope = expected_slope.double()
    if dtype == torch.float32:
        assert_within_rounding(slope, expected_slope, dtype, terms)
    else:
        # Each gradient is rounded once; those near zero have float32's error.
        scale = expected_slope.abs() + 0.01 * expected_slope.abs().max()
        assert_within_rounding(slope, expected_slope, dtype, 2, scale)


def test_gradient_of_a_likely_token_is_not_rounded_to_zero():
    logits = torch.zeros(1, 64, dtype=torch.bfloat16)
    logits[0, 5] = 12
    leaf = logits.requires_grad_()
    picked, _ = logprobs_and_entropy(leaf.clone(), torch.tensor([[5]]), torch.ones(1))
    picked.sum().backward()
    assert leaf.grad[0, 5].item() == pytest.approx(1 - picked.exp().item(), rel=0.01)


def test_nan_stays_in_its_row():
    logits = torch.zeros(2, 64)
    logits[1, 3] = torch.nan
    picked, entropy = logprobs_and_entropy(logits, torch.tensor([[0], [0]]), torch.ones(2))
    assert picked[0].isfinite().all()
    assert entropy[0].isfinite()
    assert picked[1].isnan().all()
    assert entropy[1].isnan()


def test_rejects_second_backward_after_logits_were_overwritten(way):
    leaf = torch.randn(2, 64, requires_grad=True)
    picked, _ = logprobs_and_entropy(leaf.clone(), torch.tensor([[0], [0]]), torch.ones(2))
    picked.sum().backward(retain_graph=True)
    once = leaf.grad.clone()
    if way == "plain" or not is_enabled():
        picked.sum().backward()
        assert torch.equal(leaf.grad, 2 * once)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            picked.sum().backward()


@pytest.mark.parametrize("token", [-1, 64])
def test_rejects_token_outside_the_vocabulary(token):
    with pytest.raises(IndexError, match="token ids below 64"):
        logprobs_and_entropy(torch.zeros(1, 64), torch.tensor([[token]]), torch.ones(1))


@torch.no_grad()
@pytest.mark.numerical
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocabulary", "groups"), [(200, 20), (49, 7), (127, 127)])
def test_sums_in_groups_equal_pytorch_s(vocabulary, groups, dtype):
    logits = 3 * torch.randn(3, vocabulary).to(dtype)
    logits[:, : vocabulary // groups] = -torch.inf
    largest, sums = sums_in_groups(logits)
    powers = (logits.double() - logits.double().amax(-1, keepdim=True)).exp()
    assert sums.shape == (3, groups)
    assert torch.equal(largest, logits.float().amax(-1))
    exact = powers.unflatten(-1, (groups, -1)).sum(-1)
    # Differences of logits, up to 24, are rounded in units of one. An exponential below e^-87 is zero.
    assert_within_rounding(sums, exact, torch.float32, vocabulary // groups + 24, scale=exact + 1e-30)
    # An impossible token must never be sampled.
    assert torch.equal(sums == 0, (powers.unflatten(-1, (groups, -1)) == 0).all(-1))
