"""The examples that share `script.py`, each from its command line to its summary, with a tiny model."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import shutil
import signal
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import script

from llamagym import Agent, ConfigError
from llamagym.conversation.masking import Masking
from llamagym.envs.babyai import make_babyai
from tests.tiny import tiny_base_model, tiny_tokenizer

pytestmark = pytest.mark.long

SMALL = "--num-envs 4 --batch-size 32 --mini-batch-size 16 --eval-every 1"
FACTS = "seed model dtype episodes turns updates minutes turns_per_second peak_memory_gib baselines settings"
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
    """What every summary promises."""
    assert set(FACTS.split()) <= set(summary)
    for when in TIMES:
        assert 0.0 <= summary[f"expected_return_{when}"] <= summary["baselines"]["optimum"]
        assert not math.isnan(summary[f"standard_error_{when}"])
    assert summary["updates"] == len(metrics) >= 1
    assert all({"minutes", "expected_return", "standard_error"} <= set(line) for line in metrics)
    assert 0 <= summary["baselines"]["random"] < summary["baselines"]["optimum"]


def test_frozenlake_is_scored_exactly(start, tmp_path, capsys):
    summary, metrics = start("frozenlake", "--episodes 30")
    check(summary, metrics)
    assert summary["episodes"] == 30
    assert summary["updates"] > 1
    assert summary["expected_return_after"] == metrics[-1]["expected_return"]
    assert summary["expected_return_before"] != summary["expected_return_after"]
    assert (tmp_path / "run" / "agent").is_dir()
    assert "goal" in capsys.readouterr().out


def test_five_hands_say_why_the_batch_did_not_fill(start, capsys):
    summary, metrics = start("blackjack", "--episodes 5", sizes="")
    assert "a batch needs 768 that differ or 8192 in all" in capsys.readouterr().out
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


def test_memory_can_begin_with_episodes_that_are_shown(start):
    pytest.importorskip("minigrid", reason="the extra minigrid is not installed")
    level = "--level MiniGrid-MemoryS7-v0 --context episode --max-steps 12"
    summary, metrics = start("babyai", f"{level} --shown-episodes 8 --episodes 6 --eval-episodes 2 --batch-size 24")
    check(summary, metrics)
    assert 8 * 5 <= summary["warm_start"]["samples"] <= 8 * 9
    with pytest.raises(ConfigError, match="knows memory levels only"):
        start("babyai", "--shown-episodes 8")


def test_babyai_replies_name_the_thing_that_the_mission_names():
    agent = importlib.import_module("babyai").BabyAIAgent
    view = "You see: red ball ahead 2; purple key left 3. Ahead: free."
    named = f"{view} Mission: go to a purple key."
    choices = agent.get_action_choices(agent, named)
    assert choices == ["purple key left", "purple key right", "purple key ahead"]
    assert [agent.extract_action(agent, choice) for choice in choices] == [0, 1, 2]
    # MemoryS7's mission names nothing, and in a conversation it is said once.
    for unnamed in (view, f"{view} Mission: go to the matching object at the end of the hallway."):
        assert agent.get_action_choices(agent, unnamed) == ["left", "right", "ahead"]


@pytest.mark.parametrize("name", ["guess_number", "mastermind"])
def test_games_of_memory_see_the_whole_conversation(name: str, start):
    summary, metrics = start(name, "--episodes 10 --eval-episodes 2 --batch-size 24")
    check(summary, metrics)
    assert metrics[0]["turns_per_episode"] > 3
    assert summary["expected_return_after"] in (0.0, 0.5, 1.0)


def test_mastermind_can_begin_with_games_that_are_shown(start):
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
    assert 8 <= summary["warm_start"]["samples"] <= 48


def test_taxi_offers_what_changes_something_and_knows_the_shortest_ways(start):
    taxi = importlib.import_module("taxi")
    env, words = taxi.make(), taxi.Driver.get_action_choices(None, 0)
    possible = Masking(lambda word: taxi.Driver.extract_action(None, word)).possible
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


def test_blackjack_is_saved_when_it_is_stopped_and_goes_on_from_there(model, tmp_path, monkeypatch):
    blackjack, log = importlib.import_module("blackjack"), tmp_path / "run" / "metrics.jsonl"
    options = "--episodes 60 --num-envs 2 --batch-size 8 --mini-batch-size 8 --checkpoint-every 2 --device cpu"
    folders = f"--model {model} --run-dir {tmp_path / 'run'} --checkpoint-dir {tmp_path / 'saved'}"
    command = ["blackjack.py", *options.split(), *folders.split()]
    evaluate, left = blackjack.expected_return, [4]

    def stopping(policy):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(policy)

    monkeypatch.setattr(blackjack, "expected_return", stopping)
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as exit_:
        blackjack.main()
    assert exit_.value.code == 130
    before = log.read_text()
    assert before.count("\n") == 3
    log.write_text(before + "lost\n")
    monkeypatch.setattr(sys, "argv", [*command, "--resume"])
    blackjack.main()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["episodes"] >= 60
    lines = log.read_text().splitlines()
    assert lines[:3] == before.splitlines()
    assert summary["updates"] == len(lines) > 3
    # It is over when it is resumed once more.
    blackjack.main()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["updates"] == len(lines)


def test_a_run_that_goes_on_keeps_its_beginning(tmp_path):
    scores, warm_starts = iter([(0.5, 0.1), (0.9, 0.2)]), iter([{"samples": 3.0}, {"samples": 4.0}])

    def begin(resume, checkpoint_dir=None):
        args = argparse.Namespace(resume=resume, checkpoint_dir=checkpoint_dir)
        agent = Mock(spec=Agent)
        return script.begin(args, tmp_path / "run", agent, lambda greedy: next(scores), lambda: next(warm_starts))

    # It was stopped before it had begun.
    assert begin(resume=True, checkpoint_dir=tmp_path) == ({"samples": 3.0}, (0.5, 0.1))
    assert begin(resume=True) == ({"samples": 3.0}, (0.5, 0.1))
    assert begin(resume=False) == ({"samples": 4.0}, (0.9, 0.2))


@pytest.mark.parametrize("scored", [True, False])
def test_what_a_warm_start_taught_is_there_before_the_first_checkpoint(start, tmp_path, monkeypatch, scored):
    options = f"--shown-games 8 --episodes 6 --eval-episodes 2 --batch-size 24 --checkpoint-dir {tmp_path / 'saved'}"
    whole, _ = start("mastermind", options)
    shutil.rmtree(tmp_path / "saved")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    if not scored:
        (tmp_path / "run" / "before.json").unlink()
    monkeypatch.setattr(Agent, "sft_from_jsonl", lambda *args, **kwargs: pytest.fail("it started warm again"))
    resumed, _ = start("mastermind", f"{options} --resume")
    times = {"minutes", "processor_minutes", "turns_per_second", "peak_memory_gib", "settings"}
    assert {key: resumed[key] for key in resumed.keys() - times} == {key: whole[key] for key in whole.keys() - times}


def test_a_warm_start_is_not_repeated_when_its_run_left_a_checkpoint_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(script.checkpoints, "newest", lambda folder: folder / "some")
    args = argparse.Namespace(resume=True, checkpoint_dir=tmp_path)
    agent = Mock(spec=Agent)
    begun = script.begin(args, tmp_path / "run", agent, lambda greedy: (0.5, 0.1), lambda: pytest.fail("it did"))
    assert begun == (None, (0.5, 0.1))


def test_blackjack_is_saved_when_it_fails_and_goes_on_from_there(model, tmp_path, monkeypatch):
    blackjack = importlib.import_module("blackjack")
    options = "--episodes 20 --num-envs 2 --batch-size 8 --mini-batch-size 8 --checkpoint-every 100 --device cpu"
    folders = f"--model {model} --run-dir {tmp_path / 'run'} --checkpoint-dir {tmp_path / 'saved'}"
    command = ["blackjack.py", *options.split(), *folders.split()]
    make_vec = blackjack.gym.make_vec

    class Jammed(blackjack.gym.vector.VectorWrapper):
        """Deals for ten steps."""

        steps = 0

        def step(self, actions):
            self.steps += 1
            if self.steps > 10:
                raise RuntimeError("out of cards")
            return self.env.step(actions)

    monkeypatch.setattr(blackjack.gym, "make_vec", lambda *args, **options: Jammed(make_vec(*args, **options)))
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(RuntimeError, match="out of cards"):
        blackjack.main()
    (saved,) = (tmp_path / "saved").iterdir()
    assert saved == blackjack.checkpoints.path_of(tmp_path / "saved", 20)
    monkeypatch.setattr(blackjack.gym, "make_vec", make_vec)
    monkeypatch.setattr(sys, "argv", [*command, "--resume"])
    blackjack.main()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["episodes"] >= 20
    assert summary["turns"] > 20
