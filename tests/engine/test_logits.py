"""Logits of target tokens only."""

from __future__ import annotations

import pytest
import torch

from llamagym.engine.transformer import Transformer
from tests.helpers.rounding import assert_within_rounding
from tests.helpers.tiny import tiny_model

pytestmark = pytest.mark.equivalence


@pytest.mark.numerical
def test_logits_of_targets_are_not_rounded_to_bfloat16():
    transformer = Transformer(tiny_model("llama").bfloat16())
    hidden, targets = 5 * torch.randn(9, 32).bfloat16(), torch.randint(200, (9, 3))
    received = transformer.logits_of(hidden, targets)
    weights = transformer.head.weight.detach().double()
    exact = (hidden.double() @ weights.T).gather(1, targets)
    assert_within_rounding(
        received, exact, torch.float32, 32, (hidden.double().abs() @ weights.T.abs()).gather(1, targets)
    )
    assert not torch.equal(received, received.bfloat16().float())
