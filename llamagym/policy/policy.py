"""The policy: samples replies, and says how likely recorded ones are. The one place where a model is asked.

Both directions share one path (`score.read`), so the distribution that is sampled is the one that is trained:

- free text: each token from softmax(logits / temperature), until an end-of-sequence token or `max_new_tokens`;
- choices: one of the given strings, token by token among those that the strings allow (see `choices`), measured against
  how likely the model finds them before it has learned anything (see `calibration`), so that one which always says the
  same word still explores. That is part of the policy.

Shapes: N turns, L decisions a turn (tokens of free text; 1 for a choice), C choices.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..conversation.episode import Reply, Segment
from ..engine.backbone import Backbone
from ..engine.radix_tree import RadixTree
from ..engine.token_tree import TokenTree
from ..engine.weights import Change, WeightsState
from ..errors import ConfigError
from ..models.generation import GenerationConfig
from ..models.lock import alone, lock_of
from ..models.lora import aim_, fresh_rows, is_fresh, mask_frozen_gradients_
from ..models.peft_internals import is_low_rank
from ..models.value_head import AutoModelForCausalLMWithValueHead
from .calibration import Calibration
from .choice_cache import ChoiceCache, ScoredChoices
from .choices import offer_logprobs
from .chunks import check_room, chunks
from .evaluation import Evaluation, evaluate_turns, read_inputs
from .sampling import draw_choices, require_finite, write_text
from .score import Reading, read, read_reference
from .trees import Trees

logger = logging.getLogger(__name__)

# Contexts whose features are taken as a sample of all.
_INIT_CONTEXTS = 512
# Keys and values of replies that are decoded together, each with room for its longest.
_DECODE_BYTES = 2**30
# Attributes that belong to one model, and are made for each.
_DERIVED = ("_backbone", "_state", "trees", "_workspaces", "_aside")
NOT_PICKLED = (
    "An agent is neither pickled nor copied by copy.copy(): its model, caches and compiled layers belong together. "
    "Use copy.deepcopy(agent) for another agent in this process, and agent.save(folder) with load(folder), or "
    "save_checkpoint, for another process."
)


class CriticReading(NamedTuple):
    """What the critic says of N contexts.

    Attributes:
        values: Its estimates, in reward units, float32 (N,).
        features: What these are read from, float32 (N, H).
    """

    values: Tensor
    features: Tensor


Weights = Literal["policy", "reference", "base"]
"""Which weights are read: those that act, those that `init_kl_coef` holds the policy to, or those that choices are
measured against: the model under its adapter."""


@dataclass(eq=False)
class Workspace:
    """What acting measures and caches.

    Whoever learns has one. Whoever only looks at the policy works in another: a number that comes from a cache is
    rounded otherwise than one that is computed again, so that a run would depend on whether it was looked at.

    Attributes:
        calibration: What choices are measured against, if anything.
        offered: Every choice that was ever offered.
        choices: Distributions over choices.
        activations: What the engine has computed of tokens.
        recalibrations: How often the calibration has become another one.
    """

    calibration: Calibration | None
    offered: dict[tuple[int, ...], None]
    choices: ChoiceCache
    activations: RadixTree
    recalibrations: int = 0

    def copy(self) -> Workspace:
        """One that begins with all that this one has, and does not change it."""
        calibration = self.calibration and self.calibration.apart()
        return Workspace(calibration, dict(self.offered), self.choices.copy(), self.activations.copy())


class Policy:
    """A language model as a stochastic policy over replies, with a critic.

    Attributes:
        generation: How replies are sampled.
        calibrates: Whether choices are measured against what is usual, unless demonstrations said what is meant.
        aims_lora: Whether a fresh adapter is pointed at what differs between observations (see `lora`).
        num_updates: Number of updates. An update is all that is learned from one batch: the learner's optimizer steps
            and, where there is replay, its steps after them. A warm start is not an update.
        rng: Draws replies.
        reference: The reference's values of the weights that learn, by name: none if it is the model under a fresh
            adapter. None until `fix_reference`; then the model under its adapter stands for it.
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
        self.calibrates = calibrate_choices
        self._eos_ids, self._closing_id = frozenset(eos_ids), closing_id
        self.aims_lora, self.num_updates = aim_lora, 0
        self._backbone = Backbone(model)
        self.reference: dict[str, Tensor] | None = None
        self._state, self.trees = WeightsState(model), Trees()
        calibration = Calibration() if calibrate_choices else None
        # Learning's first; the last is in use.
        self._workspaces = [Workspace(calibration, {}, ChoiceCache(), self._backbone.activations)]
        # Of acting that is not learned from; None until there is some.
        self._aside: Workspace | None = None
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
        copied._state = WeightsState(copied.model)
        copied._state.number = self._state.number
        copied.trees = Trees()
        learning = self._workspaces[0]
        copied._workspaces = [
            Workspace(
                deepcopy(learning.calibration, memo),
                dict(learning.offered),
                ChoiceCache(),
                copied._backbone.activations,
                learning.recalibrations,
            )
        ]
        copied._aside = None
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
    def calibration(self) -> Calibration | None:
        """What choices are measured against, if anything."""
        return self._workspaces[-1].calibration

    @calibration.setter
    def calibration(self, calibration: Calibration | None) -> None:
        self._workspaces[-1].calibration = calibration
        self.calibration_changed()

    @property
    def offered(self) -> dict[tuple[int, ...], None]:
        """Every choice that was ever offered."""
        return self._workspaces[-1].offered

    @offered.setter
    def offered(self, offered: dict[tuple[int, ...], None]) -> None:
        self._workspaces[-1].offered = offered

    @property
    def is_measuring(self) -> bool:
        """Whether somebody only looks at the policy (see `measuring`)."""
        return len(self._workspaces) > 1

    def measuring(self) -> AbstractContextManager[None]:
        """While open, the policy is only looked at: what is measured and cached meanwhile is dropped when it closes."""
        self._notice_changes()
        return self._working_in(self._workspaces[-1].copy())

    def acting(self, learning: bool) -> AbstractContextManager[None]:
        """While open, contexts are calibrated and replies sampled, to learn from or apart from all that is learned."""
        if learning or self.is_measuring:
            return nullcontext()
        self._notice_changes()
        if self._aside is None:
            self._aside = self._workspaces[0].copy()
        return self._working_in(self._aside)

    @contextmanager
    def _working_in(self, workspace: Workspace) -> Iterator[None]:
        self._workspaces.append(workspace)
        self._backbone.activations = workspace.activations
        try:
            yield
        finally:
            self._workspaces.remove(workspace)
            self._backbone.activations = self._workspaces[-1].activations

    @property
    def weights_version(self) -> int:
        """Number of the weights' state; another one after every change, whoever made it."""
        self._notice_changes()
        return self._version

    def weights_changed(self) -> None:
        """Drop all that was computed with the weights: they were edited where it cannot be noticed."""
        self._invalidate(Change.FROZEN)

    def drop_caches(self, version: int | None = None, packed: bool = False) -> None:
        """Drop all that was computed, and take the weights for the state of this number, by default the one they have.

        Activations that are computed again round differently, in other batches. Packed copies of weights do not, so
        they stay unless `packed` says that they go, too.
        """
        self._notice_changes()
        workspace = self._workspaces[-1]
        workspace.choices.clear()
        self._backbone.forget_all(packed)
        if not self.is_measuring:
            self._aside = None
        if version is not None:
            self._state.number = version - workspace.recalibrations

    def temporary_copies(self) -> AbstractContextManager[None]:
        """While open, the packed copies of weights may be dropped and made again; then they are those from before."""
        return self._backbone.temporary_copies()

    def calibration_changed(self) -> None:
        """Notice that choices are measured otherwise: replies sampled until now are another policy's."""
        workspace = self._workspaces[-1]
        workspace.choices.clear()
        workspace.recalibrations += 1
        self._choices_measured()

    def _choices_measured(self) -> None:
        """Let acting that is not learned from measure choices against what learning does now."""
        if self._aside is not None and not self.is_measuring:
            self._aside.calibration = self.calibration and self.calibration.apart()
            self._aside.choices.clear()
            self._aside.recalibrations += 1

    @property
    def _version(self) -> int:
        return self._state.number + self._workspaces[-1].recalibrations

    @property
    def max_length(self) -> int:
        """Tokens that the model can hold, reply included."""
        return self._backbone.max_length

    @property
    def tokens_forwarded(self) -> int:
        """Tokens that went through the model so far, with what padding there was."""
        return self._backbone.tokens_forwarded

    @property
    def is_initialized_from_data(self) -> bool:
        """Whether `initialize_from_data` has run, now or before the model was saved, or the value head was trained."""
        head = self.model.v_head
        return bool(head.summary.weight.any() or head.feature_mean.any())

    def seed(self, seed: int | None) -> None:
        """Restart the sampling's random numbers."""
        self.rng.manual_seed(self.rng.seed() if seed is None else int(seed))

    def fix_reference(self) -> None:
        """Take the policy as it is now for the reference, unless there is one.

        Under a fresh adapter that is the model without it, which takes no memory and no copy.
        """
        weights = self._weights_that_learn()
        if self.reference is None:
            is_base = is_fresh(self.model.pretrained_model) and all(map(is_low_rank, weights))
            self.reference = {} if is_base else {name: weight.detach().clone() for name, weight in weights.items()}
        elif self.reference and _shapes(self.reference) != _shapes(weights):
            logger.warning("the trainable weights were replaced: the reference is the policy as it is now")
            self.reference = None
            self.fix_reference()

    def _weights_that_learn(self) -> dict[str, Tensor]:
        """The language model's, by name."""
        named = self.model.pretrained_model.named_parameters()
        return {name: weight for name, weight in named if weight.requires_grad}

    @alone
    @torch.no_grad()
    def calibrate(self, contexts: Sequence[Segment]) -> None:
        """Measure choices that have not been measured, on the contexts that offer them now; before they are sampled.

        Args:
            contexts: Each with a pending prompt, with choices or without.
        """
        self._notice_changes()
        trees = [tree for tree in self.trees.of(contexts) if tree.decisions[0].choices is not None]
        self.offered.update(dict.fromkeys(choice for tree in trees for choice in tree.decisions[0].choices or ()))
        calibration = self.calibration
        if not calibration or not (fresh := calibration.unmeasured(dict.fromkeys(trees), self.num_updates > 0)):
            return
        with self._reader("base") as backbone:
            parts = [[fresh[row] for row in rows] for rows in self._chunks(fresh)]
            found = dict(each for part in parts for each in read_reference(backbone, part, self._closing_id).items())
        if calibration.add(found):
            self.calibration_changed()
        else:
            self._choices_measured()

    @alone
    @torch.no_grad()
    def sample(self, contexts: Sequence[Segment], learning: bool = True, greedy: bool = False) -> list[Reply]:
        """Draw a reply to each context's pending prompt; of all state, only random numbers and caches change.

        Args:
            contexts: Each with a pending prompt; of any lengths. Choices have been calibrated (see `calibrate`).
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
        # What has changed was noticed.
        version = self._version
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
        of: Weights = "reference" if reference else "policy"
        return evaluate_turns(segments, self.trees.of(segments), lambda trees: self._read(trees, of))

    @alone
    @torch.no_grad()
    def choice_logprobs(self, contexts: Sequence[Segment]) -> list[Tensor]:
        """Log-probability of every choice of each context's pending prompt, calibrated before, float32 (C,) each."""
        trees = self.trees.of(contexts)
        check_room(trees, self.max_length)
        return [offer for offer, _ in self._score_choices(trees)]

    @alone
    @torch.no_grad()
    def read_critic(self, contexts: Sequence[Segment]) -> CriticReading:
        """The critic's estimate at each context's pending prompt, and its features there; contexts may be none."""
        self._notice_changes()
        trees = self.trees.of(contexts)
        check_room(trees, self.max_length)
        distinct = list(dict.fromkeys(trees))
        values: dict[TokenTree, Tensor] = {}
        features: dict[TokenTree, Tensor] = {}
        for rows in self._chunks(distinct):
            chunk = [distinct[row] for row in rows]
            reading = self._read(chunk)
            values |= dict(zip(chunk, reading.values.float().cpu(), strict=True))
            features |= dict(zip(chunk, reading.features.float().cpu(), strict=True))
        width = self.model.v_head.summary.in_features
        return CriticReading(
            torch.stack([values[tree] for tree in trees]) if trees else torch.zeros(0),
            torch.stack([features[tree] for tree in trees]) if trees else torch.zeros(0, width),
        )

    def values(self, contexts: Sequence[Segment]) -> list[float]:
        """The critic's estimate at each context's pending prompt, in reward units."""
        values: list[float] = self.read_critic(contexts).values.tolist()
        return values

    @alone
    @torch.no_grad()
    def initialize_from_data(self, segments: Sequence[Segment], critic: bool = True) -> None:
        """Data-dependent initialization from these segments, equal ones once; replies and values stay what they are.

        A fresh adapter is pointed at what differs between observations (see `lora`), and the value head's features
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
        cache = self._workspaces[-1].choices
        scored = {tree: cache[tree] for tree in trees if tree in cache}
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
        """Drop what was computed with weights that have changed since."""
        if change := self._state.change():
            self._invalidate(change)

    def _invalidate(self, change: Change) -> None:
        """Drop what depends on the weights that have changed."""
        unused = [] if self._aside is None or self._aside in self._workspaces else [self._aside]
        # The one in use last, as the backbone's stays.
        workspaces = [*unused, *self._workspaces]
        if change is Change.FROZEN:
            self._backbone.forget_copies()
        elif change is Change.PARTS:
            forwarded, self._backbone = self._backbone.tokens_forwarded, Backbone(self.model)
            self._backbone.tokens_forwarded += forwarded
            for workspace in workspaces:
                workspace.activations = self._backbone.activations.copy()
        for workspace in workspaces:
            workspace.choices.clear()
            self._backbone.activations = workspace.activations
            if change is Change.TRAINED:
                self._backbone.forget()
            else:
                self._backbone.forget_all()
                # The base is another one.
                workspace.calibration = workspace.calibration and workspace.calibration.empty_copy()
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
    def _with_reference_weights(self) -> Iterator[None]:
        """While open, the reference's weights stand in the place of those that learn."""
        assert self.reference is not None
        weights = self._weights_that_learn()
        own = {name: weights[name].data for name in self.reference}
        for name, reference in self.reference.items():
            weights[name].data = reference.to(weights[name])
        try:
            yield
        finally:
            for name, data in own.items():
                weights[name].data = data

    def _takes_reference_weights(self, of: Weights) -> bool:
        """Whether other values of weights are read than the policy's."""
        return bool(self.reference) and (of == "reference" or (of == "base" and not self.model.is_peft_model))

    @contextmanager
    def _reader(self, of: Weights = "policy") -> Iterator[Backbone]:
        """The backbone to read with; the caller has noticed changes, as each public method does at its beginning."""
        weights: AbstractContextManager[None] = nullcontext()
        if self._takes_reference_weights(of):
            weights = self._with_reference_weights()
        elif of != "policy":
            weights = self._without_adapter()
        with weights, self._backbone.ready():
            yield self._backbone

    def _read(self, trees: Sequence[TokenTree], of: Weights = "policy") -> Reading:
        """Read trees."""
        how = self.calibration, self.generation.temperature, self._closing_id
        adapted = of == "policy" or self._takes_reference_weights(of)
        with self._reader(of) as backbone:
            return read(backbone, self.model.v_head, trees, *how, adapted=adapted, cached=of == "policy")


def _shapes(weights: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}
