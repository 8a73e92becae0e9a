"""The checks of `preflight`: each returns its finding, or raises an error that says what to do."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch

from ..learners.base import Learner
from ..models.hardware import PASS_TOKENS, computing_dtype, container_limit
from ..models.loading import BESIDE_WEIGHTS_GIB
from ..text.chat_template import check_vocabulary, end_ids
from ..text.episode import Conversation, Segment
from .actor import Actor
from .alarms import ratio_tolerance

# A sentence that every recent language model finds likely.
_ENGLISH = "The capital of France is Paris, and the capital of Italy is Rome."
# Texts that must survive encoding and decoding.
_TEXTS = ("go left", "12 against 7", "x=3.14, y=-2", "A cat, a dog and 5 birds.", "naïve café ☂")
# Nats per token by which rounding may move the log-probability of a model with random weights from chance.
_CHANCE_TOLERANCE = 1.0
# Number of conversations, and of turns in each if prompts hold the whole conversation.
_CONVERSATIONS = 4
_TURNS = 2
# Number of conversations in the measurement of speed: the default minimum of environments.
_SPEED_BATCH = 16
# Forward passes of all checks per token of the longest reply, and in addition.
_PASSES_PER_TOKEN = _TURNS + 1
_OTHER_PASSES = 20
# Float32 numbers per trained weight, besides the weight: its gradient, Adam's two moments, copies of weight and moments
# that are restored after an error, and of the weight before the latest step.
_NUMBERS_PER_WEIGHT = 7
_GIB = 2**30


class FaultError(Exception):
    """A check failed; the message says why and what to do."""


class OutOfTimeError(Exception):
    """The time limit is over."""


class Probes:
    """Checks an agent in conversations that they share: `replies` begins them, and later checks use them."""

    def __init__(self, actor: Actor, learner: Learner[Any], observations: Sequence[Any], seconds: float) -> None:
        """Starts the time limit.

        Args:
            actor: The agent's actor; `max_new_tokens` of its policy may be lowered.
            learner: The agent's learner.
            observations: Observations of its environment, of which the first are used.
            seconds: Time limit, after which slow checks raise OutOfTimeError.
        """
        self._actor = actor
        self._learner = learner
        self._observations = list(observations)[:_CONVERSATIONS]
        self._deadline = time.perf_counter() + seconds
        # The conversations with their replies.
        self._segments: list[Segment] = []
        # Bytes that autograd saves per token of a forward pass.
        self._saved_bytes = 0.0

    def tokenizer(self) -> str:
        """Checks that decoding restores encoded texts, and that names of control tokens stay text."""
        actor = self._actor
        check_vocabulary(actor.policy.model.pretrained_model, actor.tokenizer)
        template = actor.chat_template
        for text in _TEXTS:
            decoded = str(actor.tokenizer.decode(template.encode(text)))
            if decoded.strip() != text.strip():
                raise FaultError(
                    f"{text!r} is encoded and decoded to {decoded!r}. Look at the tokenizer's normalizer and decoder."
                )
        names = actor.tokenizer.all_special_tokens
        for name in names:
            if set(template.encode(str(name))) & set(actor.tokenizer.all_special_ids):
                raise FaultError(f"the text {name!r} becomes a control token. Report this as a bug.")
        return f"decoding restores {len(_TEXTS)} texts, {len(names)} names of control tokens stay text"

    @torch.no_grad()
    def language(self) -> str:
        """Checks that an English sentence is likelier than chance."""
        policy = self._actor.policy
        model: Any = policy.model.pretrained_model
        ids = torch.tensor([self._actor.chat_template.encode(_ENGLISH)], device=policy.device)
        for _ in range(2):  # the first pass also warms up
            started = time.perf_counter()
            logits = model(input_ids=ids).logits[0, :-1].float()
        self._shorten_replies(time.perf_counter() - started)
        if not logits.isfinite().all():
            raise FaultError("the model's output is not finite. Load the last saved model, or pass dtype='float32'.")
        nats = -logits.log_softmax(-1).gather(1, ids[0, 1:, None]).mean().item()
        chance = math.log(logits.shape[1])
        if nats > chance + _CHANCE_TOLERANCE:
            raise FaultError(
                f"an English sentence costs {nats:.1f} nats a token, and chance is {chance:.1f}: the tokenizer may be "
                "another model's. Load both from one place."
            )
        note = " (weights are random?)" if nats > chance - _CHANCE_TOLERANCE else ""
        return f"an English sentence costs {nats:.1f} nats a token, chance is {chance:.1f}{note}"

    def end(self) -> str:
        """Checks that the template's end-of-turn token is one of the ids that end a reply."""
        actor = self._actor
        ends = end_ids(actor.policy.model.pretrained_model, actor.tokenizer)
        closing = actor.chat_template.closing_token()
        names = [str(actor.tokenizer.convert_ids_to_tokens(end)) for end in ends]
        if closing is not None and closing in actor.tokenizer.all_special_ids and closing not in ends:
            name = actor.tokenizer.convert_ids_to_tokens(closing)
            raise FaultError(
                f"the template closes replies with {name!r}, but they end at {names}: a trained model's replies would "
                "run on. Add its id to model.pretrained_model.generation_config.eos_token_id."
            )
        return f"replies end at {', '.join(names)}"

    def replies(self) -> str:
        """Checks that conversations take replies, in several turns if prompts hold the whole conversation."""
        actor = self._actor
        observations: list[Any] = self._observations or [f"This is observation {n}." for n in range(_CONVERSATIONS)]
        conversations = [actor.new_conversation() for _ in observations]
        for _ in range(1 if actor.sees_one_turn else _TURNS):
            contexts = []
            for conversation, observation in zip(conversations, observations, strict=True):
                contexts.append(self._observe(conversation, observation))
            actor.policy.calibrate(contexts)
            for conversation, reply in zip(conversations, actor.policy.sample(contexts), strict=True):
                conversation.answer(reply, "")
        self._segments = [conversation.current_segment() for conversation in conversations]
        turns = sum(len(segment.turns) for segment in self._segments)
        return f"{turns} replies in {len(conversations)} conversations"

    def _observe(self, conversation: Conversation, observation: Any) -> Segment:
        hooks = self._actor.hooks
        if not self._observations:
            return conversation.observe(observation, hooks.response_prefix)
        choices = hooks.choices(observation)
        return conversation.observe(hooks.text(observation), hooks.response_prefix, choices)

    def actions(self) -> str:
        """Checks that every choice names an action."""
        hooks = self._actor.hooks
        count = 0
        for observation in self._observations:
            for choice in hooks.choices(observation) or ():
                reply = hooks.response_prefix + choice
                count += 1
                if hooks.action(reply) is None:
                    raise FaultError(f"extract_action({reply!r}) names no action, though it is offered as a choice.")
        return f"{count} choices name actions" if count else "skipped (no choices)"

    def caches(self) -> str:
        """Checks that cached values equal recomputed ones."""
        policy = self._actor.policy
        cached = self._logprobs(self._replied_segments())
        policy.drop_caches(packed=True)
        return self._require_equal(
            cached,
            self._logprobs(self._segments),
            "cached and recomputed values",
            "Call agent.policy.weights_changed() after editing weights in place.",
        )

    def one_is_many(self) -> str:
        """Checks that a batch of one equals a batch of many."""
        policy = self._actor.policy
        # Without caches, each batch is computed as it is.
        policy.drop_caches()
        batched = self._logprobs(self._replied_segments())
        single = []
        for segment in self._segments:
            policy.drop_caches()
            single.append(self._logprobs([segment]))
        return self._require_equal(
            batched,
            torch.cat(single),
            "conversations in one batch and in batches of one",
            "Look for layers that depend on the batch, such as dropout.",
        )

    def ratio(self) -> str:
        """Checks that the policy that samples is the one that is trained."""
        weights_version = self._actor.policy.weights_version
        with torch.enable_grad():
            evaluation = self._actor.policy.evaluate(self._replied_segments())
        # Calibration during the run changes the policy, so earlier replies were sampled from another one.
        turns = [turn for segment in self._segments for turn in segment.turns]
        on_policy_rows = [row for row, turn in enumerate(turns) if turn.reply.weights_version == weights_version]
        sampled: list[float] = []
        for row in on_policy_rows:
            if turns[row].decision_count:
                sampled += turns[row].reply.logprobs
        return self._require_equal(
            torch.tensor(sampled),
            evaluation.logprobs[on_policy_rows][evaluation.mask[on_policy_rows]].detach().float().cpu(),
            "sampling and training",
            "Look for layers that draw random numbers, such as dropout.",
        )

    def speed(self) -> str:
        """Measures the speed of acting and learning, with choices and in free text as the observations have them."""
        hooks = self._actor.hooks
        kinds: dict[str, list[Any]] = {}
        for observation in self._observations:
            kind = "free text" if hooks.choices(observation) is None else "choices"
            kinds.setdefault(kind, []).append(observation)
        findings = [self._speed_of(kind, observations) for kind, observations in kinds.items()]
        return "; ".join(findings or [self._speed_of("free text", [])])

    def _speed_of(self, kind: str, observations: Sequence[Any]) -> str:
        """Measures the speed in observations of one kind, numbered, so that none comes from the cache."""
        actor = self._actor
        self._require_time()
        conversations = [actor.new_conversation() for _ in range(_SPEED_BATCH)]
        contexts = []
        for number, conversation in enumerate(conversations):
            text = _ENGLISH
            choices = None
            if observations:
                observation = observations[number % len(observations)]
                text = actor.hooks.text(observation)
                choices = actor.hooks.choices(observation)
            contexts.append(conversation.observe(f"{number}: {text}", actor.hooks.response_prefix, choices))
        actor.policy.calibrate(contexts)
        started = time.perf_counter()
        replies = actor.policy.sample(contexts)
        acting_s = (time.perf_counter() - started) / len(replies)
        for conversation, reply in zip(conversations, replies, strict=True):
            conversation.answer(reply, "")
        learning_s = self._learning_s([conversation.current_segment() for conversation in conversations])
        passes = self._learner.epochs
        tokens = sum(len(reply.ids) for reply in replies) / len(replies)
        return (
            f"{kind}, new observations: {1 / acting_s:.1f} turns/s acting, {1 / learning_s:.1f} in a pass of learning, "
            f"{1 / (acting_s + passes * learning_s):.1f} with up to {passes} passes; {len(replies)} at once, replies "
            f"of {tokens:.0f} tokens"
        )

    def memory(self) -> str:
        """Checks that the free memory is enough for learning."""
        model = self._actor.policy.model
        # Larger batches are halved if memory runs out.
        tokens = self._learner.config.max_tokens_per_pass or PASS_TOKENS
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        weights = _NUMBERS_PER_WEIGHT * 4 * trained
        activations = tokens * self._saved_bytes
        needed = weights + activations + BESIDE_WEIGHTS_GIB * _GIB
        if model.device.type == "cuda":
            free = int(torch.cuda.mem_get_info(model.device)[0])
        else:
            free = int(min(psutil.virtual_memory().available, container_limit() - psutil.Process().memory_info().rss))
        finding = (
            f"training {trained / 1e6:.1f} million weights takes up to {needed / _GIB:.1f} GiB, "
            f"{activations / _GIB:.1f} of it for activations and logits of {tokens} tokens; {free / _GIB:.1f} are free"
        )
        if needed <= free:
            return finding
        if activations > weights:
            raise FaultError(f"{finding}. Lower max_tokens_per_pass, or load a smaller model.")
        raise FaultError(f"{finding}. Train an adapter instead of all weights, or load a smaller model.")

    def _shorten_replies(self, pass_s: float) -> None:
        """Lowers `max_new_tokens` so that all checks fit into the time limit.

        Args:
            pass_s: Seconds per forward pass.
        """
        policy = self._actor.policy
        remaining_s = self._deadline - time.perf_counter()
        most = max(1, int((remaining_s / pass_s - _OTHER_PASSES) / _PASSES_PER_TOKEN))
        policy.generation = replace(policy.generation, max_new_tokens=min(most, policy.generation.max_new_tokens))

    def _require_time(self) -> None:
        if time.perf_counter() > self._deadline:
            raise OutOfTimeError

    def _learning_s(self, segments: list[Segment]) -> float:
        """Returns the seconds per turn of a pass of learning; records the bytes that autograd saves per token."""
        policy = self._actor.policy
        sizes = dict[int, int]()

        def record_size(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        weights = [weight for weight in policy.model.parameters() if weight.requires_grad]
        # As in training, where a batch is evaluated first, and layers that the adapter does not change are then cached.
        self._logprobs(segments)
        started = time.perf_counter()
        forwarded = policy.tokens_forwarded
        with torch.autograd.graph.saved_tensors_hooks(record_size, lambda tensor: tensor):
            evaluation = policy.evaluate(segments)
        mask = evaluation.mask
        loss = evaluation.logprobs[mask].sum() + evaluation.entropy[mask].sum() + evaluation.values.sum()
        torch.autograd.grad(loss, weights, allow_unused=True)
        self._saved_bytes = sum(sizes.values()) / max(1, policy.tokens_forwarded - forwarded)
        return (time.perf_counter() - started) / len(segments)

    def _replied_segments(self) -> list[Segment]:
        """Returns the conversations of `replies`, if it succeeded and there is time left."""
        if not self._segments:
            raise FaultError("skipped, because the check of replies failed.")
        self._require_time()
        return self._segments

    @torch.no_grad()
    def _logprobs(self, segments: list[Segment]) -> torch.Tensor:
        """Returns the log-probabilities of all decisions, float32 (decisions,)."""
        evaluation = self._actor.policy.evaluate(segments)
        return evaluation.logprobs[evaluation.mask].float().cpu()

    def _require_equal(self, logprobs: torch.Tensor, other: torch.Tensor, subject: str, advice: str) -> str:
        """Rejects log-probabilities that differ by more than rounding; returns the finding.

        Args:
            logprobs: Log-probabilities, float32 (decisions,).
            other: The same, computed in another way.
            subject: Names of both.
            advice: What to do if they differ.
        """
        tolerance = ratio_tolerance(computing_dtype(self._actor.policy.model.pretrained_model))
        # If each context offers a single choice, there are no decisions.
        error = (logprobs - other).square().mean().sqrt().item() if len(logprobs) else 0.0
        if not error <= tolerance:
            off = f"log-probabilities are off by {error:.2g} nats, where rounding explains {tolerance:.0g}"
            raise FaultError(f"{subject} differ: {off}. {advice}")
        return f"{subject} agree to {error:.1g} nats"
