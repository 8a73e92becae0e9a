"""Guess the number: answers are true, bisection always wins, and the last answer alone does not suffice."""

from __future__ import annotations

import re

import pytest
from gymnasium.utils.env_checker import check_env

from llamagym import ConfigError
from llamagym.envs.guess_number import GuessTheNumber


def play(env: GuessTheNumber, seed: int, remembers: bool) -> float:
    """Bisects based on the texts; without memory, on the last answer only."""
    said, _ = env.reset(seed=seed)
    low, high, done = 1, env.largest, False
    while not done:
        assert env.observation_space.contains(said)
        guess = (low + high) // 2
        said, reward, done, truncated, info = env.step(guess)
        assert not truncated
        assert info["success"] == (reward == 1.0)
        answer = re.fullmatch(r"(\d+) is (too low|too high|right)\. \d guess(es)? left\.", said)
        assert answer
        assert int(answer[1]) == guess
        low, high = (low, high) if remembers else (1, env.largest)
        if answer[2] == "too low":
            low = guess + 1
        elif answer[2] == "too high":
            high = guess - 1
    return reward


def test_bisection_always_finds_the_number():
    assert all(play(GuessTheNumber(), seed, remembers=True) == 1.0 for seed in range(64))


def test_without_memory_most_numbers_are_missed():
    found = [play(GuessTheNumber(), seed, remembers=False) for seed in range(64)]
    assert sum(found) / 64 < 0.6


def test_draws_all_numbers_and_repeats_them_by_seed():
    def number(seed: int) -> int:
        env = GuessTheNumber(largest=8, tries=8)
        env.reset(seed=seed)
        return next(guess for guess in range(1, 9) if env.step(guess)[1] == 1.0)

    numbers = [number(seed) for seed in range(64)]
    assert set(numbers) == set(range(1, 9))
    assert numbers == [number(seed) for seed in range(64)]


def test_passes_the_checks_of_gymnasium():
    check_env(GuessTheNumber(), skip_render_check=True)


@pytest.mark.parametrize("wrong", [{"largest": 1}, {"tries": 0}])
def test_rejects_a_game_without_possibilities_or_guesses(wrong):
    with pytest.raises(ConfigError, match="expected at least"):
        GuessTheNumber(**wrong)
