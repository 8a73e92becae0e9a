"""A causal language model taken apart: its body, or trunk and top, and the output layer.

The body is called with explicit positions and an explicit mask, so padding, shared prefixes and branches mean the same
to every architecture. When it is loaded, a probe compares this with the model's own forward pass: over the whole
model, over cached, padded and branching tokens, and over sliding windows. A model that computes something else is
rejected by its class and the reason.

Shapes: B rows, T tokens, S columns of keys, L layers, H width, M states that logits are read from, K targets, V
vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from ..errors import LlamaGymError, ModelLoadError
from ..models.adapters import check_adapter
from ..models.hardware import check_one_device, is_out_of_memory, pass_tokens
from ..models.peft_internals import acting_on_every_token, require_activation
from ..models.torch_internals import CONTAINERS
from ..models.transformers_internals import CACHE_LAYER, attention_name, cache_argument
from ..models.value_head import AutoModelForCausalLMWithValueHead
from .acceleration import Acceleration
from .attention import for_any_shape, register, sharing
from .kv_cache import KVBuffer, entries_of
from .layers import first_layers, first_trained_layer, kinds_of_layers, split
from .masks import Tokens, attention_mask, causal
from .positions import context_length
from .radix_tree import Activations
from .structure import structure_of

logger = logging.getLogger(__name__)

# Attention in two parts, to what is shared and to a row's own, takes longer than in one where there is less to share:
# fewer pairs of tokens than these.
_SHARED_SCORES = 1024
# Tokens of the probe, and the window of sliding layers while it runs: their own is longer than any probe.
_PROBE_TOKENS, _PROBE_WINDOW = 12, 5
# Largest error relative to the standard deviation. 8 and 4 bits round single logits further than that.
_TOLERANCE = 0.05
_TOLERANCE_OF = {torch.float32: 0.005, torch.float64: 0.005}


@dataclass
class _Checked:
    """Results of comparing a model's own computations with faster ones.

    Attributes:
        nothing: Keys and values of no tokens, (2L, heads, 0, head size).
        window: How far back sliding layers see; None if none has a window.
        is_fused: Whether layers may run as one function each.
        can_share: Whether rows may attend to one shared prefix.
        can_split: Whether the body may be split at the first trained layer; None until a model is split.
    """

    nothing: Tensor
    window: int | None
    is_fused: bool
    can_share: bool
    can_split: bool | None = None


# By the structure of a model. The checks run on the weights of the first model that has it.
_CHECKED: dict[Hashable, _Checked] = {}
# A key of a large model takes a megabyte. When so many are kept, the oldest is dropped.
_MOST_CHECKED = 32


class Transformer:
    """The body and the output layer of a causal language model.

    Attributes:
        max_length: Tokens that it can hold.
        vocabulary: Tokens that it knows.
    """

    def __init__(self, model: AutoModelForCausalLMWithValueHead) -> None:
        """Find the parts of `model` and check that together they give the model's own logits.

        Raises:
            ModelLoadError: They do not; the message names the model's class and the reason.
        """
        check_one_device(model)
        pretrained: Any = model.pretrained_model
        lm: Any = pretrained.get_base_model() if model.is_peft_model else pretrained
        CACHE_LAYER.require()
        check_adapter(pretrained)
        require_activation(pretrained)
        register()
        self._pretrained = pretrained
        self._lm = lm
        self._weights: int = sum(weight.numel() for weight in lm.parameters())
        with self._errors_name_the_model():
            self._body: Any = getattr(lm, lm.base_model_prefix, None) or lm.model
            self._cache_argument = cache_argument(self._body)
            self._head: nn.Module = lm.get_output_embeddings()
            config = lm.config.get_text_config()
            self._scale = logit_scale(config)
            self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
            self._window: int | None = getattr(config, "sliding_window", None)
            self._layer_types: set[str] = set(getattr(config, "layer_types", None) or ())
            self.max_length = context_length(config, type(lm).__name__)
            self.vocabulary: int = config.vocab_size
        self._acceleration = Acceleration(lm, self._body)
        self._is_ready = False
        self._trunk: Any = None
        self._top = self._body
        self._first_top_layer = 0
        structure = structure_of(lm)
        with self._errors_name_the_model():
            self._checked = _CHECKED.get(structure) or self._check()
        if structure is not None and structure not in _CHECKED:
            if len(_CHECKED) >= _MOST_CHECKED:
                del _CHECKED[next(iter(_CHECKED))]
            _CHECKED[structure] = self._checked
        self._nothing = self._checked.nothing
        self._can_share = self._checked.can_share
        self._window = self._checked.window
        if not self._checked.is_fused:
            self._acceleration.unfuse()

    @property
    def device(self) -> torch.device:
        """Where inputs must lie."""
        device: torch.device = self._lm.device
        return device

    @property
    def pass_tokens(self) -> int:
        """How many tokens to forward and backward in one pass."""
        return pass_tokens(self.device, self._weights)

    @contextmanager
    def ready(self, is_accelerated: bool = True) -> Iterator[None]:
        """While open, the model runs as fast as it can, and its frozen weights must not change.

        Every pass opens it for itself. Where many passes follow each other, it is opened once for all of them, since
        looking whether weights have changed takes as long as a layer.

        Args:
            is_accelerated: Without, the model runs on its own operations: packing weights costs more than a few tokens.
        """
        if self._is_ready:
            yield
            return
        self._is_ready = True
        try:
            with self._acceleration if is_accelerated else nullcontext(), for_any_shape(self.device):
                yield
        finally:
            self._is_ready = False

    def forget_copies(self) -> None:
        """Drop the packed copies of weights; passes to come make those that they multiply by."""
        self._acceleration.forget_copies()

    def temporary_copies(self) -> AbstractContextManager[None]:
        """Drop the packed copies that are made while this is open, and no others, when it closes."""
        return self._acceleration.temporary_copies()

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits (M, V) of hidden states (M, H), in the model's dtype or in float32."""
        with self.ready():
            return self._cap(self._head(hidden))

    def logits_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Logits in float32, (M, K), of the target tokens (M, K) alone."""
        if type(self._head) is not nn.Linear:
            return self.logits(hidden).gather(1, targets).float()
        # In bfloat16 logits near 20 would lie an eighth apart, and probabilities with them.
        logits = (self._head.weight[targets].float() @ hidden.float()[:, :, None])[:, :, 0]
        return self._cap(logits if self._head.bias is None else logits + self._head.bias[targets])

    @property
    def token_bytes(self) -> int:
        """Size of a token's keys and values in all layers."""
        return self._nothing.new_empty(*self._nothing.shape[:2], 1, self._nothing.shape[3]).nbytes

    def new_states(self, *sizes: int) -> Tensor:
        """Memory for hidden states (*sizes, H), filled with anything."""
        width = self._body.get_input_embeddings().weight.shape[1]
        return self._nothing.new_empty(*sizes, width)

    def shares(self, prefix: Tensor, queries: int) -> bool:
        """Whether `queries` tokens in one pass should attend to one shared prefix rather than to a copy in each row."""
        return self._can_share and queries * prefix.shape[2] >= _SHARED_SCORES

    def _cap(self, logits: Tensor) -> Tensor:
        if self._scale != 1.0:
            logits = logits * self._scale
        return logits if self._softcap is None else self._softcap * torch.tanh(logits.float() / self._softcap)

    def _run(self, part: nn.Module | None, tokens: Tokens, cache: Cache) -> Tensor:
        """Last hidden states (B, T, H) of `part`; without a part, they are the embeddings.

        `cache` holds the S - T entries before, and is added to.
        """
        tokens = Tokens(*(tensor.to(self.device) for tensor in tokens))
        hidden: Tensor
        if part is None:
            hidden = self._body.get_input_embeddings()(tokens.inputs)
            return hidden
        mask = attention_mask(tokens, self._window, self._layer_types, self._lm.dtype)
        # Padding may lie beyond the positions that the model knows, or switch its encoding of all of them.
        positions = tokens.positions.clamp(max=self.max_length - 1)
        inputs_argument = "inputs_embeds" if tokens.inputs.is_floating_point() else "input_ids"
        arguments = {inputs_argument: tokens.inputs, self._cache_argument: cache}
        with self.ready(), sharing(self._body, cache) as shared:
            output = part(**arguments, position_ids=positions, attention_mask=mask, use_cache=True, **shared)
        hidden = output.last_hidden_state
        return hidden

    @contextmanager
    def _errors_name_the_model(self) -> Iterator[None]:
        """While open, whatever a model raises that is not a plain transformer is a `ModelLoadError`."""
        try:
            yield
        except LlamaGymError:
            raise
        except Exception as error:  # of any architecture's own code
            if is_out_of_memory(error):
                raise
            raise self._rejected(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error

    def _rejected(self, reason: str) -> ModelLoadError:
        return ModelLoadError(
            f"{type(self._lm).__name__} computes in a way that llamagym does not reproduce ({reason}). It needs a "
            "decoder whose layers attend to cached keys and values under a given mask. Use a class that the page on "
            "models lists as supported."
        )

    def _check(self) -> _Checked:
        """Compare what this class computes with the model's own forward pass, and raise if they disagree."""
        if self._layer_types and "sliding_attention" not in self._layer_types:
            # A config may name a window that none of its layers has.
            self._window = None
        if self._window is not None and not self._shows_window():
            raise self._rejected(f"its layers do not follow sliding_window={self._window} of its config")
        window = self._window
        with self._narrow_window():
            nothing = self._check_parts()
            # The second layer's keys and values are made of what the first one saw. Over many layers bfloat16 drifts as
            # far as an error would.
            part = first_layers(self._body, max(2, kinds_of_layers(self._body.config)))
            alone, hidden = self._read_alone(part)
            with self.ready(is_accelerated=False):
                if not self._branches_as(part, alone, hidden, is_shared=False, is_learning=False):
                    raise self._rejected("tokens that follow cached ones, or branch off them, are computed otherwise")
            is_fused = self._sees_as(part, alone, hidden, is_shared=False)
            if not is_fused:
                self._acceleration.unfuse(f"layers of {type(self._lm).__name__} compute something else")
            is_sdpa = attention_name(self._body.config) == "sdpa"
            # On a processor, where it was measured; in learning and acting.
            can_share = is_sdpa and self.device.type == "cpu" and self._sees_as(part, alone, hidden, is_shared=True)
            can_share = can_share and self._sees_as(part, alone, hidden, is_shared=True, is_learning=True)
        self._check_positions(part)
        return _Checked(nothing, window, is_fused, can_share)

    @contextmanager
    def _narrow_window(self) -> Iterator[None]:
        """While open, sliding layers see a few tokens, so that a short probe shows whether they see the right ones."""
        usual = self._window
        if usual is None or usual <= _PROBE_WINDOW:
            yield
            return
        configs = {id(config): config for config in (self._lm.config.get_text_config(), self._body.config)}
        self._window = _PROBE_WINDOW
        for config in configs.values():
            config.sliding_window = _PROBE_WINDOW
        try:
            yield
        finally:
            self._window = usual
            for config in configs.values():
                config.sliding_window = usual

    def _shows_window(self) -> bool:
        """Whether the model's own forward pass follows the window in its config, so that a short one can be tried."""
        usual = self._plain_logits()
        with self._narrow_window():
            return not torch.equal(self._plain_logits(), usual)

    @torch.no_grad()
    def _plain_logits(self) -> Tensor:
        """The model's own logits of the probe, (T, V), adapters included."""
        logits: Tensor = self._pretrained(input_ids=probe().inputs.to(self.device)).logits
        return logits[0].float()

    @torch.no_grad()
    def _check_parts(self) -> Tensor:
        """Compare with the model's own forward pass, and raise if they disagree.

        Returns:
            Keys and values of no tokens, (2L, heads, 0, head size).
        """
        cache, expected = DynamicCache(), self._plain_logits()
        with self.ready(is_accelerated=False):
            received = self.logits(self._run(self._body, probe(), cache)[0]).float()
        if not self._agree(received, expected):
            raise self._rejected(f"its logits differ by up to {(received - expected).abs().max().item():.3g}")
        layers: list[Any] = cache.layers
        if len(layers) != self._lm.config.get_text_config().num_hidden_layers or any(
            getattr(layer, "keys", None) is None for layer in layers
        ):
            raise self._rejected("not each of its layers keeps keys and values of its own")
        if len({part.shape for layer in layers for part in (layer.keys, layer.values)}) > 1:
            raise self._rejected("its keys and values have several shapes")
        return entries_of(cache, slice(0, 0))[0]

    @torch.no_grad()
    def _read_alone(self, part: nn.Module) -> tuple[DynamicCache, Tensor]:
        """Keys and values of the probe in a plain sequence, and its last hidden states (T, H), without acceleration."""
        alone = DynamicCache()
        with acting_on_every_token(self._body), self.ready(is_accelerated=False):
            hidden = self._run(part, probe(), alone)
        return alone, hidden[0]

    def _sees_as(
        self, part: nn.Module, alone: DynamicCache, hidden: Tensor, is_shared: bool, is_learning: bool = False
    ) -> bool:
        """Whether `_branches_as` holds, without an error."""
        with suppress(Exception):
            return self._branches_as(part, alone, hidden, is_shared, is_learning)
        return False

    def _branches_as(
        self, part: nn.Module, alone: DynamicCache, hidden: Tensor, is_shared: bool, is_learning: bool
    ) -> bool:
        """Whether tokens that branch off a cache, shared or not, see what they saw alone, in a plain sequence.

        One row knows all columns, the other is padded. In both, tokens that nothing sees stand between those that
        follow each other, so that their places in memory are not their positions.
        """
        known = torch.tensor([_PROBE_TOKENS - 5, _PROBE_TOKENS - 3])
        columns = int(known.max())
        prefix = entries_of(alone, slice(0, 2))[0]
        buffer = KVBuffer(prefix, len(known), columns + 5, is_shared)
        for row, count in enumerate(known.tolist()):
            history = Activations(entries_of(alone, slice(2, count))[0], hidden[2:count])
            buffer.fill(row, 2, [history], until=columns)
        chain, offsets = torch.tensor([1, 3, 4]), torch.tensor([0, 0, 0, 1, 2])
        positions = known[:, None] + offsets
        ids = probe().inputs[0][positions]
        ids[:, [0, 2]] = 1
        own = torch.eye(5, dtype=torch.bool)
        own[chain[:, None], chain] = torch.ones(3, 3, dtype=torch.bool).tril()
        before = torch.arange(columns) < known[:, None]
        visible = torch.cat([before[:, None].expand(-1, 5, -1), own.expand(len(known), -1, -1)], dim=2)
        keys = torch.cat([torch.arange(columns).expand(len(known), -1), positions], dim=1)
        with torch.set_grad_enabled(is_learning), acting_on_every_token(self._body):
            cache = buffer.cache(slice(None), columns)
            received = self._run(part, Tokens(ids, positions, visible, keys), cache)[:, chain]
        return self._agree(received.detach(), hidden[positions[:, chain].to(hidden.device)])

    @torch.no_grad()
    def _check_positions(self, part: nn.Module) -> None:
        """Raise if a token's position means something else where more tokens follow."""
        positions = torch.linspace(0, self.max_length - 2, _PROBE_TOKENS).long()[None]
        visible = causal(0, _PROBE_TOKENS)[None]
        short = Tokens(probe().inputs, positions, visible, positions)
        last = torch.tensor([[self.max_length - 1]])
        further = torch.cat([positions, last], dim=1)
        longer = torch.cat([short.inputs, torch.ones_like(last)], dim=1)
        long = Tokens(longer, further, causal(0, _PROBE_TOKENS + 1)[None], further)
        with self.ready(is_accelerated=False):
            expected = self._run(part, short, DynamicCache())
            received = self._run(part, long, DynamicCache())[:, :-1]
        if not self._agree(received, expected):
            raise self._rejected("its position encodings depend on how many tokens follow")

    def _agree(self, received: Tensor, expected: Tensor) -> bool:
        """Whether only rounding tells two computations apart; scaled logits, say, are off by far more.

        The largest difference would not tell: 8 and 4 bits round single ones of a hundred thousand logits as far.
        """
        is_plain = getattr(self._lm, "hf_quantizer", None) is None
        tolerance = _TOLERANCE_OF.get(self._lm.dtype, _TOLERANCE) if is_plain else _TOLERANCE
        error = (received - expected).float().square().mean().sqrt()
        return bool(error <= tolerance * expected.float().std())

    @torch.no_grad()
    def _split(self) -> None:
        """Split the body at the first trained layer, where that gives the same hidden states."""
        first = first_trained_layer(self._body)
        if first == 0 or not CONTAINERS.works:
            return
        trunk, top = split(self._body, first)
        if self._checked.can_split is None:
            self._checked.can_split = self._is_split(trunk, top)
        if self._checked.can_split:
            self._trunk = trunk
            self._top = top
            self._first_top_layer = first
        else:
            logger.info("%s cannot be split at layer %d; every pass runs all layers", type(self._lm).__name__, first)

    def _is_split(self, trunk: nn.Module, top: nn.Module) -> bool:
        """Whether trunk and top, one after the other, give the body's hidden states."""
        tokens = probe()
        with self._narrow_window(), self.ready(is_accelerated=False), suppress(Exception):
            expected = self._run(self._body, tokens, DynamicCache())
            hidden = self._run(trunk, tokens, DynamicCache())
            received = self._run(top, tokens._replace(inputs=hidden), DynamicCache())
            return torch.equal(received, expected)
        return False


def probe() -> Tokens:
    """A few tokens in a row to compare computations on."""
    positions = torch.arange(_PROBE_TOKENS)[None]
    return Tokens(positions + 1, positions, causal(0, _PROBE_TOKENS)[None], positions)


def logit_scale(config: Any) -> float:
    """The factor that a model applies to its logits, which some architectures have in their config."""
    factor = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    return float(1.0 if factor is None else factor) / float(divisor or 1.0)
