"""What is looked at before an agent learns: each probe finds something as it should be, or says what to do."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch

from ..models.hardware import PASS_TOKENS, container_limit
from ..models.loading import BESIDE_WEIGHTS_GIB
from ..models.quantization import computing_dtype
from ..text.chat_template import check_vocabulary, end_ids
from ..text.episode import Conversation, Segment
from .alarms import ratio_tolerance
from .collector import LearningActor

# What any language model of the last years finds likely; and texts whose ids must give them back.
_ENGLISH = "The capital of France is Paris, and the capital of Italy is Rome."
_TEXTS = ("go left", "12 against 7", "x=3.14, y=-2", "A cat, a dog and 5 birds.", "naïve café ☂")
# Nats per token that a model's weights may fall short of pure chance by rounding.
_CHANCE = 1.0
# What is looked at: so many contexts, of so many turns where conversations are whole; and for speed, so many at once.
_CONTEXTS, _TURNS, _TOGETHER = 4, 2, 8
# Forward passes that all probes make for each token of the longest reply, and beside.
_PASSES_PER_TOKEN, _OTHER_PASSES = _TURNS + 1, 20
# Beside weights: gradients, Adam's two moments, copies of weights and moments to go back to after an error, and of the
# weights before the latest step, in float32.
_COPIES = 7
_GIB = 2**30


class FaultError(Exception):
    """A check's finding that something is not as it should be."""


class OutOfTimeError(Exception):
    """There is no time left for a check."""


class Probes:
    """Contexts of an agent, and what it says to them."""

    def __init__(self, actor: LearningActor, observations: Sequence[Any], seconds: float) -> None:
        """Look over an agent.

        Args:
            actor: The agent; the longest reply that it may give is shortened.
            observations: Some that its environment gives.
            seconds: When these are over, what takes a while is left out, and said to be.
        """
        self._actor, self._observations = actor, list(observations)[:_CONTEXTS]
        self._ends = time.perf_counter() + seconds
        self._said: list[Segment] = []
        # Bytes that learning keeps for each token of a pass.
        self._kept = 0.0

    def tokenizer(self) -> str:
        """Texts come back from their ids, and names of control tokens stay text."""
        actor = self._actor
        check_vocabulary(actor.policy.model.pretrained_model, actor.tokenizer)
        template = actor.chat_template
        for text in _TEXTS:
            back = str(actor.tokenizer.decode(template.encode(text)))
            if back.strip() != text.strip():
                raise FaultError(
                    f"{text!r} becomes {back!r} in token ids. Look at the tokenizer's normalizer and decoder."
                )
        for name in actor.tokenizer.all_special_tokens:
            if set(template.encode(str(name))) & set(actor.tokenizer.all_special_ids):
                raise FaultError(f"the text {name!r} becomes a control token. Report this as a bug.")
        return (
            f"{len(_TEXTS)} texts come back from their ids, {len(actor.tokenizer.all_special_tokens)} names stay text"
        )

    @torch.no_grad()
    def language(self) -> str:
        """English is likelier than chance."""
        policy = self._actor.policy
        model: Any = policy.model.pretrained_model
        ids = torch.tensor([self._actor.chat_template.encode(_ENGLISH)], device=policy.device)
        for _ in range(2):  # the first pass prepares what later ones have
            started = time.perf_counter()
            logits = model(input_ids=ids).logits[0, :-1].float()
        self._shorten_replies(time.perf_counter() - started)
        if not logits.isfinite().all():
            raise FaultError("the model's output is not finite. Load the last saved model, or pass dtype='float32'.")
        nats = -logits.log_softmax(-1).gather(1, ids[0, 1:, None]).mean().item()
        chance = math.log(logits.shape[1])
        if nats > chance + _CHANCE:
            raise FaultError(
                f"an English sentence costs {nats:.1f} nats a token, and chance is {chance:.1f}: the tokenizer may be "
                "another model's. Load both from one place."
            )
        note = " (weights are random?)" if nats > chance - _CHANCE else ""
        return f"an English sentence costs {nats:.1f} nats a token, chance is {chance:.1f}{note}"

    def end(self) -> str:
        """What the template closes a reply with ends one."""
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
        """Conversations take replies, of several turns where they are whole."""
        actor = self._actor
        observations: list[Any] = self._observations or [f"This is observation {n}." for n in range(_CONTEXTS)]
        conversations = [actor.new_conversation() for _ in observations]
        for _ in range(1 if actor.sees_one_turn else _TURNS):
            pairs = zip(conversations, observations, strict=True)
            contexts = [self._observed(conversation, observation) for conversation, observation in pairs]
            actor.policy.calibrate(contexts)
            for conversation, reply in zip(conversations, actor.policy.sample(contexts), strict=True):
                conversation.answer(reply, "")
        self._said = [conversation.current_segment() for conversation in conversations]
        turns = sum(len(segment.turns) for segment in self._said)
        return f"{turns} replies in {len(conversations)} conversations"

    def _observed(self, conversation: Conversation, observation: Any) -> Segment:
        if not self._observations:
            return conversation.observe(observation, self._actor.response_prefix)
        choices = self._actor.choices_for(observation)
        return conversation.observe(self._actor.text_of(observation), self._actor.response_prefix, choices)

    def actions(self) -> str:
        """Every choice names an action."""
        actor, count = self._actor, 0
        for observation in self._observations:
            for choice in actor.choices_for(observation) or ():
                text, count = actor.response_prefix + choice, count + 1
                try:
                    action = actor.extract_action(text)
                except ValueError:
                    action = None
                if action is None:
                    raise FaultError(f"extract_action({text!r}) names no action, though it is offered as a choice.")
        return f"{count} choices name actions" if count else "not looked at: no choices"

    def caches(self) -> str:
        """What is kept equals what is computed again."""
        policy = self._actor.policy
        kept = self._logprobs(self._replied())
        policy.drop_caches(packed=True)
        return self._agree(
            kept,
            self._logprobs(self._said),
            "what is kept, and what is computed again,",
            "Call agent.weights_changed() after editing weights in place.",
        )

    def one_is_many(self) -> str:
        """A batch of one equals a batch of many."""
        # What is kept was computed together, or alone: each must be computed again.
        policy = self._actor.policy
        policy.drop_caches()
        together = self._logprobs(self._replied())
        alone = []
        for segment in self._said:
            policy.drop_caches()
            alone.append(self._logprobs([segment]))
        return self._agree(
            together,
            torch.cat(alone),
            "conversations alone and together",
            "Look for layers that depend on the batch, such as dropout.",
        )

    def ratio(self) -> str:
        """What samples is what is trained."""
        version = self._actor.policy.weights_version
        with torch.enable_grad():
            now = self._actor.policy.evaluate(self._replied())
        # While choices are calibrated, the first of them are drawn from another policy.
        turns = [turn for segment in self._said for turn in segment.turns]
        fresh = [row for row, turn in enumerate(turns) if turn.reply.weights_version == version]
        decided = [turns[row].reply for row in fresh if turns[row].decision_count]
        sampled = [logprob for reply in decided for logprob in reply.logprobs]
        return self._agree(
            torch.tensor(sampled),
            now.logprobs[fresh][now.mask[fresh]].detach().float().cpu(),
            "sampling and training",
            "Look for layers that draw random numbers, such as dropout.",
        )

    def speed(self) -> str:
        """How fast it acts and learns."""
        actor, policy = self._actor, self._actor.policy
        self._require_time()
        conversations = [actor.new_conversation() for _ in range(_TOGETHER)]
        contexts = [
            each.observe(f"Observation {n}: {_ENGLISH}", actor.response_prefix) for n, each in enumerate(conversations)
        ]
        started = time.perf_counter()
        replies = policy.sample(contexts)
        acting = (time.perf_counter() - started) / len(replies)
        for conversation, reply in zip(conversations, replies, strict=True):
            conversation.answer(reply, "")
        learning = self._learning_s([conversation.current_segment() for conversation in conversations])
        passes = actor.learner.epochs
        tokens = sum(len(reply.ids) for reply in replies) / len(replies)
        return (
            f"{1 / acting:.1f} free-text turns/s acting, {1 / learning:.1f} in a pass of learning, "
            f"{1 / (acting + passes * learning):.1f} with up to {passes} passes; {len(replies)} at once, replies of "
            f"{tokens:.0f} tokens"
        )

    def memory(self) -> str:
        """Learning fits into what is free."""
        model = self._actor.policy.model
        # Larger ones are halved where memory runs out.
        nodes = self._actor.learner.config.max_tokens_per_pass or PASS_TOKENS
        learns = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        weights, activations = _COPIES * 4 * learns, nodes * self._kept
        needed = weights + activations + BESIDE_WEIGHTS_GIB * _GIB
        if model.device.type == "cuda":
            free = int(torch.cuda.mem_get_info(model.device)[0])
        else:
            free = int(min(psutil.virtual_memory().available, container_limit() - psutil.Process().memory_info().rss))
        found = (
            f"training {learns / 1e6:.1f} million weights takes up to {needed / _GIB:.1f} GiB, "
            f"{activations / _GIB:.1f} of it for activations and logits of {nodes} tokens; {free / _GIB:.1f} are free"
        )
        if needed <= free:
            return found
        if activations > weights:
            raise FaultError(f"{found}. Lower max_tokens_per_pass, or load a smaller model.")
        raise FaultError(f"{found}. Train an adapter instead of all weights, or load a smaller model.")

    def _shorten_replies(self, pass_s: float) -> None:
        """Let replies take no longer than there is time, at so many seconds for a forward pass."""
        generation, left = self._actor.policy.generation, self._ends - time.perf_counter()
        longest = max(1, int((left / pass_s - _OTHER_PASSES) / _PASSES_PER_TOKEN))
        self._actor.policy.generation = replace(generation, max_new_tokens=min(longest, generation.max_new_tokens))

    def _require_time(self) -> None:
        if time.perf_counter() > self._ends:
            raise OutOfTimeError

    def _learning_s(self, segments: list[Segment]) -> float:
        """Seconds a turn that a pass of learning takes; notes how much it keeps for each token."""
        policy, kept = self._actor.policy, dict[int, int]()

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        weights = [weight for weight in policy.model.parameters() if weight.requires_grad]
        # A batch is read before it is learned from, and what the adapter leaves alone is kept from that.
        self._logprobs(segments)
        started, forwarded = time.perf_counter(), policy.tokens_forwarded
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            now = policy.evaluate(segments)
        loss = now.logprobs[now.mask].sum() + now.entropy[now.mask].sum() + now.values.sum()
        torch.autograd.grad(loss, weights, allow_unused=True)
        self._kept = sum(kept.values()) / max(1, policy.tokens_forwarded - forwarded)
        return (time.perf_counter() - started) / len(segments)

    def _replied(self) -> list[Segment]:
        if not self._said:
            raise FaultError("not looked at: there are no replies.")
        self._require_time()
        return self._said

    @torch.no_grad()
    def _logprobs(self, segments: list[Segment]) -> torch.Tensor:
        now = self._actor.policy.evaluate(segments)
        return now.logprobs[now.mask].float().cpu()

    def _agree(self, one: torch.Tensor, other: torch.Tensor, what: str, advice: str) -> str:
        tolerance = ratio_tolerance(computing_dtype(self._actor.policy.model.pretrained_model))
        # Where each context offers a single choice, nothing is decided and nothing can differ.
        error = (one - other).square().mean().sqrt().item() if len(one) else 0.0
        if not error <= tolerance:
            off = f"log-probabilities are off by {error:.2g} nats, where rounding explains {tolerance:.0g}"
            raise FaultError(f"{what} differ: {off}. {advice}")
        return f"{what} agree to {error:.1g} nats"
