"""Sampling of replies: one of the choices, or free text token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import TopKLogitsWarper, TopPLogitsWarper

from ..engine.backbone import Backbone
from ..engine.decode import Decoder, PartialReply, spare_columns
from ..engine.likelihood import sums_in_groups
from ..engine.token_tree import TokenTree
from ..errors import DivergedError
from ..models.registry import GenerationConfig
from ..models.value_head import ValueHead
from ..text.episode import FinishReason
from .drafts import Draft, DraftContext, Drafter, best_draft_length
from .evaluation import chunks

# Bytes of keys and values of replies that are decoded together; each reserves memory for the longest reply.
_DECODE_BYTES = 2**30


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


Watcher = Callable[[tuple[int, ...]], int | None]
"""Called with a reply's tokens whenever it has grown; returns the number to keep to end it, or None to continue."""


@dataclass(frozen=True, slots=True)
class SampledText:
    """A sampled text.

    Attributes:
        ids: Token ids, with an end-of-sequence token only if it was sampled.
        logprobs: Log-probability of each token.
        finish_reason: Why it ended.
        value: The critic's estimate where the text begins; None if the sampler has no critic.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    value: float | None = None


def watched(texts: Sequence[SampledText], watchers: Sequence[Watcher]) -> list[SampledText]:
    """Returns complete texts as their watchers end them; without watchers, as they are."""
    if not watchers:
        return list(texts)
    ended: list[SampledText] = []
    for text, watcher in zip(texts, watchers, strict=True):
        kept = watcher(text.ids)
        if kept is not None and kept < len(text.ids):
            text = replace(text, ids=text.ids[:kept], logprobs=text.logprobs[:kept], finish_reason="stop")
        ended.append(text)
    return ended


def draw(weights: Tensor, rng: torch.Generator) -> Tensor:
    """Samples indices in proportion to weights (V,) or (B, V); int64 () or (B,) on the CPU."""
    return index_at(weights.to(rng.device), torch.rand((*weights.shape[:-1], 1), generator=rng))


def index_at(weights: Tensor, uniform: Tensor) -> Tensor:
    """Samples indices in proportion to weights (..., V), from numbers that are uniform in [0, 1), (..., 1)."""
    cumulative = weights.cumsum(-1)
    total = cumulative[..., -1:]
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


def draw_tokens(logits: Tensor, largest: Tensor, sums: Tensor, rows: Tensor, uniforms: Tensor) -> Tensor:
    """Samples tokens from softmax(logits): first a group of tokens, then one of its tokens.

    Only the groups' sums and one group per token are read.

    Args:
        logits: Float (B, V).
        largest: Largest logit of each row, from `sums_in_groups`.
        sums: Sums of exponentials of each row's groups, from `sums_in_groups`.
        rows: Row of each token to sample, int64 (N,).
        uniforms: Two numbers for each token, uniform in [0, 1), on the CPU, (N, 2).

    Returns:
        Token ids, int64 (N,), on the CPU.
    """
    groups = logits.unflatten(-1, (sums.shape[1], -1))
    chosen = index_at(sums[rows].cpu(), uniforms[:, :1])
    weights = (groups[rows, chosen.to(rows.device)].float() - largest[rows, None]).exp()
    return groups.shape[-1] * chosen + index_at(weights.cpu(), uniforms[:, 1:])


@torch.no_grad()
def write_replies(
    backbone: Backbone,
    v_head: ValueHead,
    trees: Sequence[TokenTree],
    config: GenerationConfig,
    eos_ids: AbstractSet[int],
    rng: torch.Generator,
    drafter: Drafter,
    watchers: Sequence[Watcher] = (),
) -> list[SampledText]:
    """Samples a reply to each context, as many at once as memory allows, and values the context in the same pass.

    Args:
        backbone: The model.
        v_head: The critic.
        trees: Contexts of any lengths whose pending prompt has no choices.
        config: Options of sampling.
        eos_ids: All ids that end a reply.
        rng: Random numbers.
        drafter: Guesses of next tokens; remembers the replies.
        watchers: One per context, or empty.
    """
    transformer = backbone.transformer
    spare = config.max_new_tokens + spare_columns(config.draft_limit)
    lengths = [len(tree.prompt_ids) + spare for tree in trees]
    texts: dict[int, SampledText] = {}
    for rows in chunks(trees, lengths, _DECODE_BYTES // transformer.token_bytes, equal_once=False):
        chunk = [trees[row] for row in rows]
        with transformer.ready():
            chunk_watchers = [watchers[row] for row in rows] if watchers else ()
            features, written = write_text(backbone, chunk, config, eos_ids, rng, drafter, chunk_watchers)
        values = v_head(features).squeeze(-1).tolist()
        for row, text, value in zip(rows, written, values, strict=True):
            texts[row] = replace(text, value=value)
    return [texts[row] for row in range(len(trees))]


@torch.no_grad()
def write_text(
    backbone: Backbone,
    trees: Sequence[TokenTree],
    config: GenerationConfig,
    eos_ids: AbstractSet[int],
    rng: torch.Generator,
    drafter: Drafter,
    watchers: Sequence[Watcher] = (),
) -> tuple[Tensor, list[SampledText]]:
    """Samples a reply to each context.

    Log-probabilities are under softmax(logits / temperature), before top-k and top-p. Each token of each reply has its
    own random numbers, so neither drafts nor the replies to other contexts change it.

    Args:
        backbone: The model.
        trees: Contexts whose pending prompt has no choices.
        config: Options of sampling.
        eos_ids: All ids that end a reply.
        rng: Random numbers.
        drafter: Guesses of next tokens; remembers the replies.
        watchers: One per context, or empty.

    Returns:
        The hidden state of each context's last token, float (B, H), and the texts.
    """
    transformer = backbone.transformer
    # In more rows, a draft rarely pays.
    may_draft = len(trees) <= transformer.weights_cost
    max_draft_tokens = config.draft_limit if may_draft else 0
    decoder = Decoder(backbone, trees, config.max_new_tokens, max_draft_tokens)
    uniforms = torch.empty(len(trees), config.max_new_tokens, 2)
    if config.do_sample:
        uniforms = torch.rand(uniforms.shape, generator=rng)
    texts = [_GrowingText(tree, numbers) for tree, numbers in zip(trees, uniforms, strict=True)]
    for text, watcher in zip(texts, watchers, strict=False):
        text.watcher = watcher
    contexts: dict[TokenTree, DraftContext] = {}
    if max_draft_tokens:
        for tree in trees:
            contexts[tree] = DraftContext(tree.prompt_ids)
    first: Tensor | None = None
    active = texts
    while active:
        # Equal partial replies are computed once.
        drafts: dict[PartialReply, Draft] = {}
        for tree, ids in dict.fromkeys(text.reply for text in active):
            room = min(max_draft_tokens, config.max_new_tokens - len(ids) - 1)
            drafts[tree, ids] = drafter.draft(contexts[tree], ids, room) if room else Draft((), ())
        max_length = best_draft_length(list(drafts.values()), transformer.weights_cost)
        draft_ids = {reply: draft.ids[:max_length] for reply, draft in drafts.items()}
        states = decoder.hidden_states(draft_ids)
        # The rows of hidden states that belong to each reply: one for its next token, and one for each of its draft's.
        rows: dict[PartialReply, range] = {}
        for reply, own in zip(drafts, states, strict=True):
            start = rows[next(reversed(rows))].stop if rows else 0
            rows[reply] = range(start, start + len(own))
        hidden = torch.cat(states)
        if first is None:
            first = hidden[[rows[text.reply].start for text in texts]]
        tokens, logprobs = _draw_positions(
            transformer.logits(hidden), [(text, rows[text.reply]) for text in active], config
        )
        start = 0
        for text in active:
            end = start + len(rows[text.reply])
            text.extend(tokens[start:end], logprobs[start:end], draft_ids[text.reply], eos_ids)
            start = end
        decoder.finish(text.reply for text in active if text.finish_reason is not None)
        active = [text for text in active if text.finish_reason is None]
    if max_draft_tokens:
        for text in texts:
            drafter.add(contexts[text.tree], text.ids)
    assert first is not None, "a batch has contexts"
    return first, [SampledText(text.ids, text.logprobs, text.finish_reason or "length") for text in texts]


class _GrowingText:
    """A text that is being sampled.

    Attributes:
        tree: Its context.
        uniforms: Two random numbers for each of its tokens, (max_new_tokens, 2).
        ids: The tokens so far.
        logprobs: Their log-probabilities.
        finish_reason: Why it ended; None as long as it continues.
        watcher: Its watcher, if it has one.
    """

    __slots__ = ("finish_reason", "ids", "logprobs", "tree", "uniforms", "watcher")

    def __init__(self, tree: TokenTree, uniforms: Tensor) -> None:
        self.tree = tree
        self.uniforms = uniforms
        self.watcher: Watcher | None = None
        self.ids: tuple[int, ...] = ()
        self.logprobs: tuple[float, ...] = ()
        self.finish_reason: FinishReason | None = None

    @property
    def reply(self) -> PartialReply:
        """The context and the tokens so far."""
        return self.tree, self.ids

    def extend(
        self, tokens: Sequence[int], logprobs: Sequence[float], draft: Sequence[int], eos_ids: AbstractSet[int]
    ) -> None:
        """Appends sampled tokens up to the first that differs from the draft.

        Args:
            tokens: Sampled tokens: the first follows the text so far, each other one a further token of the draft.
            logprobs: Their log-probabilities.
            draft: The guesses of these tokens but for the last.
            eos_ids: All ids that end a text.
        """
        count = 0
        while self.finish_reason is None:
            token = tokens[count]
            count += 1
            if token in eos_ids:
                self.finish_reason = "eos"
            elif len(self.ids) + count == len(self.uniforms):
                self.finish_reason = "length"
            if count == len(tokens) or token != draft[count - 1]:
                break
        self.ids += tuple(tokens[:count])
        self.logprobs += tuple(logprobs[:count])
        kept = None if self.watcher is None else self.watcher(self.ids)
        # A watcher's limit may coincide with the end of the text.
        if kept is not None and (kept < len(self.ids) or self.finish_reason is None):
            self.ids = self.ids[:kept]
            self.logprobs = self.logprobs[:kept]
            self.finish_reason = "stop"


def _draw_positions(
    logits: Tensor, texts: Sequence[tuple[_GrowingText, range]], config: GenerationConfig
) -> tuple[list[int], list[float]]:
    """Samples a token at each position of each text.

    Args:
        logits: Logits (M, V).
        texts: Texts with their rows of logits, in the order of positions from the next token on.
        config: Options of sampling.

    Returns:
        Tokens and their log-probabilities, one text after the other.

    Raises:
        DivergedError: Logits are not finite.
    """
    if config.temperature != 1.0:
        logits = logits.float() / config.temperature
    largest, sums = sums_in_groups(logits)
    total = largest + sums.sum(-1).log()
    require_finite(total)
    rows = torch.tensor([row for _, own in texts for row in own], device=logits.device)
    if not config.do_sample:
        tokens = logits.argmax(-1)[rows].cpu()
    else:
        uniforms = torch.cat([text.uniforms[len(text.ids) : len(text.ids) + len(own)] for text, own in texts])
        if config.top_k or config.top_p < 1.0:
            filtered = _filtered(logits.float(), config)
            tokens = draw_tokens(filtered, *sums_in_groups(filtered), rows, uniforms)
        else:
            tokens = draw_tokens(logits, largest, sums, rows, uniforms)
    logprobs = logits[rows, tokens.to(rows.device)].float() - total[rows]
    return tokens.tolist(), logprobs.tolist()


def _filtered(logits: Tensor, config: GenerationConfig) -> Tensor:
    """Logits (B, V) after top-k and top-p filtering."""
    if config.top_k:
        logits = TopKLogitsWarper(config.top_k)(None, logits)
    if config.top_p < 1.0:
        logits = TopPLogitsWarper(config.top_p)(None, logits)
    return logits
