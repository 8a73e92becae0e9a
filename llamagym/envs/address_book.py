"""A tool-use task: a question that two queries to a small database answer, the second based on the first.

Calls, results and the answer are text, as with the tools of a language model. The facts are random in each episode, so
a model's prior knowledge does not help.
"""

from __future__ import annotations

import random
import re
import string
from typing import Any

import gymnasium

from ..errors import ConfigError

PEOPLE = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Julia", "Kevin", "Laura", "Peter")
CITIES = ("Berlin", "Boston", "Cairo", "Chicago", "Dublin", "London", "Madrid", "Moscow", "Paris", "Rome", "Tokyo")
COLOURS = ("black", "blue", "brown", "green", "grey", "orange", "pink", "purple", "red", "white", "yellow")


def random_call(rng: random.Random, conversation: str) -> str:
    """Returns a random call, or an answer with probability 1/4.

    Its argument is a matching word of the conversation; without one, any matching word.
    """
    verb, words = rng.choice([("find", (*PEOPLE, *CITIES))] * 3 + [("answer", COLOURS)])
    distinct_words = dict.fromkeys(re.findall(r"\w+", conversation))
    candidates = [word for word in distinct_words if word in words]
    return f"{verb} {rng.choice(candidates or words)}"


class AddressBook(gymnasium.Env[str, str]):
    """Asks for the color of the houses in the city where a person lives.

    An action is a line of text: `find NAME` queries a person or a city, `answer COLOR` ends the episode. Any other
    text takes a turn, and the observation explains the format. Every fact also names an irrelevant person or city. The
    reward is 1 for the right answer, else 0. Episodes terminate after the last turn and are never truncated.
    `info["success"]` is True after the right answer.

    Attributes:
        turns: Maximum number of calls, including the answer.

    >>> env = AddressBook()
    >>> env.reset(seed=0)[0]
    'Which colour are the houses where Laura lives?'
    >>> env.step("find Laura")[0], env.step("find Tokyo")[0]
    ('Laura lives in Tokyo, next to Anna.', 'Houses in Tokyo are black. It is near London.')
    >>> env.step("answer black")[1:3]
    (1.0, True)
    """

    def __init__(self, turns: int = 5) -> None:
        """Creates the environment.

        Raises:
            ConfigError: `turns` is less than 3, too few for two calls and the answer.
        """
        if turns < 3:
            raise ConfigError(f"turns={turns}; two calls and the answer take at least 3.")
        self.turns = turns
        self.action_space = gymnasium.spaces.Text(200, min_length=0, charset=string.printable)
        self.observation_space = gymnasium.spaces.Text(200, charset=string.printable)
        self._facts: dict[str, str] = {}
        self._answer = ""
        self._turns_left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Draws new facts and a new question."""
        super().reset(seed=seed, options=options)
        person = str(self.np_random.choice(PEOPLE))
        home = {name: str(self.np_random.choice(CITIES)) for name in PEOPLE}
        color = {city: str(self.np_random.choice(COLOURS)) for city in CITIES}
        self._facts = {}
        for name in PEOPLE:
            self._facts[name] = f"{name} lives in {home[name]}, next to {self._other(PEOPLE, name)}."
        for city in CITIES:
            self._facts[city] = f"Houses in {city} are {color[city]}. It is near {self._other(CITIES, city)}."
        self._answer = color[home[person]]
        self._turns_left = self.turns
        return f"Which colour are the houses where {person} lives?", {"success": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Runs a call, or checks the answer."""
        self._turns_left -= 1
        verb, _, name = action.strip().partition(" ")
        is_answer = verb == "answer" and bool(name)
        is_right = is_answer and name == self._answer
        if is_answer:
            observation = "That is right." if is_right else "That is wrong."
        elif verb == "find" and name:
            observation = self._facts.get(name, f"Nothing is known of {name[:50]}.")
        else:
            observation = "Say find and a name, or answer and a colour."
        terminated = is_answer or not self._turns_left
        return observation, float(is_right), terminated, False, {"success": is_right}

    def _other(self, names: tuple[str, ...], name: str) -> str:
        """Draws one of the names other than `name`."""
        return str(self.np_random.choice([other for other in names if other != name]))
