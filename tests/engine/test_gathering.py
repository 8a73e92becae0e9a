"""`GatheringCache` gathers histories one layer at a time or all at once, with gradients or without."""

from __future__ import annotations

import pytest
import torch

from llamagym.engine.kv_cache import GatheringCache
from llamagym.engine.radix_tree import Activations

LAYERS, HEADS, WIDTH, NEW = 3, 2, 4, 2
SIZES = ((), (5,), (2, 1, 3))
LONGEST, PREFIX, FIRST = 6, 3, 2


@pytest.fixture
def given():
    """A prefix, and each row's history in pieces."""
    rng = torch.Generator().manual_seed(0)

    def entries(count):
        return torch.randn(2 * LAYERS, HEADS, count, WIDTH, generator=rng)

    return entries(PREFIX), [[Activations(entries(size), torch.zeros(size, 1)) for size in row] for row in SIZES]


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("at_once", [1, LAYERS])
@pytest.mark.parametrize("learns", [False, True])
def test_gathers_each_layer_and_saves_new_columns(given, is_shared, at_once, learns):
    prefix, histories = given
    with torch.set_grad_enabled(learns):
        cache = GatheringCache(prefix, histories, LONGEST, NEW, is_shared, FIRST)
        cache.layers_at_once = at_once
        own = LONGEST + (0 if is_shared else PREFIX)
        new = torch.arange(2 * LAYERS * len(SIZES) * HEADS * NEW * WIDTH).float()
        new = new.view(LAYERS, 2, len(SIZES), HEADS, NEW, WIDTH).requires_grad_(learns)
        kept = []
        for layer in range(LAYERS):
            assert cache.get_seq_length(FIRST + layer) == own
            keys, values = cache.update(*new[layer], FIRST + layer)
            assert keys.shape == values.shape == (len(SIZES), HEADS, own + NEW, WIDTH)
            for row, pieces in enumerate(histories):
                parts = [piece.entries for piece in pieces]
                known = torch.cat([*([] if is_shared else [prefix]), *parts, prefix[:, :, :0]], dim=2)
                pair = torch.stack([keys[row], values[row]])
                assert torch.equal(pair[:, :, : known.shape[2]], known[2 * layer : 2 * layer + 2])
                assert not pair[:, :, known.shape[2] : own].any()
                assert torch.equal(pair[:, :, own:], new[layer, :, row])
            kept.append((keys, values))
    if learns:
        # The backward pass finds the keys and values of earlier layers unchanged.
        assert torch.equal(kept[0][0][1, :, own - LONGEST : own - 1], histories[1][0].entries[0])
        sum(part.sum() for pair in kept for part in pair).backward()
        assert torch.equal(new.grad, torch.ones_like(new))
    else:
        for row in range(len(SIZES)):
            assert torch.equal(cache.new_entries(row), new[:, :, row].flatten(0, 1))
