"""The policy: samples replies and evaluates recorded ones. The only place where a model runs.

Sampling and evaluation share one path (`evaluation.read`), so the sampled distribution is the one that is trained:

- free text: each token from softmax(logits / temperature), until an end-of-sequence token or `max_new_tokens`;
- choices: one of the given strings, token by token among the tokens that the strings allow (see `choices`), relative to
  the model's probabilities before learning (see `calibration`). So a model that prefers one word still explores. The
  calibration is part of the policy.

Shapes: N turns, L decisions a turn (tokens of free text; 1 for a choice), C choices.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..engine.backbone import Backbone
from ..engine.token_tree import TokenTree
from ..engine.weights import Change, WeightsState
from ..errors import ConfigError
from ..models.lock import lock_of, with_model_lock
from ..models.lora import (
    fresh_rows,
    initialize_rows_,
    is_activated,
    is_fresh,
    make_lora_plain_,
    mask_frozen_gradients_,
)
from ..models.peft_internals import is_lora_weight
from ..models.registry import GenerationConfig
from ..models.value_head import AutoModelForCausalLMWithValueHead
from ..text.episode import Reply, Segment
from .calibration import Calibration, Row
from .choices import offer_logprobs
from .drafts import Drafter
from .evaluation import (
    CriticReading,
    Evaluation,
    Reading,
    TreeCache,
    Weights,
    check_context_lengths,
    chunks,
    evaluate_turns,
    read,
    read_inputs,
    read_reference,
)
from .sampler import Sampler, check_sampler, sample_checked
from .sampling import SampledText, Watcher, draw_choices, require_finite, watched, write_replies
from .workspace import ChoiceCache, ScoredChoices, Workspace

logger = logging.getLogger(__name__)

# Largest number of contexts that the adapter and the value head are initialized from.
_MAX_INIT_CONTEXTS = 512
# Attributes that belong to one model; a copy creates its own.
_NOT_COPIED = ("backbone", "_state", "trees", "workspaces", "_eval_workspace")
NOT_PICKLED = (
    "An agent is neither pickled nor copied by copy.copy(): its model, caches and compiled layers belong together. "
    "Use copy.deepcopy(agent) for another agent in this process, and agent.save(folder) with load(folder), or "
    "save_checkpoint, for another process."
)


class Policy:
    """A language model as a stochastic policy over replies, with a critic.

    Attributes:
        generation: Options of sampling.
        calibrates: Whether choices are calibrated, until a warm start.
        aims_lora: Whether a fresh adapter is initialized to what differs between observations (see `lora`).
        num_updates: Number of batches that were trained on; a warm start does not count.
        rng: Random numbers of sampling.
        reference: The reference's values of the trainable weights, by name; empty if the reference is the model without
            its adapter, which was fresh. None until `fix_reference`; the model without its adapter serves until then.
        trees: Builds the token trees of segments.
        eos_ids: All ids that end a reply.
        workspaces: Calibration and caches: the first for learning, the last in use.
    """

    def __init__(
        self,
        model: AutoModelForCausalLMWithValueHead,
        eos_ids: Sequence[int],
        closing_id: int,
        generation: GenerationConfig,
        calibrate_choices: bool = True,
        aim_lora: bool = True,
        seed: int | None = None,
    ) -> None:
        """Wraps a model.

        Args:
            model: Causal language model with value head. Dropout is disabled for good: it would make the sampled policy
                differ from the trained one.
            eos_ids: All ids that end a reply.
            closing_id: The id among them that ends a choice which is a prefix of another.
            generation: Options of sampling.
            calibrate_choices: Whether choices are calibrated.
            aim_lora: Whether a fresh adapter is initialized to what differs between observations.
            seed: Seed of sampling; None draws one.
        """
        self.model = model.eval()
        self.generation = generation
        self.calibrates = calibrate_choices
        self.aims_lora = aim_lora
        self._sampler: Sampler | None = None
        self._weights_id = uuid.uuid4().hex
        self.num_updates = 0
        self.trees = TreeCache()
        self.eos_ids = frozenset(eos_ids)
        self._closing_id = closing_id
        self.backbone = Backbone(model)
        self.reference: dict[str, Tensor] | None = None
        self._state = WeightsState(model)
        calibration = Calibration() if calibrate_choices else None
        self.workspaces = [Workspace(calibration, {}, ChoiceCache(), self.backbone.prefix_cache)]
        # For acting that is not learned from; None until it is needed.
        self._eval_workspace: Workspace | None = None
        self.rng = torch.Generator()
        self.rng.manual_seed(self.rng.seed() if seed is None else int(seed))

    @with_model_lock
    def __deepcopy__(self, memo: dict[int, Any]) -> Policy:
        """A policy with its own copy of the model and the same distribution."""
        # The copy could not notice earlier changes of the weights.
        self._notice_changes()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in vars(self).items():
            if name not in _NOT_COPIED:
                setattr(copied, name, deepcopy(value, memo))
        mask_frozen_gradients_(copied.model.pretrained_model)
        copied.backbone = Backbone(copied.model)
        copied.backbone.tokens_forwarded = self.backbone.tokens_forwarded
        copied._state = WeightsState(copied.model)
        copied._state.number = self._state.number
        copied._weights_id = uuid.uuid4().hex
        copied.trees = TreeCache()
        learning = self.workspaces[0]
        copied.workspaces = [
            Workspace(
                deepcopy(learning.calibration, memo),
                dict(learning.offered),
                ChoiceCache(),
                copied.backbone.prefix_cache,
                learning.recalibrations,
            )
        ]
        copied._eval_workspace = None
        return copied

    def __reduce__(self) -> NoReturn:
        """Rejects pickling and shallow copies: caches and compiled layers belong to one model in one process."""
        raise ConfigError(NOT_PICKLED)

    @property
    def lock(self) -> threading.RLock:
        """The lock that a thread holds while it uses the model."""
        return lock_of(self.model)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.backbone.transformer.device

    @property
    def calibration(self) -> Calibration | None:
        """Calibration of choices; None without it."""
        return self.workspaces[-1].calibration

    @calibration.setter
    def calibration(self, calibration: Calibration | None) -> None:
        self.workspaces[-1].calibration = calibration
        self.calibration_changed()

    @property
    def offered(self) -> dict[tuple[int, ...], None]:
        """Every choice that was ever offered."""
        return self.workspaces[-1].offered

    @offered.setter
    def offered(self, offered: dict[tuple[int, ...], None]) -> None:
        self.workspaces[-1].offered = offered

    @property
    def sampler(self) -> Sampler | None:
        """The server that writes replies in free text; None for the built-in engine."""
        return self._sampler

    @sampler.setter
    def sampler(self, sampler: Sampler | None) -> None:
        check_sampler(sampler)
        if sampler is not None and not sampler.activates_lora and is_activated(self.model.pretrained_model):
            make_lora_plain_(self.model.pretrained_model, type(sampler).__name__)
            self._invalidate(Change.PARTS)
        self._sampler = sampler

    @property
    def is_measuring(self) -> bool:
        """Whether a read-only call is running (see `measuring`)."""
        return len(self.workspaces) > 1

    def measuring(self) -> AbstractContextManager[None]:
        """While open, calls are read-only: calibration and caches return to their state before."""
        self._notice_changes()
        return self._using(self.workspaces[-1].copy())

    def acting(self, learning: bool) -> AbstractContextManager[None]:
        """While open, calls calibrate and sample; without `learning`, in a separate workspace."""
        if learning or self.is_measuring:
            return nullcontext()
        self._notice_changes()
        if self._eval_workspace is None:
            self._eval_workspace = self.workspaces[0].copy()
        return self._using(self._eval_workspace)

    @contextmanager
    def _using(self, workspace: Workspace) -> Iterator[None]:
        self.workspaces.append(workspace)
        self.backbone.prefix_cache = workspace.prefix_cache
        try:
            yield
        finally:
            self.workspaces.remove(workspace)
            self.backbone.prefix_cache = self.workspaces[-1].prefix_cache

    @property
    def weights_version(self) -> int:
        """Number of the weights' state, which every change increases, also one from outside."""
        self._notice_changes()
        return self._version

    def weights_changed(self) -> None:
        """Drops all caches, after a change of the weights that cannot be detected."""
        self._invalidate(Change.FROZEN)

    def drop_caches(self, version: int | None = None, packed: bool = False) -> None:
        """Drops all caches.

        Args:
            version: New number of the weights' state; None keeps it.
            packed: Whether packed copies of weights are dropped, too. Computed again they are the same, while
                activations are rounded differently in other batches.
        """
        self._notice_changes()
        workspace = self.workspaces[-1]
        workspace.choices.clear()
        workspace.drafter = Drafter()
        self.backbone.prefix_cache.clear()
        if packed:
            self.backbone.transformer.drop_packed_weights()
        if not self.is_measuring:
            self._eval_workspace = None
        if version is not None:
            self._state.number = version - workspace.recalibrations

    def calibration_changed(self) -> None:
        """Drops distributions over choices after a new calibration; earlier replies are off-policy."""
        workspace = self.workspaces[-1]
        workspace.choices.clear()
        workspace.recalibrations += 1
        self._update_eval_workspace()

    def _update_eval_workspace(self) -> None:
        """Copies the calibration to the workspace of acting that is not learned from."""
        if self._eval_workspace is not None and not self.is_measuring:
            self._eval_workspace.calibration = self.calibration and self.calibration.separate_copy()
            self._eval_workspace.choices.clear()
            self._eval_workspace.recalibrations += 1

    @property
    def _version(self) -> int:
        return self._state.number + self.workspaces[-1].recalibrations

    @property
    def max_length(self) -> int:
        """Maximum tokens of a context, including the reply."""
        return self.backbone.transformer.max_length

    @property
    def tokens_forwarded(self) -> int:
        """Number of tokens forwarded so far, including padding."""
        return self.backbone.tokens_forwarded

    @property
    def is_initialized_from_data(self) -> bool:
        """Whether `initialize_from_data` has run, now or before the model was saved, or the value head was trained."""
        head = self.model.v_head
        return bool(head.summary.weight.any() or head.feature_mean.any())

    def fix_reference(self) -> None:
        """Makes the current policy the reference, unless one is set.

        With a fresh adapter it is the model without adapter, which needs no copy.
        """
        weights = self._trainable_weights()
        if self.reference is None:
            is_base = is_fresh(self.model.pretrained_model) and all(map(is_lora_weight, weights))
            self.reference = {} if is_base else {name: weight.detach().clone() for name, weight in weights.items()}
        elif self.reference and _shapes(self.reference) != _shapes(weights):
            logger.warning("the trainable weights were replaced: the reference is the policy as it is now")
            self.reference = None
            self.fix_reference()

    def _trainable_weights(self) -> dict[str, Tensor]:
        """The language model's trainable weights, by name."""
        named = self.model.pretrained_model.named_parameters()
        return {name: weight for name, weight in named if weight.requires_grad}

    @with_model_lock
    @torch.no_grad()
    def calibrate(self, contexts: Sequence[Segment]) -> None:
        """Calibrates new choices on these contexts. Call it before `sample`.

        Args:
            contexts: Segments with a pending prompt, with or without choices.
        """
        self._notice_changes()
        trees = [tree for tree in self.trees.of(contexts) if tree.decisions[0].choices is not None]
        self.offered.update(dict.fromkeys(choice for tree in trees for choice in tree.decisions[0].choices or ()))
        calibration = self.calibration
        if not calibration:
            return
        unmeasured = calibration.unmeasured(dict.fromkeys(trees), self.num_updates > 0)
        if not unmeasured:
            return
        measured: dict[TokenTree, list[Row]] = {}
        with self._backbone_with("base") as backbone:
            for rows in self._chunks(unmeasured):
                chunk = [unmeasured[row] for row in rows]
                measured |= read_reference(backbone, chunk, self._closing_id)
        if calibration.add(measured):
            self.calibration_changed()
        else:
            self._update_eval_workspace()

    @with_model_lock
    @torch.no_grad()
    def sample(self, contexts: Sequence[Segment], learning: bool = True, greedy: bool = False) -> list[Reply]:
        """Samples a reply to each pending prompt; changes no state but random numbers and caches.

        Args:
            contexts: Segments with a pending prompt, of any lengths, calibrated before (see `calibrate`).
            learning: Whether replies will be trained on, and so are sampled from the full distribution.
            greedy: Whether to take the most likely choice or token.
        """
        greedy = greedy or not self.generation.do_sample
        config = replace(self.generation, do_sample=not greedy)
        if learning:
            # A truncated distribution would bias the ratio.
            config = replace(config, top_p=1.0, top_k=0)
        trees = self.trees.of(contexts)
        replies = dict[int, Reply]()
        text_rows = [row for row, tree in enumerate(trees) if tree.decisions[0].choices is None]
        choice_rows = [row for row, tree in enumerate(trees) if tree.decisions[0].choices is not None]
        text_trees = [trees[row] for row in text_rows]
        choice_trees = [trees[row] for row in choice_rows]
        check_context_lengths(text_trees, self.max_length, self.generation.max_new_tokens)
        check_context_lengths(choice_trees, self.max_length)
        offers = self._score_choices(choice_trees)
        # `_score_choices` has noticed changes of the weights.
        version = self._version
        for row, text in zip(text_rows, self.write(text_trees, config, learning), strict=True):
            replies[row] = Reply(text.ids, text.logprobs, text.value, text.finish_reason, None, version)
        drawn = draw_choices([offer for offer, _ in offers], greedy, self.rng)
        for row, (offer, value), index in zip(choice_rows, offers, drawn, strict=True):
            ids = trees[row].decisions[0].choices[index]  # type: ignore[index]
            logprobs = tuple(offer.tolist())
            replies[row] = Reply(ids, (logprobs[index],), value, "choice", index, version, logprobs)
        return [replies[row] for row in range(len(contexts))]

    @with_model_lock
    def write(
        self, trees: Sequence[TokenTree], config: GenerationConfig, learning: bool, watchers: Sequence[Watcher] = ()
    ) -> list[SampledText]:
        """Samples replies in free text, by the sampler if there is one.

        Args:
            trees: Contexts that fit the model with a reply of `config.max_new_tokens`.
            config: Options of sampling.
            learning: Whether replies will be learned from.
            watchers: One per context, or empty. A sampler's replies are shown to them complete.
        """
        if not trees:
            return []
        model = self.model
        if self._sampler is None:
            drafter = self.workspaces[-1].drafter
            return write_replies(self.backbone, model.v_head, trees, config, self.eos_ids, self.rng, drafter, watchers)
        self._sampler.set_weights(model, self._weights_id)
        prompts = [tree.prompt_ids for tree in trees]
        vocabulary = self.backbone.transformer.vocabulary
        texts = sample_checked(self._sampler, prompts, config, self.eos_ids, self.rng, vocabulary, learning)
        return watched(texts, watchers)

    @with_model_lock
    def evaluate(self, segments: Sequence[Segment], reference: bool = False) -> Evaluation:
        """Log-probabilities, entropies and values of recorded turns, in the order of the segments' turns.

        Args:
            segments: Segments without a pending prompt; equal ones are computed once.
            reference: Whether to evaluate the reference instead, without gradients.
        """
        self._notice_changes()
        of: Weights = "reference" if reference else "policy"
        return evaluate_turns(segments, self.trees.of(segments), lambda trees: self._read(trees, of))

    @with_model_lock
    @torch.no_grad()
    def choice_logprobs(self, contexts: Sequence[Segment]) -> list[Tensor]:
        """Log-probabilities of all choices of each pending prompt, calibrated before; float32 (C,) each."""
        trees = self.trees.of(contexts)
        check_context_lengths(trees, self.max_length)
        return [offer for offer, _ in self._score_choices(trees)]

    @with_model_lock
    @torch.no_grad()
    def read_critic(self, contexts: Sequence[Segment]) -> CriticReading:
        """The critic's values and features at each pending prompt; `contexts` may be empty."""
        self._notice_changes()
        trees = self.trees.of(contexts)
        check_context_lengths(trees, self.max_length)
        distinct = list(dict.fromkeys(trees))
        values: dict[TokenTree, Tensor] = {}
        features: dict[TokenTree, Tensor] = {}
        for rows in self._chunks(distinct):
            chunk = [distinct[row] for row in rows]
            reading = self._read(chunk)
            values |= dict(zip(chunk, reading.values.float().cpu(), strict=True))
            features |= dict(zip(chunk, reading.features.float().cpu(), strict=True))
        if not trees:
            return CriticReading(torch.zeros(0), torch.zeros(0, self.model.v_head.summary.in_features))
        return CriticReading(
            torch.stack([values[tree] for tree in trees]), torch.stack([features[tree] for tree in trees])
        )

    @with_model_lock
    @torch.no_grad()
    def initialize_from_data(self, segments: Sequence[Segment], critic: bool = True) -> None:
        """Data-dependent initialization that changes neither replies nor values.

        A fresh adapter is initialized to what differs between observations (see `lora`), and the value head's features
        are standardized.

        Args:
            segments: Segments with turns; equal contexts count once.
            critic: Whether to standardize the value head's features.
        """
        self._notice_changes()
        trees = list({tree.prompt_key: tree for tree in self.trees.of(segments)}.values())[:_MAX_INIT_CONTEXTS]
        if sum(len(tree.decisions) for tree in trees) < 2:
            # A single context has no differences; a later batch may hold more.
            return
        fresh = fresh_rows(self.model.pretrained_model) if self.aims_lora else {}
        chunked = ([trees[row] for row in rows] for rows in self._chunks(trees))
        nodes = sum(tree.node_count for tree in trees)
        # Layers whose inputs are recorded are not fused, and use other packed copies.
        with self.backbone.transformer.temporary_packing():
            features, inputs, groups = read_inputs(chunked, nodes, fresh, lambda chunk: self._read(chunk).features)
        self._notice_changes()
        for layer, received in inputs.items():
            initialize_rows_(layer, fresh[layer], received, groups)
        if critic:
            self.model.v_head.standardize_(features)
        self._state.record()

    @property
    def pass_tokens(self) -> int:
        """Default tokens of one forward or backward pass, by model and device."""
        return self.backbone.transformer.pass_tokens

    def chunks(self, segments: Sequence[Segment], max_tokens: int | None = None) -> Iterator[list[Segment]]:
        """Splits segments into chunks of similar length, of at most `max_tokens` or a single segment."""
        for rows in self._chunks(self.trees.of(segments), max_tokens):
            yield [segments[row] for row in rows]

    def _chunks(self, trees: Sequence[TokenTree], max_tokens: int | None = None) -> Iterator[list[int]]:
        """Rows in chunks for one forward pass each, of at most `max_tokens` or a single row."""
        sizes = [self.backbone.cost(tree) for tree in trees]
        return chunks(trees, sizes, max_tokens or self.pass_tokens, equal_once=True)

    def _score_choices(self, trees: Sequence[TokenTree]) -> list[ScoredChoices]:
        """Log-probabilities of choices, float32 (C,), and the value, of each context; cached until weights change."""
        self._notice_changes()
        cache = self.workspaces[-1].choices
        scored = {tree: cache.entries[tree] for tree in trees if tree in cache.entries}
        fresh = [tree for tree in dict.fromkeys(trees) if tree not in scored]
        for rows in self._chunks(fresh):
            reading = self._read([fresh[row] for row in rows])
            offers = offer_logprobs(reading.plan, reading.branch_logprobs)
            for row, offer, value in zip(rows, offers, reading.values.tolist(), strict=True):
                require_finite(offer)
                scored[fresh[row]] = offer, value
        cache.update({tree: scored[tree] for tree in fresh})
        return [scored[tree] for tree in trees]

    def _notice_changes(self) -> None:
        """Drops caches that were computed with other weights."""
        change = self._state.change()
        if change:
            self._invalidate(change)

    def _invalidate(self, change: Change) -> None:
        """Drops what depends on the changed weights."""
        workspaces = list(self.workspaces)
        if self._eval_workspace is not None and self._eval_workspace not in workspaces:
            workspaces.insert(0, self._eval_workspace)
        if change is Change.FROZEN:
            self.backbone.transformer.drop_packed_weights()
        elif change is Change.PARTS:
            tokens_forwarded = self.backbone.tokens_forwarded
            self.backbone = Backbone(self.model)
            self.backbone.tokens_forwarded += tokens_forwarded
            for workspace in workspaces:
                workspace.prefix_cache = self.backbone.prefix_cache.copy()
        for workspace in workspaces:
            workspace.choices.clear()
            if change is Change.TRAINED:
                workspace.prefix_cache.remove_outdated()
            else:
                workspace.prefix_cache.clear()
                if workspace.calibration is not None:
                    # The base weights have changed.
                    workspace.calibration = workspace.calibration.empty_copy()
        self.backbone.prefix_cache = self.workspaces[-1].prefix_cache
        self._state.accept(change)
        self._weights_id = uuid.uuid4().hex

    @contextmanager
    def _without_adapter(self) -> Iterator[None]:
        """Disables a plain LoRA while open; an activated one acts from the reply on only."""
        pretrained: Any = self.model.pretrained_model
        if not self.model.is_peft_model or self.backbone.history_is_frozen:
            yield
            return
        with pretrained.disable_adapter():
            yield
        # PEFT unmerges a merged adapter to disable it, which does not change the policy.
        self._state.record()

    @contextmanager
    def _with_reference_weights(self) -> Iterator[None]:
        """While open, the trainable weights have the reference's values."""
        assert self.reference is not None
        weights = self._trainable_weights()
        own = {name: weights[name].data for name in self.reference}
        for name, reference in self.reference.items():
            weights[name].data = reference.to(weights[name])
        try:
            yield
        finally:
            for name, data in own.items():
                weights[name].data = data

    def _takes_reference_weights(self, of: Weights) -> bool:
        """Whether the trainable weights need other values than the policy's."""
        return bool(self.reference) and (of == "reference" or (of == "base" and not self.model.is_peft_model))

    @contextmanager
    def _backbone_with(self, of: Weights = "policy") -> Iterator[Backbone]:
        """Yields the backbone with these weights; the caller has called `_notice_changes`."""
        weights: AbstractContextManager[None] = nullcontext()
        if self._takes_reference_weights(of):
            weights = self._with_reference_weights()
        elif of != "policy":
            weights = self._without_adapter()
        with weights, self.backbone.transformer.ready():
            yield self.backbone

    def _read(self, trees: Sequence[TokenTree], of: Weights = "policy") -> Reading:
        """Runs the model on token trees."""
        with self._backbone_with(of) as backbone:
            return read(
                backbone,
                self.model.v_head,
                trees,
                self.calibration,
                self.generation.temperature,
                self._closing_id,
                adapted=of == "policy" or self._takes_reference_weights(of),
                cached=of == "policy",
            )


def _shapes(weights: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}
