"""BabyAI as text: descriptions of views, ends of episodes, and that the descriptions suffice to succeed."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from llamagym import ConfigError
from llamagym.envs.babyai import ACTIONS, MOVES, describe, make_babyai

pytestmark = pytest.mark.long


def walk(said: str) -> str:
    """Chooses an action from the text: to the ball if it is in view, else ahead, and left at a wall."""
    ball = re.search(r"red ball ([^.;]*)", said)
    if not ball:
        return "left" if "Ahead: wall" in said else "ahead"
    return next((way for way in ("ahead", "left") if way in ball[1]), "right")


def test_without_minigrid_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "minigrid", None)
    with pytest.raises(ConfigError, match=r"pip install 'llamagym\[minigrid\]'"):
        make_babyai()


def test_descriptions_suffice_to_succeed():
    pytest.importorskip("minigrid", reason="the extra minigrid is not installed")
    env, said = make_babyai(), set()
    for seed in range(60):
        text, info = env.reset(seed=seed)
        assert not info["success"]
        done = False
        while not done:
            assert env.observation_space.contains(text)
            said.add(text)
            text, reward, terminated, truncated, info = env.step(MOVES.index(walk(text)))
            done = terminated or truncated
        assert info["success"]
        assert terminated
        assert not truncated
        assert 0 < reward <= 1
    assert len(said) < 60


def test_the_limit_truncates_without_success():
    pytest.importorskip("minigrid", reason="the extra minigrid is not installed")
    env = make_babyai()
    env.reset(seed=0)
    limit = env.unwrapped.max_steps
    # A turn to the left and one to the right, over and over, from a place where the ball is not ahead.
    ends = [env.step(step % 2)[1:] for step in range(limit)]
    assert [truncated for _, _, truncated, _ in ends] == [False] * (limit - 1) + [True]
    assert not any(terminated or info["success"] or reward for reward, terminated, _, info in ends)


def test_max_steps_and_repeat_mission_take_effect():
    pytest.importorskip("minigrid", reason="the extra minigrid is not installed")
    env, usual = make_babyai(max_steps=3, repeat_mission=False), make_babyai()
    text = env.reset(seed=0)[0]
    assert text == usual.reset(seed=0)[0]
    assert re.search(r"\. Mission: go to [^.]*\.$", text)
    for step in range(3):
        text, _, terminated, truncated, _ = env.step(step % 2)
        assert text == usual.step(step % 2)[0].partition(" Mission: ")[0]
        assert (terminated, truncated) == (False, step == 2)
    # minigrid takes 0.9 of the reward off in proportion to the limit that is used up.
    assert env.unwrapped.max_steps == 3 < usual.unwrapped.max_steps


def test_a_seed_determines_the_room():
    pytest.importorskip("minigrid", reason="the extra minigrid is not installed")
    env = make_babyai(all_actions=True)
    assert env.action_space.n == len(env.action_names) == len(ACTIONS)
    views = [env.reset(seed=seed)[0] for seed in range(20)]
    assert views == [env.reset(seed=seed)[0] for seed in range(20)]
    assert len(set(views)) > 5


def test_describes_a_view():
    pytest.importorskip("minigrid", reason="the extra minigrid is not installed")
    view = np.zeros((7, 7, 3), dtype=np.uint8)
    view[:, :, 0] = 1
    assert describe(view) == "You see: nothing. Ahead: free"
    view[3, 5] = (4, 4, 2)
    view[1, 3] = (6, 0, 0)
    view[6, 6] = (5, 2, 0)
    view[3, 6] = (7, 3, 0)
    assert describe(view) == (
        "You see: purple box in hand; locked yellow door ahead 1; blue key right 3; red ball ahead 3, left 2. "
        "Ahead: door"
    )
    view[1, 3], view[0, 5] = (1, 0, 0), (6, 0, 0)
    assert describe(view).split("; ")[-1] == "red ball left 3, ahead 1. Ahead: door"
    view[3, 5] = (2, 5, 0)
    assert describe(view).endswith("Ahead: wall")
