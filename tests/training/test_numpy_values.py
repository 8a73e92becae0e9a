"""NumPy's values from users are saved and logged as Python's own, or rejected where they are passed."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from llamagym import Callback, ConfigError, EpisodeError, default_tracker, train
from llamagym.agent.agent import collector_of
from tests.helpers.agents import ChoiceAgent, CountdownEnv, WordAgent, actor_of, make_agent

SMALL = {"context": "turn", "ppo": {"batch_size": 6}}
ADDED = {
    "float32": np.float32(0.5),
    "float64": np.float64(0.5),
    "int64": np.int64(3),
    "bool": np.True_,
    "zero_dimensional": np.array(2.0),
    "tensor": torch.tensor(0.25),
    "fraction": Fraction(1, 2),
    "word": "far",
}
PLAIN = {
    "float32": 0.5,
    "float64": 0.5,
    "int64": 3,
    "bool": 1.0,
    "zero_dimensional": 2.0,
    "tensor": 0.25,
    "fraction": 0.5,
    "word": "far",
}


class Adding(Callback):
    """Adds statistics, and has a state of NumPy's values."""

    def __init__(self, added: dict[Any, Any]) -> None:
        self.added, self.loaded = added, None

    def on_update(self, run, stats):
        stats.update(self.added)

    def state_dict(self):
        return {"count": np.int64(3), "mean": np.array([0.5, 1.0]), "nested": {"best": (np.float32(2.0), None)}}

    def load_state_dict(self, state):
        self.loaded = state


def test_statistics_and_state_of_a_callback_are_logged_saved_and_resumed(tmp_path):
    def run(episodes: int, **options: Any) -> tuple[Any, Adding]:
        callback = Adding(ADDED)
        result = train(
            make_agent(ChoiceAgent, **SMALL),
            CountdownEnv,
            episodes=episodes,
            num_envs=2,
            seed=0,
            callbacks=callback,
            on_update=lambda stats: stats.update(late=np.float32(1.5)),
            run_dir=tmp_path,
            checkpoint_every=1,
            **options,
        )
        return result, callback

    run(2)
    result, callback = run(2, resume=True)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == len(result.updates) == 2
    for stats in (*rows, *result.updates):
        assert {name: stats[name] for name in PLAIN} == PLAIN
    assert [stats["late"] for stats in result.updates] == [1.5, 1.5]
    assert callback.loaded == {"count": 3, "mean": [0.5, 1.0], "nested": {"best": [2.0, None]}}


@pytest.mark.parametrize(
    "added",
    [{"mine": np.ones(2)}, {"mine": None}, {"mine": [1.0]}, {"mine": object()}, {"mine": 1j}, {5: 1.0}],
    ids=range(6),
)
def test_rejects_non_numeric_statistic_by_name_and_saves_the_run(added, tmp_path):
    (name,) = added
    agent = make_agent(ChoiceAgent, **SMALL)
    with pytest.raises(ConfigError, match=rf"statistic.*{name}"):
        train(
            agent,
            CountdownEnv,
            episodes=4,
            num_envs=2,
            seed=0,
            callbacks=Adding(added),
            checkpoint_dir=tmp_path / "run",
        )
    again = make_agent(ChoiceAgent, **SMALL)
    result = train(
        again,
        CountdownEnv,
        episodes=4,
        num_envs=2,
        seed=0,
        callbacks=Adding({}),
        checkpoint_dir=tmp_path / "run",
        resume=True,
    )
    assert len(result.updates) == 2


def test_rows_that_a_loop_of_your_own_logs(tmp_path):
    tracker = default_tracker(tmp_path, {"rate": np.float32(0.5)})
    tracker.log({"loss": np.float32(0.5), "count": np.int64(2), "bad": np.float64("nan")}, step=np.int64(7))
    tracker.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 7, "loss": 0.5, "count": 2}
    assert json.loads((tmp_path / "config.json").read_text())["rate"] == 0.5


def test_environment_ids_and_groups_of_numpy_are_saved(tmp_path):
    def made() -> Any:
        return make_agent(ChoiceAgent, algorithm="grpo", grpo={"batch_size": 1000, "group_size": 2})

    agent, rng = made(), np.random.default_rng(0)
    ids = np.arange(4)
    agent.act_batch(["a", "b", "c", "d"], env_ids=ids)
    agent.assign_rewards(np.ones(4, dtype=np.float32), env_ids=ids)
    agent.terminate_episodes(ids[:2], groups=[rng.integers(9), (np.int32(1), np.str_("x"))])
    agent.act("e")
    agent.save_checkpoint(tmp_path / "run", loop={"best": np.float32(0.5), "steps": np.int64(4), "map": np.eye(2)})
    again = made()
    loop = again.load_checkpoint(tmp_path / "run", keep_episodes=True)
    assert loop == {"best": 0.5, "steps": 4, "map": [[1.0, 0.0], [0.0, 1.0]]}
    assert actor_of(again).conversation(0).messages[-2]["content"] == "Observation e"
    assert list(actor_of(again).conversations) == list(actor_of(agent).conversations) == [2, 3, 0]
    assert [episode.group for episode in collector_of(again).buffer] == [
        int(np.random.default_rng(0).integers(9)),
        (1, "x"),
    ]


def test_penalty_of_numpy_is_saved(tmp_path):
    class Refusing(WordAgent):
        def extract_action(self, response):
            return None

    agent = make_agent(Refusing, invalid_action_penalty=np.float32(-0.5))
    agent.act("a")
    agent.save_checkpoint(tmp_path / "run")
    assert actor_of(agent).conversation(0).turns[0].penalty == -0.5


@pytest.mark.parametrize(
    "key",
    [float("nan"), np.float64("inf"), 2**63, 10**5000, np.True_, object(), Fraction(1, 2), (1, {}), 1j],
    ids=range(9),
)
def test_rejects_ids_and_groups_that_cannot_be_saved(key):
    agent = make_agent(ChoiceAgent)
    agent.act("a")
    agent.assign_reward(0.0)
    for call in (
        lambda: agent.act_batch(["b"], [key]),
        lambda: agent.terminate_episode(group=key),
        lambda: actor_of(agent).conversation(key),
        lambda: actor_of(agent).discard_episodes([key]),
    ):
        with pytest.raises(EpisodeError, match="cannot be saved"):
            call()
    assert list(actor_of(agent).conversations) == [0]
