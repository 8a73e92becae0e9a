"""TextArena's games through Gymnasium, with the real package and without a network."""

from __future__ import annotations

import random
import re
import socket

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from llamagym import evaluate
from llamagym.envs.textarena import TextArenaEnv
from llamagym.errors import ConfigError
from tests.helpers.agents import WordAgent, make_agent

pytest.importorskip("textarena", reason="needs the extra textarena")
pytestmark = [
    pytest.mark.long,
    # Of the package's own, as it is imported.
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a game went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def bisect(env: gymnasium.Env, seed: int) -> tuple[list[str], list[float], dict]:
    """Plays GuessTheNumber by bisection."""
    observation, info = env.reset(seed=seed)
    low, high = map(int, re.search(r"between (\d+) and (\d+)", observation).groups())
    said, rewards, over = [observation], [], False
    while not over:
        guess = (low + high) // 2
        observation, reward, over, truncated, info = env.step(f"I guess [{guess}].")
        assert not truncated
        low, high = (guess + 1, high) if "higher" in observation else (low, guess - 1)
        said.append(observation)
        rewards.append(reward)
    return said, rewards, info


def test_bisection_wins_and_the_reward_comes_with_the_end():
    env = TextArenaEnv("GuessTheNumber-v0")
    for seed in range(5):
        said, rewards, info = bisect(env, seed)
        assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
        assert len(rewards) <= 5
        assert info["success"] is True
        assert "correct" in info["reason"]
        assert said[-1].endswith(info["reason"])


def test_an_observation_is_the_new_text_or_the_whole_game():
    new, whole = TextArenaEnv("GuessTheNumber-v0"), TextArenaEnv("GuessTheNumber-v0", repeats=True)
    for env in (new, whole):
        env.reset(seed=0)
    assert new.step("[1]")[0] == "The target number is higher."
    repeated = whole.step("[1]")[0]
    assert "You are playing Guess The Number" in repeated
    assert "[1]" in repeated
    assert repeated.endswith("The target number is higher.")
    # A new game does not begin with the old one.
    assert "The target number is higher." not in whole.reset(seed=0)[0]


def test_a_second_invalid_move_in_a_row_loses():
    env = TextArenaEnv("GuessTheNumber-v0")
    env.reset(seed=0)
    observation, reward, over, _, info = env.step("hello")
    assert "invalid move" in observation
    assert (reward, over, info["success"]) == (0.0, False, False)
    _, _, over, _, info = env.step("hello")
    assert over
    assert info["invalid_move"] is True
    assert info["success"] is False
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("[1]")


@pytest.mark.parametrize(
    "game", ["GuessTheNumber-v0", "TowerOfHanoi-v0", "Minesweeper-v0-small", "FrozenLake-v0-random"]
)
def test_only_seed_and_actions_determine_an_episode(game):
    def played(disturb: bool) -> list[str]:
        env, other = TextArenaEnv(game), TextArenaEnv("GuessTheNumber-v0")
        said = [env.reset(seed=3)[0]]
        for move in ("[1]", "[A C]", "[2 2]"):
            if disturb:
                random.seed(99)
                np.random.seed(99)
                other.reset(seed=5)
            observation, _, is_over, _, _ = env.step(move)
            said.append(observation)
            if is_over:
                break
        return said

    assert played(disturb=False) == played(disturb=True)


def test_the_global_random_numbers_are_left_alone():
    random.seed(0)
    np.random.seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist()
    env = TextArenaEnv("Minesweeper-v0-small")
    env.reset(seed=1)
    env.step("[0 0]")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_passes_the_checks_of_gymnasium():
    check_env(TextArenaEnv("TowerOfHanoi-v0"), skip_render_check=True)


@pytest.mark.parametrize(
    ("game", "message"),
    [
        ("GuessNumber-v0", "no game 'GuessNumber-v0'"),
        ("TicTacToe-v0", "not for one player"),
        ("TwentyQuestions-v0", "cannot be made: ValueError: OpenRouter API key"),
    ],
)
def test_error_explains_why_a_game_cannot_be_played(game, message, monkeypatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=message):
        TextArenaEnv(game)


class Guesser(WordAgent):
    def get_action_choices(self, observation):
        return [f"[{number}]" for number in (1, 5, 9)]


def test_an_agent_plays_many_games_at_once():
    result = evaluate(make_agent(Guesser), lambda: TextArenaEnv("GuessTheNumber-v0"), episodes=4, num_envs=2, seed=0)
    assert len(result.returns) == 4
    # A wrong guess ends with a share of the reward: a number guessed before is not a valid move.
    assert all(0 <= value <= 1 for value in result.returns)
