"""Acting and learning on a device that is not the CPU: a tensor that is left behind is found without a GPU.

Where there is a GPU, all of it runs there as well.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.helpers import ROOT
from tests.helpers.on_other_device import CASES, FAULTS

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.fixture(scope="module", params=["other", GPU])
def found(request: pytest.FixtureRequest) -> Any:
    """Results of all cases and faults, from a process that has the other device."""
    environment = {**os.environ, "LLAMAGYM_CPU_KERNELS": "0"}
    command = [sys.executable, "-m", "tests.helpers.on_other_device", request.param]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_another_device_computes_what_the_processor_does(found: Any, case: str):
    numbers = found["numbers"][case]
    assert numbers["other"] == pytest.approx(numbers["cpu"], rel=2e-3, abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_tensor_that_is_left_behind_is_found(found: Any, fault: str):
    assert "same device" in found["errors"][fault]


@pytest.mark.long
def test_a_value_head_that_is_left_behind_is_named(found: Any):
    assert re.search("cpu and (other|cuda):0", found["errors"]["value head"])
    assert "model.to(" in found["errors"]["value head"]
