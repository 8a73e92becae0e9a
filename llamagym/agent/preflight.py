"""Looks over an agent before it learns: what usually goes wrong in silence, each with the next move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from ..models.private_apis import changed_apis
from .collector import LearningActor
from .probes import FaultError, OutOfTimeError, Probes

# Of half a minute that checks may take, what is left once the last of them has begun.
_SECONDS = 25.0


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What.
        passed: Whether it is as it should be.
        finding: What was found, and the next move where it is not.
        looked_at: Whether there was time to look; if not, it counts as passed.
    """

    name: str
    passed: bool
    finding: str
    looked_at: bool = True


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

    @property
    def left_out(self) -> list[str]:
        """Names of the checks that there was no time for."""
        return [check.name for check in self.checks if not check.looked_at]

    def __str__(self) -> str:
        """One line a check."""
        width = max(len(check.name) for check in self.checks)
        lines = [
            f"{('ok  ' if c.looked_at else '--  ') if c.passed else 'FAIL'} {c.name:{width}}  {c.finding}"
            for c in self.checks
        ]
        return "\n".join(lines)


def preflight(actor: LearningActor, observations: Sequence[Any] = (), seconds: float = _SECONDS) -> Report:
    """Look an agent over; it is afterwards as it was before.

    Args:
        actor: The agent.
        observations: Some that its environment gives, up to four: then the methods that format them, offer choices
            and extract actions are looked at too. Without any, texts stand in for them.
        seconds: A slow model's replies are shortened to fit in; when these are over, what takes a while is left out,
            and said to be.
    """
    with actor.lock, _untouched(actor):
        probes = Probes(actor, observations, seconds)
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
        return Check(name, True, "not looked at: the model is so slow that there is no time left", False)
    except Exception as error:  # whatever is wrong is a finding
        return Check(name, False, str(error) if isinstance(error, FaultError) else f"{type(error).__name__}: {error}")


@contextmanager
def _untouched(actor: LearningActor) -> Iterator[None]:
    """Restores the random state, the mode, the longest reply, packed weights; all else is measured apart."""
    policy = actor.policy
    generation = policy.generation
    drawn, mode = policy.rng.get_state(), (actor.learning, actor.greedy)
    actor.train()
    try:
        with policy.measuring(), policy.temporary_copies():
            yield
    finally:
        policy.rng.set_state(drawn)
        policy.generation = generation
        if not mode[0]:
            actor.eval(mode[1])


def _versions() -> str:
    if broken := changed_apis():
        raise FaultError(
            f"These private APIs have changed, and what they make faster is switched off: {'; '.join(broken)}. Install "
            "versions that this version of llamagym was tested with, or a later llamagym."
        )
    return ", ".join(f"{library} {version(library)}" for library in ("torch", "transformers", "peft"))
