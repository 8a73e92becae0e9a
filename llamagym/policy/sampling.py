"""Sampling of replies: one of the choices, or free text token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import TopKLogitsWarper, TopPLogitsWarper

from ..engine.backbone import Backbone
from ..engine.decode import Decoder, PartialReply
from ..engine.likelihood import sums_in_groups
from ..engine.token_tree import TokenTree
from ..errors import DivergedError
from ..models.registry import GenerationConfig
from ..text.episode import FinishReason


@contextmanager
def redrawn_on_error(rng: torch.Generator) -> Iterator[None]:
    """While open, an exception restores the generator's state."""
    state = rng.get_state()
    try:
        yield
    except BaseException:
        rng.set_state(state)
        raise


def require_finite(outputs: Tensor) -> None:
    """Rejects output of a model that is not finite.

    Args:
        outputs: Values computed from its logits or hidden states, of any shape.

    Raises:
        DivergedError: A value is NaN or infinite.
    """
    if not outputs.isfinite().all():
        raise DivergedError(
            "The model's output is NaN or infinite: its weights are, or activations overflow its dtype. Load the last "
            "saved model, lower learning_rate, or load the model with dtype='float32'."
        )


@dataclass(frozen=True, slots=True)
class Text:
    """A sampled text: token ids, the log-probability of each, and why it ended."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


def draw(weights: Tensor, rng: torch.Generator) -> Tensor:
    """Samples indices in proportion to weights (V,) or (B, V); int64 () or (B,) on the CPU."""
    cumulative = weights.to(rng.device).cumsum(-1)
    total = cumulative[..., -1:]
    uniform = torch.rand(total.shape, generator=rng)
    # Below the total even after rounding, so that no index with weight 0 is drawn.
    point = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1)


def draw_choices(offers: Sequence[Tensor], greedy: bool, rng: torch.Generator) -> list[int]:
    """Samples a choice for each decision.

    Args:
        offers: Log-probabilities of each decision's choices, (C,), with any C.
        greedy: Whether to take the most likely choice.
        rng: Random numbers.

    Returns:
        Indices of the choices.
    """
    if not offers:
        return []
    logprobs = pad_sequence(list(offers), batch_first=True, padding_value=-torch.inf)
    return (logprobs.argmax(-1) if greedy else draw(logprobs.exp(), rng)).tolist()


def draw_tokens(logits: Tensor, largest: Tensor, sums: Tensor, rows: Tensor, rng: torch.Generator) -> Tensor:
    """Samples tokens from softmax(logits): first a group of tokens, then one of its tokens.

    Only the groups' sums and one group per token are read.

    Args:
        logits: Float (B, V).
        largest: Largest logit of each row, from `sums_in_groups`.
        sums: Sums of exponentials of each row's groups, from `sums_in_groups`.
        rows: Row of each token to sample, int64 (N,).
        rng: Random numbers.

    Returns:
        Token ids, int64 (N,), on the CPU.
    """
    groups = logits.unflatten(-1, (sums.shape[1], -1))
    chosen = draw(sums[rows], rng)
    weights = (groups[rows, chosen.to(rows.device)].float() - largest[rows, None]).exp()
    return groups.shape[-1] * chosen + draw(weights, rng)


@torch.no_grad()
def write_text(
    backbone: Backbone,
    trees: Sequence[TokenTree],
    config: GenerationConfig,
    eos_ids: AbstractSet[int],
    rng: torch.Generator,
) -> tuple[Tensor, list[Text]]:
    """Samples a reply to each context.

    Log-probabilities are under softmax(logits / temperature), before top-k and top-p.

    Args:
        backbone: The model.
        trees: Contexts whose pending prompt has no choices.
        config: Options of sampling.
        eos_ids: All ids that end a reply.
        rng: Random numbers.

    Returns:
        The hidden state of each context's last token, float (B, H), and the texts.
    """
    decoder = Decoder(backbone, trees, config.max_new_tokens)
    ids: list[tuple[int, ...]] = [()] * len(trees)
    logprobs: list[tuple[float, ...]] = [()] * len(trees)
    reasons: list[FinishReason] = ["length"] * len(trees)
    active = list(range(len(trees)))
    first: Tensor | None = None
    for _ in range(config.max_new_tokens):
        # Equal partial replies are computed once.
        row_of: dict[PartialReply, int] = {}
        rows = torch.tensor([row_of.setdefault((trees[i], ids[i]), len(row_of)) for i in active])
        states = decoder.hidden_states(list(row_of))
        rows = rows.to(states.device)
        if first is None:
            first = states[rows]
        logits = backbone.transformer.logits(states)
        if config.temperature != 1.0:
            logits = logits.float() / config.temperature
        largest, sums = sums_in_groups(logits)
        total = largest + sums.sum(-1).log()
        require_finite(total)
        if not config.do_sample:
            tokens = logits.argmax(-1)[rows]
        elif config.top_k or config.top_p < 1.0:
            filtered = _filtered(logits.float(), config)
            tokens = draw_tokens(filtered, *sums_in_groups(filtered), rows, rng)
        else:
            tokens = draw_tokens(logits, largest, sums, rows, rng)
        token_logprobs = logits[rows, tokens.to(rows.device)].float() - total[rows]
        for i, token, logprob in zip(active, tokens.tolist(), token_logprobs.tolist(), strict=True):
            ids[i] = (*ids[i], token)
            logprobs[i] = (*logprobs[i], logprob)
            if token in eos_ids:
                reasons[i] = "eos"
        active = [i for i in active if reasons[i] != "eos"]
        if not active:
            break
    decoder.close()
    assert first is not None, "max_new_tokens is positive"
    return first, [Text(*text) for text in zip(ids, logprobs, reasons, strict=True)]


def _filtered(logits: Tensor, config: GenerationConfig) -> Tensor:
    """Logits (B, V) after top-k and top-p filtering."""
    if config.top_k:
        logits = TopKLogitsWarper(config.top_k)(None, logits)
    if config.top_p < 1.0:
        logits = TopPLogitsWarper(config.top_p)(None, logits)
    return logits
