"""Settings of the whole suite."""

from __future__ import annotations

import pytest
import torch

from llamagym.engine.acceleration import is_enabled

# Models here are tiny: a second thread costs more in waiting than it computes.
torch.set_num_threads(1)


def pytest_runtest_setup(item):
    """Leave out tests of what is switched off."""
    if item.get_closest_marker("kernels") and not is_enabled():
        pytest.skip("LLAMAGYM_CPU_KERNELS=0 switches the processor's kernels off")


@pytest.fixture(autouse=True)
def _reproducible():
    torch.manual_seed(0)
