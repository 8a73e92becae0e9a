"""Training with several processes equals training with one."""

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
from llamagym.agent.agent import collector_of
from llamagym.errors import ConfigError, RankError
from llamagym.learners.ppo import PPOConfig
from llamagym.policy.calibration import Calibration
from llamagym.text.episode import map_weights_versions
from llamagym.trl_compat.ppo_trainer import PPOTrainer
from tests.helpers.agents import ChoiceAgent, WordAgent, make_agent
from tests.helpers.processes import KILLED, together
from tests.helpers.resumed_run import CASES as RUNS
from tests.helpers.resumed_run import learn, make
from tests.helpers.tiny import tiny_model

# Turns of the episodes that each of two processes plays.
UNEVEN = [[1, 4, 2], [3, 5]]
ONE_IDLE = [[1, 4, 2, 3], []]
GROUPED = [[2, 2, 3], [3, 3, 2, 1, 3]]


@dataclass
class Case:
    """An agent with its options, episode lengths per process, and whether unfinished episodes are trained on."""

    kind: type
    lengths: list[list[int]]
    options: dict[str, Any]
    cuts: bool = False


_STEPS = {"mini_batch_size": 4, "learning_rate": 1e-3, "warmup_steps": 1}
_LONG = {"context": "episode", "generate": {"max_new_tokens": 4}}
CASES = {
    "PPO": Case(ChoiceAgent, UNEVEN, {"ppo": {**_STEPS, "target_kl": 0.3}}),
    "PPO, one process without episodes": Case(ChoiceAgent, ONE_IDLE, {"ppo": _STEPS}),
    "PPO, episodes under way": Case(ChoiceAgent, UNEVEN, {"ppo": _STEPS}, cuts=True),
    "PPO, whole conversations in free text, KL": Case(
        WordAgent, UNEVEN, {"ppo": {**_STEPS, "init_kl_coef": 0.1}, **_LONG}
    ),
    "PPO, gradient critic": Case(ChoiceAgent, UNEVEN, {"ppo": {**_STEPS, "critic": "gradient"}}),
    "PPO, replay": Case(ChoiceAgent, UNEVEN, {"ppo": _STEPS, "replay_config_dict": {"episodes": 2, "batch_size": 4}}),
    "GRPO": Case(ChoiceAgent, GROUPED, {"algorithm": "grpo", "grpo": {**_STEPS, "group_size": 4}}),
}


def agent_of(case: Case) -> Any:
    """Returns the agent of a case, whose batch is full once all episodes have ended, or earlier."""
    algorithm = case.options.get("algorithm", "ppo")
    options = {"context": "turn", **case.options}
    options[algorithm] = {**options[algorithm], "batch_size": 10 if case.cuts else sum(map(sum, case.lengths))}
    return make_agent(case.kind, **options)


def play(case: Case) -> dict[str, Any]:
    """Plays the episodes of a process until the update; returns weights, statistics and other state."""
    agent, own = agent_of(case), case.lengths[distributed.rank()]
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
    with collector_of(agent).using_unfinished_episodes(range(len(own))) if case.cuts else nullcontext():
        stats = play_rounds(agent, own)
    return {
        **learned,
        "before": before,
        "after": weights_of(agent),
        "stats": stats,
        "calibration": agent.policy.calibration.record(learns=True),
        "draw": int(torch.randint(2**60, (), generator=agent.policy.rng)),
        "transcripts": collector_of(agent).transcripts,
    }


def play_rounds(agent: Any, own: list[int]) -> dict[str, float]:
    """Plays episodes of these lengths; returns the statistics of the update."""
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
    """Returns an observation; some observations occur in both processes."""
    return 10 * env + step if env < 2 else 100 * rank + 10 * env + step


def play_all() -> dict[str, Any]:
    return {name: play(case) for name, case in CASES.items()}


def weights_of(agent: Any) -> np.ndarray:
    """Returns all trained tensors, concatenated."""
    return torch.cat([weight.detach().flatten() for weight in agent.learner.updated_tensors()]).numpy().copy()


@pytest.fixture(scope="module")
def played() -> list[dict[str, Any]]:
    answers = together(2, play_all)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_an_update_of_two_processes_equals_that_of_one_with_all_episodes(played, name):
    first = played[0][name]
    agent = agent_of(CASES[name])
    assert np.array_equal(weights_of(agent), first["before"])
    agent.policy.calibration = Calibration.from_record(first["calibration"])
    now = {first["version"]: agent.policy.weights_version}
    for episode in first["episodes"]:
        object.__setattr__(episode, "turns", tuple(map_weights_versions(episode.turns, now)))
    assert all(episode.is_over for episode in first["episodes"]) != CASES[name].cuts
    assert {episode.rank for episode in first["episodes"]} == {0, 1} - ({1} if not CASES[name].lengths[1] else set())
    with torch.enable_grad():
        stats = agent.learner.update(first["episodes"])
    if collector_of(agent).replay is not None:
        stats |= collector_of(agent).replay.update(first["episodes"])
    assert np.abs(first["after"] - first["before"]).max() > 1e-4
    np.testing.assert_allclose(weights_of(agent), first["after"], atol=1e-5, rtol=0)
    compared = {key: value for key, value in stats.items() if not key.endswith("_s") and key != "learn_tokens"}
    assert {key: first["stats"][key] for key in compared} == pytest.approx(compared, abs=1e-4, nan_ok=True)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_processes_end_with_equal_weights_and_different_random_states(played, name):
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
    measured = [rows for per_process in played[0]["PPO"]["measured"] for rows in per_process]
    assert all(measured[rank] for rank in range(2))
    together, alone = Calibration(), Calibration()
    together.agree(measured, learns=False)
    alone.agree(measured[::2], learns=False)
    assert played[0]["PPO"]["calibration"] == together.record(learns=True)
    assert alone.prior != together.prior


def run_on(folder: Path, updates: int, resume: bool) -> dict[str, Any]:
    """Starts or resumes a run for a number of updates."""
    kind, options = RUNS["ppo"]
    return learn(make(kind, **options), updates, seed=0, checkpoint_dir=folder, resume=resume)


def run_with_and_without_stop(folder: Path) -> list[dict[str, Any]]:
    """Returns the results of a run without interruption, and of one resumed after two updates."""
    run_on(folder / "two", 2, resume=False)
    return [run_on(folder / "one", 3, resume=False), run_on(folder / "two", 1, resume=True)]


@pytest.mark.long
def test_a_run_of_two_processes_is_resumed_bit_for_bit(tmp_path):
    for in_one_go, resumed in together(2, run_with_and_without_stop, tmp_path):
        # As text, where NaN equals itself.
        assert repr(resumed) == repr(in_one_go)


def train_until_killed(folder: Path) -> tuple[str, float, int]:
    """Trains until process 1 is killed in the third update; returns the error of process 0 and its delay."""
    kind, options = RUNS["ppo"]
    agent, died = make(kind, **options), 0.0
    credit = agent.learner.compute_targets
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

    agent.learner.compute_targets = crediting  # type: ignore[method-assign]
    agent.learner._bounded_entropy_coef = dying  # type: ignore[method-assign]
    try:
        learn(agent, 9, seed=0, checkpoint_dir=folder)
    except RankError as error:
        assert np.array_equal(weights_of(agent), before), "half an update was left"
        return str(error), time.perf_counter() - died, agent.policy.num_updates
    raise AssertionError("process 0 went on alone")


@pytest.mark.long
def test_a_killed_process_ends_the_others_and_any_number_can_resume(tmp_path):
    (message, seconds, updates), gone = together(2, train_until_killed, tmp_path / "run")
    assert gone == KILLED
    assert seconds < 60
    assert "lost another one" in message
    assert updates == 2
    shutil.copytree(tmp_path / "run", tmp_path / "alone")
    alone = run_on(tmp_path / "alone", 1, resume=True)
    both = together(2, run_on, tmp_path / "run", 1, True)
    assert both[0]["weights"] == both[1]["weights"]
    for done in (alone, *both):
        assert [of["updates"] for of in done["stats"]] == [1.0, 2.0, 3.0]
    # What two had begun with goes on as two; alone it is other episodes.
    assert repr(alone["stats"][:2]) == repr(both[0]["stats"][:2])


def answer_late(seconds: float) -> list[int]:
    """Process 1 answers too late."""
    PartialState(cpu=True, timeout=timedelta(seconds=seconds))
    if distributed.rank() == 1:
        time.sleep(2 * seconds)
    return distributed.gather_objects(distributed.rank())


@pytest.mark.long
def test_a_process_that_does_not_answer_ends_the_others():
    waiting, _ = together(2, answer_late, 5)
    assert isinstance(waiting, RankError)
    assert "did not answer in time" in str(waiting)


def check_different_weights() -> None:
    """Changes the weights of process 1 only."""
    agent = agent_of(CASES["PPO"])
    if distributed.rank() == 1:
        with torch.no_grad():
            agent.policy.model.v_head.summary.bias.add_(1e-3)
    distributed.check_equal_weights(agent.learner.updated_tensors())


@pytest.mark.long
def test_rejects_different_weights_in_one_process():
    for answer in together(2, check_different_weights):
        assert isinstance(answer, RankError)
        assert "weights of processes [1]" in str(answer)


def step_with_ratio(ratio: float) -> tuple[float, np.ndarray]:
    """Steps a PPOTrainer in which process 1 measures this mean ratio; returns `skipped` and the weights."""
    trainer = PPOTrainer(PPOConfig(batch_size=2, mini_batch_size=2), tiny_model("llama"))
    loss = trainer._loss

    def loss_with_ratio(*args: Any) -> Any:
        value, stats, error = loss(*args)
        return value, {**stats, "mean_ratio": ratio}, error

    if distributed.rank() == 1:
        trainer._loss = loss_with_ratio  # type: ignore[method-assign]
    query = torch.tensor([1, 2])
    stats = trainer.step([query, query], [torch.tensor([3]), torch.tensor([4 + distributed.rank()])], [0.0, 1.0])
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    weights = torch.cat([weight.detach().flatten() for weight in trained])
    return stats["skipped"], weights.numpy().copy()


@pytest.mark.long
@pytest.mark.parametrize(("ratio", "skipped"), [(15.0, 0.0), (100.0, 4.0)])
def test_processes_of_a_ppo_trainer_skip_the_same_minibatches(ratio, skipped):
    (first, first_weights), (second, second_weights) = together(2, step_with_ratio, ratio)
    # The threshold is 10; the mean ratio of process 0 is about 1.
    assert first == second == skipped
    assert np.array_equal(first_weights, second_weights)


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_rejects_engines_that_shard_a_model(engine, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(ConfigError, match="they would deadlock"):
        make_agent(ChoiceAgent)


def test_agents_on_different_devices_can_join(monkeypatch):
    """Accelerate alone would reject a second device, since it has one state per process."""
    distributed.accelerator(torch.device("cpu"))
    monkeypatch.setitem(PartialState._shared_state, "device", torch.device("cuda:0"))
    assert distributed.accelerator(torch.device("cpu")).num_processes == 1


def test_rejects_processes_that_accelerate_did_not_join(monkeypatch):
    make_agent(ChoiceAgent)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="has joined 1 of them"):
        make_agent(ChoiceAgent)
