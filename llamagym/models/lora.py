"""LoRA as a policy's weights: active where replies are decided, and aimed at what differs between observations.

Four properties of a LoRA adapter decide what a language model learns of acting, and how fast.

Where it acts. An activated LoRA (Greenewald et al. 2025, https://arxiv.org/abs/2504.12397; `alora_invocation_tokens` in
PEFT's `LoraConfig`) changes only the tokens from the start of the reply on. What comes before is read by the base
model, so its keys and values never change while the adapter learns: they are computed once.

How deep it reaches. To compare what several turns of a conversation said takes layer after layer: LoRA on the last
quarter of them found half of the numbers in guess-the-number, on the last half all. Where a single turn is seen a
quarter is enough, and to learn from a turn costs half.

What it sees. In one environment prompts are nearly alike: the hidden states where replies begin share a large mean and
differ in a few small directions. A random down-projection A sees mostly the mean, and then the gradient moves every
observation's reply together, hundreds of times faster than apart: the policy is certain of one reply before it has
told two observations from each other. So A takes the principal components of its inputs where replies are decided,
centred, orthogonal to their mean, each scaled to the same deviation. B is still zero, so the model's output does not
change. (EVA, Paischer et al. 2024, https://arxiv.org/abs/2410.07170, takes components of all inputs, mean included.)

What it has learned before. Demonstrations teach what all observations share, the format above all, and through that the
gradient moves them all together again, hundreds of times faster than apart. So what they taught is frozen, and
rewards move a fresh adapter beside it, aimed at what differs between observations by then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .peft_internals import (
    ADAPTER_LAYERS,
    TARGETS,
    count_active,
    double_ranks_,
    is_low_rank,
    keep_layers_,
    lora_layers,
    projections,
)

if TYPE_CHECKING:
    from .value_head import AutoModelForCausalLMWithValueHead

# No component is amplified more than this many times over an average input: beyond it lies rounding, not observation.
_MAX_GAIN = 30.0
# Dimensions given up at most to what all observations share.
_MAX_SHARED = 16


def is_activated(model: nn.Module) -> bool:
    """Whether a model learns by an activated LoRA alone, so that what precedes a reply does not depend on it."""
    from peft import LoraConfig, PeftModel  # takes more than a second to import

    if not isinstance(model, PeftModel):
        return False
    config = model.active_peft_config
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    return (
        isinstance(config, LoraConfig) and config.alora_invocation_tokens is not None and all(map(is_low_rank, trained))
    )


def fresh_rows(model: nn.Module) -> dict[nn.Linear, Tensor]:
    """The rows of each A matrix whose columns of B are still zero, int64; matrices that have none are left out."""
    rows = {down: (~up.weight.any(dim=0)).nonzero()[:, 0] for down, up in projections(model)}
    return {down: of_down for down, of_down in rows.items() if len(of_down)}


def is_fresh(model: nn.Module) -> bool:
    """Whether there is LoRA, on linear layers alone, and none of it does anything yet."""
    pairs = projections(model)
    return bool(pairs) and len(pairs) == count_active(model) and not any(up.weight.any() for _, up in pairs)


def settle_depth_(model: AutoModelForCausalLMWithValueHead, sees_one_turn: bool) -> None:
    """Take the registry's LoRA, while it is fresh, off the lower half of its layers if an agent sees one turn.

    Once: the model's first agent settles it.
    """
    is_open, model.lora_depth_is_open = model.lora_depth_is_open, False
    if not (is_open and sees_one_turn and is_fresh(model.pretrained_model)):
        return
    config: Any = model.pretrained_model.active_peft_config
    if (layers := config.layers_to_transform) is not None and TARGETS.works:
        config.layers_to_transform = layers[-max(1, round(len(layers) / 2)) :]
        keep_layers_(model.pretrained_model, set(config.layers_to_transform))


@torch.no_grad()
def redraw_(model: nn.Module, seed: int) -> None:
    """Draw the A matrices of a LoRA that is fresh from a seed, where PEFT drew them from global random numbers."""
    if not is_fresh(model) or model.active_peft_config.init_lora_weights is not True:  # type: ignore[union-attr]
        return
    # Another stream than the one that replies are drawn from.
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    for down, _ in projections(model):
        drawn = torch.empty(down.weight.shape)
        down.weight.copy_(nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator))


@torch.no_grad()
def freeze_and_extend_(model: nn.Module) -> None:
    """Freeze what LoRA has learned, and extend it by as much again, fresh, for what is to be learned now.

    The rank doubles, and the matrices are new: an optimizer must look at them again. What is saved is an ordinary
    adapter; loaded again, all of it learns.

    Args:
        model: A PEFT model with LoRA on linear layers alone.
    """
    ADAPTER_LAYERS.require()
    for down, up in projections(model):
        rank = down.out_features
        # As PEFT begins: A at random, as large as it was, and B at zero.
        fresh = torch.randn(down.weight.shape, generator=torch.Generator().manual_seed(0)).to(down.weight)
        fresh *= down.weight.norm() / fresh.norm()
        down.weight = nn.Parameter(torch.cat([down.weight, fresh]))
        up.weight = nn.Parameter(torch.cat([up.weight, torch.zeros_like(up.weight)], dim=1))
        down.out_features = up.in_features = 2 * rank
        down.register_buffer("learns", torch.arange(2 * rank, device=down.weight.device) >= rank, persistent=False)
    mask_frozen_gradients_(model)
    double_ranks_(model)
    adapted: Any = model
    config = adapted.active_peft_config
    # The scale, alpha / r or alpha / sqrt(r), stays what it is when the adapter is loaded again.
    growth = math.sqrt(2) if config.use_rslora else 2
    config.r, config.lora_alpha = 2 * config.r, growth * config.lora_alpha
    config.rank_pattern = {name: 2 * rank for name, rank in config.rank_pattern.items()}
    config.alpha_pattern = {name: growth * alpha for name, alpha in config.alpha_pattern.items()}


@contextmanager
def extension_undone_on_error(model: nn.Module) -> Iterator[None]:
    """While open, an exception takes back what `freeze_and_extend_` did to a model."""
    pairs = projections(model)
    changed: list[Any] = [*lora_layers(model), *(layer for pair in pairs for layer in pair)]
    if changed:
        changed.append(model.active_peft_config)
    # Layers hold ranks, scales, parameters and buffers in dictionaries.
    before = [{k: dict(v) if type(v) is dict else v for k, v in vars(part).items()} for part in changed]
    try:
        yield
    except BaseException:
        for part, attributes in zip(changed, before, strict=True):
            vars(part).clear()
            vars(part).update(attributes)
        raise


def has_frozen_half(model: nn.Module) -> bool:
    """Whether a half of LoRA is frozen."""
    return any(hasattr(down, "learns") for down, _ in projections(model))


def mask_frozen_gradients_(model: nn.Module) -> None:
    """Zero the gradients of LoRA's frozen half by hooks, in a deep copy of a model as well, which has none yet."""
    down: Any
    for down, up in projections(model):
        # A deep copy is another tensor, without the original's hooks.
        if hasattr(down, "learns") and getattr(down, "masked_weight", None) != id(down.weight):
            down.weight.register_hook(lambda grad, down=down: grad * down.learns[:, None])
            up.weight.register_hook(lambda grad, down=down: grad * down.learns)
            down.masked_weight = id(down.weight)


@contextmanager
def latest_inputs(layers: list[nn.Linear]) -> Iterator[dict[nn.Linear, Tensor]]:
    """While open, holds each layer's input (B, T, H) in the latest forward pass."""
    inputs: dict[nn.Linear, Tensor] = {}

    def keep(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        inputs[layer] = args[0]

    handles = [layer.register_forward_pre_hook(keep) for layer in layers]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def aim_(layer: nn.Linear, rows: Tensor, inputs: Tensor, groups: Tensor) -> None:
    """Replace rows of a down-projection by the directions in which its inputs differ.

    A row is scaled so that its output deviates over these inputs as a random row's output does over inputs of their
    size. Rows beyond the number of directions found stay as they are.

    Args:
        layer: With a weight (r, H).
        rows: Which, int64 (R,).
        inputs: What it receives where replies are decided, (M, H).
        groups: Equal where the same words of a reply were read, after whatever observation, int64 (M,).
    """
    inputs = inputs.to(layer.weight)
    directions, deviations = directions_of_difference(inputs, groups, len(rows))
    gain = (inputs.square().mean().sqrt() / deviations).clamp_max(_MAX_GAIN)
    layer.weight[rows[: len(directions)]] = layer.weight.norm(dim=1).mean() * gain[:, None] * directions


def directions_of_difference(inputs: Tensor, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first principal components within groups, orthogonal to the groups' means.

    Args:
        inputs: Float (M, H).
        groups: Which group each belongs to, int64 (M,).
        count: How many components at most.

    Returns:
        Orthonormal rows, largest deviation first, (K, H) with K <= count, and the deviations (K,), all positive.

    >>> inputs = torch.tensor([[9.0, 1.0, 0.0], [9.0, -1.0, 0.0], [0.0, 0.0, 5.0]])
    >>> directions, deviations = directions_of_difference(inputs, torch.tensor([0, 0, 1]), 2)
    >>> directions.abs().tolist(), round(deviations.item(), 3)
    ([[0.0, 1.0, 0.0]], 0.816)
    """
    rounding = torch.finfo(inputs.dtype).eps * max(inputs.shape) * inputs.norm()
    _, group, sizes = groups.to(inputs.device).unique(return_inverse=True, return_counts=True)
    means = inputs.new_zeros(len(sizes), inputs.shape[1]).index_add(0, group, inputs) / sizes[:, None]
    centred = inputs - means[group]
    _, size, shared = torch.linalg.svd(means, full_matrices=False)
    shared = shared[: min(int((size > rounding).sum()), _MAX_SHARED)]
    centred = centred - centred @ shared.T @ shared
    _, singular, components = torch.linalg.svd(centred, full_matrices=False)
    found = min(count, int((singular > rounding).sum()))
    return components[:found], singular[:found] / len(inputs) ** 0.5
