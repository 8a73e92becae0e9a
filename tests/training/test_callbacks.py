"""Callbacks: order of calls, their arguments, how they end a training, and saving the best agent."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from llamagym import (
    Callback,
    CheckpointError,
    ConfigError,
    EvalCallback,
    StopOnReturn,
    evaluate,
    load_model_and_tokenizer,
    train,
)
from llamagym.saving import state_files
from llamagym.saving.checkpoints import newest
from llamagym.saving.state_files import read_state, saveable_state, write_state
from llamagym.training.callbacks import Callbacks
from llamagym.training.tracking import MultiTracker
from tests.helpers.agents import ChoiceAgent, CountdownEnv, make_agent
from tests.helpers.tiny import tiny_base_model, tiny_tokenizer

SMALL = {"context": "turn", "ppo": {"batch_size": 6}}


class Recorder(Callback):
    """Records its calls."""

    def __init__(self, stop_at: str = "", answer: object = False) -> None:
        self.heard: list[str] = []
        self.episodes: list = []
        self.stop_at, self.answer = stop_at, answer

    def _hear(self, what: str) -> object:
        self.heard.append(what)
        return self.answer if what == self.stop_at else None

    def on_training_start(self, run):
        self._hear(f"start at {run.turns}")

    def on_step(self, run):
        return self._hear(f"step {run.turns}")

    def on_episode_end(self, run, episode):
        self.episodes.append(episode)
        return self._hear(f"episode {len(run.returns)}")

    def on_update(self, run, stats):
        stats["mine"] = float(len(run.updates))
        return self._hear(f"update {len(run.updates)}")

    def on_training_end(self, run):
        self._hear("end" if run.is_over else "broken off")

    def state_dict(self):
        return {"heard": self.heard}

    def load_state_dict(self, state):
        self.heard = [*state["heard"], "loaded"]


class Renamed(Recorder):
    """A callback without a state in the checkpoint."""


def test_callbacks_are_called_in_order_and_add_to_the_statistics():
    recorder, logged = Recorder(), []
    result = train(
        make_agent(ChoiceAgent, **SMALL),
        CountdownEnv,
        episodes=2,
        num_envs=2,
        seed=0,
        callbacks=recorder,
        on_update=logged.append,
    )
    steps = ["step 2", "step 4", "step 6", "episode 2", "episode 2", "update 1"]
    assert recorder.heard == ["start at 0", *steps, "end"]
    assert result.updates[0]["mine"] == logged[0]["mine"] == 1.0
    first, second = recorder.episodes
    assert (first.copy, second.copy) == (0, 1)
    assert first.seed != second.seed
    assert [first.total_reward, second.total_reward] == result.returns
    assert first.length == len(first.turns) == len(first.rewards) == 3
    assert [turn.reward for turn in first.turns] == list(first.rewards) == [float(action) for action in first.actions]
    assert [message["role"] for message in first.messages] == ["system", *["user", "assistant"] * 3]
    assert first.terminated
    assert not first.truncated


@pytest.mark.parametrize("answer", [False, np.False_])
@pytest.mark.parametrize(("stop_at", "turns"), [("step 4", 4), ("episode 2", 6), ("update 1", 6)])
def test_false_ends_the_training_once_all_callbacks_were_called(stop_at, turns, answer):
    stopper, other = Recorder(stop_at, answer), Recorder()
    result = train(
        make_agent(ChoiceAgent, **SMALL), CountdownEnv, episodes=100, num_envs=2, seed=0, callbacks=[stopper, other]
    )
    assert result.turns == turns
    assert other.heard == stopper.heard
    assert stopper.heard[-1] == "end"


@pytest.mark.parametrize("answer", [None, True, 0, 0.0, "", [], {}, np.int64(0), np.zeros(2)], ids=repr)
def test_only_false_ends_the_training(answer):
    recorders = [Recorder(stop_at, answer) for stop_at in ("step 2", "episode 2", "update 1")]
    praised = EvalCallback(CountdownEnv, episodes=1, every=1, on_best=lambda result: answer)
    agent = make_agent(ChoiceAgent, **SMALL)
    callbacks = [*recorders, praised]
    result = train(
        agent, CountdownEnv, episodes=6, num_envs=2, seed=0, callbacks=callbacks, on_update=lambda stats: answer
    )
    assert len(result.returns) == 6


@pytest.mark.parametrize("answer", [False, np.False_])
def test_false_from_on_update_ends_the_training_and_is_logged(answer, caplog):
    agent = make_agent(ChoiceAgent, **SMALL)
    with caplog.at_level(logging.WARNING):
        result = train(agent, CountdownEnv, episodes=6, num_envs=2, seed=0, on_update=lambda stats: answer)
    assert len(result.updates) == 1
    # A comparison that is True at the last update, which ended training in earlier versions, is False at the first.
    assert "on_update returned False, which ends the training" in caplog.text


def test_true_from_on_update_which_ended_earlier_versions_is_logged_once(caplog):
    def train_with(answer: object) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            agent = make_agent(ChoiceAgent, **SMALL)
            result = train(agent, CountdownEnv, episodes=6, num_envs=2, seed=0, on_update=lambda stats: answer)
        assert len(result.updates) == 3
        return [message for message in caplog.messages if "on_update" in message]

    (message,) = train_with(True)
    assert "Return False to end it" in message
    assert train_with(None) == train_with(1) == []


def test_a_failing_callback_ends_the_training_once_all_were_called():
    class Failing(Callback):
        def on_update(self, run, stats):
            raise OSError("no room")

    recorder = Recorder()
    with pytest.raises(OSError, match="no room"):
        train(
            make_agent(ChoiceAgent, **SMALL),
            CountdownEnv,
            episodes=4,
            num_envs=2,
            seed=0,
            callbacks=[recorder, Failing()],
        )
    assert recorder.heard[-1] == "broken off"


def test_callback_states_are_saved_with_a_checkpoint(tmp_path, caplog):
    where = {"checkpoint_dir": tmp_path / "run", "checkpoint_every": 1, "seed": 0}
    before = Recorder()
    train(make_agent(ChoiceAgent, **SMALL), CountdownEnv, episodes=2, num_envs=2, callbacks=before, **where)
    after = Recorder()
    train(
        make_agent(ChoiceAgent, **SMALL), CountdownEnv, episodes=2, num_envs=2, callbacks=[after], resume=True, **where
    )
    # on_training_start is called before the state is loaded.
    count = len(before.heard)
    assert after.heard[: count + 1] == [*before.heard, "loaded"]
    assert after.heard[count + 1 :] == ["step 8", "step 10", "step 12", "episode 4", "episode 4", "update 2", "end"]
    with caplog.at_level(logging.WARNING):
        train(
            make_agent(ChoiceAgent, **SMALL),
            CountdownEnv,
            episodes=4,
            num_envs=2,
            callbacks=[Renamed()],
            resume=True,
            **where,
        )
    assert "The checkpoint has no state for Renamed" in caplog.text
    assert "The checkpoint has a state of Recorder, but no such callback was passed" in caplog.text


def test_rejects_objects_that_are_not_callbacks():
    with pytest.raises(ConfigError, match="a function of an update's statistics is passed as on_update"):
        train(make_agent(ChoiceAgent), CountdownEnv, episodes=1, callbacks=[print])


def test_stop_on_return_ends_the_training():
    # Returns are between 0 and 6.
    result = train(
        make_agent(ChoiceAgent), CountdownEnv, episodes=40, num_envs=2, seed=0, callbacks=StopOnReturn(0.0, episodes=5)
    )
    assert len(result.returns) == 6
    result = train(
        make_agent(ChoiceAgent), CountdownEnv, episodes=10, num_envs=2, seed=0, callbacks=StopOnReturn(6.1, episodes=1)
    )
    assert len(result.returns) == 10
    with pytest.raises(ConfigError, match="episodes=0"):
        StopOnReturn(1.0, episodes=0)


class Noise(Callback):
    """Changes the weights after each update, so that the agent becomes better or worse."""

    def __init__(self) -> None:
        self.rng = torch.Generator().manual_seed(0)

    def on_update(self, run, stats):
        with torch.no_grad():
            for name, weight in run.agent.policy.model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=3.0, generator=self.rng)


def test_only_the_best_agent_is_saved(tmp_path):
    tiny_base_model("llama").save_pretrained(tmp_path / "base")
    tiny_tokenizer("llama").save_pretrained(tmp_path / "base")
    model, tokenizer, device = load_model_and_tokenizer(tmp_path / "base", "cpu", "float32")
    # Without a prior, which would favor the same choice in all of them.
    options = {"context": "turn", "calibrate_choices": False, "seed": 0}
    agent = ChoiceAgent(model, tokenizer, device, None, {"batch_size": 6}, **options)
    praised: list[float] = []
    callback = EvalCallback(
        CountdownEnv,
        episodes=4,
        every=1,
        best_dir=tmp_path / "best",
        on_best=lambda result: praised.append(result.mean),
    )
    result = train(agent, CountdownEnv, episodes=12, num_envs=2, seed=0, callbacks=[Noise(), callback])
    means = [measured.mean for _, measured in callback.results]
    assert means == [stats["eval_return"] for stats in result.updates]
    assert len(means) == 6
    assert callback.best_mean == max(means)
    assert callback.best_update == 1 + means.index(max(means))
    # Which agent is the best depends on rounding; that they differ does not.
    assert len(set(means)) > 2, means
    assert praised == sorted(set(praised))
    assert praised[-1] == max(means)
    best = ChoiceAgent.load(tmp_path / "best", "cpu", "float32")
    again = [evaluate(each, CountdownEnv, episodes=4, seed=1_000_000) for each in (best, agent)]
    assert again == [callback.results[callback.best_update - 1][1], callback.results[-1][1]]


def test_evaluates_at_the_interval_and_at_the_end():
    def updates(episodes: int, **options: int) -> list[int]:
        callback = EvalCallback(CountdownEnv, episodes=1, **options)
        train(make_agent(ChoiceAgent, **SMALL), CountdownEnv, episodes=episodes, num_envs=2, seed=0, callbacks=callback)
        return [update for update, _ in callback.results]

    assert updates(10, every=2) == [2, 4, 5]
    assert updates(8, every_episodes=3) == [2, 4]
    with pytest.raises(ConfigError, match="Pass one of them"):
        EvalCallback(CountdownEnv, every=1, every_episodes=1)
    with pytest.raises(ConfigError, match="every=0"):
        EvalCallback(CountdownEnv, every=0)


def test_evaluation_does_not_change_what_is_learned(tmp_path):
    def weights(callbacks: list[Callback]) -> list[torch.Tensor]:
        agent = make_agent(ChoiceAgent, **SMALL)
        train(agent, CountdownEnv, episodes=6, num_envs=2, seed=0, callbacks=callbacks)
        return [weight.detach().clone() for weight in agent.policy.model.parameters()]

    sampled = EvalCallback(CountdownEnv, episodes=3, every=1, greedy=False)
    for one, other in zip(weights([]), weights([sampled]), strict=True):
        assert torch.equal(one, other)


def test_a_resumed_run_keeps_the_best_result(tmp_path):
    where = {"checkpoint_dir": tmp_path / "run", "checkpoint_every": 1, "seed": 0}
    first = EvalCallback(CountdownEnv, episodes=2, every=1)
    train(make_agent(ChoiceAgent, **SMALL), CountdownEnv, episodes=4, num_envs=2, callbacks=[Noise(), first], **where)
    again, stop = EvalCallback(CountdownEnv, episodes=2, every=100), Recorder(stop_at="step 14")
    train(
        make_agent(ChoiceAgent, **SMALL),
        CountdownEnv,
        episodes=4,
        num_envs=2,
        callbacks=[Noise(), again, stop],
        resume=True,
        **where,
    )
    assert stop.heard[-2:] == ["step 14", "end"]
    assert (again.best_mean, again.best_update) == (first.best_mean, first.best_update)
    assert again.results == []


# Callbacks that fail


class Raising(Callback):
    """Raises in one of its methods."""

    def __init__(self, method: str, stops: bool = True) -> None:
        self.stops_on_error = stops

        def fail(*given):
            raise OSError("no room")

        setattr(self, method, fail)


EVENTS = ["on_training_start", "on_step", "on_episode_end", "on_update", "on_training_end", "state_dict"]


@pytest.mark.parametrize("method", EVENTS)
def test_errors_without_stops_on_error_are_logged_once(method, tmp_path, caplog):
    recorder = Recorder()
    where = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "seed": 0}
    callbacks = [Raising(method, stops=False), recorder]
    result = train(make_agent(ChoiceAgent, **SMALL), CountdownEnv, episodes=4, num_envs=2, callbacks=callbacks, **where)
    assert len(result.updates) == 2
    assert recorder.heard[-1] == "end"
    assert caplog.text.count(f"Raising.{method}() failed: OSError('no room'). Training goes on.") == 1


@pytest.mark.parametrize("method", EVENTS)
def test_a_callback_error_stops_the_run_after_a_checkpoint(method, tmp_path, caplog):
    recorder, logged = Recorder(), []

    class Keeping:
        def log(self, metrics, step):
            logged.append(step)

        def close(self):
            pass

    where = {"checkpoint_dir": tmp_path, "checkpoint_every": 100, "seed": 0, "tracker": Keeping()}
    with pytest.raises(OSError, match="no room"):
        train(
            make_agent(ChoiceAgent, **SMALL),
            CountdownEnv,
            episodes=4,
            num_envs=2,
            callbacks=[Raising(method), recorder],
            **where,
        )
    at = {"on_step": 2, "on_episode_end": 6, "on_update": 6, "on_training_end": 12}.get(method, 0)
    if method in ("on_episode_end", "on_update"):
        # The other callbacks were called for the whole step, and the update is logged.
        assert recorder.heard[-4:] == ["episode 2", "episode 2", "update 1", "broken off"]
        assert logged == [2]
    if method == "on_training_start":
        assert newest(tmp_path) is None
        return
    folder = newest(tmp_path)
    assert folder is not None
    assert read_state(folder, "state")["loop"]["turns"] == at
    again = Recorder()
    # The same budget continues where the error stopped it; another one would start from zero.
    result = train(
        make_agent(ChoiceAgent, **SMALL), CountdownEnv, episodes=4, num_envs=2, callbacks=again, resume=True, **where
    )
    assert len(result.returns) == 4
    assert "loaded" in again.heard
    assert logged == [2, 4]


@pytest.mark.parametrize("resume", [False, True])
def test_an_error_at_the_start_does_not_name_the_checkpoint(tmp_path, resume):
    class Missing(Callback):
        def on_training_start(self, run):
            raise CheckpointError("my own folder is missing.")

    options = {"episodes": 4, "num_envs": 2, "seed": 0, "checkpoint_dir": tmp_path}
    if resume:
        train(make_agent(ChoiceAgent, **SMALL), CountdownEnv, **options)
    recorder = Recorder()
    with pytest.raises(CheckpointError, match=r"^my own folder is missing\.$"):
        train(make_agent(ChoiceAgent, **SMALL), CountdownEnv, callbacks=[Missing(), recorder], resume=resume, **options)
    assert recorder.heard[-1] == "broken off"


def test_a_run_that_fails_at_its_last_step_is_not_over():
    recorder = Recorder()
    with pytest.raises(OSError, match="no room"):
        train(
            make_agent(ChoiceAgent, **SMALL),
            CountdownEnv,
            turns=2,
            num_envs=2,
            callbacks=[Raising("on_step"), recorder],
        )
    assert recorder.heard[-1] == "broken off"


def test_callback_errors_at_the_end_do_not_replace_the_training_error(caplog):
    def fail(stats):
        raise ZeroDivisionError("first")

    options = {"callbacks": Raising("on_training_end"), "on_update": fail}
    with pytest.raises(ZeroDivisionError, match="first"):
        train(make_agent(ChoiceAgent, **SMALL), CountdownEnv, episodes=4, num_envs=2, seed=0, **options)
    assert "A callback has failed as well: OSError('no room')" in caplog.text


def test_a_failing_save_does_not_replace_the_training_error(tmp_path, monkeypatch, caplog):
    def fail(stats):
        monkeypatch.setattr("llamagym.agent.checkpoint.write_state", full)
        raise ZeroDivisionError("first")

    def full(*given):
        raise OSError(28, "No space left on device")

    with pytest.raises(ZeroDivisionError, match="first"):
        train(
            make_agent(ChoiceAgent, **SMALL),
            CountdownEnv,
            episodes=4,
            num_envs=2,
            checkpoint_dir=tmp_path,
            on_update=fail,
        )
    assert "its state could not be saved: cannot write the checkpoint" in caplog.text


def nested(levels: int) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for _ in range(levels):
        state = {"a": state}
    return state


class Stated(Callback):
    """Has a state, and adds it to the statistics."""

    def __init__(self, state, stats=()) -> None:
        self.state, self.stats = state, dict(stats)

    def on_update(self, run, stats):
        stats.update(self.stats)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.loaded = state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"seen": [1, {2}]}, r"Stated\.state_dict\(\)/seen/1 is a set, which cannot be saved"),
        ({"by": {3: 1}}, r"Stated\.state_dict\(\)/by has the key 3 \(int\)\. Use strings"),
        ({"raw": b"x"}, r"Stated\.state_dict\(\)/raw is a bytes"),
        (None, r"Stated\.state_dict\(\) must be a dictionary, got NoneType"),
        ({"w": {"__tensor__": "x"}}, r"/w has '__tensor__' as its only key, which is reserved"),
        ({"w": [{"__number__": "5"}]}, r"/w/0 has '__number__' as its only key"),
        (
            {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}},
            r"Two tensors would be saved as Stated\.state_dict\(\)/a/b",
        ),
        ({"n": 10**5000}, r"/n is an int of 16610 bits"),
        ({10**5000: 1}, r"has the key <int of 16610 bits>"),
        (nested(3000), r"has more than 100 levels, or contains itself"),
        ({"w": torch.ones(1, dtype=torch.complex64)}, r"/w is a tensor that cannot be saved \(torch\.complex64"),
        ({"w": torch.ones(1, dtype=torch.uint16)}, r"torch\.uint16"),
        ({"w": torch.eye(2).to_sparse()}, r"torch\.sparse_coo"),
        ({"w": torch.ones(1, device="meta")}, r"on meta"),
        ({"w": np.complex64(1j)}, r"/w is a complex, which cannot be saved"),
        ({"seen_\udcff": torch.ones(1)}, r"'Stated\.state_dict\(\)/seen_\\udcff' contains a lone surrogate"),
    ],
    ids=range(16),
)
def test_an_unsaveable_callback_state_is_named(state, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        train(
            make_agent(ChoiceAgent, **SMALL),
            CountdownEnv,
            episodes=2,
            num_envs=2,
            callbacks=Stated(state),
            checkpoint_dir=tmp_path,
        )
    assert newest(tmp_path) is not None


def test_a_stateless_callback_takes_no_state_of_another_instance():
    class Broken(Stated):
        stops_on_error = False

        def state_dict(self):
            if self.state is None:
                raise OSError("no state")
            return self.state

    saved = Callbacks([Broken(None), Broken({"n": 2})]).state_dict()
    first, second = Broken({"n": 0}), Broken({"n": 0})
    Callbacks([first, second]).load_state_dict(saved)
    assert not hasattr(first, "loaded")
    assert second.loaded == {"n": 2}


def test_states_and_positions_of_maximum_depth_are_saved(tmp_path):
    class Deep(MultiTracker):
        def position(self):
            return nested(97)

    where = {"checkpoint_dir": tmp_path, "seed": 0, "tracker": MultiTracker(Deep())}
    state = nested(100)
    train(make_agent(ChoiceAgent, **SMALL), CountdownEnv, episodes=2, num_envs=2, callbacks=Stated(state), **where)
    folder = newest(tmp_path)
    assert folder is not None
    loop = read_state(folder, "state")["loop"]
    assert loop["callbacks"]["callbacks"][0][1] == state
    assert loop["tracker"] == [["Deep", nested(97)]]


def test_a_run_s_lists_are_checked_without_a_path_for_each_value(monkeypatch):
    checked, check = [], state_files.check_part

    def record(part, path, *rest):
        checked.append(path)
        check(part, path, *rest)

    monkeypatch.setattr(state_files, "check_part", record)
    saveable_state({"returns": [1.0] * 9, "successes": [True, None, False] * 9, "names": ["a"] * 9}, "loop")
    assert checked == ["loop", "loop/returns", "loop/successes", "loop/names"]


def test_states_may_hold_arrays_and_tensors(tmp_path):
    state = {"counts": np.arange(2), "mean": np.float32(0.5), "weights": torch.ones(2), "at": (1, None)}
    where = {"checkpoint_dir": tmp_path, "seed": 0}
    train(make_agent(ChoiceAgent, **SMALL), CountdownEnv, episodes=2, num_envs=2, callbacks=Stated(state), **where)
    after = Stated({})
    train(make_agent(ChoiceAgent, **SMALL), CountdownEnv, episodes=4, num_envs=2, callbacks=after, resume=True, **where)
    assert torch.equal(after.loaded.pop("weights"), state["weights"])
    assert after.loaded == {"counts": [0, 1], "mean": 0.5, "at": [1, None]}


@pytest.mark.parametrize(
    ("stats", "message"),
    [
        ({"mine": {1}}, r"'mine' must be .*\(set\)"),
        ({"mine": None}, r"'mine' must be .*\(NoneType\)"),
        ({"mine": np.zeros(2)}, r"'mine' must be .*\(ndarray\)"),
        ({"mine": np.array(1j)}, r"'mine' must be .*\(ndarray\)"),
        ({"mine": np.complex64(1 + 2j)}, r"'mine' must be .*\(complex64\)"),
        ({"mine": np.bytes_(b"7")}, r"'mine' must be .*\(bytes_\)"),
        ({"mine": np.timedelta64(5, "s")}, r"'mine' must be .*\(timedelta64\)"),
        ({"mine": 10**5000}, r"'mine' must be .*got <int of 16610 bits>"),
        ({"turns": 0}, r"\['turns'\] are the library's own and keep their values"),
        ({"episodes": "x", "step": 9, "minutes": -1}, r"\['step', 'minutes', 'episodes'\] are the library's own"),
        ({3: 1.0}, r"must be a string, got 3 \(int\)"),
    ],
)
def test_rejects_statistics_that_are_not_numbers_or_strings(stats, message, tmp_path):
    where = {"checkpoint_dir": tmp_path, "seed": 0}
    with pytest.raises(ConfigError, match=rf"Stated\.on_update\(\) set .*{message}"):
        train(
            make_agent(ChoiceAgent, **SMALL), CountdownEnv, episodes=2, num_envs=2, callbacks=Stated({}, stats), **where
        )
    # The update itself is in the checkpoint.
    result = train(make_agent(ChoiceAgent, **SMALL), CountdownEnv, episodes=4, num_envs=2, resume=True, **where)
    assert len(result.updates) == 1 + 2


class Removing(Callback):
    """Removes the statistics of the update."""

    stops_on_error = False

    def on_update(self, run, stats):
        stats.clear()


def test_callbacks_cannot_change_the_statistics_of_the_loop(tmp_path, caplog):
    def run(**options: Any) -> Any:
        return train(make_agent(ChoiceAgent, **SMALL), CountdownEnv, episodes=4, seed=0, **options)

    plain, result = run(), run(callbacks=Removing(), checkpoint_dir=tmp_path)
    assert [list(stats) for stats in result.updates] == [list(stats) for stats in plain.updates]
    assert "are the library's own and keep their values" in caplog.text
    assert newest(tmp_path) is not None


def test_callbacks_may_change_statistics_of_other_callbacks():
    both = [Stated({}, {"mine": 1}), Stated({}, {"mine": 2})]
    result = train(make_agent(ChoiceAgent, **SMALL), CountdownEnv, episodes=2, num_envs=2, callbacks=both)
    assert result.updates[0]["mine"] == 2


def test_states_may_hold_tensors_of_every_saveable_type(tmp_path):
    dtypes = state_files.SAVEABLE_DTYPES
    state = saveable_state({str(dtype): torch.tensor([0, 1]).to(dtype) for dtype in dtypes}, "loop")
    write_state(tmp_path, "state", state)
    loaded = read_state(tmp_path, "state")
    assert [tensor.dtype for tensor in loaded.values()] == list(dtypes)
    assert [tensor.tolist() for tensor in loaded.values()] == [[0, 1]] * len(dtypes)


def test_statistics_become_plain_numbers():
    stats = {"int": 3, "numpy": np.float32(0.5), "array": np.array(2), "tensor": torch.tensor(1.5), "text": "x"}
    result = train(make_agent(ChoiceAgent, **SMALL), CountdownEnv, episodes=2, num_envs=2, callbacks=Stated({}, stats))
    added = {name: result.updates[0][name] for name in stats}
    assert added == {"int": 3, "numpy": 0.5, "array": 2.0, "tensor": 1.5, "text": "x"}
    assert {type(value) for value in added.values()} == {int, float, str}
