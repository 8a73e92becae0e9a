"""Guess a number: the answer to each guess is "too low" or "too high".

The optimal strategy is bisection. It needs memory: an agent that sees only the last answer cannot follow it.
"""

from __future__ import annotations

import string
from typing import Any

import gymnasium

from ..errors import ConfigError


class GuessTheNumber(gymnasium.Env[str, Any]):
    """A game in which a number from 1 to `largest` must be found in `tries` guesses.

    The reward is 1 for finding it, else 0. Episodes terminate after the last guess and are never truncated.
    `info["success"]` is True once the number is found.

    Attributes:
        largest: The largest possible number.
        tries: Number of guesses in a game.

    >>> env = GuessTheNumber()
    >>> env.reset(seed=0)[0]
    'I am thinking of a number from 1 to 16. You have 5 guesses.'
    >>> env.step(8)
    ('8 is too low. 4 guesses left.', 0.0, False, False, {'success': False})
    """

    def __init__(self, largest: int = 16, tries: int = 5) -> None:
        """Creates the environment.

        Raises:
            ConfigError: `largest` is less than 2, or `tries` less than 1.
        """
        if largest < 2 or tries < 1:
            raise ConfigError(f"largest={largest} and tries={tries}; expected at least 2 numbers and 1 guess.")
        self.largest = largest
        self.tries = tries
        self.action_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(largest, start=1)
        self.observation_space = gymnasium.spaces.Text(100, charset=string.printable)
        self._number = 0
        self._guesses_left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Draws a new number."""
        super().reset(seed=seed, options=options)
        self._number = int(self.np_random.integers(1, self.largest + 1))
        self._guesses_left = self.tries
        return f"I am thinking of a number from 1 to {self.largest}. You have {self.tries} guesses.", {"success": False}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answers a guess."""
        self._guesses_left -= 1
        found = action == self._number
        answer = "too low" if action < self._number else "too high"
        if found:
            answer = "right"
        plural = "" if self._guesses_left == 1 else "es"
        observation = f"{action} is {answer}. {self._guesses_left} guess{plural} left."
        return observation, float(found), found or not self._guesses_left, False, {"success": found}
