"""A question that takes tool calls: who asks a small database the right things, in turn, can answer it.

All is text, as with the tools of a language model: a call, its result, another call that the result suggests, and the
answer. The facts are drawn again for each episode, so nothing that a model knows already helps.
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
    """A call, or in one of four cases an answer, with a word of its kind: one that the conversation holds, if any."""
    verb, words = rng.choice([("find", (*PEOPLE, *CITIES))] * 3 + [("answer", COLOURS)])
    read = dict.fromkeys(re.findall(r"\w+", conversation))
    return f"{verb} {rng.choice([word for word in read if word in words] or words)}"


class AddressBook(gymnasium.Env[str, str]):
    """Asks which colour the houses have in the city where somebody lives.

    An action is a line of text: `find NAME` asks the database for a person or a city, `answer COLOUR` ends the episode.
    Anything else takes a turn and says how calls are written. Every fact names another person or city too, which leads
    nowhere. The reward is 1 for the right answer, else 0; the last turn ends the episode, so nothing is ever truncated.
    `info["success"]` says whether the answer was right.

    Attributes:
        turns: Calls and the answer together, at most.

    >>> env = AddressBook()
    >>> env.reset(seed=0)[0]
    'Which colour are the houses where Laura lives?'
    >>> env.step("find Laura")[0], env.step("find Tokyo")[0]
    ('Laura lives in Tokyo, next to Anna.', 'Houses in Tokyo are black. It is near London.')
    >>> env.step("answer black")[1:3]
    (1.0, True)
    """

    def __init__(self, turns: int = 5) -> None:
        """Make a task.

        Raises:
            ConfigError: `turns` are too few for two calls and the answer.
        """
        if turns < 3:
            raise ConfigError(f"turns={turns}; two calls and the answer take at least 3.")
        self.turns = turns
        self.action_space = gymnasium.spaces.Text(200, min_length=0, charset=string.printable)
        self.observation_space = gymnasium.spaces.Text(200, charset=string.printable)
        self._facts: dict[str, str] = {}
        self._answer, self._left = "", 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Ask about another person, with other facts."""
        super().reset(seed=seed, options=options)
        person = str(self.np_random.choice(PEOPLE))
        home = {name: str(self.np_random.choice(CITIES)) for name in PEOPLE}
        colour = {city: str(self.np_random.choice(COLOURS)) for city in CITIES}
        self._facts = {name: f"{name} lives in {home[name]}, next to {self._other(PEOPLE, name)}." for name in PEOPLE}
        self._facts |= {
            city: f"Houses in {city} are {colour[city]}. It is near {self._other(CITIES, city)}." for city in CITIES
        }
        self._answer, self._left = colour[home[person]], self.turns
        return f"Which colour are the houses where {person} lives?", {"success": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a call or the answer."""
        self._left -= 1
        verb, _, name = action.strip().partition(" ")
        is_answer = verb == "answer" and bool(name)
        is_right = is_answer and name == self._answer
        if is_answer:
            said = "That is right." if is_right else "That is wrong."
        elif verb == "find" and name:
            said = self._facts.get(name, f"Nothing is known of {name[:50]}.")
        else:
            said = "Say find and a name, or answer and a colour."
        return said, float(is_right), is_answer or not self._left, False, {"success": is_right}

    def _other(self, names: tuple[str, ...], name: str) -> str:
        return str(self.np_random.choice([other for other in names if other != name]))
