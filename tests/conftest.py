"""Settings of the whole suite."""

from __future__ import annotations

import pytest
import torch

# Models here are tiny: a second thread costs more in waiting than it computes.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _reproducible():
    torch.manual_seed(0)
