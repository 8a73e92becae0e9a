"""Mastermind: a code of colours is to be found; each guess is answered with how near it came.

An answer says little by itself: only together with all earlier guesses and answers does it tell which codes are left.
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
    """A code of `pegs` colours, which may repeat, is to be found in `tries` guesses.

    The reward is 1 for finding it, else 0, unless it is asked for guess by guess. The last guess ends the game, so
    nothing is ever truncated.
    Answers are pegs, as in the game: black for each colour in place, white for each more that stands elsewhere.
    `info["success"]` says whether the code was found. An action is the number of a code in `codes`.

    Attributes:
        codes: All codes, as words.
        tries: Guesses in a game.

    >>> env = Mastermind()
    >>> env.reset(seed=0)[0]
    'A code of 3 colours out of red, green, blue, yellow. Black is a colour in place, white one elsewhere. 6 guesses.'
    >>> env.codes[20], env.step(20)[0]
    ('green green red', 'black: green green red. 5 guesses left.')
    """

    def __init__(self, pegs: int = 3, colours: int = 4, tries: int = 6, reward_consistent: bool = False) -> None:
        """Make a game.

        Args:
            pegs: Colours in a code.
            colours: How many there are.
            tries: Guesses in a game.
            reward_consistent: Whether to reward, for learning, every guess that no answer so far rules out with
                1 / `tries`, and finding the code with what is then left of 1.

        Raises:
            ConfigError: There is no code, nothing to choose from, or no guess.
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
        self._code, self._left = self.codes[0], 0
        self._answers: list[tuple[str, tuple[int, int]]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Think of another code."""
        super().reset(seed=seed, options=options)
        self._code, self._left = self.codes[int(self.np_random.integers(len(self.codes)))], self.tries
        self._answers = []
        return self._task, {"success": False}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer a guess."""
        self._left -= 1
        guess = self.codes[action]
        in_place, elsewhere = answer = compare(guess, self._code)
        found = guess == self._code
        reward = self._graded(guess, found) if self._reward_consistent else float(found)
        self._answers.append((guess, answer))
        pegs = " ".join(["black"] * in_place + ["white"] * elsewhere) or "no pegs"
        said = f"{pegs}: {guess}. {_guesses(self._left)} left."
        return said, reward, found or not self._left, False, {"success": found}

    def _graded(self, guess: str, found: bool) -> float:
        fits = all(compare(earlier, guess) == answer for earlier, answer in self._answers)
        return fits * (1 + found * self._left) / self.tries


def _guesses(count: int) -> str:
    return f"{count} guess{'' if count == 1 else 'es'}"


def compare(guess: str, code: str) -> tuple[int, int]:
    """How many colours of a guess stand where they do in the code, and how many more stand elsewhere in it.

    >>> compare("red red blue", "red blue green"), compare("red red blue", "blue blue red")
    ((1, 1), (0, 2))
    """
    guessed, hidden = guess.split(), code.split()
    in_place = sum(map(str.__eq__, guessed, hidden))
    return in_place, (Counter(guessed) & Counter(hidden)).total() - in_place
