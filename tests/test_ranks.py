"""Several processes that learn together, against one that does all of it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState

from llamagym import distributed
from llamagym.errors import ConfigError, RankError
from llamagym.policy.calibration import Calibration
from llamagym.text.episode import renumbered
from tests.agents import ChoiceAgent, WordAgent, make_agent
from tests.processes import KILLED, together
from tests.resumed_run import CASES as RUNS
from tests.resumed_run import learn, make

# Turns of the episodes that each of two processes plays.
RAGGED = [[1, 4, 2], [3, 5]]
ONE_IDLE = [[1, 4, 2, 3], []]
GROUPED = [[2, 2, 3], [3, 3, 2, 1, 3]]


@dataclass
class Case:
    """How to learn, from episodes of which lengths, and whether a batch takes what there is after the third step."""

    kind: type
    lengths: list[list[int]]
    options: dict[str, Any]
    cuts: bool = False


_STEPS = {"mini_batch_size": 4, "learning_rate": 1e-3, "warmup_steps": 1}
_LONG = {"context": "episode", "generate": {"max_new_tokens": 4}}
CASES = {
    "PPO": Case(ChoiceAgent, RAGGED, {"ppo": {**_STEPS, "target_kl": 0.3}}),
    "PPO, one process without episodes": Case(ChoiceAgent, ONE_IDLE, {"ppo": _STEPS}),
    "PPO, episodes under way": Case(ChoiceAgent, RAGGED, {"ppo": _STEPS}, cuts=True),
    "PPO, whole conversations in free text, KL": Case(
        WordAgent, RAGGED, {"ppo": {**_STEPS, "init_kl_coef": 0.1}, **_LONG}
    ),
    "PPO, gradient critic": Case(ChoiceAgent, RAGGED, {"ppo": {**_STEPS, "critic": "gradient"}}),
    "PPO, replay": Case(ChoiceAgent, RAGGED, {"ppo": _STEPS, "replay_config_dict": {"episodes": 2, "batch_size": 4}}),
    "GRPO": Case(ChoiceAgent, GROUPED, {"algorithm": "grpo", "grpo": {**_STEPS, "group_size": 4}}),
}


def made(case: Case) -> Any:
    """The agent of a case; its batch is full once all episodes have ended, or sooner."""
    algorithm = case.options.get("algorithm", "ppo")
    options = {"context": "turn", **case.options}
    options[algorithm] = {**options[algorithm], "batch_size": 10 if case.cuts else sum(map(sum, case.lengths))}
    return make_agent(case.kind, **options)


def play(case: Case) -> dict[str, Any]:
    """Let a process play its episodes, in rounds, until they are learned from; says all that it then knows."""
    agent, own = made(case), case.lengths[distributed.rank()]
    before, learn = weights_of(agent), agent.learner.update
    learned: dict[str, Any] = {"measured": []}
    agree = agent.policy.calibration.agree

    def agree_on(measured: list[Any], learns: bool) -> bool:
        learned["measured"].append(measured)
        return agree(measured, learns)

    def update(episodes: list[Any]) -> dict[str, float]:
        learned.update(episodes=list(episodes), version=agent.policy.weights_version)
        return learn(episodes)

    agent.learner.update, agent.policy.calibration.agree = update, agree_on
    with agent.cutting_episodes(range(len(own))) if case.cuts else nullcontext():
        stats = play_rounds(agent, own)
    return {
        **learned,
        "before": before,
        "after": weights_of(agent),
        "stats": stats,
        "calibration": agent.policy.calibration.record(learns=True),
        "draw": int(torch.randint(2**60, (), generator=agent.policy.rng)),
        "transcripts": agent.transcripts,
    }


def play_rounds(agent: Any, own: list[int]) -> dict[str, float]:
    """Play episodes of these lengths; returns the statistics of the update."""
    stats: dict[str, float] = {}
    for step in range(5):
        playing = [env for env, length in enumerate(own) if length > step]
        if playing:
            actions = agent.act_batch([observation(distributed.rank(), env, step) for env in playing], playing)
            earned = [float(len(str(action)) + env) for env, action in zip(playing, actions, strict=True)]
            agent.assign_rewards(earned, playing)
        ended = [env for env in playing if own[env] == step + 1]
        # Groups of four: the first three of process 0 and the first of process 1, then the rest of process 1.
        groups = ["first" if distributed.rank() == 0 or env == 0 else "second" for env in ended]
        cut = [env % 2 == 1 for env in ended]
        final = [observation(distributed.rank(), env, step + 1) for env in ended]
        stats |= agent.terminate_episodes(ended, cut, final, groups=groups)
    return stats


def observation(rank: int, env: int, step: int) -> int:
    """Some are met by both processes."""
    return 10 * env + step if env < 2 else 100 * rank + 10 * env + step


def play_all() -> dict[str, Any]:
    return {name: play(case) for name, case in CASES.items()}


def weights_of(agent: Any) -> np.ndarray:
    """All that learns, in one row."""
    return torch.cat([weight.detach().flatten() for weight in agent.learner._updated_tensors()]).numpy().copy()


@pytest.fixture(scope="module")
def played() -> list[dict[str, Any]]:
    answers = together(2, play_all)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_an_update_of_two_processes_is_that_of_one_with_all_episodes(played, name):
    first = played[0][name]
    agent = made(CASES[name])
    assert np.array_equal(weights_of(agent), first["before"])
    agent.policy.calibration = Calibration.from_record(first["calibration"])
    now = {first["version"]: agent.policy.weights_version}
    for episode in first["episodes"]:
        object.__setattr__(episode, "turns", tuple(renumbered(episode.turns, now)))
    assert all(episode.is_over for episode in first["episodes"]) != CASES[name].cuts
    assert {episode.rank for episode in first["episodes"]} == {0, 1} - ({1} if not CASES[name].lengths[1] else set())
    with torch.enable_grad():
        stats = agent.learner.update(first["episodes"])
    if agent._replay is not None:
        stats |= agent._replay.update(first["episodes"])
    assert np.abs(first["after"] - first["before"]).max() > 1e-4
    np.testing.assert_allclose(weights_of(agent), first["after"], atol=1e-5, rtol=0)
    told = {key: value for key, value in stats.items() if not key.endswith("_s") and key != "learn_tokens"}
    assert {key: first["stats"][key] for key in told} == pytest.approx(told, abs=1e-4, nan_ok=True)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_both_processes_end_with_the_same_bits_and_draw_other_numbers(played, name):
    first, second = (answer[name] for answer in played)
    assert np.array_equal(first["after"], second["after"])
    assert first["calibration"] == second["calibration"]
    same = {key: value for key, value in first["stats"].items() if not key.endswith("_s")}
    assert {key: second["stats"][key] for key in same} == pytest.approx(same, nan_ok=True, rel=0, abs=0)
    assert first["draw"] != second["draw"]


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_transcripts_of_each_process_have_their_advantages(played, name):
    for rank, answer in enumerate(played):
        transcripts = answer[name]["transcripts"]
        own = [episode for episode in answer[name]["episodes"] if episode.rank == rank and episode.is_over]
        assert len(transcripts) == min(len(own), 4)
        assert all(turn["advantage"] is not None for transcript in transcripts for turn in transcript["turns"])


@pytest.mark.long
def test_choices_are_calibrated_over_the_contexts_of_both(played):
    measured = [rows for told in played[0]["PPO"]["measured"] for rows in told]
    assert all(measured[rank] for rank in range(2))
    together, alone = Calibration(), Calibration()
    together.agree(measured, learns=False)
    alone.agree(measured[::2], learns=False)
    assert played[0]["PPO"]["calibration"] == together.record(learns=True)
    assert alone.prior != together.prior


def run_on(folder: Path, updates: int, resume: bool) -> dict[str, Any]:
    """Begin a run, or go on with it, for so many updates."""
    kind, options = RUNS["ppo"]
    return learn(make(kind, **options), updates, seed=0, checkpoint_dir=folder, resume=resume)


def in_one_go_and_in_two(folder: Path) -> list[dict[str, Any]]:
    """The same run without a stop, and with one after two updates."""
    run_on(folder / "two", 2, resume=False)
    return [run_on(folder / "one", 3, resume=False), run_on(folder / "two", 1, resume=True)]


@pytest.mark.long
def test_a_run_of_two_processes_is_resumed_bit_for_bit(tmp_path):
    for in_one_go, resumed in together(2, in_one_go_and_in_two, tmp_path):
        # As text, where NaN equals itself.
        assert repr(resumed) == repr(in_one_go)


def killed_in_an_update(folder: Path) -> tuple[str, float, int]:
    """Learn until process 1 is killed in the middle of the third update; says how, and how soon, process 0 ends."""
    kind, options = RUNS["ppo"]
    agent, died = make(kind, **options), 0.0
    credit = agent.learner._compute_targets
    entropy_coef = agent.learner._bounded_entropy_coef
    before = weights_of(agent)

    def crediting(*args: Any) -> Any:
        nonlocal before
        before = weights_of(agent)
        return credit(*args)

    def dying(*args: Any, **options: Any) -> Any:
        nonlocal died
        if agent.policy.num_updates == 2 and not died:
            died = time.perf_counter()
            if distributed.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return entropy_coef(*args, **options)

    agent.learner._compute_targets = crediting  # type: ignore[method-assign]
    agent.learner._bounded_entropy_coef = dying  # type: ignore[method-assign]
    try:
        learn(agent, 9, seed=0, checkpoint_dir=folder)
    except RankError as error:
        assert np.array_equal(weights_of(agent), before), "half an update was left"
        return str(error), time.perf_counter() - died, agent.policy.num_updates
    raise AssertionError("process 0 went on alone")


@pytest.mark.long
def test_a_process_that_is_killed_ends_the_others_and_any_number_goes_on(tmp_path):
    (said, seconds, updates), gone = together(2, killed_in_an_update, tmp_path / "run")
    assert gone == KILLED
    assert seconds < 60
    assert "lost another one" in said
    assert updates == 2
    shutil.copytree(tmp_path / "run", tmp_path / "alone")
    alone = run_on(tmp_path / "alone", 1, resume=True)
    both = together(2, run_on, tmp_path / "run", 1, True)
    assert both[0]["weights"] == both[1]["weights"]
    for done in (alone, *both):
        assert [of["updates"] for of in done["stats"]] == [1.0, 2.0, 3.0]
    # What two had begun with goes on as two; alone it is other episodes.
    assert repr(alone["stats"][:2]) == repr(both[0]["stats"][:2])


def late(seconds: float) -> list[int]:
    """Process 1 comes too late for the other one."""
    PartialState(cpu=True, timeout=timedelta(seconds=seconds))
    if distributed.rank() == 1:
        time.sleep(2 * seconds)
    return distributed.gather_objects(distributed.rank())


@pytest.mark.long
def test_a_process_that_does_not_answer_ends_the_others():
    waiting, _ = together(2, late, 5)
    assert isinstance(waiting, RankError)
    assert "did not answer in time" in str(waiting)


def with_other_weights() -> None:
    """Process 1 changes its weights, which the other one does not."""
    agent = made(CASES["PPO"])
    if distributed.rank() == 1:
        with torch.no_grad():
            agent.policy.model.v_head.summary.bias.add_(1e-3)
    distributed.check_alike(agent.learner._updated_tensors())


@pytest.mark.long
def test_other_weights_in_one_process_are_noticed():
    for answer in together(2, with_other_weights):
        assert isinstance(answer, RankError)
        assert "weights of processes [1]" in str(answer)


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_engines_that_divide_a_model_are_refused(engine, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(ConfigError, match="wait for each other for ever"):
        make_agent(ChoiceAgent)


def test_an_agent_joins_where_one_on_another_device_did(monkeypatch):
    """Accelerate, which this process has one state of, would refuse."""
    distributed.accelerator(torch.device("cpu"))
    monkeypatch.setitem(PartialState._shared_state, "device", torch.device("cuda:0"))
    assert distributed.accelerator(torch.device("cpu")).num_processes == 1


def test_processes_that_accelerate_did_not_join_are_noticed(monkeypatch):
    make_agent(ChoiceAgent)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="has joined 1 of them"):
        make_agent(ChoiceAgent)
