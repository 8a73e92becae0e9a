"""The policy: samples replies, and says how likely recorded ones are. The one place where a model is asked.

Both directions share one path (`score.read`), so the distribution that is sampled is the one that is trained:

- free text: each token from softmax(logits / temperature), until an end-of-sequence token or `max_new_tokens`;
- choices: one of the given strings, token by token among those that the strings allow (see `choices`), measured against
  how likely the model finds them before it has learnt anything (see `calibration`), so that one which always says the
  same word still explores. That is part of the policy.

Shapes: N turns, L decisions a turn (tokens of free text; 1 for a choice), C choices.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..conversation.episode import Reply, Segment
from ..engine.backbone import Backbone
from ..engine.token_tree import TokenTree
from ..engine.weights import Change, WeightsState
from ..errors import ConfigError
from ..models.generation import GenerationConfig
from ..models.lock import alone, lock_of
from ..models.lora import aim_, fresh_rows, mask_frozen_gradients_
from ..models.value_head import AutoModelForCausalLMWithValueHead
from .calibration import Calibration
from .choice_cache import ChoiceCache, ScoredChoices
from .choices import offer_logprobs
from .chunks import check_room, chunks
from .evaluation import Evaluation, evaluate_turns, read_inputs
from .sampling import draw_choices, require_finite, write_text
from .score import Reading, read, read_reference
from .trees import Trees

# Contexts whose features are taken as a sample of all.
_INIT_CONTEXTS = 512
# Keys and values of replies that are decoded together, each with room for its longest.
_DECODE_BYTES = 2**30
# Attributes that belong to one model, and are made for each.
_DERIVED = ("_backbone", "_frozen", "_choice_cache", "_state", "trees")
NOT_PICKLED = (
    "An agent is neither pickled nor copied by copy.copy(): its model, caches and compiled layers belong together. "
    "Use copy.deepcopy(agent) for another agent in this process, and agent.save(folder) with load(folder), or "
    "save_checkpoint, for another process."
)


class Policy:
    """A language model as a stochastic policy over replies, with a critic.

    Attributes:
        generation: How replies are sampled.
        offered: Every choice that was ever offered.
        calibrates: Whether choices are measured against what is usual, unless demonstrations said what is meant.
        calibration: What they are measured against, if anything.
        aims_lora: Whether a fresh adapter is pointed at what differs between observations (see `adapter`).
        num_updates: How often a learner has changed the weights.
        rng: Draws replies.
        reference: The frozen copy that serves as reference; None if the base under the adapter does, or nothing.
        trees: Lays out what is read.
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
        """Wrap a model.

        Args:
            model: Causal language model with value head. Dropout is switched off for good: it would make the sampled
                policy differ from the trained one.
            eos_ids: Every id that ends a reply.
            closing_id: The one of them that ends a choice where longer ones go on.
            generation: How replies are sampled.
            calibrate_choices: Whether choices are measured against what is usual.
            aim_lora: Whether a fresh adapter is pointed at what differs between observations.
            seed: Of the sampling; None draws one.
        """
        self.model = model.eval()
        self.generation = generation
        self.offered: dict[tuple[int, ...], None] = {}
        self.calibrates = calibrate_choices
        self.calibration = Calibration() if calibrate_choices else None
        self._eos_ids, self._closing_id = frozenset(eos_ids), closing_id
        self.aims_lora, self.num_updates = aim_lora, 0
        self._backbone = Backbone(model)
        self.reference: AutoModelForCausalLMWithValueHead | None = None
        self._frozen: Backbone | None = None
        self._choice_cache, self._state, self.trees = ChoiceCache(), WeightsState(model), Trees()
        self.rng = torch.Generator()
        self.seed(seed)

    @alone
    def __deepcopy__(self, memo: dict[int, Any]) -> Policy:
        """A policy with a model of its own, which says what this one says."""
        # What has changed must not count as seen there without having been.
        self._notice_changes()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in vars(self).items():
            if name not in _DERIVED:
                setattr(copied, name, deepcopy(value, memo))
        mask_frozen_gradients_(copied.model.pretrained_model)
        copied._backbone = Backbone(copied.model)
        copied._backbone.tokens_forwarded = self._backbone.tokens_forwarded
        copied._frozen = None if copied.reference is None else Backbone(copied.reference)
        copied._choice_cache, copied._state, copied.trees = ChoiceCache(), WeightsState(copied.model), Trees()
        copied._state.number = self._state.number
        return copied

    def __reduce__(self) -> NoReturn:
        """Reject what copies piece by piece: caches and compiled layers belong to one model in one process."""
        raise ConfigError(NOT_PICKLED)

    @property
    def lock(self) -> threading.RLock:
        """What a thread holds while it uses the model."""
        return lock_of(self.model)

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self._backbone.device

    @property
    def weights_version(self) -> int:
        """Number of the weights' state; another one after every change, whoever made it."""
        self._notice_changes()
        return self._state.number

    def weights_changed(self) -> None:
        """Drop all that was computed with the weights: they were edited where it cannot be noticed."""
        self._invalidate(Change.FROZEN)

    def drop_caches(self, version: int | None = None, packed: bool = False) -> None:
        """Drop all that was computed, and take the weights for the state of this number, by default the one they have.

        What is computed anew is rounded otherwise, since batches fall otherwise. Weights that are packed anew are not,
        so they stay unless `packed` says that they go, too.
        """
        self._notice_changes()
        self._choice_cache.clear()
        self._backbone.forget_all(packed)
        self._state.number = self._state.number if version is None else version

    def calibration_changed(self) -> None:
        """Notice that choices are measured otherwise: replies sampled until now are another policy's."""
        self._choice_cache.clear()
        self._state.number += 1

    @property
    def max_length(self) -> int:
        """Tokens that the model can hold, reply included."""
        return self._backbone.max_length

    @property
    def tokens_forwarded(self) -> int:
        """Tokens that went through the model so far, with what padding there was."""
        frozen = self._frozen.tokens_forwarded if self._frozen else 0
        return self._backbone.tokens_forwarded + frozen

    @property
    def is_initialized_from_data(self) -> bool:
        """Whether `initialize_from_data` has run, now or before the model was saved, or the value head was trained."""
        head = self.model.v_head
        return bool(head.summary.weight.any() or head.feature_mean.any())

    def seed(self, seed: int | None) -> None:
        """Restart the sampling's random numbers."""
        self.rng.manual_seed(self.rng.seed() if seed is None else int(seed))

    def enable_reference(self) -> None:
        """Make sure that there is a reference policy: the base under the adapter, or else a frozen copy made now."""
        if not self.model.is_peft_model and self._frozen is None:
            self.reference = deepcopy(self.model).requires_grad_(False)
            self._frozen = Backbone(self.reference)

    @alone
    @torch.no_grad()
    def sample(self, contexts: Sequence[Segment], learning: bool = True, greedy: bool = False) -> list[Reply]:
        """Draw a reply to each context's pending prompt.

        Args:
            contexts: Each with a pending prompt; of any lengths.
            learning: Whether replies will be trained on, and so come from the full distribution.
            greedy: Take the most likely choice or token.
        """
        greedy = greedy or not self.generation.do_sample
        config = replace(self.generation, do_sample=not greedy)
        if learning:
            # A cut distribution would bias the ratio.
            config = replace(config, top_p=1.0, top_k=0)
        trees = self.trees.of(contexts)
        replies = dict[int, Reply]()
        texts = [row for row, tree in enumerate(trees) if tree.decisions[0].choices is None]
        choosing = [row for row, tree in enumerate(trees) if tree.decisions[0].choices is not None]
        lengths = check_room([trees[row] for row in texts], self.max_length, self.generation.max_new_tokens)
        check_room([trees[row] for row in choosing], self.max_length)
        offers = self._score_choices([trees[row] for row in choosing])
        # What has changed was noticed; and choices are calibrated now, which may have made the policy another.
        version = self._state.number
        room = _DECODE_BYTES // self._backbone.token_bytes
        for rows in chunks([trees[row] for row in texts], lengths, room, equal_once=False):
            chunk = [trees[texts[row]] for row in rows]
            with self._backbone.ready():
                features, texts_written = write_text(self._backbone, chunk, config, self._eos_ids, self.rng)
            values = self.model.v_head(features).squeeze(-1).tolist()
            for row, value, text in zip(rows, values, texts_written, strict=True):
                replies[texts[row]] = Reply(text.ids, text.logprobs, value, text.finish_reason, None, version)
        drawn = draw_choices([offer for offer, _ in offers], greedy, self.rng)
        for row, (offer, value), index in zip(choosing, offers, drawn, strict=True):
            ids = trees[row].decisions[0].choices[index]  # type: ignore[index]
            logprobs = tuple(offer.tolist())
            replies[row] = Reply(ids, (logprobs[index],), value, "choice", index, version, logprobs)
        return [replies[row] for row in range(len(contexts))]

    @alone
    def evaluate(self, segments: Sequence[Segment], reference: bool = False) -> Evaluation:
        """Log-probabilities, entropies and values of recorded turns, in the order of the segments' turns.

        Segments whose trees are the same (one observation met twice) are computed once; gradients add up.

        Args:
            segments: Without pending prompts.
            reference: Ask the reference policy instead; without gradients.
        """
        self._notice_changes()
        return evaluate_turns(segments, self.trees.of(segments), lambda trees: self._read(trees, reference))

    @alone
    @torch.no_grad()
    def choice_logprobs(self, contexts: Sequence[Segment]) -> list[Tensor]:
        """Log-probability of every choice of each context's pending prompt, float32 (C,) each."""
        trees = self.trees.of(contexts)
        check_room(trees, self.max_length)
        return [offer for offer, _ in self._score_choices(trees)]

    @alone
    @torch.no_grad()
    def values(self, contexts: Sequence[Segment]) -> list[float]:
        """The critic's estimate at each context's pending prompt, in reward units."""
        self._notice_changes()
        trees = self.trees.of(contexts)
        check_room(trees, self.max_length)
        results: dict[int, float] = {}
        for rows in self._chunks(trees):
            results |= dict(zip(rows, self._read([trees[row] for row in rows]).values.tolist(), strict=True))
        return [results[row] for row in range(len(contexts))]

    @alone
    @torch.no_grad()
    def initialize_from_data(self, segments: Sequence[Segment], critic: bool = True) -> None:
        """Data-dependent initialisation from these segments, equal ones once; replies and values stay what they are.

        A fresh adapter is pointed at what differs between observations (see `adapter`), and the value head's features
        are standardised.

        Args:
            segments: Where replies are decided.
            critic: Whether the value head's features are standardised too.
        """
        self._notice_changes()
        trees = list({tree.undecided: tree for tree in self.trees.of(segments)}.values())[:_INIT_CONTEXTS]
        if sum(len(tree.decisions) for tree in trees) < 2:
            # In a single context nothing differs; a later batch may hold more.
            return
        fresh = fresh_rows(self.model.pretrained_model) if self.aims_lora else {}
        chunked = ([trees[row] for row in rows] for rows in self._chunks(trees))
        # While they are watched, layers are not fused and multiply by other copies than otherwise.
        with self._backbone.temporary_copies():
            features, inputs, groups = read_inputs(chunked, list(fresh), lambda chunk: self._read(chunk).features)
        self._notice_changes()
        for layer, received in inputs.items():
            aim_(layer, fresh[layer], received, groups)
        if critic:
            self.model.v_head.standardize_(features)
        self._state.keep()

    @property
    def pass_tokens(self) -> int:
        """Tokens in one pass, forward or backward, that suit the model and its device."""
        return self._backbone.pass_tokens

    def chunks(self, segments: Sequence[Segment], nodes: int | None = None) -> Iterator[list[Segment]]:
        """Split segments, alike in length, into batches of at most `nodes` nodes (or a single segment)."""
        for rows in self._chunks(self.trees.of(segments), nodes):
            yield [segments[row] for row in rows]

    def _chunks(self, trees: Sequence[TokenTree], most: int | None = None) -> Iterator[list[int]]:
        """Rows in chunks for one forward pass each, of at most `most` nodes or a single row."""
        return chunks(trees, [self._backbone.size(tree) for tree in trees], most or self.pass_tokens, equal_once=True)

    def _score_choices(self, trees: Sequence[TokenTree]) -> list[ScoredChoices]:
        """Log-probabilities (C,) of the choices, and the value, of each context that offers choices.

        The same context has the same distribution until the weights change, so it is computed once until then.
        """
        self._notice_changes()
        self.offered |= dict.fromkeys(choice for tree in trees for choice in tree.decisions[0].choices or ())
        self._calibrate_choices(trees)
        scored = {tree: self._choice_cache[tree] for tree in trees if tree in self._choice_cache}
        fresh = [tree for tree in dict.fromkeys(trees) if tree not in scored]
        for rows in self._chunks(fresh):
            reading = self._read([fresh[row] for row in rows])
            offers = offer_logprobs(reading.plan, reading.branch_logprobs)
            for row, offer, value in zip(rows, offers, reading.values.tolist(), strict=True):
                require_finite(offer)
                scored[fresh[row]] = offer, value
        self._choice_cache.update({tree: scored[tree] for tree in fresh})
        return [scored[tree] for tree in trees]

    def _notice_changes(self) -> None:
        """Drop what was computed with weights that have changed since."""
        if change := self._state.change():
            self._invalidate(change)

    def _invalidate(self, change: Change) -> None:
        """Drop what depends on the weights that have changed."""
        self._choice_cache.clear()
        if change is Change.TRAINED:
            self._backbone.forget()
        elif change is Change.FROZEN:
            self._backbone.forget_all(packed=True)
        else:
            forwarded, self._backbone = self._backbone.tokens_forwarded, Backbone(self.model)
            self._backbone.tokens_forwarded += forwarded
        if change is not Change.TRAINED:
            # The reference is another one.
            self.calibration = self.calibration and self.calibration.anew()
        self._state.accept(change)

    @contextmanager
    def _without_adapter(self) -> Iterator[None]:
        """Switches a plain LoRA off; an activated one acts only where it is asked to."""
        pretrained: Any = self.model.pretrained_model
        if not self.model.is_peft_model or self._backbone.history_is_frozen:
            yield
            return
        with pretrained.disable_adapter():
            yield
        # To switch off an adapter that was merged, PEFT takes it out again; that is no other policy.
        self._state.keep()

    @contextmanager
    def _reader(self, reference: bool = False) -> Iterator[Backbone]:
        """The backbone to read with; the caller has noticed changes, as each public method does at its beginning."""
        backbone = self._frozen if reference and self._frozen is not None else self._backbone
        with self._without_adapter() if reference else nullcontext(), backbone.ready():
            yield backbone

    def _read(self, trees: Sequence[TokenTree], reference: bool = False) -> Reading:
        """Read trees."""
        how = self.calibration, self.generation.temperature, self._closing_id
        with self._reader(reference) as backbone:
            return read(backbone, self.model.v_head, trees, *how, adapted=not reference)

    def _calibrate_choices(self, trees: Sequence[TokenTree]) -> None:
        """Measure what has not been measured, on the contexts that offer it now."""
        calibration = self.calibration
        if not calibration or not (fresh := calibration.unmeasured(dict.fromkeys(trees), self.num_updates > 0)):
            return
        with self._reader(reference=True) as backbone:
            parts = [[fresh[row] for row in rows] for rows in self._chunks(fresh)]
            found = dict(each for part in parts for each in read_reference(backbone, part, self._closing_id).items())
        if calibration.add(found):
            self.calibration_changed()
