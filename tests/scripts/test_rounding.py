"""The bounds on rounding: they hold for sums in any order and not for wrong ones. And the runs that rely on them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scripts import test_processors as processors
from scripts.benchmarks.common import git
from tests.helpers.rounding import assert_within_rounding, gamma, in_float64, rounding_noise
from tests.helpers.tiny import FAMILIES, tiny_base_model


@pytest.mark.numerical
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_any_order_are_within_their_bound_and_a_missing_term_is_not(dtype):
    terms = 100
    rows = torch.rand(50, terms).to(dtype)
    exact, in_order = rows.double().sum(1), torch.zeros(50, dtype=dtype)
    for column in rows.T:
        in_order += column
    for computed in (in_order, rows.sum(1), rows.flip(1).cumsum(1)[:, -1]):
        assert_within_rounding(computed, exact, dtype, terms)
    missing = rows[:, :25].sum(1)
    with pytest.raises(AssertionError, match="times what 100 roundings"):
        assert_within_rounding(missing, exact, dtype, terms)
    with pytest.raises(AssertionError):
        assert_within_rounding(exact.clone().fill_(torch.nan), exact, dtype, terms)


def test_a_bound_that_leaves_no_digit_is_refused():
    with pytest.raises(ValueError, match="no correct digit"):
        gamma(1000, torch.bfloat16)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_in_float64_computes_what_the_model_does_without_its_rounding(family):
    model, ids = tiny_base_model(family), torch.tensor([[1, 2, 3, 4]])
    exact = in_float64(model)
    result = exact(ids).logits
    assert result.dtype == torch.float64
    error = (model(ids).logits - result).norm()
    assert 0 < error <= rounding_noise(lambda: exact(ids).logits, exact, torch.float32, terms=64)
    # Were anything rounded to float32, changes of 1e-12 would be lost or exaggerated.
    for weight in exact.parameters():
        weight.mul_(1 + 1e-12)
    assert (exact(ids).logits - result).norm() < 1e-10 * result.norm()


@torch.no_grad()
def test_noise_is_in_proportion_to_the_roundings_and_leaves_the_model_as_it_was():
    model, inputs = nn.Linear(8, 8).double(), torch.randn(3, 8, dtype=torch.float64)
    before = model.weight.clone()
    of_one, of_four = (rounding_noise(lambda: model(inputs), model, torch.float32, terms) for terms in (1, 4))
    assert of_four == pytest.approx(2 * of_one, rel=1e-6)
    assert torch.equal(model.weight, before)


def test_a_combination_computes_as_it_says_and_counts_what_failed(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import os, pytest\n"
        "def test_environment(): assert os.environ['ATEN_CPU_CAPABILITY'] == 'avx2'\n"
        "def test_threads(): assert os.environ['OMP_NUM_THREADS'] == os.environ['LLAMAGYM_TEST_THREADS'] == '3'\n"
        "def test_kernels(): assert os.environ['LLAMAGYM_CPU_KERNELS'] == '1'\n"
        "def test_skipped(): pytest.skip('no such device')\n"
    )
    combination = processors.Combination("avx2", 3, kernels=False)
    output = processors.run(combination, [str(tmp_path)])
    assert (combination.passed, combination.failed, combination.skipped) == (2, 1, 1)
    assert [name.rpartition("::")[2] for name in combination.failures] == ["test_kernels"]
    assert "test_kernels" in output


@pytest.mark.long
def test_a_combination_whose_tests_do_not_start_has_failed(tmp_path):
    combination = processors.Combination("default", 1, kernels=True)
    processors.run(combination, [str(tmp_path / "missing.py")])
    assert combination.failed == 1


@pytest.mark.long
def test_an_interrupted_run_of_all_combinations_continues_with_those_that_are_missing(tmp_path):
    path = tmp_path / "result.json"
    result = processors.Result("short", path)
    assert result.pending == result.combinations
    first, second, *others = result.combinations
    first.passed, second.failed = 3, 1
    result.take(second)
    result.take(first)
    continued = processors.Result("short", path)
    assert list(map(str, continued.pending)) == list(map(str, (second, *others)))
    assert continued.combinations[0].passed == 3
    assert continued.combinations[0].commit.startswith(git("rev-parse", "HEAD"))
    assert continued.combinations[0].processor == processors.processor()
    # Other tests are another run.
    assert len(processors.Result("long", path).pending) == len(result.combinations)
