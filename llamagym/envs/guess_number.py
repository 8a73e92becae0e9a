"""Guess a number: each guess is answered with too low or too high, so whoever remembers the answers halves the range.

The optimum is bisection. An agent that sees the last answer only cannot follow it: the game needs memory.
"""

from __future__ import annotations

import string
from typing import Any

import gymnasium

from ..errors import ConfigError


class GuessTheNumber(gymnasium.Env[str, Any]):
    """A number from 1 to `largest` is to be found in `tries` guesses.

    The reward is 1 for finding it, else 0. The last guess ends the game, so nothing is ever truncated.
    `info["success"]` says whether the number was found.

    Attributes:
        largest: The largest number that is thought of.
        tries: Guesses in a game.

    >>> env = GuessTheNumber()
    >>> env.reset(seed=0)[0]
    'I am thinking of a number from 1 to 16. You have 5 guesses.'
    >>> env.step(8)
    ('8 is too low. 4 guesses left.', 0.0, False, False, {'success': False})
    """

    def __init__(self, largest: int = 16, tries: int = 5) -> None:
        """Make a game.

        Raises:
            ConfigError: There is nothing to guess, or no guess.
        """
        if largest < 2 or tries < 1:
            raise ConfigError(f"largest={largest} and tries={tries}; expected at least 2 numbers and 1 guess.")
        self.largest, self.tries = largest, tries
        self.action_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(largest, start=1)
        self.observation_space = gymnasium.spaces.Text(100, charset=string.printable)
        self._number = self._left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Think of another number."""
        super().reset(seed=seed, options=options)
        self._number, self._left = int(self.np_random.integers(1, self.largest + 1)), self.tries
        return f"I am thinking of a number from 1 to {self.largest}. You have {self.tries} guesses.", {"success": False}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer a guess."""
        self._left -= 1
        found = action == self._number
        answer = "right" if found else "too low" if action < self._number else "too high"
        guesses = f"{self._left} guess{'' if self._left == 1 else 'es'} left"
        return f"{action} is {answer}. {guesses}.", float(found), found or not self._left, False, {"success": found}
