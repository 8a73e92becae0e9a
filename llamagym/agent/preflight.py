"""Checks an agent before it learns for faults that raise no error; each finding says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from ..learners.base import Learner
from ..models.private_apis import changed_apis
from .actor import Actor
from .probes import FaultError, OutOfTimeError, Probes

# No check starts later, so that all of them take about half a minute.
_SECONDS = 25.0


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: Name of the check.
        passed: Whether it passed.
        finding: The observed facts and, after a failure, what to do.
        ran: Whether there was time for the check; if not, it counts as passed.
    """

    name: str
    passed: bool
    finding: str
    ran: bool = True


@dataclass(frozen=True)
class Report:
    """The results of `preflight`."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    @property
    def failing(self) -> list[str]:
        """Names of the checks that failed."""
        return [check.name for check in self.checks if not check.passed]

    @property
    def skipped(self) -> list[str]:
        """Names of the checks that were skipped for lack of time."""
        return [check.name for check in self.checks if not check.ran]

    def __str__(self) -> str:
        """Returns one line per check."""
        width = max(len(check.name) for check in self.checks)
        lines = []
        for check in self.checks:
            mark = "FAIL"
            if check.passed:
                mark = "ok  " if check.ran else "--  "
            lines.append(f"{mark} {check.name:{width}}  {check.finding}")
        return "\n".join(lines)


def preflight(
    actor: Actor, learner: Learner[Any], observations: Sequence[Any] = (), seconds: float = _SECONDS
) -> Report:
    """Checks an agent and leaves its state unchanged.

    Args:
        actor: The agent's actor.
        learner: The agent's learner.
        observations: Up to four observations of its environment, with which the methods that format them, offer choices
            and extract actions are checked as well. Empty: texts replace them.
        seconds: Time limit. A slow model's replies are shortened to keep it, and the slow checks that are left when it
            is over are skipped.
    """
    with actor.lock, _unchanged(actor):
        probes = Probes(actor, learner, observations, seconds)
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
            ("speed", probes.speed),
            ("memory", probes.memory),
        ]
        return Report(tuple(_checked(name, check) for name, check in checks))


def _checked(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except OutOfTimeError:
        return Check(name, True, "skipped (no time left)", False)
    except FaultError as fault:
        return Check(name, False, str(fault))
    except Exception as error:  # an unexpected error is a finding, too
        return Check(name, False, f"{type(error).__name__}: {error}")


@contextmanager
def _unchanged(actor: Actor) -> Iterator[None]:
    """While open, the actor samples as in training, by the built-in engine; afterwards its state is as before."""
    policy = actor.policy
    generation = policy.generation
    sampler = policy.sampler
    rng_state = policy.rng.get_state()
    was_learning = actor.is_learning
    was_greedy = actor.is_greedy
    actor.is_learning = True
    actor.is_greedy = False
    # The checks are about the learner's own numbers.
    policy.sampler = None
    try:
        with policy.measuring(), policy.backbone.transformer.temporary_packing():
            yield
    finally:
        policy.rng.set_state(rng_state)
        policy.generation = generation
        policy.sampler = sampler
        actor.is_learning = was_learning
        actor.is_greedy = was_greedy


def _versions() -> str:
    broken = changed_apis()
    if broken:
        raise FaultError(
            f"Private APIs have changed, and the optimizations that use them are off: {'; '.join(broken)}. Install "
            "versions that this version of llamagym was tested with, or a later llamagym."
        )
    return ", ".join(f"{library} {version(library)}" for library in ("torch", "transformers", "peft"))
