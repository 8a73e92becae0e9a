"""Settings of the whole suite."""

from __future__ import annotations

import os

import pytest
import torch

from llamagym.engine import verification
from llamagym.engine.acceleration import is_enabled
from llamagym.models.private_apis import DECLARED
from tests.helpers.pairwise import pairwise

# Models here are tiny: a second thread costs more in waiting than it computes. `scripts/test_processors.py` runs the
# tests with another number, too, since threads split sums differently.
torch.set_num_threads(int(os.environ.get("LLAMAGYM_TEST_THREADS", "1")))


def pytest_generate_tests(metafunc):
    """Run `pairwise` tests in combinations of their parameters, those of `equivalence` with and without kernels.

    Combinations beyond those in which every value occurs once are `long`.
    """
    axes = {}
    for marker in metafunc.definition.iter_markers("pairwise"):
        axes |= marker.kwargs
    if metafunc.definition.get_closest_marker("equivalence"):
        metafunc.fixturenames.append("_kernels")
        axes["_kernels"] = ["1", "0"] if is_enabled() else ["0"]
    if axes:
        rows, enough = pairwise(axes)
        cases = [
            pytest.param(*row.values(), id="-".join(map(_id_of, row.items())), marks=pytest.mark.long if late else ())
            for row, late in ((row, index >= enough) for index, row in enumerate(rows))
        ]
        metafunc.parametrize(list(axes), cases, indirect=[name for name in axes if name == "_kernels"])


def _id_of(parameter):
    name, value = parameter
    if name == "_kernels":
        return "kernels" if value == "1" else "plain"
    if isinstance(value, bool):
        return name if value else f"not_{name}"
    return getattr(value, "__name__", str(value))


@pytest.fixture
def _kernels(request, monkeypatch):
    monkeypatch.setenv("LLAMAGYM_CPU_KERNELS", request.param)


def pytest_runtest_setup(item):
    """Leave out tests of what is switched off."""
    if item.get_closest_marker("kernels") and not is_enabled():
        pytest.skip("LLAMAGYM_CPU_KERNELS=0 switches the processor's kernels off")


@pytest.fixture(autouse=True)
def _reproducible():
    torch.manual_seed(0)
    yield
    # A test that breaks a layer or an API must not slow down, and round, the models of later tests.
    for api in DECLARED:
        if not vars(api).get("works", True):
            vars(api).pop("works")
            vars(api).pop("_fault", None)
            verification.FINDINGS.clear()
