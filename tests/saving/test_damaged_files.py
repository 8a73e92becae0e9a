"""Damaged or hostile saves: one CheckpointError that names the file, and the agent in memory is as it was.

A fuzzer mutates every file of a saved agent and of a checkpoint, by itself or with a manifest that was made to fit.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium.wrappers import TimeLimit
from safetensors import safe_open
from safetensors.torch import save_file

from llamagym import (
    Agent,
    Callback,
    CheckpointError,
    ConfigError,
    EvalCallback,
    ModelLoadError,
    ScoreCallback,
    load_model_and_tokenizer,
    train,
    write_report,
)
from llamagym.agent.agent import collector_of
from llamagym.errors import LlamaGymError
from llamagym.models.lora import freeze_and_extend_, has_frozen_half
from llamagym.saving.checkpoints import newest
from llamagym.saving.manifest import MANIFEST
from llamagym.saving.state_files import read_state, write_state
from llamagym.training.tracking import default_tracker
from tests.helpers import ROOT
from tests.helpers.agents import ChoiceAgent, actor_of, make_agent
from tests.helpers.resumed_run import SIZES, DiceEnv
from tests.helpers.tiny import tiny_base_model, tiny_tokenizer

SEED = 20260
LONGEST_MESSAGE = 2000


def fresh(base: Path, seed: int = 1) -> Any:
    model, tokenizer, device = load_model_and_tokenizer(base, "cpu", "float32")
    replay = {"episodes": 3, "batch_size": 4}
    return ChoiceAgent(model, tokenizer, device, None, SIZES, context="turn", seed=seed, replay_config_dict=replay)


def save_all(folder: Path) -> None:
    """A base, an agent that learned and has an episode under way, its save and its checkpoint."""
    tiny_base_model("llama").save_pretrained(folder / "base")
    tiny_tokenizer("llama").save_pretrained(folder / "base")
    agent = fresh(folder / "base")
    train(agent, DiceEnv, episodes=10, num_envs=2, seed=0)
    agent.act(3)
    agent.assign_reward(1.0)
    agent.save(folder / "agent")
    agent.save_checkpoint(folder / "checkpoint", loop={"turns": 3})


def another_agent(saved: Path) -> Any:
    """Another agent in memory, which loads checkpoints."""
    agent = fresh(saved / "base", seed=2)
    train(agent, DiceEnv, episodes=6, num_envs=2, seed=5)
    agent.act(7)
    return agent


def callbacks_of_run() -> list[Callback]:
    return [ScoreCallback(lambda agent: 1.0), EvalCallback(DiceEnv, episodes=2, every=1)]


def save_run(saved: Path, folder: Path) -> Path:
    """The newest checkpoint of a run with callbacks."""
    agent, options = fresh(saved / "base"), {"episodes": 4, "num_envs": 2, "seed": 0}
    train(agent, DiceEnv, checkpoint_dir=folder, callbacks=callbacks_of_run(), **options)
    found = newest(folder)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_all(folder)
    return folder


@pytest.fixture(scope="module")
def other(saved) -> Any:
    return another_agent(saved)


@pytest.fixture(scope="module")
def stopped(saved, tmp_path_factory) -> Path:
    return save_run(saved, tmp_path_factory.mktemp("stopped"))


def snapshot(agent: Agent) -> str:
    """All of an agent's state."""
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key, value in part.items():
                digest.update(repr(key).encode())
                add(value)
        elif isinstance(part, (list, tuple)):
            digest.update(str(len(part)).encode())
            for value in part:
                add(value)
        else:
            digest.update(repr(part).encode())

    add(collector_of(agent).state_dict())
    return digest.hexdigest()


# Mutations: each changes a file, given random numbers.


def delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def empty(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def truncate(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def extend(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 200)))


def flip_bytes(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.randrange(1, 20)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)


def flip_early_bytes(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(min(len(data), 300))] = rng.randrange(256)
    path.write_bytes(data)


def random_bytes(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.randrange(1, 1000)))


class Executed:
    """Pickled, it leaves a trace wherever it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:  # noqa: D105
        return (os.mkdir, (str(self.trace),))


def pickled(path: Path, rng: random.Random) -> None:
    path.write_bytes(pickle.dumps(Executed(path.parent.parent / "executed")))


def other_json(path: Path, rng: random.Random) -> None:
    values = [
        "[]",
        "{}",
        "null",
        "0",
        '"x"',
        "true",
        "NaN",
        "1e999",
        "[" * 50_000,
        '{"a":' * 50_000,
        "9" * 5000,
        "\ud800",
    ]
    path.write_bytes(rng.choice(values).encode("utf-8", "surrogatepass"))


def symbolic_link(path: Path, rng: random.Random) -> None:
    target = path.parent.parent / "outside"
    shutil.copy(path, target)
    path.unlink()
    path.symlink_to(rng.choice([target, path, "nowhere", path.parent, "/dev/zero", "/proc/self/environ"]))


def folder_instead(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def pipe_instead(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


JUNK = [
    None,
    True,
    -1,
    0,
    10**30,
    1e308,
    float("nan"),
    "",
    "x",
    "../x",
    [],
    {},
    [[]],
    {"x": 1},
    "\ud800",
    {"__tensor__": "x"},
    {"__tensor__": []},
    {"__number__": "x"},
]


def change_json(path: Path, rng: random.Random) -> None:
    """Replace, delete or add a value somewhere in a JSON file."""
    if path.suffix != ".json":
        flip_bytes(path, rng)
        return
    content = json.loads(path.read_text())
    places: list[tuple[Any, Any]] = []

    def collect(part: Any) -> None:
        for key, value in list(part.items() if isinstance(part, dict) else enumerate(part)):
            places.append((part, key))
            if isinstance(value, (dict, list)) and value:
                collect(value)

    collect(content)
    for _ in range(rng.choice([1, 1, 1, 3])):
        part, key = rng.choice(places)
        action = rng.randrange(4)
        if action == 0 and (not isinstance(part, list) or key < len(part)) and (isinstance(part, list) or key in part):
            del part[key]
        elif action == 1 and isinstance(part, dict):
            part["unknown"] = rng.choice(JUNK)
        elif not isinstance(part, list) or key < len(part):
            part[key] = rng.choice(JUNK)
    path.write_text(json.dumps(content))


def change_tensors(path: Path, rng: random.Random) -> None:
    """Drop, add, reshape or convert a tensor."""
    if path.suffix != ".safetensors":
        change_json(path, rng)
        return
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    changed: list[Callable[[], Any]] = [
        lambda: tensors.pop(name),
        lambda: tensors.update({"unknown": tensor.clone()}),
        lambda: tensors.update({name: tensor.flatten().clone()}),
        lambda: tensors.update({name: tensor[:1].clone() if tensor.ndim else tensor[None].clone()}),
        lambda: tensors.update({name: torch.zeros(())}),
        lambda: tensors.update({name: torch.zeros(0)}),
        lambda: tensors.update({name: tensor.to(torch.float16 if tensor.is_floating_point() else torch.int16)}),
        lambda: tensors.update({name: tensor.to(torch.bool)}),
        lambda: tensors.update({name: torch.full_like(tensor, -1) if tensor.dtype != torch.uint8 else tensor + 1}),
    ]
    rng.choice(changed)()
    save_file(tensors, path, metadata={"format": "pt"})


def huge_header(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.choice([2**63, 2**40, 99_999_999]).to_bytes(8, "little") + path.read_bytes()[8:])


MUTATIONS = [
    delete, empty, truncate, extend, flip_bytes, flip_early_bytes, random_bytes, pickled, other_json, symbolic_link,
    folder_instead, pipe_instead, huge_header, change_json, change_json, change_json, change_tensors, change_tensors,
]  # fmt: skip


if not hasattr(os, "mkfifo"):  # Windows
    MUTATIONS.remove(pipe_instead)


def reseal(folder: Path) -> None:
    """Make the manifest fit, as somebody would who wrote the folder on purpose."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        for name in manifest["files"]:
            data = (folder / name).read_bytes() if (folder / name).is_file() else b""
            manifest["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
        path.write_text(json.dumps(manifest))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass  # it is the manifest that was mutated


def is_readable(path: Path) -> bool:
    return path.is_file() and not str(path.resolve()).startswith(("/dev", "/proc"))


class Fuzzer:
    """Mutates files of a folder and loads it."""

    def __init__(
        self,
        original: Path,
        work: Path,
        load: Callable[[Path], Any],
        allowed: type[LlamaGymError] = CheckpointError,
    ) -> None:
        self.original, self.work, self.load, self.allowed = original, work, load, allowed
        self.files = sorted(path.relative_to(original).as_posix() for path in original.rglob("*") if path.is_file())
        self.outcomes: dict[str, int] = {}

    def mutate(self, number: int) -> tuple[str, Path]:
        rng = random.Random(f"{SEED} {number}")
        shutil.rmtree(self.work, ignore_errors=True)
        folder = self.work / "save"
        shutil.copytree(self.original, folder)
        # Each file in turn, so that none is left out.
        name, mutation = self.files[number % len(self.files)], rng.choice(MUTATIONS)
        mutation(folder / name, rng)
        resealed = rng.random() < 0.6
        if resealed and (is_readable(folder / name) or not os.path.lexists(folder / name)):
            reseal(folder)
        return f"{number}: {mutation.__name__} of {name}{', resealed' if resealed else ''}", folder

    def run(self, numbers: range, after: Callable[[str], None] = lambda _: None) -> None:
        raw = []
        for number in numbers:
            what, folder = self.mutate(number)
            outcome = "loaded"
            try:
                self.load(folder)
            except self.allowed as error:
                outcome = type(error).__name__
                if str(folder) not in str(error) or len(str(error)) > LONGEST_MESSAGE:
                    raw.append(f"{what}: message {str(error)[:300]!r}")
            except ModelLoadError as error:
                outcome = "ModelLoadError"
                if "base of the adapter" not in str(error):
                    raw.append(f"{what}: {error!r:.300}")
            except BaseException as error:
                raw.append(f"{what}: {error!r:.300}")
            assert not (self.work / "executed").exists(), what
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
            after(what)
        assert raw == [], f"{len(raw)} raw errors: " + "\n".join(raw[:30])


def learn(agent: Agent) -> None:
    """Acts and learns; what was loaded may be a policy that diverges."""
    with suppress(LlamaGymError):
        agent.eval()
        agent.act_batch([1], ["new"])
        actor_of(agent).discard_episodes(["new"])
        train(agent, DiceEnv, episodes=3, num_envs=2, seed=1)


def fuzz_agent(saved: Path, work: Path, numbers: range) -> dict[str, int]:
    fuzzer = Fuzzer(saved / "agent", work, lambda folder: learn(ChoiceAgent.load(folder, "cpu")))
    fuzzer.run(numbers)
    return fuzzer.outcomes


def fuzz_checkpoint(saved: Path, other: Any, work: Path, numbers: range) -> dict[str, int]:
    before = snapshot(other)
    state = []

    def load(folder: Path) -> None:
        state[:] = ["failed"]
        other.load_checkpoint(folder, keep_episodes=True)
        state[:] = ["loaded"]
        learn(other)

    def unchanged(what: str) -> None:
        nonlocal before
        if state == ["failed"]:
            assert snapshot(other) == before, what
        else:
            before = snapshot(other)

    fuzzer = Fuzzer(saved / "checkpoint", work, load)
    fuzzer.run(numbers, unchanged)
    return fuzzer.outcomes


def test_mutated_agents_raise_a_checkpoint_error_or_load(saved, tmp_path):
    outcomes = fuzz_agent(saved, tmp_path, range(60))
    assert outcomes["CheckpointError"] > 30


def test_mutated_checkpoints_raise_a_checkpoint_error_and_leave_the_agent_unchanged(saved, other, tmp_path):
    outcomes = fuzz_checkpoint(saved, other, tmp_path, range(60))
    assert outcomes["CheckpointError"] > 30


@pytest.mark.long
def test_a_thousand_mutated_agents(saved, tmp_path):
    outcomes = fuzz_agent(saved, tmp_path, range(60, 1060))
    assert sum(outcomes.values()) == 1000
    assert outcomes["CheckpointError"] > 500


@pytest.mark.long
def test_a_thousand_mutated_checkpoints(saved, other, tmp_path):
    outcomes = fuzz_checkpoint(saved, other, tmp_path, range(60, 1060))
    assert sum(outcomes.values()) == 1000
    assert outcomes["CheckpointError"] > 500


# A run's other files


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A run of a loop of one's own: settings, metrics, transcripts, a table."""
    folder = tmp_path_factory.mktemp("run") / "run"
    agent = make_agent(ChoiceAgent, ppo=SIZES, context="turn")
    train(agent, DiceEnv, episodes=8, num_envs=2, seed=0, run_dir=folder, track=["csv"])
    (folder / "report.html").unlink()
    shutil.rmtree(folder / "checkpoints")
    return folder


def test_mutated_run_files_give_a_report_or_a_config_error(run_folder, tmp_path):
    fuzzer = Fuzzer(run_folder, tmp_path, lambda folder: write_report([folder], tmp_path / "report.html"), ConfigError)
    fuzzer.run(range(120))
    assert fuzzer.outcomes["loaded"] > 30
    assert set(fuzzer.outcomes) == {"loaded", "ConfigError"}


def test_mutated_run_files_are_continued_or_a_config_error(run_folder, tmp_path):
    def go_on(folder: Path) -> None:
        tracker = default_tracker(folder, {"seed": 0}, track=["csv"])
        tracker.log({"entropy": 1.0, "new": 2.0}, 9)
        tracker.close()

    fuzzer = Fuzzer(run_folder, tmp_path, go_on, ConfigError)
    fuzzer.run(range(120))
    assert fuzzer.outcomes["loaded"] > 30
    assert set(fuzzer.outcomes) == {"loaded", "ConfigError"}


# Single cases


def test_a_missing_base_is_not_reported_as_damage(saved, tmp_path):
    folder = shutil.copytree(saved / "agent", tmp_path / "agent")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(tmp_path / "gone")}))
    reseal(folder)
    with pytest.raises(ModelLoadError, match=r"the base of the adapter .*gone"):
        ChoiceAgent.load(folder, "cpu")


def test_wrong_options_are_not_reported_as_damage(saved):
    with pytest.raises(ConfigError, match="context"):
        ChoiceAgent.load(saved / "agent", "cpu", context="week")
    with pytest.raises(ConfigError, match="float99"):
        ChoiceAgent.load(saved / "agent", "cpu", "float99")
    with pytest.raises(ConfigError, match="unknown device"):
        ChoiceAgent.load(saved / "agent", "nowhere")


def test_options_that_are_never_saved_are_rejected(saved, tmp_path):
    folder = shutil.copytree(saved / "agent", tmp_path / "agent")
    state = json.loads((folder / "agent.json").read_text())
    state["options"]["sft_warm_start"] = True
    (folder / "agent.json").write_text(json.dumps(state))
    reseal(folder)
    with pytest.raises(CheckpointError, match=r"options that are never saved: \['sft_warm_start'\]"):
        ChoiceAgent.load(folder, "cpu")


def test_a_failed_load_undoes_the_extension_of_an_adapter(saved, tmp_path):
    """A warm start freezes the adapter and extends it; loading its checkpoint extends the adapter of the agent, too."""
    model, tokenizer, device = load_model_and_tokenizer(saved / "base", "cpu", "float32")
    taught = ChoiceAgent(model, tokenizer, device, None, SIZES, context="turn", seed=1)
    freeze_and_extend_(taught.policy.model.pretrained_model)
    taught.learner.reset_optimizer()
    train(taught, DiceEnv, episodes=6, num_envs=2, seed=0)
    taught.save_checkpoint(tmp_path / "checkpoint")
    model, tokenizer, device = load_model_and_tokenizer(saved / "base", "cpu", "float32")
    agent = ChoiceAgent(model, tokenizer, device, None, SIZES, context="turn", seed=1)
    before = snapshot(agent)
    path = tmp_path / "checkpoint" / "state.json"
    state = json.loads(path.read_text())
    # The last part that is read.
    state["agent"]["buffer"] = [3]
    damaged = shutil.copytree(tmp_path / "checkpoint", tmp_path / "damaged")
    (damaged / "state.json").write_text(json.dumps(state))
    reseal(damaged)
    with pytest.raises(CheckpointError, match=r"damaged/state.json' cannot be read"):
        agent.load_checkpoint(damaged)
    assert not has_frozen_half(agent.policy.model.pretrained_model)
    assert snapshot(agent) == before
    # It learns as if nothing had happened, and the intact checkpoint still fits.
    train(agent, DiceEnv, episodes=6, num_envs=2, seed=0)
    agent.load_checkpoint(tmp_path / "checkpoint")
    assert has_frozen_half(agent.policy.model.pretrained_model)
    assert snapshot(agent) == snapshot(taught)


# The state of a loop


Place = tuple[str | int, ...]
MISSING = object()
JUNK_OF_LOOP = [MISSING, None, True, -1, 10**30, 10**400, "x", [], {}, [[]], {"x": 1}, [3], [None, None], [True, "x"]]


def paths_in(state: Any, path: Place = ()) -> list[Place]:
    """Paths of all entries of dictionaries, and of the first two of lists, whose others are like them."""
    found = []
    entries = state.items() if isinstance(state, dict) else enumerate(state[:2]) if isinstance(state, list) else ()
    for key, value in entries:
        found += [(*path, key), *paths_in(value, (*path, key))]
    return found


def damaged_loops(stopped: Path) -> list[tuple[Place, Any]]:
    loop = json.loads((stopped / "state.json").read_text())["loop"]
    paths = [path for path in paths_in(loop) if path[0] != "updates"]
    return [(path, junk) for path in paths for junk in JUNK_OF_LOOP]


def resume_damaged(agent: Any, stopped: Path, root: Path, path: Place, junk: Any, **options: Any) -> str:
    """Resume a run whose loop's state has another value at a path; returns what came of it."""
    shutil.rmtree(root, ignore_errors=True)
    folder = shutil.copytree(stopped, root / stopped.name)
    state = json.loads((folder / "state.json").read_text())
    *outer, name = path
    part = state["loop"]
    for key in outer:
        part = part[key]
    part[name] = junk
    if junk is MISSING:
        del part[name]
    (folder / "state.json").write_text(json.dumps(state))
    reseal(folder)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    before = snapshot(agent)
    options = {"episodes": 1, "num_envs": 2, "seed": 0, "env": DiceEnv, "callbacks": callbacks_of_run(), **options}
    message = ""
    try:
        train(agent, checkpoint_dir=root, resume=True, **options)
    except CheckpointError as error:
        message = str(error)
    if not message:
        return "trained"
    assert "state.json" in message, message
    assert len(message) < LONGEST_MESSAGE
    assert snapshot(agent) == before
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
    assert [path.name for path in root.iterdir()] == [folder.name]
    return "CheckpointError"


def try_damaged_loops(saved: Path, stopped: Path, root: Path, cases: list[Any]) -> dict[str, int]:
    agent = fresh(saved / "base", seed=2)
    outcomes: dict[str, int] = {}
    raw = []
    for path, junk in cases:
        try:
            outcome = resume_damaged(agent, stopped, root, path, junk)
        except BaseException as error:
            outcome = "raw"
            raw.append(f"{'/'.join(map(str, path))} = {junk!r:.30}: {error!r:.200}")
        if outcome != "CheckpointError":
            agent = fresh(saved / "base", seed=2)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert raw == [], "\n".join(raw)
    return outcomes


def test_damaged_loop_states_are_checkpoint_errors_and_leave_the_agent_unchanged(saved, stopped, tmp_path):
    cases = random.Random(SEED).sample(damaged_loops(stopped), 12)
    outcomes = try_damaged_loops(saved, stopped, tmp_path, cases)
    assert outcomes["CheckpointError"] >= 6


@pytest.mark.parametrize(
    "first",
    [
        3,
        {},
        {"texts": ["a"], "choices": {"lists": [None], "indices": [0, 0]}},
        {"texts": [1, 2], "choices": {"lists": [None], "indices": [0, 0]}},
        {"texts": ["a", "b"], "choices": {"lists": [], "indices": [0, 0]}},
    ],
)
def test_damaged_beginnings_of_episodes_are_checkpoint_errors(saved, stopped, tmp_path, first):
    agent = fresh(saved / "base", seed=2)
    assert resume_damaged(agent, stopped, tmp_path, ("play", "first"), first) == "CheckpointError"


@pytest.mark.parametrize(
    "state",
    [{}, {"best": [1], "last": [0, 0]}, {"best": ["abc", 1], "last": [0, 0]}, {"best": [None, 0], "last": [0, -1]}],
)
def test_damaged_states_of_callbacks_are_checkpoint_errors(saved, stopped, tmp_path, state):
    agent = fresh(saved / "base", seed=2)
    assert resume_damaged(agent, stopped, tmp_path, ("callbacks", "callbacks", 1, 1), state) == "CheckpointError"


@pytest.mark.parametrize("indices", [[], [0], [0, 0, 0]])
def test_choices_of_another_length_are_checkpoint_errors_in_other_environments(saved, stopped, tmp_path, indices):
    options = {"env": lambda: TimeLimit(DiceEnv(), 9), "allow_changes": ["environment"]}
    agent, place = fresh(saved / "base", seed=2), ("play", "choices", "indices")
    assert resume_damaged(agent, stopped, tmp_path, place, indices, **options) == "CheckpointError"


@pytest.mark.parametrize("action", [[1], [[1]], [0, 1], 0.5, None, "x"])
def test_impossible_saved_actions_are_checkpoint_errors(saved, stopped, tmp_path, action):
    assert resume_damaged(fresh(saved / "base"), stopped, tmp_path, ("play", "actions", 1), []) == "trained"
    agent = fresh(saved / "base", seed=2)
    assert resume_damaged(agent, stopped, tmp_path, ("play", "actions", 1), [action]) == "CheckpointError"


def test_a_resume_that_a_callback_rejects_keeps_all_metrics(saved, tmp_path):
    options = {"episodes": 8, "num_envs": 2, "seed": 0, "run_dir": tmp_path, "checkpoint_every": 1}
    train(fresh(saved / "base"), DiceEnv, callbacks=callbacks_of_run(), **options)
    shutil.rmtree(newest(tmp_path / "checkpoints"))
    folder = newest(tmp_path / "checkpoints")
    state = json.loads((folder / "state.json").read_text())
    state["loop"]["callbacks"]["callbacks"][1][1] = {}
    (folder / "state.json").write_text(json.dumps(state))
    reseal(folder)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"state\.json.* has nothing at 'callbacks/EvalCallback/best'"):
        train(fresh(saved / "base"), DiceEnv, callbacks=callbacks_of_run(), resume=True, **options)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_the_page_on_security_shows_the_counts_of_the_result_file():
    root = ROOT
    result = json.loads((root / "scripts" / "reliability" / "results" / "damaged_files.json").read_text())
    page = (root / "docs" / "security.md").read_text()
    assert "scripts/reliability/results/damaged_files.json" in page
    assert result["seed"] == SEED
    columns = [result["counts"][name] for name in ("agents", "checkpoints", "loop_states")]
    assert [sum(column.values()) for column in columns[:2]] == [1000, 1000]
    loaded = [sum(count for name, count in column.items() if name != "CheckpointError") for column in columns]
    rows = {
        "`CheckpointError` with file and reason": [column["CheckpointError"] for column in columns],
        "loaded": loaded,
        "other errors": [result["other_errors"]] * 3,
    }
    for name, counts in rows.items():
        (row,) = re.findall(rf"^\| {re.escape(name)}[^|]*\|(.*)\|$", page, re.MULTILINE)
        assert [int(cell) for cell in row.split("|")] == counts, name


@pytest.mark.long
def test_every_damaged_loop_state(saved, stopped, tmp_path):
    outcomes = try_damaged_loops(saved, stopped, tmp_path, damaged_loops(stopped))
    assert outcomes["CheckpointError"] > 200


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda moments: moments.pop("exp_avg"), "expected"),
        (lambda moments: moments.update(exp_avg=moments["exp_avg"].bool()), "torch.bool"),
        (lambda moments: moments.update(exp_avg_sq=moments["step"]), "exp_avg_sq"),
        (lambda moments: moments.update(step=moments["exp_avg"]), "step"),
        (lambda moments: moments.update(step=None), "NoneType"),
    ],
)
@pytest.mark.parametrize("owner", ["learner", "replay"])
def test_loading_rejects_optimizer_moments_that_do_not_fit(saved, other, tmp_path, damage, what, owner):
    folder = shutil.copytree(saved / "checkpoint", tmp_path / "checkpoint")
    # The original, since tensors are mapped to the file.
    state = read_state(saved / "checkpoint", "state")
    moments = next(iter(state["agent"][owner]["learning"]["optimizer"]["adam"]["state"].values()))
    damage(moments)
    write_state(folder, "state", state)
    reseal(folder)
    before = snapshot(other)
    with pytest.raises(CheckpointError, match=rf"state.json'.*{what}"):
        other.load_checkpoint(folder)
    assert snapshot(other) == before


def test_a_checkpoint_of_another_version_is_rejected_as_such(saved, other, tmp_path):
    folder = shutil.copytree(saved / "checkpoint", tmp_path / "checkpoint")
    state = read_state(saved / "checkpoint", "state")
    state["agent"]["learner"]["learning"]["_whiten"]["_usual"] = 1.0
    write_state(folder, "state", state)
    reseal(folder)
    before = snapshot(other)
    with pytest.raises(CheckpointError, match=r"Whitening has \['_usual'\].*another version saved it"):
        other.load_checkpoint(folder)
    assert snapshot(other) == before


@pytest.mark.parametrize(
    "place_and_value",
    [((1, 0), 1), ((1, 1), []), ((1, 4), 99), ((1, 4), None), ((0, 3), 10**6), ((0, 4), -1), ((0, 2), None)],
)
def test_loading_rejects_inconsistent_turns(saved, other, tmp_path, place_and_value):
    (part, index), value = place_and_value
    folder = shutil.copytree(saved / "checkpoint", tmp_path / "checkpoint")
    # The original, since tensors are mapped to the file.
    state = read_state(saved / "checkpoint", "state")
    turn = state["agent"]["replay"]["recent"][0][0]["turns"][0]
    assert turn[part][index] != value
    turn[part][index] = value
    write_state(folder, "state", state)
    reseal(folder)
    before = snapshot(other)
    with pytest.raises(CheckpointError, match=r"state.json'"):
        other.load_checkpoint(folder)
    assert snapshot(other) == before


@pytest.mark.parametrize(
    ("key", "value"),
    [("turns", "3"), ("returns", {}), ("seconds", None), ("updates", 3), ("tracker", {}), ("play", []), ("play", {})],
)
def test_a_damaged_loop_state_is_a_checkpoint_error(saved, tmp_path, key, value):
    agent = fresh(saved / "base")
    train(agent, DiceEnv, episodes=4, num_envs=2, seed=0, checkpoint_dir=tmp_path)
    for folder in tmp_path.glob("checkpoint-*"):
        state = json.loads((folder / "state.json").read_text())
        state["loop"][key] = value
        (folder / "state.json").write_text(json.dumps(state))
        reseal(folder)
    with pytest.raises(CheckpointError, match=rf"checkpoint-\d+/state.json.*{key}"):
        train(agent, DiceEnv, episodes=8, num_envs=2, seed=0, checkpoint_dir=tmp_path, resume=True)
