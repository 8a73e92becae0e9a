"""LoRA for a policy: activated at the reply, initialized from the differences between observations.

Four properties of a LoRA adapter decide what a policy learns, and how fast.

Where it acts. An activated LoRA (Greenewald et al. 2025, https://arxiv.org/abs/2504.12397; `alora_invocation_tokens` in
PEFT's `LoraConfig`) changes only the tokens from the start of the reply on. The base model reads the tokens before it,
so their keys and values never change while the adapter learns, and are computed once.

How many layers it adapts. Comparing the contents of several turns takes several layers: in guess-the-number, LoRA on
the last quarter of the layers found half of the numbers, and LoRA on the last half found all. An agent that sees a
single turn needs a quarter, and learns from a turn at half the cost.

How A is initialized. In one environment prompts are nearly equal: the hidden states where replies begin share a large
mean and differ in a few small directions. A random A mostly passes on the mean. Then the gradient moves the replies to
all observations together, hundreds of times faster than apart, and the policy becomes certain of one reply before it
distinguishes two observations. So A is set to the principal components of its inputs where replies are decided,
centered, orthogonal to their mean, each scaled to the same deviation. B is still zero, so the model's output does not
change. (EVA, Paischer et al. 2024, https://arxiv.org/abs/2410.07170, takes components of all inputs, mean included.)

What it learned from demonstrations. They teach what all observations share, above all the format, and thereby the
gradient moves all replies together again. So the adapter is frozen after them, and rewards train a fresh one beside it,
which is initialized in the same way.

Shapes: r rank, H features of a layer's input, M inputs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .peft_internals import (
    ADAPTER_LAYERS,
    TARGETS,
    count_active_lora,
    deactivate_,
    double_ranks_,
    is_lora_weight,
    lora_layers,
    lora_matrices,
    restrict_lora_to_layers_,
)

if TYPE_CHECKING:
    from .value_head import AutoModelForCausalLMWithValueHead

logger = logging.getLogger(__name__)

# Upper limit of a component's amplification over an average input: components beyond it are rounding errors.
_MAX_GAIN = 30.0
# Upper limit of the dimensions that are removed because all observations share them.
_MAX_SHARED = 16


def is_activated(model: nn.Module) -> bool:
    """Whether a model trains an activated LoRA alone, so that the tokens before a reply do not depend on it."""
    from peft import LoraConfig, PeftModel  # takes more than a second to import

    if not isinstance(model, PeftModel):
        return False
    config = model.active_peft_config
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    has_invocation = isinstance(config, LoraConfig) and config.alora_invocation_tokens is not None
    return has_invocation and all(map(is_lora_weight, trained))


def fresh_rows(model: nn.Module) -> dict[nn.Linear, Tensor]:
    """The rows of each A matrix whose columns of B are still zero, int64; matrices without such rows are left out."""
    rows = {}
    for down, up in lora_matrices(model):
        indices = (~up.weight.any(dim=0)).nonzero()[:, 0]
        if len(indices):
            rows[down] = indices
    return rows


def is_fresh(model: nn.Module) -> bool:
    """Whether a model has LoRA on linear layers alone, and all B matrices are still zero."""
    pairs = lora_matrices(model)
    return bool(pairs) and len(pairs) == count_active_lora(model) and not any(up.weight.any() for _, up in pairs)


def set_lora_depth_(model: AutoModelForCausalLMWithValueHead, sees_one_turn: bool) -> None:
    """Removes the registry's LoRA, if fresh, from the lower half of its layers for an agent that sees one turn.

    Only the first agent of a model has this effect.
    """
    is_open = model.lora_depth_is_open
    model.lora_depth_is_open = False
    if not (is_open and sees_one_turn and is_fresh(model.pretrained_model)):
        return
    config: Any = model.pretrained_model.active_peft_config
    layers = config.layers_to_transform
    if layers is not None and TARGETS.works:
        count = max(1, round(len(layers) / 2))
        config.layers_to_transform = layers[-count:]
        restrict_lora_to_layers_(model.pretrained_model, set(config.layers_to_transform))


def make_lora_plain_(model: nn.Module, sampler_name: str) -> None:
    """Converts a fresh activated LoRA to a plain one; replies stay the same.

    Args:
        model: A language model with any adapter or none.
        sampler_name: Name of the sampler that cannot apply an activated LoRA, for messages.

    Raises:
        ConfigError: The model has an activated LoRA that was trained.
    """
    if not is_activated(model):
        return
    if not is_fresh(model):
        raise ConfigError(
            f"The adapter is an activated LoRA, which {sampler_name} cannot apply, and it was trained as one. Sample "
            "with the built-in engine or a LlamaCppSampler, or start from a model with a fresh adapter."
        )
    deactivate_(model)
    logger.info("%s cannot apply an activated LoRA: the fresh adapter is a plain LoRA now", sampler_name)


@torch.no_grad()
def seed_lora_(model: nn.Module, seed: int) -> None:
    """Draws the A matrices of a fresh LoRA again, from a seed; PEFT drew them from the global random generator."""
    if not is_fresh(model) or model.active_peft_config.init_lora_weights is not True:  # type: ignore[union-attr]
        return
    # Not the stream that replies are sampled from.
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    for down, _ in lora_matrices(model):
        values = torch.empty(down.weight.shape)
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        down.weight.copy_(values)


@torch.no_grad()
def freeze_and_extend_(model: nn.Module) -> None:
    """Doubles the rank of LoRA: freezes the trained half, and adds a fresh half that is trained from now on.

    The parameters are new objects, so an optimizer must be created again. The model is saved as an ordinary adapter;
    after loading, all of it is trained.

    Args:
        model: A PEFT model with LoRA on linear layers alone.
    """
    ADAPTER_LAYERS.require()
    for down, up in lora_matrices(model):
        rank = down.out_features
        # As PEFT initializes them: A random, of the same norm as the trained half, and B zero.
        fresh = torch.randn(down.weight.shape, generator=torch.Generator().manual_seed(0)).to(down.weight)
        fresh *= down.weight.norm() / fresh.norm()
        down.weight = nn.Parameter(torch.cat([down.weight, fresh]))
        up.weight = nn.Parameter(torch.cat([up.weight, torch.zeros_like(up.weight)], dim=1))
        down.out_features = up.in_features = 2 * rank
        down.register_buffer("is_trained", torch.arange(2 * rank, device=down.weight.device) >= rank, persistent=False)
    mask_frozen_gradients_(model)
    double_ranks_(model)
    adapted: Any = model
    config = adapted.active_peft_config
    # Keeps the scale, alpha / r or alpha / sqrt(r), of an adapter that is loaded again.
    growth = math.sqrt(2) if config.use_rslora else 2
    config.r = 2 * config.r
    config.lora_alpha = growth * config.lora_alpha
    config.rank_pattern = {name: 2 * rank for name, rank in config.rank_pattern.items()}
    config.alpha_pattern = {name: growth * alpha for name, alpha in config.alpha_pattern.items()}


@contextmanager
def undo_extension_on_error(model: nn.Module) -> Iterator[None]:
    """While open, an exception undoes `freeze_and_extend_` on a model."""
    objects: list[Any] = list(lora_layers(model))
    for pair in lora_matrices(model):
        objects += pair
    if objects:
        objects.append(model.active_peft_config)
    saved = [_copy_attributes(changed) for changed in objects]
    try:
        yield
    except BaseException:
        for changed, attributes in zip(objects, saved, strict=True):
            vars(changed).clear()
            vars(changed).update(attributes)
        raise


def _copy_attributes(owner: Any) -> dict[str, Any]:
    """An object's attributes; dictionaries among them, such as ranks, scales and parameters, are copied."""
    return {name: dict(value) if type(value) is dict else value for name, value in vars(owner).items()}


def has_frozen_half(model: nn.Module) -> bool:
    """Whether `freeze_and_extend_` has frozen a half of LoRA."""
    return any(hasattr(down, "is_trained") for down, _ in lora_matrices(model))


def mask_frozen_gradients_(model: nn.Module) -> None:
    """Adds hooks that zero the gradients of LoRA's frozen half; a deep copy of a model needs them again."""
    down: Any
    for down, up in lora_matrices(model):
        if hasattr(down, "is_trained") and getattr(down, "masked_weight", None) != id(down.weight):
            down.weight.register_hook(lambda grad, down=down: grad * down.is_trained[:, None])
            up.weight.register_hook(lambda grad, down=down: grad * down.is_trained)
            down.masked_weight = id(down.weight)


@contextmanager
def latest_inputs(layers: list[nn.Linear]) -> Iterator[dict[nn.Linear, Tensor]]:
    """While open, records each layer's input (B, T, H) in the latest forward pass."""
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
def initialize_rows_(layer: nn.Linear, rows: Tensor, inputs: Tensor, groups: Tensor) -> None:
    """Sets rows of an A matrix to the principal components in which its inputs differ between observations.

    A row is scaled such that its output has the same deviation over these inputs as a random row's output over random
    inputs of the same size. Rows beyond the number of components stay as they are.

    Args:
        layer: The layer with the A matrix (r, H).
        rows: Indices of the rows, int64 (R,).
        inputs: The layer's inputs where replies are decided, (M, H).
        groups: Equal for inputs after the same words of a reply, whatever the observation, int64 (M,).
    """
    inputs = inputs.to(layer.weight)
    components, deviations = within_group_components(inputs, groups, len(rows))
    gain = (inputs.square().mean().sqrt() / deviations).clamp_max(_MAX_GAIN)
    layer.weight[rows[: len(components)]] = layer.weight.norm(dim=1).mean() * gain[:, None] * components


def within_group_components(inputs: Tensor, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first principal components of inputs within groups, orthogonal to the groups' means.

    Args:
        inputs: Float (M, H).
        groups: Group of each input, int64 (M,).
        count: Maximum number of components.

    Returns:
        Orthonormal components, largest deviation first, (K, H) with K <= count; and the deviations (K,), all positive.

    >>> inputs = torch.tensor([[9.0, 1.0, 0.0], [9.0, -1.0, 0.0], [0.0, 0.0, 5.0]])
    >>> components, deviations = within_group_components(inputs, torch.tensor([0, 0, 1]), 2)
    >>> components.abs().tolist(), round(deviations.item(), 3)
    ([[0.0, 1.0, 0.0]], 0.816)
    """
    rounding = torch.finfo(inputs.dtype).eps * max(inputs.shape) * inputs.norm()
    _, group, sizes = groups.to(inputs.device).unique(return_inverse=True, return_counts=True)
    means = inputs.new_zeros(len(sizes), inputs.shape[1]).index_add(0, group, inputs) / sizes[:, None]
    centered = inputs - means[group]
    _, mean_sizes, shared = torch.linalg.svd(means, full_matrices=False)
    shared = shared[: min(int((mean_sizes > rounding).sum()), _MAX_SHARED)]
    centered = centered - centered @ shared.T @ shared
    _, singular_values, components = torch.linalg.svd(centered, full_matrices=False)
    found = min(count, int((singular_values > rounding).sum()))
    return components[:found], singular_values[:found] / len(inputs) ** 0.5
