"""Vector environments of every kind, close(), worker processes that hang or are killed, observations, infos."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FlattenObservation, NormalizeObservation, TimeLimit, TransformReward
from gymnasium.wrappers import RecordEpisodeStatistics as RecordSingleStatistics
from gymnasium.wrappers.vector import ClipReward, DictInfoToList, RecordEpisodeStatistics

from llamagym import (
    Callback,
    ConfigError,
    EnvironmentLostError,
    EnvironmentTimeoutError,
    LlamaGymError,
    evaluate,
    train,
)
from llamagym.training.managed_env import ManagedEnv
from tests.helpers import ROOT
from tests.helpers.agents import ChoiceAgent, CountdownEnv, make_agent

# Vector environments of every kind


class Counter(gym.Env):
    """Observations are the seed and the step; each episode has one step more than the one before."""

    observation_space = gym.spaces.MultiDiscrete([2**32, 10])
    action_space = gym.spaces.Discrete(3)

    def __init__(self, truncates: bool = False) -> None:
        self.truncates = truncates

    def shown(self) -> Any:
        return np.array([self.seed, self.at], dtype=np.int64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.at = 0 if seed is None else seed, 0
        self.length = 2 + (seed or 0) % 3
        return self.shown(), {"at": 0, "final_obs": "the user's"}

    def step(self, action):
        self.at += 1
        over = self.at == self.length
        info = {"at": self.at, "success": over, "final_obs": "the user's", "final_info": self.at}
        return self.shown(), float(action), over and not self.truncates, over and self.truncates, info


class Plain(Counter):
    """Has no infos under names that a vector environment in SAME_STEP uses itself."""

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        return observation, {"at": info["at"]}

    def step(self, action):
        *outcome, info = super().step(action)
        return *outcome, {"at": info["at"], "success": info["success"]}


class Seeing(ChoiceAgent):
    """Records each environment's observations and infos."""

    def format_observation(self, observation, info=None):
        seen = self.__dict__.setdefault("seen", [])
        seen.append((int(observation[0]), int(observation[1]), info["at"]))
        return str(observation[1])


class Remembering(Callback):
    """Records the episodes."""

    def __init__(self) -> None:
        self.episodes: list[Any] = []

    def on_episode_end(self, run, episode):
        self.episodes.append(episode)


WRAPPERS = {
    "none": lambda envs: envs,
    "statistics": RecordEpisodeStatistics,
    "list of infos": lambda envs: DictInfoToList(RecordEpisodeStatistics(envs)),
    "rewards": lambda envs: ClipReward(envs, -5.0, 5.0),
}


@pytest.mark.parametrize("truncates", [False, True], ids=["terminates", "truncates"])
@pytest.mark.parametrize(
    "wrapper", ["none", *(pytest.param(name, marks=pytest.mark.long) for name in list(WRAPPERS)[1:])]
)
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", ["sync", "async shared", "async"])
def test_episodes_are_the_same_in_every_vector_environment(kind, mode, wrapper, truncates):
    """Each observation is seen once and in order, each action is taken, each reset has a seed."""
    makers = [functools.partial(Plain, truncates)] * 2
    if kind == "sync":
        base: Any = SyncVectorEnv(makers, autoreset_mode=mode)
    else:
        base = AsyncVectorEnv(makers, autoreset_mode=mode, shared_memory=kind == "async shared")
    envs = WRAPPERS[wrapper](base)
    agent = make_agent(Seeing, context="turn", ppo={"batch_size": 1000})
    kept = Remembering()
    try:
        if kind == "async" and mode == AutoresetMode.NEXT_STEP:
            with pytest.raises(ConfigError, match=r"shared_memory=False and the autoreset mode NEXT_STEP.*DISABLED"):
                train(agent, envs, episodes=8, seed=3)
            return
        result = train(agent, envs, episodes=8, seed=3, callbacks=kept)
    finally:
        envs.close()
    assert len(kept.episodes) == 8
    for episode in kept.episodes:
        # Expected by hand: the length follows from the seed, each step from the one before.
        length = 2 + episode.seed % 3
        assert episode.seed != 0
        assert episode.length == length
        assert episode.rewards == tuple(float(action) for action in episode.actions)
        assert (episode.terminated, episode.truncated) == (not truncates, truncates)
        assert episode.info["at"] == length
        assert episode.success is True
        shown = [(episode.seed, at, at) for at in range(length + truncates)]
        assert [seen for seen in agent.seen if seen[0] == episode.seed] == shown
    assert result.successes == [True] * 8


@pytest.mark.parametrize("options", [{}, {"env_timeout": 60}], ids=["here", "in processes"])
def test_infos_may_use_names_of_gymnasium(options):
    agent = make_agent(Seeing, context="turn", ppo={"batch_size": 1000})
    kept = Remembering()
    result = train(agent, Counter, episodes=4, num_envs=2, seed=0, callbacks=kept, **options)
    assert result.successes == [True] * 4
    for episode in kept.episodes:
        assert episode.info == {
            "at": episode.length,
            "success": True,
            "final_obs": "the user's",
            "final_info": episode.length,
        }
        shown = [(episode.seed, at, at) for at in range(episode.length)]
        assert [seen for seen in agent.seen if seen[0] == episode.seed] == shown


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP], ids=lambda mode: mode.name)
def test_final_obs_is_reserved_in_same_step_only(mode):
    agent = make_agent(Seeing, context="turn", ppo={"batch_size": 1000})
    kept = Remembering()
    assert (
        train(agent, SyncVectorEnv([Counter] * 2, autoreset_mode=mode), episodes=4, seed=0, callbacks=kept).successes
        == [True] * 4
    )
    assert all(episode.info["final_obs"] == "the user's" for episode in kept.episodes)


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_rejects_reset_infos_that_would_replace_final_ones(kind):
    envs = kind([Counter] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(ConfigError, match=r"reset\(\) returns final_obs as info.*SAME_STEP.*DISABLED"):
        train(make_agent(Seeing), envs, episodes=4)
    envs.close()


class Named(CountdownEnv):
    """Returns infos whose names are not strings."""

    info: ClassVar = {1: "x", (2, 3): 5, "success": True, "nested": {7: 8}}

    def step(self, action):
        return *super().step(action)[:4], dict(self.info)


@pytest.mark.parametrize("env", [Named, lambda: SyncVectorEnv([Named] * 2)], ids=["own", "caller's"])
def test_info_names_may_have_any_type(env):
    kept = Remembering()
    env = env if env is Named else env()
    train(make_agent(ChoiceAgent), env, episodes=4, num_envs=2, callbacks=kept)
    assert all(episode.info == Named.info for episode in kept.episodes)


def fails_with(error: Exception, method: str) -> type[CountdownEnv]:
    def fail(self, *args, **given):
        raise error

    return type("Fails", (CountdownEnv,), {method: fail})


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium logs the errors of its processes.
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize(
    "error", [ValueError("illegal move e2e5"), KeyError("board"), AssertionError("no king"), TypeError("no board")]
)
def test_errors_in_a_callers_vector_environment_are_unchanged(kind, method, error):
    envs = kind([fails_with(error, method)] * 2)
    with pytest.raises(type(error), match=error.args[0]) as caught:
        train(make_agent(ChoiceAgent), envs, episodes=4)
    assert not isinstance(caught.value, LlamaGymError)
    envs.close()


class Shows(CountdownEnv):
    """Returns one value as observation."""

    def __init__(self, space: gym.Space, value: Any) -> None:
        super().__init__()
        self.observation_space, self.value = space, value

    def reset(self, *, seed=None, options=None):
        return copy.copy(self.value), super().reset(seed=seed)[1]

    def step(self, action):
        return copy.copy(self.value), *super().step(action)[1:]


@pytest.mark.parametrize(
    ("space", "value", "match"),
    [
        (gym.spaces.Box(-128, 127, (1,), np.int8), np.array([300]), r"observation is array\(\[300\]\).*type int8"),
        (gym.spaces.Box(-9, 9, (1,), np.int16), [70_000], "type int16"),
        (gym.spaces.MultiBinary(1), np.array([300]), "type int8"),
        (gym.spaces.MultiDiscrete([5], dtype=np.int32), np.array([2**40]), "type int32"),
        (gym.spaces.Box(-np.inf, np.inf, (1,), np.float32), np.array([1e300]), "type float32"),
        (gym.spaces.Dict(a=gym.spaces.MultiBinary(1)), {"a": np.array([300])}, r"observation\['a'\] is"),
        (gym.spaces.Tuple([gym.spaces.Discrete(3)] * 2), np.array([1, 2, 2]), r"lacks observation\[2\]"),
        (gym.spaces.Tuple([gym.spaces.Discrete(3)] * 2), np.array(1), "observations do not fit Tuple"),
        (gym.spaces.Tuple([gym.spaces.Discrete(3)] * 2), (1,), "observations do not fit Tuple"),
    ],
)
def test_rejects_observations_that_their_space_would_change(space, value, match):
    with pytest.raises(ConfigError, match=match):
        evaluate("random", lambda: Shows(space, value), episodes=2, num_envs=2)


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (gym.spaces.Box(-128, 127, (2,), np.int8), [1, 2]),
        (gym.spaces.Box(-np.inf, np.inf, (2,), np.float32), np.array([np.inf, 0.1])),
        (gym.spaces.Box(-np.inf, np.inf, (1,), np.float16), np.array([np.nan])),
        (gym.spaces.Discrete(3), 2),
        (gym.spaces.Tuple([gym.spaces.Discrete(3)] * 2), np.array([1, 2])),
        (gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.MultiDiscrete([3, 3])]), (1, np.array([1, 2]))),
        (gym.spaces.Text(3), "abc"),
    ],
)
def test_accepts_observations_of_another_type_with_equal_values(space, value):
    assert len(evaluate("random", lambda: Shows(space, value), episodes=2, num_envs=2).returns) == 2


def test_unpicklable_infos_are_logged_once(caplog):
    class Unpicklable(CountdownEnv):
        def step(self, action):
            return *super().step(action)[:4], {"board": lambda: 1, "success": True}

    result = train(make_agent(ChoiceAgent), Unpicklable, episodes=4, num_envs=2, env_timeout=30)
    assert result.successes == [True] * 4
    assert caplog.text.count("The infos ['board'] cannot be pickled") == 1


# The end of a run


class FailsToClose(CountdownEnv):
    """Raises in close()."""

    closed = 0

    def close(self) -> None:
        type(self).closed += 1
        raise OSError("no connection")


@pytest.mark.parametrize("env_timeout", [None, 30])
def test_an_error_in_close_keeps_the_result(env_timeout, caplog):
    FailsToClose.closed = 0
    result = train(make_agent(ChoiceAgent), FailsToClose, episodes=4, num_envs=2, seed=0, env_timeout=env_timeout)
    assert len(result.returns) == 4
    assert "in close()" in caplog.text
    if env_timeout is None:
        assert FailsToClose.closed == 2
        assert len(evaluate("random", FailsToClose, episodes=4, seed=0, num_envs=2).returns) == 4


def test_an_error_in_close_does_not_replace_an_earlier_error():
    class Fails(FailsToClose):
        def step(self, action):
            raise ZeroDivisionError("first")

    with pytest.raises(ZeroDivisionError, match="first"):
        train(make_agent(ChoiceAgent), Fails, episodes=4, num_envs=2)


class Hangs(CountdownEnv):
    """Ignores SIGTERM, and hangs when it is closed or at the first step."""

    at_step = False

    def wait(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    def step(self, action):
        if self.at_step:
            self.wait()
        return super().step(action)

    def close(self):
        # The one made in this process for its spaces hangs as well.
        if multiprocessing.parent_process() is None:
            time.sleep(600)
        self.wait()


def test_a_hanging_close_in_this_process_times_out(caplog):
    env = ManagedEnv(Hangs(), 3, in_child=False, close_timeout=0.05)
    env.close()
    assert "Environment 3 did not close in this process within 0.05 seconds (env_timeout)" in caplog.text


@pytest.mark.parametrize("env_timeout", [None, 30])
def test_an_exit_in_close_keeps_the_result(env_timeout):
    class Exits(CountdownEnv):
        def close(self):
            sys.exit(3)

    result = train(make_agent(ChoiceAgent), Exits, episodes=4, num_envs=2, seed=0, env_timeout=env_timeout)
    assert len(result.returns) == 4


@pytest.mark.long
def test_a_hanging_close_in_a_worker_is_named_and_killed(caplog):
    started = time.monotonic()
    result = train(make_agent(ChoiceAgent), Hangs, episodes=4, num_envs=2, seed=0, env_timeout=1.5)
    assert len(result.returns) == 4
    assert time.monotonic() - started < 60
    assert (
        "Environments [0, 1] did not close within 1.5 seconds (env_timeout), and their processes were killed"
        in caplog.text
    )
    assert multiprocessing.active_children() == []


@pytest.mark.long
def test_a_worker_that_ignores_sigterm_is_killed():
    with pytest.raises(EnvironmentTimeoutError, match=r"did not answer within 1\.5 seconds"):
        train(
            make_agent(ChoiceAgent), type("Hangs", (Hangs,), {"at_step": True}), episodes=4, num_envs=2, env_timeout=1.5
        )
    assert multiprocessing.active_children() == []


class WithServer(CountdownEnv):
    """Starts a subprocess, then hangs at a step or kills itself."""

    def __init__(self, folder: Path, is_killed: bool) -> None:
        super().__init__()
        self.is_killed = is_killed
        if multiprocessing.parent_process() is not None:
            server = subprocess.Popen(["sleep", "600"])
            (folder / f"{server.pid}").touch()

    def step(self, action):
        if self.is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


def is_running(pid: int) -> bool:
    """Whether a process has not ended; a zombie has."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("is_killed", [True, pytest.param(False, marks=pytest.mark.long)], ids=["killed", "hangs"])
def test_processes_started_by_a_worker_end_with_it(is_killed, tmp_path):
    error, timeout = (EnvironmentLostError, 30) if is_killed else (EnvironmentTimeoutError, 1)
    with pytest.raises(error):
        train(
            make_agent(ChoiceAgent),
            lambda: WithServer(tmp_path, is_killed),
            episodes=2,
            num_envs=2,
            env_timeout=timeout,
        )
    pids = [int(path.name) for path in tmp_path.iterdir()]
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pids) == 2
    assert not any(map(is_running, pids))


class Killed(CountdownEnv):
    """Kills its process at a step or a reset, as a system without free memory does."""

    method, at = "step", 4

    def count(self, method: str) -> None:
        calls = self.__dict__.setdefault("calls", {})
        calls[method] = calls.get(method, 0) + 1
        if method == self.method and calls[method] == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def reset(self, **given):
        self.count("reset")
        return super().reset(**given)

    def step(self, action):
        self.count("step")
        return super().step(action)


@pytest.mark.parametrize("options", [{"env_timeout": 30}, {"overlap": True}], ids=["with a limit", "overlapping"])
@pytest.mark.parametrize(("method", "at"), [("step", 1), ("step", 4), ("reset", 2)])
def test_a_killed_worker_is_named(method, at, options, tmp_path, caplog):
    kind = type("Killed", (Killed,), {"method": method, "at": at})
    with pytest.raises(
        EnvironmentLostError, match=r"have ended: \d.*\(SIGKILL\)\. All others have been stopped.*num_envs"
    ):
        train(make_agent(ChoiceAgent), kind, episodes=8, num_envs=2, seed=0, checkpoint_dir=tmp_path, **options)
    assert "the last complete state is saved in" in caplog.text
    assert multiprocessing.active_children() == []


class KillsOne(Callback):
    """Kills the process of an environment between two steps."""

    def on_step(self, run):
        for process in multiprocessing.active_children()[:1]:
            process.kill()
            process.join()


@pytest.mark.parametrize("options", [{"env_timeout": 30}, {"overlap": True}], ids=["with a limit", "overlapping"])
def test_a_worker_killed_between_steps_is_named(options, tmp_path, caplog):
    with pytest.raises(EnvironmentLostError, match=r"have ended: \d.*\(SIGKILL\)\. All others"):
        train(
            make_agent(ChoiceAgent),
            CountdownEnv,
            episodes=8,
            num_envs=4,
            callbacks=KillsOne(),
            checkpoint_dir=tmp_path,
            **options,
        )
    assert "the last complete state is saved in" in caplog.text
    assert multiprocessing.active_children() == []


def test_a_worker_that_exits_while_making_its_environment_is_named():
    def make() -> gym.Env:
        if multiprocessing.parent_process() is not None:
            os._exit(7)
        return CountdownEnv()

    with pytest.raises(EnvironmentLostError, match=r"have ended: 0 \(exit code 7\)"):
        train(make_agent(ChoiceAgent), make, episodes=4, num_envs=2, env_timeout=30)
    assert multiprocessing.active_children() == []


def test_a_killed_worker_of_a_callers_vector_environment_is_named():
    kind = type("Killed", (Killed,), {"at": 2})
    envs = RecordEpisodeStatistics(AsyncVectorEnv([CountdownEnv, kind], autoreset_mode=AutoresetMode.DISABLED))
    with pytest.raises(EnvironmentLostError, match=r"have ended: 1 \(SIGKILL\)\. A process"):
        train(make_agent(ChoiceAgent), envs, episodes=4)
    assert not envs.closed
    # Without waiting for an answer of the killed one.
    for process in envs.unwrapped.processes:
        process.kill()
        process.join()
    envs.closed = True


class Disconnected(CountdownEnv):
    """Loses its own connection."""

    def step(self, action):
        raise ConnectionResetError("the game's server")


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium logs the errors of its processes.
@pytest.mark.parametrize("is_callers", [False, True])
def test_a_connection_error_of_an_environment_is_unchanged(is_callers):
    envs: Any = Disconnected
    options: dict[str, Any] = {"num_envs": 2, "env_timeout": 30}
    if is_callers:
        envs, options = AsyncVectorEnv([Disconnected] * 2, autoreset_mode=AutoresetMode.DISABLED), {}
    with pytest.raises(ConnectionResetError, match="the game's server"):
        train(make_agent(ChoiceAgent), envs, episodes=4, **options)
    if is_callers:
        envs.close()


_ORPHANS = """
import os, sys, time, signal, subprocess
from llamagym import evaluate
from tests.helpers.agents import CountdownEnv

class Hangs(CountdownEnv):
    def step(self, action):
        # A single write: output of two processes may be interleaved.
        os.write(1, f"{os.getpid()}\\n".encode())
        # It inherits the pipe.
        subprocess.Popen(["sleep", "600"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

if __name__ == "__main__":
    from llamagym.training.environments import open_envs
    with open_envs(Hangs, [2], in_processes=True) as (copies,):
        copies.reset([0, 1])
        copies.send([0, 0])
        time.sleep(600)
"""


@pytest.mark.long
def test_no_worker_outlives_a_killed_run(tmp_path):
    (tmp_path / "orphans.py").write_text(_ORPHANS)
    root = ROOT
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, str(tmp_path / "orphans.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        # Before anything can fail: the end of the block waits for it.
        process.kill()
        pids = [int(line) for line in lines]
        deadline = time.monotonic() + 60
        # The pipe is closed once the last process that writes to it has ended.
        assert process.stdout.read() == ""
        assert time.monotonic() < deadline
    assert not [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]


# Observations and errors


class WithHint(CountdownEnv):
    """Returns more than its space holds."""

    observation_space = gym.spaces.Dict(
        {"left": gym.spaces.Discrete(100), "pair": gym.spaces.Tuple((gym.spaces.Discrete(9),))}
    )

    def reset(self, **given):
        return {"left": super().reset(**given)[0], "pair": (1,)}, {}

    def step(self, action):
        observation, *outcome = super().step(action)
        return {"left": observation, "pair": (1, 2), "hint": "go"}, *outcome


@pytest.mark.parametrize("run", [train, evaluate])
def test_rejects_observation_parts_that_the_space_lacks(run):
    with pytest.raises(
        ConfigError, match=r"lacks observation\['pair'\]\[1\], observation\['hint'\].*Add them to the space"
    ):
        run(make_agent(ChoiceAgent), WithHint, episodes=2, num_envs=2)


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """An exception whose attributes cannot be set."""

    reason: str

    def __str__(self) -> str:
        """The reason."""
        return self.reason


@pytest.mark.parametrize("env_timeout", [None, 60])
@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_exception_that_is_a_frozen_dataclass_keeps_its_text(method, env_timeout, caplog):
    def fail(self, *args, **given):
        raise FrozenError("out of cards")

    kind = type("Fails", (CountdownEnv,), {method: fail})
    with pytest.raises(RuntimeError, match="FrozenError: out of cards") as caught:
        train(make_agent(ChoiceAgent), kind, episodes=2, num_envs=2, env_timeout=env_timeout)
    assert not isinstance(caught.value, LlamaGymError)
    if env_timeout is None:
        assert isinstance(caught.value.__cause__, FrozenError)
    assert method == "reset" or "failed in environment" in caplog.text


# One environment, or several from its spec


@pytest.fixture
def registered():
    gym.register("Settable-v0", Settable)
    yield "Settable-v0"
    gym.registry.pop("Settable-v0")


class Settable(CountdownEnv):
    """Has as many steps as an attribute says."""

    def __init__(self, options: Any = None) -> None:
        super().__init__()
        self.options, self.words, self.steps = options, ["a"], 0

    def step(self, action):
        self.steps += 1
        return super().step(action)


class Doubled(gym.Wrapper):
    """A user's wrapper, which does not record its arguments."""

    def step(self, action):
        observation, reward, *outcome = self.env.step(action)
        return observation, 2 * reward, *outcome


def changed(env: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(env.unwrapped, name, value)
    return env


@pytest.mark.parametrize("attributes", [{"length": 5}, {"words": ["b"]}, {"extra": 1}, {"hook": lambda: 1}])
def test_attributes_lost_in_recreated_environments_are_logged(registered, attributes, caplog):
    env = changed(gym.make(registered), **attributes)
    train(make_agent(ChoiceAgent), env, episodes=2, num_envs=2)
    (name,) = attributes
    assert f"its attributes {name} are not the same in them. Pass a function that makes it" in caplog.text
    assert caplog.text.count("are not the same in them") == 1


class Level(CountdownEnv):
    """Is one step longer at each reset."""

    def __init__(self) -> None:
        super().__init__()
        self.level = 0

    def reset(self, *, seed=None, options=None):
        self.level += 1
        self.length = 2 + self.level
        return super().reset(seed=seed)


class Outer(gym.Env):
    """Contains another environment."""

    observation_space, action_space = CountdownEnv.observation_space, CountdownEnv.action_space

    def __init__(self) -> None:
        self.inner = CountdownEnv(3)
        self.inner.outer = self
        self.tables = {}

    def reset(self, *, seed=None, options=None):
        return self.inner.reset(seed=seed)

    def step(self, action):
        return self.inner.step(action)


def with_level(registered: str) -> gym.Env:
    gym.registry[registered].entry_point = Level
    return changed(gym.make(registered), level=20)


def with_inner(registered: str) -> gym.Env:
    gym.registry[registered].entry_point = Outer
    env = gym.make(registered)
    env.unwrapped.inner.length = 7
    return env


def with_other_rewards(registered: str) -> gym.Env:
    env = TransformReward(gym.make(registered), abs)
    env.func = lambda reward: 10 * reward
    return env


def with_statistics(registered: str) -> gym.Env:
    gym.registry[registered].entry_point = functools.partial(Shows, gym.spaces.Box(-9, 9, (1,)), np.ones(1, np.float32))
    env = NormalizeObservation(gym.make(registered))
    for _ in range(3):
        env.reset()
    env.update_running_mean = False
    return env


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (with_level, {"level"}),
        (with_inner, {"inner"}),
        (with_other_rewards, {"func"}),
        (with_statistics, {"_update_running_mean", "obs_rms"}),
    ],
)
def test_lost_attributes_of_every_kind_are_logged(registered, make, names, caplog):
    env = make(registered)
    evaluate("random", env, episodes=2, num_envs=2)
    (text,) = re.findall("its attributes (.*) are not the same in them", caplog.text)
    assert set(text.split(", ")) == names


def plain(registered: str) -> gym.Env:
    return gym.make(registered, options={"a": np.zeros(3)})


def wrapped(registered: str) -> gym.Env:
    return TransformReward(RecordSingleStatistics(FlattenObservation(TimeLimit(plain(registered), 5))), abs)


def outer(registered: str) -> gym.Env:
    gym.registry[registered].entry_point = Outer
    return gym.make(registered)


class WithFunctions(CountdownEnv):
    """Has functions with an array as a default value, one that calls itself, and one with an unassigned variable."""

    def __init__(self) -> None:
        super().__init__()

        def factorial(number: int) -> int:
            return number * factorial(number - 1) if number else 1

        def early() -> int:
            return assigned_later

        self.default = lambda number, weights=np.zeros(3): number * weights  # noqa: B008
        self.factorial = factorial
        self.early = early
        if self.length < 0:
            assigned_later = 1


def with_functions(registered: str) -> gym.Env:
    gym.registry[registered].entry_point = WithFunctions
    return gym.make(registered)


@pytest.mark.parametrize("make", [plain, wrapped, outer, with_functions])
@pytest.mark.parametrize("is_used", [False, True], ids=["as it was made", "after a reset"])
def test_an_unchanged_environment_is_recreated_without_a_warning(registered, make, caplog, is_used):
    env = make(registered)
    if is_used:
        env.reset(seed=3)
    with caplog.at_level(logging.WARNING):
        evaluate("random", env, episodes=2, num_envs=2)
        evaluate("random", env, episodes=4)
    assert "are not the same in them" not in caplog.text


@pytest.mark.parametrize("env_timeout", [None, 30])
def test_a_single_environment_is_not_recreated_and_stays_open(registered, env_timeout):
    env = changed(gym.make(registered), length=5)
    closes: list[int] = []
    env.unwrapped.close = lambda: closes.append(os.getpid())
    result = train(make_agent(ChoiceAgent), env, episodes=2, num_envs=1, env_timeout=env_timeout)
    assert result.turns == 10
    assert closes == []
    # A worker process has a copy of the same environment.
    assert env.unwrapped.steps == (10 if env_timeout is None else 0)


def test_an_environment_in_a_users_wrapper_is_not_recreated(registered):
    env = Doubled(gym.make(registered))
    result = train(make_agent(ChoiceAgent), env, episodes=2, seed=0)
    assert env.unwrapped.steps == result.turns == 6
    with pytest.raises(ConfigError, match=r"a wrapper that does not record its arguments.*Pass a function"):
        train(make_agent(ChoiceAgent), env, episodes=2, num_envs=2)


def test_rejects_environments_that_cannot_be_recreated(registered):
    class Local(gym.Wrapper, gym.utils.RecordConstructorArgs):
        def __init__(self, env):
            gym.utils.RecordConstructorArgs.__init__(self)
            super().__init__(env)

    with pytest.raises(ConfigError, match=r"cannot be made again from its spec: .*Local.*num_envs=1"):
        train(make_agent(ChoiceAgent), Local(gym.make(registered)), episodes=2, num_envs=2)


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: TimeLimit(env, 9)], ids=["itself", "wrapped"])
def test_rejects_a_function_that_returns_the_same_environment_twice(wrap):
    env = CountdownEnv()
    message = r"4 environments were made, .*expected 4 objects, got 1\. Pass a function that makes a new"
    with pytest.raises(ConfigError, match=message):
        evaluate(lambda observation: 1, lambda: wrap(env), episodes=4, num_envs=4)
    with pytest.raises(ConfigError, match=message):
        train(make_agent(ChoiceAgent), lambda: wrap(env), episodes=4, num_envs=4)
    with pytest.raises(ConfigError, match=message):
        train(make_agent(ChoiceAgent), SyncVectorEnv([lambda: wrap(env)] * 4), episodes=4)
    assert evaluate(lambda observation: 1, lambda: wrap(env), episodes=4, num_envs=1).lengths == [3] * 4


class Drawn(gym.Env):
    """Ends after two steps, and is rendered as an image."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 4}
    observation_space = gym.spaces.Discrete(3)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.left = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        self.left = 2
        return self.left, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        self.left -= 1
        return self.left, float(action), self.left == 0, False, {}

    def render(self) -> np.ndarray:
        return np.full((16, 16, 3), 50 * self.left, np.uint8)


@pytest.fixture
def video_writer(monkeypatch):
    """MoviePy, or a writer in its place: its releases need an older Pillow than the pinned one."""
    if importlib.util.find_spec("moviepy") is not None:
        return
    module = types.ModuleType("moviepy.video.io.ImageSequenceClip")

    class ImageSequenceClip:
        def __init__(self, frames: list[np.ndarray], fps: int) -> None:
            self.frames = frames

        def write_videofile(self, path: str, logger: object) -> None:
            Path(path).write_bytes(np.stack(self.frames).tobytes())

    module.ImageSequenceClip = ImageSequenceClip
    for name in ("moviepy", "moviepy.video", "moviepy.video.io"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_one_of_many_environments_records_videos_and_none_is_overwritten(tmp_path, monkeypatch, video_writer, caplog):
    monkeypatch.setitem(gym.registry, "Drawn-v0", gym.envs.registration.EnvSpec("Drawn-v0", Drawn))
    folder = tmp_path / "videos"
    env = gym.wrappers.RecordVideo(
        gym.make("Drawn-v0", render_mode="rgb_array"), str(folder), episode_trigger=lambda episode: episode < 2
    )
    agent = make_agent(ChoiceAgent, ppo={"batch_size": 64}, context="turn")
    train(agent, env, turns=160)
    trained = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(trained) == {"rl-video-episode-0.mp4", "rl-video-episode-1.mp4"}
    evaluate(agent, env, episodes=200)
    names = {path.name for path in folder.iterdir()}
    assert names == {*trained, "rl-video-2-episode-0.mp4", "rl-video-2-episode-1.mp4"}
    assert all((folder / name).read_bytes() == content for name, content in trained.items())
    assert "attributes" not in caplog.text
    # Evaluations before and after training record nothing, whatever the environments are made from.
    train(agent, env, turns=8, num_envs=1, eval_episodes=20)
    # Episodes of two turns, and the one that has begun.
    assert env.get_wrapper_attr("episode_id") <= 5
    caplog.clear()
    train(agent, lambda: env_of(tmp_path / "own"), turns=64, num_envs=4, eval_episodes=8)
    assert {path.name for path in (tmp_path / "own").iterdir()} == {"rl-video-episode-0.mp4", "rl-video-episode-1.mp4"}


def env_of(folder: Path) -> gym.Env:
    return gym.wrappers.RecordVideo(Drawn("rgb_array"), str(folder), episode_trigger=lambda episode: episode < 2)
