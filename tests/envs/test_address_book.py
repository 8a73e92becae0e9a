"""The address book: the answer follows from the facts only, and any text is an action."""

from __future__ import annotations

import re

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from llamagym import ConfigError
from llamagym.envs.address_book import CITIES, COLOURS, PEOPLE, AddressBook


def ask(env: AddressBook, seed: int) -> float:
    """Makes two calls based on the observations, then gives the answer."""
    question, info = env.reset(seed=seed)
    assert info == {"success": False}
    person = re.fullmatch(r"Which colour are the houses where (\w+) lives\?", question)[1]
    said, *_ = env.step(f"find {person}")
    assert env.observation_space.contains(said)
    city = re.match(rf"{person} lives in (\w+), next to \w+\.", said)[1]
    said, *_ = env.step(f"find {city}")
    color = re.match(rf"Houses in {city} are (\w+)\.", said)[1]
    _, reward, terminated, truncated, info = env.step(f"answer {color}")
    assert terminated
    assert not truncated
    assert info["success"] == (reward == 1.0)
    return reward


def test_two_queries_answer_every_question():
    env = AddressBook(turns=3)
    assert all(ask(env, seed) == 1.0 for seed in range(100))


def test_random_calls_rarely_answer_the_question():
    rng, env, right = np.random.default_rng(0), AddressBook(), 0.0
    for seed in range(1_000):
        said, done = env.reset(seed=seed)[0], False
        seen = [word for word in re.findall(r"\w+", said) if word in PEOPLE]
        while not done:
            word = str(rng.choice(seen))
            said, reward, done, _, _ = env.step(f"{rng.choice(['find', 'answer'])} {word}")
            seen += [word for word in re.findall(r"\w+", said) if word in (*PEOPLE, *CITIES, *COLOURS)]
            right += reward
    assert 0 < right / 1_000 < 0.1


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("", "Say find and a name, or answer and a colour."),
        ("find", "Say find and a name, or answer and a colour."),
        ("answer ", "Say find and a name, or answer and a colour."),
        ("search Anna", "Say find and a name, or answer and a colour."),
        ("find Nobody", "Nothing is known of Nobody."),
        ("  find Zoe and Tom ", "Nothing is known of Zoe and Tom."),
    ],
)
def test_invalid_texts_take_a_turn(action: str, said: str):
    env = AddressBook()
    env.reset(seed=0)
    assert env.step(action) == (said, 0.0, False, False, {"success": False})


def test_the_last_turn_terminates():
    env = AddressBook(turns=3)
    env.reset(seed=0)
    assert [env.step("find Anna")[2] for _ in range(3)] == [False, False, True]


def test_a_wrong_answer_terminates():
    env = AddressBook()
    env.reset(seed=0)
    assert env.step("answer nothing")[:4] == ("That is wrong.", 0.0, True, False)


def test_facts_differ_from_one_episode_to_the_next_and_seeds_repeat_them():
    env = AddressBook()

    def facts(seed: int) -> list[str]:
        env.reset(seed=seed)
        return [env.step(f"find {name}")[0] for name in PEOPLE[:4]]

    assert facts(0) == facts(0)
    assert facts(0) != facts(1)


def test_passes_the_checks_of_gymnasium():
    check_env(AddressBook(), skip_render_check=True)


def test_rejects_too_few_turns():
    with pytest.raises(ConfigError, match="two calls and the answer take at least 3"):
        AddressBook(turns=2)
