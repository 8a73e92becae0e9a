"""Looks over an agent before it learns: what usually goes wrong in silence, each with the next move."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import psutil
import torch
from packaging.specifiers import SpecifierSet

from ..conversation.chat_template import check_vocabulary, end_ids
from ..conversation.episode import Conversation, Segment
from ..models import peft_internals, torch_internals, transformers_internals
from ..models.hardware import container_limit
from ..models.loading import BESIDE_WEIGHTS_GIB
from ..policy.actor import Actor
from .alarms import ratio_tolerance

_KNOWN = {"torch": torch_internals, "transformers": transformers_internals, "peft": peft_internals}
# What any language model of the last years finds likely; and texts whose ids must give them back.
_ENGLISH = "The capital of France is Paris, and the capital of Italy is Rome."
_TEXTS = ("go left", "12 against 7", "x=3.14, y=-2", "A cat, a dog and 5 birds.", "naïve café ☂")
# Nats per token that a model's weights may fall short of pure chance by rounding.
_CHANCE = 1.0
# What is looked at: so many contexts, of so many turns where conversations are whole.
_CONTEXTS, _TURNS = 4, 2
# Beside weights: gradients, Adam's two moments, copies of weights and moments to go back to after an error, and of the
# weights before the latest step, in float32.
_COPIES = 7
_GIB = 2**30


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What.
        passed: Whether it is as it should be.
        finding: What was found, and the next move where it is not.
    """

    name: str
    passed: bool
    finding: str


@dataclass(frozen=True)
class Report:
    """What `preflight` found."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether all is as it should be."""
        return all(check.passed for check in self.checks)

    @property
    def failing(self) -> list[str]:
        """Names of the checks that are not."""
        return [check.name for check in self.checks if not check.passed]

    def __str__(self) -> str:
        """One line a check."""
        width = max(len(check.name) for check in self.checks)
        lines = [f"{'ok  ' if c.passed else 'FAIL'} {c.name:{width}}  {c.finding}" for c in self.checks]
        return "\n".join(lines)


class FaultError(Exception):
    """A check's finding that something is not as it should be."""


def preflight(actor: Actor, observations: Sequence[Any] = ()) -> Report:
    """Look an agent over; it is afterwards as it was before.

    Args:
        actor: The agent.
        observations: Some that its environment gives, up to four: then the methods that format them, offer choices
            and extract actions are looked at too. Without any, texts stand in for them.
    """
    with actor.lock, _untouched(actor):
        probes = _Probes(actor, list(observations)[:_CONTEXTS])
        checks = [
            ("versions", _versions),
            ("tokenizer", probes.tokenizer),
            ("language", probes.language),
            ("reply's end", probes.end),
            ("replies", probes.replies),
            ("actions", probes.actions),
            ("caches", probes.caches),
            ("one = many", probes.one_is_many),
            ("ratio", probes.ratio),
            ("memory", probes.memory),
            ("speed", probes.speed),
        ]
        return Report(tuple(_checked(name, check) for name, check in checks))


def _checked(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except Exception as error:  # whatever is wrong is a finding
        return Check(name, False, str(error) if isinstance(error, FaultError) else f"{type(error).__name__}: {error}")


@contextmanager
def _untouched(actor: Actor) -> Iterator[None]:
    """Restores the random state, the priors, the mode and the caches on exit."""
    policy = actor.policy
    drawn, prior, mode = policy.rng.get_state(), dict(policy.choice_prior), (actor.learning, actor.greedy)
    actor.train()
    try:
        yield
    finally:
        policy.rng.set_state(drawn)
        policy.choice_prior.clear()
        policy.choice_prior.update(prior)
        policy.drop_caches()
        if not mode[0]:
            actor.eval(mode[1])


def _versions() -> str:
    found = {library: version(library).split("+")[0] for library in _KNOWN}
    strange = {
        library: installed
        for library, installed in found.items()
        if installed not in SpecifierSet(_KNOWN[library].VERSIONS)
    }
    if strange:
        known = ", ".join(f"{library}{_KNOWN[library].VERSIONS}" for library in strange)
        raise FaultError(f"{strange} have not been tested. Install {known}, or run the tests and see.")
    return ", ".join(f"{library} {installed}" for library, installed in found.items())


class _Probes:
    """Contexts of an agent, and what it says to them."""

    def __init__(self, actor: Actor, observations: list[Any]) -> None:
        self._actor, self._observations = actor, observations
        self._said: list[Segment] = []

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
        ids = torch.tensor([self._actor.chat_template.encode(_ENGLISH)], device=policy.device)
        logits = policy.model(ids)[0][0, :-1].float()
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
        """What is kept equals what is computed anew."""
        policy = self._actor.policy
        kept = self._logprobs(self._replied())
        policy.drop_caches()
        return self._agree(
            kept,
            self._logprobs(self._said),
            "what is kept, and what is computed anew,",
            "Call agent.weights_changed() after editing weights in place.",
        )

    def one_is_many(self) -> str:
        """A batch of one equals a batch of many."""
        # What is kept was computed together, or alone: each must be computed anew.
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
        sampled = [logprob for segment in self._replied() for turn in segment.turns for logprob in turn.reply.logprobs]
        return self._agree(
            torch.tensor(sampled),
            self._logprobs(self._said, gradients=True),
            "sampling and training",
            "Look for layers that draw random numbers, such as dropout.",
        )

    def memory(self) -> str:
        """Learning fits into what is free."""
        model = self._actor.policy.model
        learns = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        needed = _COPIES * 4 * learns + BESIDE_WEIGHTS_GIB * _GIB
        if model.device.type == "cuda":
            free = int(torch.cuda.mem_get_info(model.device)[0])
        else:
            free = int(min(psutil.virtual_memory().available, container_limit() - psutil.Process().memory_info().rss))
        takes = f"training {learns / 1e6:.1f} million weights takes up to {needed / _GIB:.1f} GiB"
        found = f"{takes}, {free / _GIB:.1f} are free"
        if needed > free:
            raise FaultError(f"{found}. Train an adapter instead of all weights, or load a smaller model.")
        return found

    def speed(self) -> str:
        """How fast it acts."""
        actor = self._actor
        conversations = [actor.new_conversation() for _ in range(8)]
        contexts = [
            each.observe(f"Observation {n}: {_ENGLISH}", actor.response_prefix) for n, each in enumerate(conversations)
        ]
        started = time.perf_counter()
        replies = actor.policy.sample(contexts)
        seconds = time.perf_counter() - started
        tokens = sum(len(reply.ids) for reply in replies)
        return f"{len(replies) / seconds:.0f} free-text turns/s, 8 at once, {tokens / len(replies):.0f} tokens each"

    def _replied(self) -> list[Segment]:
        if not self._said:
            raise FaultError("not looked at: there are no replies.")
        return self._said

    def _logprobs(self, segments: list[Segment], gradients: bool = False) -> torch.Tensor:
        with torch.set_grad_enabled(gradients):
            now = self._actor.policy.evaluate(segments)
        return now.logprobs[now.mask].detach().float().cpu()

    def _agree(self, one: torch.Tensor, other: torch.Tensor, what: str, advice: str) -> str:
        tolerance = ratio_tolerance(self._actor.policy.model.pretrained_model.dtype)
        error = (one - other).square().mean().sqrt().item()
        if not error <= tolerance:
            off = f"log-probabilities are off by {error:.2g} nats, where rounding explains {tolerance:.0g}"
            raise FaultError(f"{what} differ: {off}. {advice}")
        return f"{what} agree to {error:.1g} nats"
