"""Compiled kernels compute what PyTorch and transformers compute, in both dtypes and for all layouts."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from llamagym.engine.cpu import attention_backward, attention_kernel, compiling, rowwise
from tests.helpers.rounding import assert_within_rounding

DTYPES = [torch.float32, torch.bfloat16]


def roundings(dtype, terms):
    """Roundings in `dtype` if sums of `terms` numbers run in float32 and 3 intermediate results in `dtype`."""
    return terms if dtype == torch.float32 else 3 + math.ceil(terms * 2.0**-16)


pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


# Compiling for threads takes half a minute.
@pytest.fixture(params=[pytest.param(True, marks=pytest.mark.long), False], ids=["threads", "alone"])
def has_threads(request, monkeypatch):
    monkeypatch.setattr(compiling, "HAS_THREADS", request.param)
    monkeypatch.setattr(compiling, "MULTIPLICATIONS_PER_THREAD", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.mark.numerical
@pytest.mark.usefixtures("has_threads")
@pytest.mark.pairwise(shape=[(3, 1, 24), (2, 5, 4, 7), (0, 1, 8)], is_added=[True, False], dtype=DTYPES)
def test_norm_equals_the_model_s(shape, is_added, dtype):
    norm = LlamaRMSNorm(shape[-1], eps=0.1).to(dtype)
    norm.weight.normal_()
    states, addend = torch.randn(2, *shape).to(dtype)
    total, received = rowwise.normalize(states, norm.weight, 0.1, addend if is_added else None)
    expected = states + addend if is_added else states
    assert torch.equal(total, expected)
    wide = expected.double()
    exact = norm.weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt()
    for result in (received, norm(expected)):
        # The sum of squares, its root and two products.
        assert_within_rounding(result, exact, dtype, roundings(dtype, shape[-1] + 6), scale=exact.abs())


@pytest.mark.numerical
@pytest.mark.usefixtures("has_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_is_silu_even_for_large_numbers(dtype):
    numbers = torch.tensor([0.0, -0.0, 1e-30, 0.5, -0.5, 20.0, -20.0, 90.0, -90.0, 1e4, -1e4, torch.inf])
    both = torch.cat([numbers, torch.randn(20)]).repeat(2, 3, 2).to(dtype)
    gate, up = both.split(32, dim=-1)
    up.copy_(torch.randn_like(up))
    usual = torch.nn.functional.silu(gate) * up
    is_infinite = gate.isinf()
    exact = (torch.nn.functional.silu(gate.double()) * up.double())[~is_infinite]
    for result in (usual, rowwise.gated(gate, up)):
        # An exponential below e^-87 is zero.
        scale = exact.abs() + 1e-30
        assert_within_rounding(result[~is_infinite], exact, dtype, roundings(dtype, 8), scale)
        assert torch.equal(result[is_infinite], usual[is_infinite])


@torch.enable_grad()
def gradients_of(function, *leaves):
    """Gradients of the leaves, of a randomly weighted sum of the function's outputs."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    torch.manual_seed(1)
    outputs = [output for output in function(*leaves) if output is not None]
    weighted = [(output.double() * torch.randn(output.shape).to(output).double()).sum() for output in outputs]
    return torch.autograd.grad(sum(weighted), leaves)


@pytest.mark.numerical
@pytest.mark.usefixtures("has_threads")
@pytest.mark.pairwise(shape=[(3, 7, 24), (2, 5, 4, 7), (0, 1, 8)], is_added=[True, False], dtype=DTYPES)
def test_gradient_of_norm(shape, is_added, dtype):
    weight, given = torch.randn(shape[-1]).to(dtype), torch.randn(1 + is_added, *shape).to(dtype)

    def exact(states, addend=0.0):
        total = states + addend
        return total, weight.double() * total / (total.square().mean(-1, keepdim=True) + 0.1).sqrt()

    received = gradients_of(lambda states, *addend: rowwise.normalize(states, weight, 0.1, *addend), *given)
    for ours, theirs in zip(received, gradients_of(exact, *given.double()), strict=True):
        assert ours.dtype == dtype
        # Two sums, one of squares and one of products, and the gradient of each element.
        assert_within_rounding(ours, theirs, dtype, roundings(dtype, 2 * shape[-1] + 8))


@pytest.mark.numerical
@pytest.mark.usefixtures("has_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_gate_even_for_large_numbers(dtype):
    numbers = torch.tensor([0.0, 1e-30, 0.5, -0.5, 20.0, -20.0, 90.0, -90.0, 1e4, -1e4])
    gate = torch.cat([numbers, torch.randn(22)]).repeat(2, 3, 1).to(dtype)
    up = torch.randn(2, 3, 32).to(dtype)

    def halves(function):
        return lambda gate, up: [function(*torch.cat([gate, up], -1).split(32, -1))]

    received = gradients_of(halves(rowwise.gated), gate, up)
    expected = gradients_of(halves(lambda gate, up: torch.nn.functional.silu(gate) * up), gate.double(), up.double())
    for ours, theirs in zip(received, expected, strict=True):
        assert_within_rounding(ours, theirs, dtype, roundings(dtype, 12), scale=theirs.abs() + 1e-30)


@pytest.mark.numerical
@pytest.mark.parametrize("threads", [1, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.pairwise(
    columns=[(0, 5), (7, 5), (9, 40)], dtype=DTYPES, is_joint=[True, False], heads=[2, 6], length=[1, 5]
)
def test_attention_rotates_and_covers_shared_and_own_columns(
    columns, dtype, threads, is_joint, heads, length, monkeypatch
):
    before, own = columns
    monkeypatch.setattr(compiling, "MULTIPLICATIONS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rows, groups, size = 3, 2, 8
    widths = [heads * size, groups * size, groups * size]
    joint = torch.randn(rows, length, sum(widths)).to(dtype)
    angles = torch.randn(rows, length, size // 2).repeat(1, 1, 2)
    angles = angles.cos().to(dtype), angles.sin().to(dtype)
    room = torch.randn(2, rows + 1, groups, own + 3, size).to(dtype)
    shared = torch.randn(2, groups, before, size).to(dtype)
    visible = torch.rand(rows, 1, length, before + own) < 0.6
    visible[..., -1] = True
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(dtype).min).to(dtype)

    def rotated_and_cached(joint):
        """The result of transformers in float64; new keys are rounded when they are cached."""
        parts = joint.double().split(widths, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts)
        query, key = apply_rotary_pos_emb(query, key, *(part.double() for part in angles))
        return query, key + (key.to(dtype).double() - key).detach(), value

    def exact(joint):
        query, *new = rotated_and_cached(joint)
        kept = [
            torch.cat([old[1:, :, : own - length].double(), part], dim=2) for old, part in zip(room, new, strict=True)
        ]
        seen = [torch.cat([of.expand(rows, -1, -1, -1), part], dim=2) for of, part in zip(shared, kept, strict=True)]
        result = torch.nn.functional.scaled_dot_product_attention(
            query, *seen, mask.double(), scale=0.3, enable_gqa=True
        )
        return [result.transpose(1, 2).flatten(2)]

    def ours(attend, filled):
        def result(joint):
            parts = joint.split(widths, dim=-1)
            query, key, value = parts if is_joint else (part.contiguous() for part in parts)
            kept = filled[:, 1:, :, :own].unbind()
            return [attend(query, key, value, angles, kept, shared if before else None, mask, 0.3)]

        return result

    (expected,), (_, *new) = exact(joint), rotated_and_cached(joint)
    # A score sums over a head, an output over all columns; scores are below 10, and exponentials scale their errors.
    terms = roundings(dtype, 10 * size + before + own)
    for attend in (attention_kernel.attend, attention_backward.attend_with_gradients):
        filled = room.clone()
        (received,) = ours(attend, filled)(joint)
        for part, of_new, old in zip(filled[:, 1:, :, :own], new, room[:, 1:], strict=True):
            assert_within_rounding(part[:, :, -length:], of_new.detach(), dtype, roundings(dtype, 3))
            assert torch.equal(part[:, :, :-length], old[:, :, : own - length])
        assert torch.equal(filled[:, 0], room[:, 0])
        assert torch.equal(filled[:, :, :, own:], room[:, :, :, own:])
        assert_within_rounding(received, expected, dtype, terms)
    (received,) = gradients_of(ours(attention_backward.attend_with_gradients, room.clone()), joint)
    (expected,) = gradients_of(exact, joint.double())
    assert received.dtype == dtype
    assert_within_rounding(received, expected, dtype, 2 * terms)


@pytest.mark.numerical
@torch.enable_grad()
def test_attention_keeps_nan_in_its_row_and_handles_large_scores():
    rows, groups, size = 2, 1, 4
    angles = torch.ones(rows, 3, size), torch.zeros(rows, 3, size)
    kept, mask = torch.zeros(2, rows, groups, 3, size), torch.zeros(rows, 1, 3, 3)
    query = torch.full((rows, 3, size), 1e4)
    query[1, 2, 0] = torch.nan
    key = torch.zeros(rows, 3, size)
    key[:, 1] = 1.0
    value = torch.randn(rows, 3, size).requires_grad_()
    seen = attention_backward.attend_with_gradients(query, key, value, angles, kept.unbind(), None, mask, 1.0)
    assert torch.equal(seen[0], value[0, 1].expand(3, -1))
    assert seen[1, 2].isnan().all()
    assert not seen[1, :2].isnan().any()


def test_threads_are_used_for_large_work_and_safe_thread_pools_only(monkeypatch):
    calls = []
    monkeypatch.setattr(
        attention_kernel, "_attend", lambda products, *given: calls.append(compiling.thread_count(products))
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)

    def attend(rows, columns):
        part, kept = torch.zeros(rows, 1, 64), torch.zeros(2, rows, 1, columns, 64)
        attention_kernel.attend(
            part, part, part, (part, part), kept.unbind(), None, torch.zeros(rows, 1, 1, columns), 1.0
        )

    monkeypatch.setattr(compiling, "HAS_THREADS", True)
    attend(4, 100)
    attend(64, 100)
    attend(64, 1000)
    monkeypatch.setattr(compiling, "HAS_THREADS", False)
    attend(64, 1000)
    assert calls == [1, 2, 4, 1]


@pytest.mark.numerical
def test_kernel_gives_the_same_with_and_without_threads(monkeypatch):
    monkeypatch.setattr(compiling, "HAS_THREADS", True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    states, weight = torch.randn(600, 1000), torch.ones(1000)
    whole = rowwise.normalize(states, weight, 1e-5)[1]
    alone = torch.cat([rowwise.normalize(part, weight, 1e-5)[1] for part in states.split(200)])
    assert compiling.thread_count(states.numel()) == 2 > compiling.thread_count(200 * 1000) == 1
    assert torch.equal(whole, alone)


@pytest.mark.numerical
def test_angles_and_mask_expand_to_all_rows_and_must_fit():
    rows, columns = 3, 5
    query, angles, mask = torch.randn(rows, 2, 8), torch.randn(2, 1, 2, 8), torch.randn(1, 1, 2, columns)
    kept = torch.randn(2, rows, 1, columns, 8)

    def attend(cosines, sines, mask):
        return attention_kernel.attend(query, query, query, (cosines, sines), kept.clone().unbind(), None, mask, 1.0)

    expected = attend(*angles.expand(-1, rows, -1, -1), mask.expand(rows, -1, -1, -1))
    assert torch.equal(attend(*angles, mask), expected)
    with pytest.raises(ValueError, match=r"given a tensor of shape \(1, 1, 2, 4\); expected \(3, 1, 2, 5\)"):
        attend(*angles, mask[..., 1:])
    with pytest.raises(ValueError, match="shape"):
        attend(*angles[..., 1:, :], mask)


def test_rejects_tensors_of_two_dtypes():
    states = torch.randn(2, 1, 8)
    with pytest.raises(TypeError, match=r"torch\.bfloat16.*torch\.float32.*expected one"):
        rowwise.normalize(states, torch.ones(8, dtype=torch.bfloat16), 1e-5)
    with pytest.raises(TypeError):
        rowwise.gated(states, states.bfloat16())


def test_has_kernels_for_float32_and_bfloat16_on_cpu_only():
    assert compiling.has_kernels(torch.zeros(1))
    assert compiling.has_kernels(torch.zeros(1, dtype=torch.bfloat16))
    assert not compiling.has_kernels(torch.zeros(1, dtype=torch.float64))
    assert not compiling.has_kernels(torch.zeros(1, device="meta"))


def test_kernels_run_without_a_disk_cache(monkeypatch):
    def refuse(function):
        raise RuntimeError("cannot cache function: no locator available")

    def double(numbers, parts):
        for i in range(len(numbers)):
            numbers[i] *= 2

    monkeypatch.setattr("numba.core.dispatcher.FunctionCache", refuse)
    numbers = torch.ones(3)
    compiling.compiled(double)(len(numbers), numbers.numpy())
    assert numbers.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.numerical
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 3e-7), (np.float64, 1e-14)])
def test_exponential_is_as_exact_as_its_dtype(dtype, tolerance):
    @numba.njit
    def exponentials(numbers):
        result = np.empty_like(numbers)
        for i in range(len(numbers)):
            result[i] = compiling.exponential(numbers[i])
        return result

    numbers = -np.concatenate([np.linspace(0, 86, 2001), [88, 1e4, 3e38]]).astype(dtype)
    received, expected = exponentials(numbers), np.exp(numbers.astype(np.longdouble))
    assert np.abs(received[:-3] / expected[:-3] - 1).max() < tolerance
    assert received[-3:].tolist() == [0.0, 0.0, 0.0]
    assert np.isnan(exponentials(np.full(1, np.nan, dtype))).all()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="kernels are compiled by the process that runs them")
def test_first_process_computes_what_later_ones_do(tmp_path):
    code = (
        "import hashlib, torch; from llamagym.engine.cpu.attention_kernel import attend; torch.manual_seed(0);"
        "r = torch.randn;"
        "q, k, v = r(8, 30, 576), r(8, 30, 192), r(8, 30, 192); angles = r(1, 30, 64), r(1, 30, 64);"
        "seen = attend(q, k, v, angles, (r(8, 3, 50, 64), r(8, 3, 50, 64)), r(2, 3, 40, 64), r(1, 1, 30, 90), 0.1);"
        "print(hashlib.sha256(seen.numpy().tobytes()).hexdigest())"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    run = partial(subprocess.run, [sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert run().stdout == run().stdout
    assert list(tmp_path.rglob("*.nbc"))


KERNELS = Path(compiling.__file__).parent


@pytest.mark.parametrize("name", sorted(path.name for path in KERNELS.glob("*.py")))
def test_source_hash_depends_on_every_file(name: str, tmp_path):
    for path in KERNELS.glob("*.py"):
        shutil.copy(path, tmp_path)
    assert compiling.source_hash(tmp_path) == compiling.source_hash(KERNELS)
    changed = tmp_path / name
    changed.write_text(changed.read_text() + "#")
    assert compiling.source_hash(tmp_path) != compiling.source_hash(KERNELS)


@pytest.mark.long
def test_machine_code_of_other_sources_is_not_run(tmp_path):
    """A kernel of another file calls the changed function, which numba does not notice."""
    package = tmp_path / "llamagym"
    shutil.copytree(KERNELS.parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import torch; from llamagym.engine.cpu.rowwise import gated; print(gated(*torch.ones(2, 1, 1, 1)).item())"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
    run = partial(subprocess.run, [sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True)
    before = float(run(capture_output=True).stdout)
    copied = package / "engine" / "cpu" / "compiling.py"
    source = copied.read_text()
    result = "return np.float32(0) if underflows else "
    assert source.count(result) == 1
    copied.write_text(source.replace(result, result + "np.float32(2) * "))
    after = float(run(capture_output=True).stdout)
    assert (before, after) == pytest.approx((1 / (1 + math.exp(-1)), 1 / (1 + 2 * math.exp(-1))))


def test_a_norm_s_weight_of_any_stride_is_read_right():
    states = torch.randn(3, 8)
    weight = torch.randn(16)[::2]
    expected = rowwise.normalize(states, weight.clone(), 1e-5)[1]
    with torch.no_grad():
        assert rowwise.normalize(states, weight, 1e-5)[1].equal(expected)
    assert rowwise.normalize(states, weight, 1e-5)[1].equal(expected)
