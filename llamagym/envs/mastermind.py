"""Mastermind: a code of colors must be found; the answer to each guess says how close it is.

Only all guesses and answers together show which codes remain possible, so the game needs memory.
"""

from __future__ import annotations

import string
from collections import Counter
from itertools import product
from typing import Any

import gymnasium

from ..errors import ConfigError

COLOURS = ("red", "green", "blue", "yellow", "orange", "purple")


class Mastermind(gymnasium.Env[str, Any]):
    """A game in which a code of `pegs` colors, which may repeat, must be found in `tries` guesses.

    An action is the index of a code in `codes`. The answer has a black peg for each color in the right place, and a
    white peg for each further color in a wrong place. The reward is 1 for finding the code, else 0, unless
    `reward_consistent` is set. Episodes terminate after the last guess and are never truncated. `info["success"]` is
    True once the code is found.

    Attributes:
        codes: All codes, as words.
        tries: Number of guesses in a game.

    >>> env = Mastermind()
    >>> env.reset(seed=0)[0]
    'A code of 3 colours out of red, green, blue, yellow. Black is a colour in place, white one elsewhere. 6 guesses.'
    >>> env.codes[20], env.step(20)[0]
    ('green green red', 'black: green green red. 5 guesses left.')
    """

    def __init__(self, pegs: int = 3, colours: int = 4, tries: int = 6, reward_consistent: bool = False) -> None:
        """Creates the environment.

        Args:
            pegs: Number of colors in a code.
            colours: Number of colors to choose from.
            tries: Number of guesses in a game.
            reward_consistent: Whether every guess that is consistent with all answers so far is rewarded with
                1 / `tries`, and finding the code in addition with 1 / `tries` for each guess left.

        Raises:
            ConfigError: `pegs` or `tries` is less than 1, or `colours` is out of range.
        """
        if pegs < 1 or not 2 <= colours <= len(COLOURS) or tries < 1:
            raise ConfigError(
                f"pegs={pegs}, colours={colours} and tries={tries}; expected at least 1 peg, 2 to {len(COLOURS)} "
                "colours and at least 1 guess."
            )
        self.codes = tuple(" ".join(code) for code in product(COLOURS[:colours], repeat=pegs))
        self.tries = tries
        self.action_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(len(self.codes))
        self.observation_space = gymnasium.spaces.Text(200, charset=string.printable)
        self._task = (
            f"A code of {pegs} colours out of {', '.join(COLOURS[:colours])}. "
            f"Black is a colour in place, white one elsewhere. {_guesses(tries)}."
        )
        self._reward_consistent = reward_consistent
        self._code = self.codes[0]
        self._guesses_left = 0
        self._answers: list[tuple[str, tuple[int, int]]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Draws a new code."""
        super().reset(seed=seed, options=options)
        self._code = self.codes[int(self.np_random.integers(len(self.codes)))]
        self._guesses_left = self.tries
        self._answers = []
        return self._task, {"success": False}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answers a guess."""
        self._guesses_left -= 1
        guess = self.codes[action]
        answer = compare(guess, self._code)
        in_place, elsewhere = answer
        found = guess == self._code
        reward = self._consistency_reward(guess, found) if self._reward_consistent else float(found)
        self._answers.append((guess, answer))
        pegs = " ".join(["black"] * in_place + ["white"] * elsewhere) or "no pegs"
        observation = f"{pegs}: {guess}. {_guesses(self._guesses_left)} left."
        return observation, reward, found or not self._guesses_left, False, {"success": found}

    def _consistency_reward(self, guess: str, found: bool) -> float:
        is_consistent = all(compare(earlier, guess) == answer for earlier, answer in self._answers)
        return is_consistent * (1 + found * self._guesses_left) / self.tries


def _guesses(count: int) -> str:
    return f"{count} guess{'' if count == 1 else 'es'}"


def compare(guess: str, code: str) -> tuple[int, int]:
    """Returns the number of colors in the right place, and the number of further colors in a wrong place.

    >>> compare("red red blue", "red blue green"), compare("red red blue", "blue blue red")
    ((1, 1), (0, 2))
    """
    guess_colors = guess.split()
    code_colors = code.split()
    in_place = sum(map(str.__eq__, guess_colors, code_colors))
    common = (Counter(guess_colors) & Counter(code_colors)).total()
    return in_place, common - in_place
