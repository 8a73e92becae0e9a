"""Splits a transformer's body into its trunk, the frozen layers below the first trained one, and its top, the rest."""

from __future__ import annotations

import copy
import re
from typing import Any

from torch import nn

from ..models.torch_internals import CONTAINERS, shallow_copy


def first_trained_layer(body: nn.Module) -> int:
    """Index of the lowest layer that is trained; 0 if anything outside the layers is, or nothing."""
    trained = [name for name, weight in body.named_parameters() if weight.requires_grad]
    layers = [re.match(r"layers\.(\d+)\.", name) for name in trained]
    return 0 if None in layers else min((int(match[1]) for match in layers if match), default=0)


def kinds_of_layers(config: Any) -> int:
    """How many of the first layers hold one of each kind that a config names; 0 if it names none."""
    kinds = list(getattr(config, "layer_types", None) or ())
    return max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)


def split(body: Any, first: int) -> tuple[Any, Any]:
    """Trunk (layers below `first`, without the final norm) and top; weights and adapters are shared, not copied.

    The top takes the trunk's output as `inputs_embeds`. Whether that gives the body's own output is for the caller to
    check: an architecture may scale what it takes for embeddings.
    """
    return first_layers(body, first), _part(body, slice(first, None))


def first_layers(body: Any, count: int) -> Any:
    """The body's layers below `count`, without the final norm; the whole body where it cannot be taken apart."""
    if not (hasattr(body, "layers") and CONTAINERS.works):
        return body
    part = _part(body, slice(0, count))
    for norm in ("norm", "final_layernorm"):
        if hasattr(part, norm):
            setattr(part, norm, nn.Identity())
    return part


def _part(body: Any, layers: slice) -> Any:
    part = shallow_copy(body)
    part.layers = nn.ModuleList(list(body.layers)[layers])
    if types := getattr(body.config, "layer_types", None):
        # A model that mixes kinds of layers looks their masks up by index.
        part.config = copy.copy(body.config)
        part.config.layer_types = types[layers]
    return part
