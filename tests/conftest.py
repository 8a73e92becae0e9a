"""Settings of the whole suite."""

from __future__ import annotations

import pytest
import torch

from llamagym.engine.acceleration import is_enabled

# Models here are tiny: a second thread costs more in waiting than it computes.
torch.set_num_threads(1)


def pytest_generate_tests(metafunc):
    """Run what must not depend on the processor's kernels with them and without."""
    if metafunc.definition.get_closest_marker("equivalence"):
        metafunc.fixturenames.append("_kernels")
        values = {"kernels": "1", "plain": "0"} if is_enabled() else {"plain": "0"}
        metafunc.parametrize("_kernels", list(values.values()), ids=list(values), indirect=True)


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
