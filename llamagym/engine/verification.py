"""Compares `Transformer` with the model's own forward pass, and rejects a model that it does not reproduce.

A few tokens run through the whole model, and through its first layers after cached, padded and branching tokens and
with a narrow sliding window. The results hold for all models of the same structure.

Shapes: B rows, T tokens, L layers, H width.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ..models.lora import is_activated
from ..models.peft_internals import (
    acting_on_every_token,
    adapter_state,
    layers_with_variants,
    lora_layers,
    tuner_layers,
    variant_types,
)
from ..models.torch_internals import CONTAINERS, HOOKS, forward_hooks_of
from ..models.transformers_internals import attention_function, attention_name, has_attention
from ..models.value_head import AutoModelForCausalLMWithValueHead
from .acceleration import is_enabled
from .kv_cache import KVBuffer, entries_of
from .masks import Tokens, causal
from .radix_tree import Activations
from .transformer import Transformer, first_layers, first_trained_layer, rejected, rejecting_errors

logger = logging.getLogger(__name__)

# Tokens of the probe, and the sliding window while it runs: a model's own window is longer than any probe.
_PROBE_TOKENS = 12
_PROBE_WINDOW = 5
# Largest root mean square error relative to the standard deviation.
_TOLERANCE = 0.05
_TOLERANCE_OF = {torch.float32: 0.005, torch.float64: 0.005}


@dataclass
class Findings:
    """Results of the comparison.

    Attributes:
        no_entries: Keys and values of no tokens, (2L, heads, 0, head size).
        window: How far back sliding layers see; None if none has a window.
        can_fuse: Whether layers may run fused.
        can_share: Whether rows may attend to one shared prefix.
        can_split: Whether the body may be split at the first trained layer; None until a model is split.
    """

    no_entries: Tensor
    window: int | None
    can_fuse: bool
    can_share: bool
    can_split: bool | None = None


class _Sequence(NamedTuple):
    """The probe as a plain sequence, run without acceleration.

    Attributes:
        layers: The first layers of a model.
        cache: Their keys and values.
        hidden: Their last hidden states, (T, H).
    """

    layers: nn.Module
    cache: DynamicCache
    hidden: Tensor


# Results by a model's structure. The first model with a structure is compared.
FINDINGS: dict[Hashable, Findings] = {}
# The structure of a large model takes a megabyte. Beyond this many, the oldest is dropped.
MAX_FINDINGS = 32


def verified_transformer(model: AutoModelForCausalLMWithValueHead) -> Transformer:
    """The transformer of a model, after a comparison with the model's own forward pass.

    With an activated LoRA it is split at the first trained layer, if that gives the same hidden states.

    Raises:
        ModelLoadError: They disagree; the message names the model's class and the reason.
    """
    transformer = Transformer(model)
    structure = structure_of(transformer.lm)
    findings = FINDINGS.get(structure)
    if findings is None:
        # Only the first model of a structure is compared. Weights that this packs would take the room of those that
        # acting uses, in this model alone.
        with rejecting_errors(transformer.lm), transformer.temporary_packing():
            findings = compare(transformer)
    if structure is not None and structure not in FINDINGS:
        if len(FINDINGS) >= MAX_FINDINGS:
            del FINDINGS[next(iter(FINDINGS))]
        FINDINGS[structure] = findings
    transformer.no_entries = findings.no_entries
    transformer.can_share = findings.can_share
    transformer.window = findings.window
    if not findings.can_fuse:
        transformer.unfuse()
    if is_activated(model.pretrained_model):
        _split(transformer, findings)
    return transformer


def compare(transformer: Transformer) -> Findings:
    """Compares all computations, and raises where a plain one differs."""
    if transformer.layer_types and "sliding_attention" not in transformer.layer_types:
        # A config may have a window that none of its layers uses.
        transformer.window = None
    window = transformer.window
    if window is not None and not _follows_window(transformer):
        raise rejected(transformer.lm, f"its layers do not follow sliding_window={window} of its config")
    with _narrow_window(transformer):
        no_entries = _compare_logits(transformer)
        # The second layer's keys and values show what the first one attended to. Over many layers bfloat16's rounding
        # adds up to as much as an error.
        layers = first_layers(transformer.body, max(2, _layers_with_all_types(transformer.body.config)))
        sequence = _run_sequence(transformer, layers)
        with transformer.ready(is_accelerated=False):
            if not _branches_match(transformer, sequence, is_shared=False):
                reason = "tokens that follow cached ones, or branch off them, are computed otherwise"
                raise rejected(transformer.lm, reason)
        can_fuse = _try_branches(transformer, sequence, is_shared=False)
        if not can_fuse:
            transformer.unfuse(f"layers of {type(transformer.lm).__name__} compute something else")
        # Sharing was measured on CPUs only.
        may_share = attention_name(transformer.body.config) == "sdpa" and transformer.device.type == "cpu"
        can_share = (
            may_share
            and _try_branches(transformer, sequence, is_shared=True)
            and _try_branches(transformer, sequence, is_shared=True, with_gradients=True)
        )
    _compare_positions(transformer, layers)
    return Findings(no_entries, window, can_fuse, can_share)


def _layers_with_all_types(config: Any) -> int:
    """Number of first layers that include each type in the config; 0 if it names none."""
    types = list(getattr(config, "layer_types", None) or ())
    return max((types.index(name) + 1 for name in set(types)), default=0)


@contextmanager
def _narrow_window(transformer: Transformer) -> Iterator[None]:
    """While open, sliding layers see a few tokens, so that a short probe shows whether they see the right ones."""
    window = transformer.window
    if window is None or window <= _PROBE_WINDOW:
        yield
        return
    configs = {id(config): config for config in (transformer.lm.config.get_text_config(), transformer.body.config)}
    transformer.window = _PROBE_WINDOW
    for config in configs.values():
        config.sliding_window = _PROBE_WINDOW
    try:
        yield
    finally:
        transformer.window = window
        for config in configs.values():
            config.sliding_window = window


def _follows_window(transformer: Transformer) -> bool:
    """Whether the model's own forward pass depends on the window in its config."""
    usual = _own_logits(transformer)
    with _narrow_window(transformer):
        return not torch.equal(_own_logits(transformer), usual)


@torch.no_grad()
def _own_logits(transformer: Transformer) -> Tensor:
    """Logits of the probe from the model's own forward pass, adapters included, (T, V)."""
    logits: Tensor = transformer.pretrained(input_ids=_probe().inputs.to(transformer.device)).logits
    return logits[0].float()


@torch.no_grad()
def _compare_logits(transformer: Transformer) -> Tensor:
    """Compares with the model's own logits, and raises if they disagree.

    Returns:
        Keys and values of no tokens, (2L, heads, 0, head size).
    """
    cache = DynamicCache()
    expected = _own_logits(transformer)
    with transformer.ready(is_accelerated=False):
        received = transformer.logits(transformer.run(transformer.body, _probe(), cache)[0]).float()
    if not _agree(transformer, received, expected):
        error = (received - expected).abs().max().item()
        raise rejected(transformer.lm, f"its logits differ by up to {error:.3g}")
    layers: list[Any] = cache.layers
    num_layers = transformer.lm.config.get_text_config().num_hidden_layers
    if len(layers) != num_layers or any(getattr(layer, "keys", None) is None for layer in layers):
        raise rejected(transformer.lm, "not each of its layers keeps keys and values of its own")
    shapes = {layer.keys.shape for layer in layers} | {layer.values.shape for layer in layers}
    if len(shapes) > 1:
        raise rejected(transformer.lm, "its keys and values have several shapes")
    return entries_of(cache, slice(0, 0))[0]


@torch.no_grad()
def _run_sequence(transformer: Transformer, layers: nn.Module) -> _Sequence:
    cache = DynamicCache()
    with acting_on_every_token(layers_with_variants(transformer.body)), transformer.ready(is_accelerated=False):
        hidden = transformer.run(layers, _probe(), cache)
    return _Sequence(layers, cache, hidden[0])


def _try_branches(transformer: Transformer, sequence: _Sequence, is_shared: bool, with_gradients: bool = False) -> bool:
    """Like `_branches_match`; False if the computation fails."""
    with suppress(Exception):
        return _branches_match(transformer, sequence, is_shared, with_gradients)
    return False


def _branches_match(
    transformer: Transformer, sequence: _Sequence, is_shared: bool, with_gradients: bool = False
) -> bool:
    """Whether tokens that branch off a cache get the hidden states that they have in a plain sequence.

    One row fills all columns, the other is padded. In both, tokens that no other sees stand between tokens that follow
    each other, so that their columns are not their positions.

    Args:
        transformer: The model.
        sequence: The plain sequence.
        is_shared: Whether the rows attend to one shared prefix.
        with_gradients: Whether to compute as in training.
    """
    lengths = torch.tensor([_PROBE_TOKENS - 5, _PROBE_TOKENS - 3])
    columns = int(lengths.max())
    prefix = entries_of(sequence.cache, slice(0, 2))[0]
    buffer = KVBuffer(prefix, len(lengths), columns + 5, is_shared)
    for row, length in enumerate(lengths.tolist()):
        history = Activations(entries_of(sequence.cache, slice(2, length))[0], sequence.hidden[2:length])
        buffer.fill(row, 2, [history], pad_to=columns)
    chain = torch.tensor([1, 3, 4])
    offsets = torch.tensor([0, 0, 0, 1, 2])
    positions = lengths[:, None] + offsets
    ids = _probe().inputs[0][positions]
    ids[:, [0, 2]] = 1
    visible_nodes = torch.eye(5, dtype=torch.bool)
    visible_nodes[chain[:, None], chain] = torch.ones(3, 3, dtype=torch.bool).tril()
    is_cached = torch.arange(columns) < lengths[:, None]
    visible_columns = is_cached[:, None].expand(-1, 5, -1)
    visible = torch.cat([visible_columns, visible_nodes.expand(len(lengths), -1, -1)], dim=2)
    key_positions = torch.cat([torch.arange(columns).expand(len(lengths), -1), positions], dim=1)
    with torch.set_grad_enabled(with_gradients), acting_on_every_token(layers_with_variants(transformer.body)):
        cache = buffer.cache(slice(None), columns)
        tokens = Tokens(ids, positions, visible, key_positions)
        received = transformer.run(sequence.layers, tokens, cache)[:, chain]
    expected = sequence.hidden[positions[:, chain].to(sequence.hidden.device)]
    return _agree(transformer, received.detach(), expected)


@torch.no_grad()
def _compare_positions(transformer: Transformer, layers: nn.Module) -> None:
    """Raises if a token's position means something else where more tokens follow."""
    positions = torch.linspace(0, transformer.max_length - 2, _PROBE_TOKENS).long()[None]
    short = Tokens(_probe().inputs, positions, causal(0, _PROBE_TOKENS)[None], positions)
    last = torch.tensor([[transformer.max_length - 1]])
    long_positions = torch.cat([positions, last], dim=1)
    long_ids = torch.cat([short.inputs, torch.ones_like(last)], dim=1)
    long = Tokens(long_ids, long_positions, causal(0, _PROBE_TOKENS + 1)[None], long_positions)
    with transformer.ready(is_accelerated=False):
        expected = transformer.run(layers, short, DynamicCache())
        received = transformer.run(layers, long, DynamicCache())[:, :-1]
    if not _agree(transformer, received, expected):
        raise rejected(transformer.lm, "its position encodings depend on how many tokens follow")


def _agree(transformer: Transformer, received: Tensor, expected: Tensor) -> bool:
    """Whether two computations differ by rounding only.

    The mean error is compared, since in 8 and 4 bits single logits are far off.
    """
    is_quantized = getattr(transformer.lm, "hf_quantizer", None) is not None
    tolerance = _TOLERANCE if is_quantized else _TOLERANCE_OF.get(transformer.lm.dtype, _TOLERANCE)
    error = (received - expected).float().square().mean().sqrt()
    return bool(error <= tolerance * expected.float().std())


@torch.no_grad()
def _split(transformer: Transformer, findings: Findings) -> None:
    """Splits the body at the first trained layer, where that gives the same hidden states."""
    first = first_trained_layer(transformer.body)
    if first == 0 or not CONTAINERS.works:
        return
    transformer.split(first)
    if findings.can_split is None:
        findings.can_split = _split_matches(transformer)
    if not findings.can_split:
        transformer.unsplit()
        logger.info("%s cannot be split at layer %d; every pass runs all layers", type(transformer.lm).__name__, first)


def _split_matches(transformer: Transformer) -> bool:
    """Whether the top after the trunk gives the body's hidden states."""
    tokens = _probe()
    with _narrow_window(transformer), transformer.ready(is_accelerated=False), suppress(Exception):
        expected = transformer.run(transformer.body, tokens, DynamicCache())
        hidden = transformer.run(transformer.trunk, tokens, DynamicCache())
        received = transformer.run(transformer.top, tokens._replace(inputs=hidden), DynamicCache())
        return torch.equal(received, expected)
    return False


def _probe() -> Tokens:
    """A short sequence of tokens to compare computations on."""
    positions = torch.arange(_PROBE_TOKENS)[None]
    return Tokens(positions + 1, positions, causal(0, _PROBE_TOKENS)[None], positions)


def structure_of(lm: nn.Module) -> Hashable | None:
    """A key that models share only if they run the same operations on tensors of the same shapes.

    Args:
        lm: Causal language model.

    Returns:
        The key; None if a hook or a module's replaced `forward` may compute anything.
    """
    if not HOOKS.works:
        return None
    modules: list[Hashable] = []
    for name, module in lm.named_modules():
        if any(forward_hooks_of(module)) or "forward" in vars(module):
            return None
        settings = tuple(item for item in vars(module).items() if isinstance(item[1], int | float | str | None))
        modules.append((name, type(module), type(module).forward, settings))
    tensors: list[Hashable] = []
    for name, tensor in [*lm.named_parameters(), *lm.named_buffers()]:
        tensors.append((name, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad))
    config: Any = lm.config
    attention = attention_name(config)
    return (
        tuple(modules),
        tuple(tensors),
        tuple(map(adapter_state, tuner_layers(lm))),
        tuple(map(variant_types, lora_layers(lm))),
        config.to_json_string(),
        attention,
        attention_function(attention) if has_attention(attention) else None,
        torch.get_num_threads(),
        is_enabled(),
    )
