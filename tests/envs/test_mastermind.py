"""Mastermind: answers are true, remembering them always finds the code, random guesses rarely do."""

from __future__ import annotations

import re

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from llamagym import ConfigError
from llamagym.envs.mastermind import Mastermind, compare


def play(env: Mastermind, seed: int) -> float:
    """Guesses the first code that is consistent with all answers until it is found; returns the sum of rewards."""
    said, _ = env.reset(seed=seed)
    left, done, total = list(env.codes), False, 0.0
    while not done:
        assert env.observation_space.contains(said)
        guess = left[0]
        said, reward, done, truncated, info = env.step(env.codes.index(guess))
        assert not truncated
        total += reward
        answer = re.fullmatch(r"(.+): (.+)\. \d guess(es)? left\.", said)
        assert answer
        assert answer[2] == guess
        near = answer[1].split().count("black"), answer[1].split().count("white")
        left = [code for code in left if compare(guess, code) == near and code != guess]
    assert info["success"]
    return total


def finds(guess: str, seed: int) -> bool:
    env = Mastermind()
    env.reset(seed=seed)
    return env.step(env.codes.index(guess))[1] == 1.0


def test_remembering_always_finds_the_code():
    assert all(play(Mastermind(), seed) == 1.0 for seed in range(200))


def test_random_guesses_rarely_find_the_code():
    rng, env, found = np.random.default_rng(0), Mastermind(), 0.0
    for seed in range(300):
        env.reset(seed=seed)
        done = False
        while not done:
            _, reward, done, _, _ = env.step(rng.integers(64))
        found += reward
    assert found / 300 == pytest.approx(1 - (63 / 64) ** 6, abs=0.05)


def test_reward_consistent_rewards_each_consistent_guess():
    env = Mastermind(reward_consistent=True)
    assert [play(env, seed) for seed in range(50)] == pytest.approx([1.0] * 50)

    env.reset(seed=0)
    hidden = next(code for code in env.codes if finds(code, seed=0))
    wrong = next(code for code in env.codes if compare(code, hidden) == (0, 0))
    same = env.codes.index(wrong)
    # The first guess is free; the same one again fits no answer; the code fits both of them and ends the game.
    rewards = [env.step(action)[1] for action in (same, same, env.codes.index(hidden))]
    assert rewards == pytest.approx([1 / 6, 0, 4 / 6])


def test_draws_all_codes_and_repeats_them_by_seed():
    def code(seed: int) -> int:
        env = Mastermind(pegs=2, colours=2, tries=4)
        env.reset(seed=seed)
        return next(guess for guess in range(4) if env.step(guess)[1] == 1.0)

    codes = [code(seed) for seed in range(64)]
    assert set(codes) == set(range(4))
    assert codes == [code(seed) for seed in range(64)]


@pytest.mark.parametrize(
    ("guess", "code", "near"),
    [
        ("red green blue", "red green blue", (3, 0)),
        ("red green blue", "green blue red", (0, 3)),
        ("red red red", "red green blue", (1, 0)),
        ("blue red red", "red green blue", (0, 2)),
        ("yellow yellow yellow", "red green blue", (0, 0)),
    ],
)
def test_each_color_counts_once(guess, code, near):
    assert compare(guess, code) == near


def test_passes_the_checks_of_gymnasium():
    check_env(Mastermind(), skip_render_check=True)


@pytest.mark.parametrize("wrong", [{"pegs": 0}, {"colours": 1}, {"colours": 7}, {"tries": 0}])
def test_rejects_a_game_without_possibilities_or_guesses(wrong):
    with pytest.raises(ConfigError, match="expected at least"):
        Mastermind(**wrong)
