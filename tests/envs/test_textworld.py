"""TextWorld as an environment: games by seed, rewards, termination and truncation, and safe commands."""

from __future__ import annotations

import multiprocessing
import re
import sys

import gymnasium
import pytest

from llamagym import ConfigError
from llamagym.envs.textworld import TextWorldEnv, make_games

pytestmark = pytest.mark.long

BACK = {"go north": "go south", "go south": "go north", "go east": "go west", "go west": "go east"}


@pytest.fixture(scope="module")
def coins(tmp_path_factory):
    """Returns the paths of two coin-collector games."""
    pytest.importorskip("textworld", reason="the extra textworld is not installed")
    return make_games("coin_collector", [1, 2], tmp_path_factory.mktemp("games"))


def explore(observation) -> str:
    """Chooses a command from the observation: takes, unlocks and opens things, and never goes back."""
    commands = observation["admissible_commands"]
    for wanted in ("take coin", "take key", "unlock door with key", "open door"):
        if wanted in commands:
            return wanted
    ways = [command for command in commands if command.startswith("go ")]
    return next((way for way in ways if way != BACK.get(observation["last_command"])), ways[0])


def play(env, seed, rule):
    """Plays an episode; returns its rewards, its last step, and its observations."""
    observation, info = env.reset(seed=seed)
    rewards, seen, terminated, truncated = [], [], False, False
    while not (terminated or truncated):
        assert env.observation_space.contains(observation)
        seen.append(observation)
        observation, reward, terminated, truncated, info = env.step(rule(observation))
        rewards.append(reward)
    return rewards, (terminated, truncated, info), seen


def test_observations_suffice_to_find_the_coin(coins):
    env = TextWorldEnv(coins, max_steps=10)
    for seed in (0, 1):
        rewards, (terminated, truncated, info), seen = play(env, seed, explore)
        # Four rooms to go through, and the coin.
        assert rewards == [0.0, 0.0, 0.0, 0.0, 1.0]
        assert (terminated, truncated, info["won"], info["lost"]) == (True, False, True, False)
        assert info["game"] == str(coins[seed])
        assert seen[0]["last_command"] == ""
    env.close()


def test_the_limit_truncates(coins):
    env = TextWorldEnv(coins, max_steps=3)
    rewards, (terminated, truncated, info), seen = play(env, 0, lambda _: "look")
    assert rewards == [0.0] * 3
    assert (terminated, truncated, info["won"]) == (False, True, False)
    # Looking changes nothing, and so is not the last command.
    assert [observation["last_command"] for observation in seen] == [""] * 3
    env.close()


def test_text_is_the_output_of_the_game(coins):
    env = TextWorldEnv(coins)
    observation, _ = env.reset(seed=0)
    # What to do, where one is, and a way out: neither the banner before nor the status line after it.
    printed = observation["text"].splitlines()
    assert re.fullmatch(r"-= \w+ =-", printed[1])
    assert all(re.match(r"\w.*[.!?]$", line) for line in (printed[0], *printed[2:]))
    assert env.step("dance")[0]["text"] == "That's not a verb I recognise."
    env.close()


def answers(games, commands):
    """Returns the game's answer to each command."""
    env = TextWorldEnv(games)
    env.reset(seed=0)
    said = [env.step(command)[0]["text"] for command in commands]
    env.close()
    return said


def test_no_command_hangs_or_crashes_the_interpreter(coins):
    written = ["\\s", "\\d go", "look\x00", "\x10", "take \x12 key", "\x1b[A", "look\n\x00"]
    commands = [command for each in written for command in (each, "dance")]
    # Nothing in this process could stop it.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        said = pool.apply_async(answers, (coins, commands)).get(timeout=120)
    # Nothing of a command is left to be taken for the next one.
    assert said[1::2] == ["That's not a verb I recognise."] * len(written)


def test_only_a_commands_first_line_counts(coins):
    env = TextWorldEnv(coins)
    env.reset(seed=0)
    assert env.step("dance\ninventory")[0]["text"] == "That's not a verb I recognise."
    assert "carrying" in env.step("inventory")[0]["text"]
    env.close()


@pytest.mark.parametrize("written", ["save", "look. SAVE", "script", "script on", "transcripts", "restore"])
def test_no_command_reaches_files(coins, written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = TextWorldEnv(coins)
    env.reset(seed=0)
    assert env.step(written)[0]["text"] == "I beg your pardon?"
    assert not list(tmp_path.iterdir())
    env.close()


def test_a_seed_picks_the_game_and_later_episodes_vary(coins):
    env = TextWorldEnv(coins)
    assert [env.reset(seed=seed)[1]["game"] for seed in (0, 1, 2, 3)] == [str(coins[seed % 2]) for seed in range(4)]
    runs = []
    for _ in range(2):
        env.reset(seed=5)
        runs.append([env.reset()[1]["game"] for _ in range(12)])
    assert runs[0] == runs[1]
    assert set(runs[0]) == {str(game) for game in coins}
    env.close()


def test_games_are_made_once(coins, monkeypatch):
    made = coins[0].stat().st_mtime_ns
    monkeypatch.setitem(sys.modules, "textworld", None)
    assert make_games("coin_collector", [1, 2], coins[0].parent) == coins
    assert coins[0].stat().st_mtime_ns == made
    with pytest.raises(ConfigError, match=r"pip install 'llamagym\[textworld\]'"):
        make_games("coin_collector", [3], coins[0].parent)


def test_the_locked_door_opens(tmp_path):
    pytest.importorskip("textworld", reason="the extra textworld is not installed")
    env = TextWorldEnv(make_games("locked_door", [0], tmp_path), max_steps=10)
    rewards, (terminated, truncated, info), seen = play(env, 0, explore)
    assert rewards == [0.0, 0.0, 0.0, 1.0]
    assert (terminated, truncated, info["won"]) == (True, False, True)
    assert "open door" not in seen[1]["admissible_commands"]
    env.close()


def test_expands_tilde_and_relative_paths_of_games(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=f"{tmp_path}/g.z8 does not exist"):
        TextWorldEnv(["~/g.z8"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path}/g.z8 does not exist"):
        TextWorldEnv(["g.z8"])


def test_rejects_invalid_arguments(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'coin_collector'"):
        make_games("coin_colector", [0], tmp_path)
    with pytest.raises(ConfigError, match="No games"):
        TextWorldEnv([])
    with pytest.raises(ConfigError, match=r"g\.z8 does not exist"):
        TextWorldEnv([tmp_path / "g.z8"])


def test_a_step_needs_a_reset(coins):
    with pytest.raises(gymnasium.error.ResetNeeded):
        TextWorldEnv(coins).step("look")


def test_the_reward_is_the_change_of_the_score(tmp_path):
    textworld = pytest.importorskip("textworld", reason="the extra textworld is not installed")
    maker = textworld.GameMaker()
    room = maker.new_room()
    maker.set_player(room)
    for name in ("lamp", "book"):
        thing = maker.new("o", name=name)
        room.add(thing)
        taken = textworld.generator.game.Event(conditions={maker.new_fact("in", thing, maker.inventory)})
        maker.quests.append(textworld.generator.game.Quest(win_events=[taken]))
    game = maker.compile(str(tmp_path / "two.z8"))
    env = TextWorldEnv([game])
    env.reset(seed=0)
    steps = [env.step(command) for command in ("take lamp", "look", "take book")]
    assert [(reward, terminated, info["score"]) for _, reward, terminated, _, info in steps] == [
        (1.0, False, 1),
        (0.0, False, 1),
        (1.0, True, 2),
    ]
    env.close()
