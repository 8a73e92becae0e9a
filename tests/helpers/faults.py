"""Environments that fail, or return something else than they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.helpers.agents import CountdownEnv


class BrokenError(Exception):
    """A user's own error."""


class StoppedError(KeyboardInterrupt):
    """Ctrl-C, told apart from that of whoever runs the tests."""


def returns(position: int | None, junk: Any) -> Callable[[Any], Any]:
    """A fault: junk instead of one of the things that a method returns, or of all."""

    def corrupted(usual: Any) -> Any:
        return junk if position is None else (*usual[:position], junk, *usual[position + 1 :])

    return corrupted


def raises(error: type[BaseException]) -> Callable[[Any], Any]:
    """A fault: an error."""

    def raised(usual: Any) -> Any:
        raise error

    return raised


FAULTS: dict[str, list[Callable[[Any], Any]]] = {
    "reset": [
        *[returns(0, junk) for junk in ("x", None, [1, 2], -(10**30))],
        *[returns(1, junk) for junk in (None, 5)],
        *[returns(None, junk) for junk in (None, 5, (1, 2, 3))],
    ],
    "step": [
        *[returns(0, junk) for junk in ("x", None, [1, 2])],
        *[returns(1, junk) for junk in ("x", None, float("nan"), float("inf"), [1.0, 2.0], 10**400)],
        *[returns(position, junk) for position in (2, 3) for junk in ("no", None, np.array([True, False]))],
        *[returns(4, junk) for junk in (None, 5)],
        *[returns(None, junk) for junk in (None, 5, (1, 2, 3))],
    ],
    "close": [],
}
for of_method in FAULTS.values():
    of_method += [raises(BrokenError), raises(StoppedError)]


class FaultyEnv(CountdownEnv):
    """At a call of one of its methods and from then on there is a fault."""

    def __init__(self, method: str, call: int, fault: Callable[[Any], Any]) -> None:
        super().__init__()
        self.faulty, self.call, self.fault, self.calls = method, call, fault, Counter[str]()

    def answer(self, method: str, usual: Any) -> Any:
        self.calls[method] += 1
        return self.fault(usual) if method == self.faulty and self.calls[method] > self.call else usual

    def reset(self, **given: Any) -> Any:
        return self.answer("reset", super().reset(**given))

    def step(self, action: Any) -> Any:
        return self.answer("step", super().step(action))

    def close(self) -> None:
        self.answer("close", None)
