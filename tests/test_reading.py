"""Log-probabilities and entropies of tokens, and their gradients, against autograd's own."""

from __future__ import annotations

import pytest
import torch

from llamagym import reading
from llamagym.losses import entropy_from_logits
from llamagym.reading import _PickedAndEntropy
from llamagym.transformer import Transformer
from tests.tiny import tiny_model


@pytest.mark.parametrize("impossible", [False, True])
def test_gradients_are_autograd_s(impossible, monkeypatch):
    monkeypatch.setattr(reading, "_CACHED_ROWS", 2)
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, 11, generator=generator, dtype=torch.float64)
    if impossible:
        logits[:, 7] = -torch.inf
    targets = torch.tensor([[0, 1], [2, 2], [10, 0], [3, 4], [5, 6]])
    of_picked = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    of_entropy = torch.randn(5, generator=generator, dtype=torch.float64)

    def outputs_and_gradient(read):
        leaf = logits.clone().requires_grad_()
        picked, entropy = read(leaf)
        ((picked * of_picked).sum() + (entropy * of_entropy).sum()).backward()
        return picked, entropy, leaf.grad

    received = outputs_and_gradient(lambda leaf: _PickedAndEntropy.apply(leaf, targets))
    expected = outputs_and_gradient(lambda leaf: (leaf.log_softmax(-1).gather(1, targets), entropy_from_logits(leaf)))
    for one, other in zip(received, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_words_logits_keep_what_bfloat16_would_round_away():
    transformer = Transformer(tiny_model("llama").bfloat16())
    hidden, words = 5 * torch.randn(9, 32).bfloat16(), torch.randint(200, (9, 3))
    received = transformer.logits_of(hidden, words)
    weights = transformer._head.weight.detach().double()
    assert torch.allclose(received.double(), (hidden.double() @ weights.T).gather(1, words), atol=1e-4)
    assert not torch.equal(received, received.bfloat16().float())
