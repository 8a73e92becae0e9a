"""The commands of the command line with a tiny model: train, eval, play and report."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import llamagym
from llamagym import Agent, ConfigError, PPOConfig
from llamagym.__main__ import main
from llamagym.cli import commands
from llamagym.cli.generic import Wording, describe, generic_agent, part_names
from llamagym.cli.prompts import agent_class, read_wording
from llamagym.models.registry import EMBEDDED_NAME
from llamagym.training.evaluation import EVALUATION_SEED
from llamagym.training.tracking import default_tracker
from tests.helpers.tiny import tiny_base_model, tiny_tokenizer

LAKE = "FrozenLake-v1"
WORDS = """
system_prompt: You cross a lake.
observation: You stand on field {observation}.
actions: [left, down, right, up]
"""
CODE = """
from llamagym import Agent

class Walker(Agent):
    def get_system_prompt(self):
        return "Walk."

    def format_observation(self, observation):
        return f"Field {observation}"

    def get_action_choices(self, observation):
        return ["left", "down", "right", "up"]

    def extract_action(self, response):
        return ["left", "down", "right", "up"].index(response)
"""


class Spaced(gym.Env):
    """An environment with any spaces."""

    def __init__(self, observed: spaces.Space, acted: spaces.Space) -> None:
        self.observation_space, self.action_space = observed, acted

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_base_model("llama").save_pretrained(folder)
    tiny_tokenizer("llama").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns a function that runs a command line and returns its exit status, stdout and stderr."""

    def command(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["llamagym", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return command


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory) -> Path:
    """Trains an agent with its own wording; returns the folder of the run."""
    folder = tmp_path_factory.mktemp("run")
    words = tmp_path_factory.mktemp("words") / "lake.yaml"
    words.write_text(WORDS)
    sizes = ["--turns", "400", "--num-envs", "16", "--eval-episodes", "4", "--batch-size", "128"]
    command = ["llamagym", "train", LAKE, *sizes, "--model", model, "--run-dir", str(folder), "--prompt", str(words)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    words.unlink()
    return folder


def test_the_version_is_printed(run):
    assert run("--version") == (0, f"llamagym {llamagym.__version__}\n", "")


class Emojis(gym.Env):
    """Observations and renderings contain characters that the terminals of Windows lack."""

    metadata: ClassVar = {"render_modes": ["ansi"]}
    observation_space, action_space = spaces.Text(9, charset="\u2603\u2192"), spaces.Discrete(4)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        return "\u2603", {}

    def step(self, action):
        return "\u2192", 1.0, True, False, {}

    def render(self) -> str:
        return "\u2603\ud83d"


@pytest.mark.parametrize("encoding", ["cp1252", "utf-8"])
def test_escapes_characters_that_the_output_cannot_encode(encoding, trained, monkeypatch):
    spec = gym.envs.registration.EnvSpec("Emojis-v0", entry_point=Emojis, disable_env_checker=True)
    monkeypatch.setitem(gym.registry, "Emojis-v0", spec)
    printed, errors = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setattr(sys, "stderr", errors)
    for words in (["play", trained, "Emojis-v0"], ["eval", trained, "\u2603-v0"], ["models"]):
        monkeypatch.setattr(sys, "argv", ["llamagym", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code or words[0] == "eval"
    printed.flush()
    errors.flush()
    stdout = printed.buffer.getvalue().decode(encoding)
    snowman = "\u2603" if encoding == "utf-8" else r"\u2603"
    assert f"{snowman}\\ud83d" in stdout
    assert "return 1 in 1 turns" in stdout
    assert "smollm2-135m" in stdout
    assert f"{snowman}-v0" in errors.buffer.getvalue().decode(encoding)


def test_eval_play_and_report_read_the_run_of_train(trained, run):
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    transcripts = [json.loads(line) for line in (trained / "transcripts.jsonl").read_text().splitlines()]
    assert rows
    assert transcripts[0]["system"] == "You cross a lake."
    assert transcripts[0]["turns"][0]["read"] == "You stand on field 0."
    assert sorted(choice for choice, _ in transcripts[0]["turns"][0]["choices"]) == ["down", "left", "right", "up"]
    assert "mean return after" in (trained / "agent" / "README.md").read_text()

    status, printed, _ = run("eval", trained, "--episodes", 6)
    assert status == 0
    header, agent, chance = printed.splitlines()
    assert "95% interval" in header
    assert agent.split()[0] == "agent"
    assert chance.split()[0] == "random"
    assert agent.split()[-1] == chance.split()[-1] == "6"
    # The agent's own folder will do, and another environment with the same spaces.
    words = ["--prompt", trained / "prompt.yaml"]
    assert run("eval", trained / "agent", "FrozenLake8x8-v1", *words, "--episodes", 2)[0] == 0
    assert run("eval", trained / "agent", LAKE, *words, "--episodes", 6)[1] == printed

    status, printed, _ = run("play", trained, "--seed", 3, "--episodes", 2)
    assert status == 0
    assert printed.startswith("You cross a lake.\n")
    assert "You stand on field 0.\n> " in printed
    assert "SFFF" in printed
    assert "Episode 2: return" in printed

    assert run("report", trained)[0] == 0
    assert (trained / "report.html").is_file()


@pytest.mark.long
def test_a_person_plays_in_the_agents_place(trained, run, monkeypatch, tmp_path):
    words = tmp_path / "stdin"
    words.write_text("north\n" + "left\n" * 100)
    with words.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        status, printed, _ = run("play", trained, "--human", "--seed", 0)
    assert status == 0
    assert "'north' is not one of" in printed
    assert "Episode 1: return" in printed
    with (tmp_path / "stdin").open("w+") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert run("play", trained, "--human")[0] == 1


@pytest.mark.long
def test_a_run_is_not_overwritten_and_can_be_resumed(trained, model, run):
    command = ["train", LAKE, "--num-envs", 16, "--eval-episodes", 2, "--model", model, "--run-dir", trained]
    command += ["--batch-size", 128, "--turns", 600]
    status, _, stderr = run(*command)
    assert status == 1
    assert "holds a run. Pass --resume" in stderr
    before = (trained / "metrics.jsonl").read_text()
    status, printed, _ = run(*command, "--resume", "--prompt", trained / "prompt.yaml")
    assert status == 0
    # 400 before, and so many more as whole steps of 16 environments.
    assert "1,008 turns" in printed
    after = (trained / "metrics.jsonl").read_text()
    assert after.startswith(before)
    assert len(after) > len(before)


def test_resuming_with_another_prompt_is_rejected_before_anything_is_written(trained, model, run, tmp_path):
    (tmp_path / "other.yaml").write_text(WORDS + "\n")
    command = ["train", LAKE, "--turns", 600, "--model", model, "--run-dir", trained, "--resume"]
    status, _, stderr = run(*command, "--prompt", tmp_path / "other.yaml")
    assert status == 1
    assert "differs from" in stderr
    assert (trained / "prompt.yaml").read_text() == WORDS


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("--num-envs", 8, "num_envs"),
        ("--batch-size", 64, "learner.batch_size"),
        ("--seed", 3, "seed"),
        ("--context", "episode", "context"),
    ],
)
def test_resuming_with_other_options_is_rejected_before_anything_is_played(
    trained, model, run, monkeypatch, option, value, name
):
    def play(*args, **kwargs):
        raise AssertionError("an evaluation was played")

    monkeypatch.setattr(llamagym.training, "evaluate", play)
    options = {"--num-envs": 16, "--batch-size": 128, option: value}
    command = ["train", LAKE, "--turns", 600, "--model", model, "--run-dir", trained, "--resume"]
    command += ["--prompt", trained / "prompt.yaml", *(word for pair in options.items() for word in pair)]
    status, _, stderr = run(*command)
    assert status == 1
    assert f"is a checkpoint of a run with other options: {name}" in stderr


def test_rejects_a_run_dir_with_other_files(run, model, tmp_path):
    (tmp_path / "config.json").write_text("mine")
    status, _, stderr = run("train", LAKE, "--turns", 10, "--model", model, "--run-dir", tmp_path)
    assert status == 1
    assert "contains files that llamagym did not write ('config.json')" in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "mine"


def test_rejects_unwritable_folders_before_anything_is_played(run, model, tmp_path, monkeypatch):
    monkeypatch.setattr(llamagym.training, "evaluate", lambda *args, **kwargs: pytest.fail("it was played"))
    default_tracker(tmp_path / "run", {}).close()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "agent").mkdir()
    (tmp_path / "run" / "agent" / "mine.txt").write_text("mine")
    (tmp_path / "checkpoints" / "checkpoint-000000000012").mkdir(parents=True)
    command = ["train", LAKE, "--turns", 10, "--model", model, "--run-dir"]
    status, _, stderr = run(*command, tmp_path / "run")
    assert status == 1
    assert "holds files ('mine.txt') and no manifest of this version" in stderr
    status, _, stderr = run(*command, tmp_path / "new", "--checkpoint-dir", tmp_path / "checkpoints")
    assert status == 1
    assert "holds checkpoints of an earlier run" in stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["p.y:ml", "q.y\\z", "words.txt"])
def test_a_prompt_with_another_ending_is_named(run, model, tmp_path, name):
    (tmp_path / name).write_text(WORDS)
    prompt = ["--prompt", tmp_path / name, "--run-dir", tmp_path / "run"]
    status, _, stderr = run("train", LAKE, "--turns", 10, "--model", model, *prompt)
    assert status == 1
    assert "is neither YAML nor Python" in stderr


@pytest.mark.long
def test_an_agent_in_python_is_trained_and_found_again(model, run, tmp_path):
    code = tmp_path / "walker.py"
    code.write_text(CODE)
    folder = tmp_path / "run"
    command = ["train", LAKE, "--episodes", 4, "--num-envs", 2, "--eval-episodes", 2, "--model", model]
    assert run(*command, "--prompt", code, "--run-dir", folder)[0] == 0
    status, _, stderr = run("eval", folder, "--episodes", 2, "--trust")
    assert status == 0
    assert f"--trust: executing {folder / 'prompt.py'}" in stderr
    assert "pass --trust" in run("eval", folder, "--episodes", 2)[2]
    # Elsewhere, nothing says which environment or class it is of.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / "agent").rename(elsewhere / "agent")
    assert "Pass its id as well" in run("eval", elsewhere / "agent")[2]
    status, _, stderr = run("eval", elsewhere / "agent", LAKE)
    assert status == 1
    assert "is a Walker" in stderr
    assert run("eval", elsewhere / "agent", LAKE, "--prompt", code, "--episodes", 2)[0] == 0


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["train", LAKE], 2, "train needs a budget"),
        (["train", LAKE, "--minutes", "1", "--resume"], 2, "needs --run-dir"),
        (["train", "FrozenLike-v1", "--minutes", "1"], 1, "env='FrozenLike-v1' cannot be made"),
        (["train", "no_such_package:Env-v0", "--minutes", "1"], 1, "No module named 'no_such_package'"),
        (["train", LAKE, "--minutes", "1", "--prompt", "none.yaml"], 1, "There is no file 'none.yaml'"),
        (["train", LAKE, "--minutes", "soon"], 2, "'soon' is not a valid float"),
        (["train", LAKE, "--minutes", "1", "--model=~/none"], 1, "there is no file or folder '{home}/none'"),
        (["train", LAKE, "--minutes", "1", "--prompt=~/none.yaml"], 1, "There is no file '{home}/none.yaml'"),
        (["eval", "nowhere"], 1, "'nowhere' holds no agent"),
        (["eval", "~/nowhere"], 1, "'{home}/nowhere' holds no agent"),
        (["play", "nowhere"], 1, "'nowhere' holds no agent"),
        (["learn"], 2, "No such command 'learn'"),
        (["train", LAKE, "--turns", "-1"], 1, "turns=-1"),
        (["train", LAKE, "--episodes", "0"], 1, "episodes=0"),
        (["train", LAKE, "--minutes", "-1"], 1, "minutes=-1"),
        (["train", "llamagym/TextWorld-v0", "--turns", "1"], 1, "missing 1 required positional argument: 'games'"),
        (["train", ":CartPole-v1", "--turns", "1"], 1, "env=':CartPole-v1' cannot be made: ValueError"),
        (["train", LAKE, "--turns", "1", "--prompt", "x" * 300], 2, "File name too long"),
        (["train", LAKE, "--turns", "1", "--run-dir", "x" * 300], 2, "File name too long"),
        (["eval", "x" * 300], 2, "File name too long"),
        (["play", "x" * 300], 2, "File name too long"),
        (["report", "x" * 300], 1, "File name too long"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_errors_are_one_line(words, status, message, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found, printed, errors = run(*words)
    assert found == status
    assert message.format(home=tmp_path / "home") in errors
    assert printed == ""
    if status == 1:
        assert len(errors.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_environment_whose_extra_is_missing_is_an_error_that_names_it(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "minigrid", None)
    status, _, errors = run("train", "llamagym/BabyAI-v0", "--minutes", 1)
    assert status == 1
    assert "llamagym[minigrid]" in errors


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("actions: [a, b]", "names 2 actions, but Discrete.4. has 4"),
        ("actions: [a, a, b, c]", "alike"),
        ("actions: left", "actions in .* is 'left'. Pass a list"),
        ("action: [a]", "unknown key 'action'. Did you mean 'actions'"),
        ("observation: nothing", "does not contain the observation"),
        ("system_prompt: [a]", "Pass a text"),
        ("observation_names: [a, b]", "has 2 names, but .* has 1 parts"),
        ("just words", "holds 'just words'"),
        ("a: [b", "cannot be read as YAML"),
        ("", "Give it one or more of the keys"),
    ],
)
def test_rejects_an_invalid_wording(text, match, tmp_path):
    path = tmp_path / "words.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match) as wrong:
        agent_class(gym.make(LAKE), path)
    assert "words.yaml" in str(wrong.value)
    assert "\n" not in str(wrong.value)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("empty.py", "", "must define one subclass of llamagym.Agent .*; found: none"),
        ("two.py", CODE + CODE.replace("Walker", "Runner"), "found: Walker, Runner"),
        ("broken.py", "import no_such_package", "cannot be run: ModuleNotFoundError"),
        ("syntax.py", "def f(:", "cannot be run: SyntaxError"),
        ("words.txt", WORDS, "neither YAML nor Python"),
    ],
)
def test_rejects_an_invalid_agent_file(name, text, match, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=match):
        agent_class(gym.make(LAKE), tmp_path / name)


def test_reads_yaml_values_as_strings(tmp_path):
    path = tmp_path / "words.yaml"
    path.write_text("actions: [yes, no, 1, null]\n")
    assert read_wording(path) == Wording(actions=["yes", "no", "1", "null"])


BOX = spaces.Box(-np.inf, np.inf, (2,))


@pytest.mark.parametrize(
    ("space", "observation", "names", "text"),
    [
        (spaces.Discrete(5), np.int64(3), [""], "3"),
        (BOX, np.array([-0.00001, 12345.6], np.float32), ["x1", "x2"], "x1 = 0, x2 = 12300"),
        (BOX, np.array([np.inf, np.nan]), ["x1", "x2"], "x1 = inf, x2 = nan"),
        (spaces.MultiBinary(2), np.array([1, 0], np.int8), ["x1", "x2"], "x1 = 1, x2 = 0"),
        (spaces.Tuple([spaces.Discrete(9), BOX]), (4, np.ones(2)), ["x1", "x2 x1", "x2 x2"],
         "x1 = 4, x2 x1 = 1, x2 x2 = 1"),
        (spaces.Dict(arm=BOX, say=spaces.Text(5)), {"arm": np.ones(2), "say": "hi"}, ["arm x1", "arm x2", "say"],
         "arm x1 = 1, arm x2 = 1, say = hi"),
    ],
)  # fmt: skip
def test_describes_observations_of_every_space(space, observation, names, text):
    assert part_names(space) == names
    assert describe(observation, space) == text


@pytest.mark.parametrize("space", [spaces.Box(0, 255, (9, 9, 3), np.uint8), spaces.Sequence(spaces.Discrete(2))])
def test_rejects_spaces_that_cannot_be_described(space):
    with pytest.raises(ConfigError, match="Define an Agent"):
        generic_agent(Spaced(space, spaces.Discrete(2)), Wording())


@pytest.mark.parametrize(
    ("space", "reply", "asks"),
    [
        (spaces.Box(-1, 1, (2,)), "[0.5, -0.5]", "as JSON"),
        (spaces.Text(9), "hello", "what you want to say"),
        (spaces.Dict(to=spaces.Discrete(3)), '{"to": 2}', "the keys to"),
        (spaces.Discrete(5000), "4711", "as JSON"),
        (spaces.MultiDiscrete([8, 8]), "3 4", "Answer with an action."),
    ],
)
def test_actions_are_choices_or_parsed_from_free_text(space, reply, asks):
    kind = generic_agent(Spaced(spaces.Discrete(2), space), Wording())
    agent = Agent.__new__(kind)
    assert asks in agent.get_system_prompt()
    assert space.contains(agent.extract_action(reply))
    assert space.contains(agent.fallback_action(0))
    assert (agent.get_action_choices(0) is None) == (not isinstance(space, spaces.MultiDiscrete))


def test_the_program_prints_its_completion_for_shells_and_names_itself(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/llamagym"])
    monkeypatch.setenv("_LLAMAGYM_COMPLETE", "zsh_source")
    with pytest.raises(SystemExit):
        main()
    assert "#compdef llamagym" in capsys.readouterr().out
    monkeypatch.setenv("_LLAMAGYM_COMPLETE", "zsh_complete")
    monkeypatch.setenv("COMP_WORDS", "llamagym train --en")
    monkeypatch.setenv("COMP_CWORD", "2")
    with pytest.raises(SystemExit):
        main()
    assert "--entropy-coef" in capsys.readouterr().out
    monkeypatch.delenv("_LLAMAGYM_COMPLETE")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/llamagym", "train", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert "Usage: llamagym train" in capsys.readouterr().out


def test_defaults_of_the_command_line_are_the_librarys():
    assert commands.MODEL == EMBEDDED_NAME
    assert commands.EVALUATION_SEED == EVALUATION_SEED
    assert PPOConfig().learning_rate == commands.LEARNING_RATE
    assert PPOConfig().entropy_coef == commands.ENTROPY_COEF


def test_train_ends_with_its_scores_and_the_next_commands_and_play_shows_probabilities(model, run, tmp_path):
    command = ["train", LAKE, "--turns", 40, "--num-envs", 4, "--batch-size", 16, "--eval-episodes", 3]
    command += ["--learning-rate", 0.002, "--entropy-coef", 0.01, "--device", "cpu", "--dtype", "float32"]
    status, printed, _ = run(*command, "--track", "csv", "--model", model, "--run-dir", tmp_path / "run")
    assert status == 0
    lines = printed.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["before", "after", "random"]
    assert lines[-2:] == [f"Next: python -m llamagym {name} {tmp_path / 'run'}".replace("Next:", label)
                          for label, name in (("Next:", "play"), ("     ", "eval"))]  # fmt: skip
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (settings["learning_rate"], settings["entropy_coef"], settings["dtype"]) == (0.002, 0.01, "float32")
    assert (tmp_path / "run" / "metrics.csv").is_file()
    status, printed, _ = run("play", tmp_path / "run", "--seed", 0)
    assert status == 0
    shown = re.search(r"^> (\w+)    \((\w+) (\d+)%, \w+ \d+%, \w+ \d+%, \w+ \d+%\)$", printed, re.MULTILINE)
    assert shown[1] == shown[2]
