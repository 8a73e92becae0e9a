"""The examples, each from its command line to its summary, with a tiny model."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import signal
import sys

import numpy as np
import pytest

from llamagym import Agent, ConfigError
from llamagym.agent.text_interface import ActionMasks
from llamagym.envs.babyai import make_babyai
from llamagym.training.saved_run import SavedRun
from tests.helpers import ROOT
from tests.helpers.tiny import tiny_base_model, tiny_tokenizer

pytestmark = pytest.mark.long

SMALL = "--num-envs 4 --batch-size 32 --mini-batch-size 16 --eval-every 1"
FACTS = "seed dtype episodes turns updates minutes baselines settings"
TIMES = ("before", "after", "greedy")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny model, as one loads a model of one's own."""
    folder = tmp_path_factory.mktemp("model")
    tiny_base_model("llama").save_pretrained(folder)
    tiny_tokenizer("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def start(model, tmp_path, monkeypatch):
    """Runs an example; returns its summary and its metrics, a dictionary an update."""
    monkeypatch.delenv("WANDB_PROJECT", raising=False)

    def run(name, options, sizes=SMALL):
        command = f"{name}.py {sizes} {options} --model {model} --device cpu --run-dir {tmp_path / 'run'}"
        monkeypatch.setattr(sys, "argv", command.split())
        importlib.import_module(name).main()
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return json.loads((tmp_path / "run" / "summary.json").read_text()), [json.loads(line) for line in lines]

    return run


def check(summary, metrics):
    """Checks the facts that every summary must contain."""
    assert set(FACTS.split()) <= set(summary)
    for when in TIMES:
        assert 0.0 <= summary[f"expected_return_{when}"] <= summary["baselines"]["optimum"]
    assert summary["updates"] == len(metrics) >= 1
    assert all({"minutes", "expected_return"} <= set(line) for line in metrics)
    assert 0 <= summary["baselines"]["random"] < summary["baselines"]["optimum"]
    assert summary["standard_error_after"] >= 0.0


def test_frozenlake_is_scored_exactly(start, tmp_path, capsys):
    summary, metrics = start("frozenlake", "--episodes 30")
    check(summary, metrics)
    assert summary["episodes"] == 30
    assert summary["updates"] > 1
    assert summary["expected_return_after"] == metrics[-1]["expected_return"]
    assert summary["expected_return_before"] != summary["expected_return_after"]
    assert (tmp_path / "run" / "agent").is_dir()
    printed = capsys.readouterr().out
    assert "goal" in printed
    assert f"Report: {tmp_path / 'run' / 'report.html'}" in printed
    assert (tmp_path / "run" / "report.html").is_file()


def test_logs_why_five_hands_filled_no_batch(start, caplog):
    summary, metrics = start("blackjack", "--episodes 5", sizes="")
    assert "a batch needs 768 that differ or 8192 in all" in caplog.text
    assert summary["updates"] == len(metrics) == 0


def test_frozenlake_tells_what_lies_around():
    agent = importlib.import_module("frozenlake").FrozenLakeAgent
    assert agent.format_observation(None, np.int64(0)) == "Row 1, column 1: left wall, down ice, right ice, up wall"
    assert agent.format_observation(None, 14) == "Row 4, column 3: left ice, down wall, right goal, up ice"
    assert agent.format_observation(None, 6) == "Row 2, column 3: left hole, down ice, right hole, up ice"


def test_cartpole_ends_when_time_is_up(start):
    summary, metrics = start("cartpole", "--episodes 100000 --eval-episodes 2 --minutes 0.1")
    check(summary, metrics)
    assert summary["episodes"] < 100000
    assert 0.1 <= summary["minutes"] < 1
    assert 15 < summary["baselines"]["random"] < 30


def test_what_cartpole_is_told_is_enough_to_balance():
    cartpole = importlib.import_module("cartpole")
    env, told, agent = cartpole.make(), set(), object.__new__(cartpole.CartPoleAgent)
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        steps, done = 0, False
        while not done:
            told.add(agent.format_observation(observation))
            push = np.dot([0.5, 0.5, 1.0, 0.1], cartpole.rounded(observation)) > 0
            observation, _, terminated, truncated, _ = env.step(int(push))
            done, steps = terminated or truncated, steps + 1
        assert steps == 500
    assert len(told) < 100
    assert "cart centre, moving nowhere; pole upright, falling right 20" in told


def test_babyai_counts_successes(start):
    pytest.importorskip("minigrid", reason="the extra minigrid is not installed")
    summary, metrics = start("babyai", "--episodes 6 --eval-episodes 2")
    check(summary, metrics)
    # Of two episodes none, one or both succeed: the reward's share for speed is not in the score.
    assert summary["expected_return_after"] in (0.0, 0.5, 1.0)


@pytest.mark.parametrize(("level", "limit"), [("MiniGrid-MemoryS7-v0", 10), ("MiniGrid-MemoryS17Random-v0", 50)])
def test_the_player_of_memory_sees_the_object_and_goes_to_its_like(level, limit):
    pytest.importorskip("minigrid", reason="the extra minigrid is not installed")
    make_player = importlib.import_module("memory_player").make_player
    env = make_babyai(level)
    for seed in range(100):
        (said, _), turns, over = env.reset(seed=seed), 0, False
        maze = env.unwrapped
        play, seen = make_player(env, seed), False
        while not over:
            seen = seen or maze.agent_sees(1, maze.height // 2 - 1)
            said, _, over, _, info = env.step(play(said))
            turns += 1
        assert info["success"]
        assert seen
        assert turns < limit


def samples_of_warm_start(capsys) -> int:
    """Number of samples that the warm start printed."""
    return int(re.search(r"Warm start: .*samples (\d+)", capsys.readouterr().out)[1])


def test_memory_can_begin_with_episodes_that_are_shown(start, tmp_path, capsys):
    pytest.importorskip("minigrid", reason="the extra minigrid is not installed")
    level = "--level MiniGrid-MemoryS7-v0 --context episode --max-steps 12"
    summary, metrics = start("babyai", f"{level} --shown-episodes 8 --episodes 6 --eval-episodes 2 --batch-size 24")
    check(summary, metrics)
    assert 8 * 5 <= samples_of_warm_start(capsys) <= 8 * 9
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ConfigError, match="knows memory levels only"):
        start("babyai", "--shown-episodes 8")


def test_babyai_replies_name_the_thing_that_the_mission_names():
    agent = importlib.import_module("babyai").BabyAIAgent
    view = "You see: red ball ahead 2; purple key left 3. Ahead: free."
    named = f"{view} Mission: go to a purple key."
    choices = agent.get_action_choices(agent, named)
    assert choices == ["purple key left", "purple key right", "purple key ahead"]
    assert [agent.extract_action(agent, choice) for choice in choices] == [0, 1, 2]
    # MemoryS7's mission names no object, and a conversation contains it only once.
    for unnamed in (view, f"{view} Mission: go to the matching object at the end of the hallway."):
        assert agent.get_action_choices(agent, unnamed) == ["left", "right", "ahead"]


@pytest.mark.parametrize("name", ["guess_number", "mastermind"])
def test_games_of_memory_see_the_whole_conversation(name: str, start):
    summary, metrics = start(name, "--episodes 10 --eval-episodes 2 --batch-size 24")
    check(summary, metrics)
    assert metrics[0]["turns_per_episode"] > 3
    assert summary["expected_return_after"] in (0.0, 0.5, 1.0)


def test_mastermind_can_begin_with_games_that_are_shown(start, capsys):
    mastermind = importlib.import_module("mastermind")
    for seed in range(50):
        env, rewards, over = mastermind.Mastermind(reward_consistent=True), 0.0, False
        said, _ = env.reset(seed=seed)
        play = mastermind.Player(env, seed)
        while not over:
            said, reward, over, _, _ = env.step(play(said))
            rewards += reward
        # Each guess fits all answers, and the last one is the code.
        assert rewards == pytest.approx(1)
    summary, metrics = start("mastermind", "--shown-games 8 --episodes 6 --eval-episodes 2 --batch-size 24")
    check(summary, metrics)
    assert 8 <= samples_of_warm_start(capsys) <= 48


def test_taxi_offers_what_changes_something_and_knows_the_shortest_ways(start):
    taxi = importlib.import_module("taxi")
    env, words = taxi.make(), taxi.Driver.get_action_choices(None, 0)
    possible = ActionMasks(lambda word: taxi.Driver.extract_action(None, word)).possible
    env.reset(seed=0)
    for state in range(0, 500, 7):
        for number, action in enumerate(taxi.ACTIONS):
            env.unwrapped.s = state
            after = env.unwrapped.step(number)[0]
            assert (action in possible(words, env.unwrapped.action_mask(state))) == (after != state)
    assert taxi.best_return() == pytest.approx(7.93)
    summary, metrics = start("taxi", "--episodes 2 --eval-episodes 2")
    assert summary["updates"] == len(metrics) >= 1
    # Without walking into walls, at worst 200 steps.
    assert -200 <= summary["expected_return_after"] <= 20


def test_text_world_learns_and_is_tested_on_different_games(start, tmp_path):
    pytest.importorskip("textworld", reason="the extra textworld is not installed")
    games = tmp_path / "games"
    options = f"--game locked_door --games 1 --games-dir {games} --max-steps 5 --eval-episodes 2"
    summary, metrics = start("text-world", f"--episodes 12 {options}")
    check(summary, metrics)
    assert {path.name for path in games.glob("*.z8")} == {"locked_door-seed0.z8", "locked_door-seed10000.z8"}


@pytest.fixture
def killed_after(monkeypatch):
    """Returns a function that sends SIGINT at a given call of a method."""

    def kill(owner, name, call):
        method, left = getattr(owner, name), [call]

        def wrapper(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    return kill


def test_blackjack_interrupted_and_resumed_is_the_run_without_an_interrupt(start, killed_after, tmp_path, monkeypatch):
    sizes = "--num-envs 2 --batch-size 8 --mini-batch-size 8"
    whole, whole_metrics = start("blackjack", "--episodes 60", sizes)
    shutil.rmtree(tmp_path / "run")
    blackjack = importlib.import_module("blackjack")
    killed_after(blackjack, "expected_return", 5)
    with pytest.raises(SystemExit) as exit_:
        start("blackjack", "--episodes 60", sizes)
    assert exit_.value.code == 130
    assert not (tmp_path / "run" / "summary.json").exists()
    summary, metrics = start("blackjack", "--episodes 60 --resume", sizes)
    assert (summary["episodes"], summary["turns"]) == (whole["episodes"], whole["turns"])
    assert summary["expected_return_before"] == whole["expected_return_before"]
    returns = [line["expected_return"] for line in metrics]
    # The checkpoint of the interrupt drops caches, and recomputed numbers are rounded differently.
    assert returns == pytest.approx([line["expected_return"] for line in whole_metrics], abs=1e-5)


def test_a_resumed_run_neither_repeats_its_warm_start_nor_its_first_score(start, killed_after, tmp_path, monkeypatch):
    options = "--shown-games 8 --episodes 6 --eval-episodes 2 --batch-size 24"
    whole, _ = start("mastermind", options)
    shutil.rmtree(tmp_path / "run")
    # The first checkpoint: nothing but the warm start and the first score has been done.
    killed_after(SavedRun, "write", 1)
    with pytest.raises(SystemExit):
        start("mastermind", options)
    monkeypatch.setattr(Agent, "sft_from_jsonl", lambda *args, **kwargs: pytest.fail("the warm start was repeated"))
    resumed, _ = start("mastermind", f"{options} --resume")
    times = {"minutes", "settings"}
    assert {name: resumed[name] for name in resumed.keys() - times} == {
        name: whole[name] for name in whole.keys() - times
    }


def test_examples_import_documented_modules_only():
    """Examples import only modules that are on the API page, or public names of `llamagym`."""
    root = ROOT
    api = (root / "docs" / "api.md").read_text(encoding="utf-8")
    undocumented = []
    for path in sorted((root / "examples").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            inner = [module for module in modules if module.startswith("llamagym.")]
            undocumented += [(path.name, module) for module in inner if f"::: {module}" not in api]
    assert undocumented == []


def test_the_flagship_and_its_options_are_short():
    examples = ROOT / "examples"
    assert len((examples / "blackjack.py").read_text().splitlines()) <= 80
    assert len((examples / "script.py").read_text().splitlines()) <= 100
