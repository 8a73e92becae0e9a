"""Pictures of a run for its report: the policy in all states, and episodes as the environment renders them."""

from __future__ import annotations

import base64
import json
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from .. import distributed
from ..agent.agent import Agent, collector_of
from ..agent.transcripts import choice_probabilities
from ..errors import ConfigError, excerpt
from ..options import json_safe
from ..saving.atomic import replace_file
from .env_specs import can_recreate, make_from_spec, without_video
from .environments import EnvSource, make_env
from .evaluation import EVALUATION_SEED, evaluation_mode
from .report.page import MAX_STATES, fits_a_page

logger = logging.getLogger(__name__)

# Episodes that are shown, turns of each, and pixels in the width of an image.
_EPISODES = 3
_TURNS = 60
_PIXELS = 200
# Characters of a rendering as text.
_CHARACTERS = 4_000
_RENDER_MODES = ("ansi", "rgb_array")


def policy_picture(agent: Agent) -> list[dict[str, Any]]:
    """Returns the probabilities of all choices in the states that an agent lists; empty without states or choices.

    An agent lists states by a method `states`, which returns observations by their place in the picture: a pair of row
    and column, or three texts or numbers, of which the first names a panel of the picture.

    Raises:
        ConfigError: `states()` returns something else, or too many states.
    """
    states = getattr(agent, "states", None)
    # A subclass may use the name for something else.
    if not callable(states):
        return []
    observations = states()
    if not isinstance(observations, Mapping) or len(observations) > MAX_STATES:
        raise ConfigError(
            f"states() returned {excerpt(observations)}. Return a dictionary of at most {MAX_STATES} observations by "
            "(row, column) or (panel, row, column)."
        )
    hooks = collector_of(agent).actor.hooks
    if any(hooks.choices(observation) is None for observation in observations.values()):
        return []
    cells = []
    probabilities = agent.action_probabilities(list(observations.values()))
    for place, choices in zip(observations, probabilities, strict=True):
        if not isinstance(place, tuple) or len(place) not in (2, 3):
            raise ConfigError(f"states() has the key {place!r}. Use (row, column) or (panel, row, column).")
        panel = str(place[0]) if len(place) == 3 else ""
        cells.append({"panel": panel, "row": str(place[-2]), "column": str(place[-1]), "choices": choices})
    if not fits_a_page(cells):
        raise ConfigError("states() has too many rows and columns for a picture. Let states share them.")
    return cells


class Pictures:
    """Writes a run's pictures into its folder: `policy.json`, and episodes with renderings into `played.jsonl`.

    A user's `states`, `render` and environments may raise anything. Errors are logged, and the picture is left out. Of
    several processes that learn together, each draws, so that none of them waits, and the first one writes.
    """

    def __init__(self, agent: Agent, env: EnvSource, folder: Path | None, env_timeout: float | None) -> None:
        """Prepares the pictures.

        Args:
            agent: The agent that is trained.
            env: As for `train`.
            folder: The run's folder; None draws nothing.
            env_timeout: As for `train`; with a limit no episodes are played here, since nothing would enforce it.
        """
        self._agent = agent
        self._env = env
        self._folder = folder
        self._plays = env_timeout is None

    def draw_before(self) -> None:
        """Draws the untrained policy."""
        self._logging_errors(lambda: self._draw_policy("before"))

    def draw_after(self) -> None:
        """Draws the trained policy, and a few episodes that it plays."""
        self._logging_errors(lambda: self._draw_policy("after"))
        if self._plays:
            self._logging_errors(self._draw_episodes)

    def _logging_errors(self, draw: Callable[[], None]) -> None:
        if self._folder is None:
            return
        try:
            draw()
        except gymnasium.error.DependencyNotInstalled as error:
            logger.info("The environment cannot be rendered: %s", error)
        except Exception as error:  # a user's methods may raise anything
            logger.warning("A picture for the report is left out: %r", error)

    def _draw_policy(self, when: str) -> None:
        assert self._folder is not None
        cells = policy_picture(self._agent)
        if not cells or not distributed.is_main_process():
            return
        path = self._folder / "policy.json"
        pictures = json.loads(path.read_text(encoding="utf-8")) if path.exists() and when == "after" else {}
        replace_file(path, json.dumps(json_safe({**pictures, when: cells})) + "\n")

    def _draw_episodes(self) -> None:
        assert self._folder is not None
        ids = [("played", 0)]
        lines = []
        with _without_display():
            env = _rendering_env(self._env)
            if env is None:
                return
            with closing(env), evaluation_mode(self._agent, ids, greedy=True, seed=EVALUATION_SEED):
                for number in range(_EPISODES):
                    episode = self._episode(env, EVALUATION_SEED + number, ids[0])
                    lines.append(json.dumps(json_safe(episode)) + "\n")
        if distributed.is_main_process():
            replace_file(self._folder / "played.jsonl", "".join(lines))

    def _episode(self, env: gymnasium.Env[Any, Any], seed: int, env_id: Any) -> dict[str, Any]:
        """Plays an episode; returns it as a transcript whose turns have the environment's rendering."""
        actor = collector_of(self._agent).actor
        observation, info = env.reset(seed=seed)
        turns: list[dict[str, Any]] = []
        is_over = False
        while not is_over and len(turns) < _TURNS:
            frame = _frame(env.render())
            (action,) = self._agent.act_batch([observation], [env_id], [info])
            conversation = actor.conversation(env_id)
            turn = conversation.turns[-1]
            read, reply = (message["content"] for message in conversation.messages[-2:])
            shown = {
                "turn": len(turns) + 1,
                "read": read,
                "reply": reply,
                "choices": choice_probabilities(turn, actor.decode),
                "valid": turn.valid,
                "value": turn.reply.value,
                "frame": frame,
            }
            turns.append(shown)
            if action is None:
                break
            observation, reward, terminated, truncated, info = env.step(action)
            shown["reward"] = float(reward)
            self._agent.assign_rewards([float(reward)], [env_id])
            is_over = terminated or truncated
        actor.discard_episodes([env_id])
        end = {"read": actor.hooks.text(observation, info), "frame": _frame(env.render())} if is_over else None
        return {
            "end": end,
            "update": self._agent.policy.num_updates,
            "system": self._agent.get_system_prompt(),
            "return": sum(turn.get("reward", 0.0) for turn in turns),
            "length": len(turns),
            "truncated": not is_over,
            "turns": turns,
        }


@contextmanager
def _without_display() -> Iterator[None]:
    """While open, pygame needs no display; without one it prints an error for each image."""
    before = os.environ.get("SDL_VIDEODRIVER")
    os.environ["SDL_VIDEODRIVER"] = "dummy"
    try:
        yield
    finally:
        if before is None:
            del os.environ["SDL_VIDEODRIVER"]
        else:
            os.environ["SDL_VIDEODRIVER"] = before


def _rendering_env(source: EnvSource) -> gymnasium.Env[Any, Any] | None:
    """Makes an environment that renders text or images; None if it renders neither."""
    if isinstance(source, VectorEnv):
        return None
    if isinstance(source, str):
        env = make_env(source)
    elif isinstance(source, gymnasium.Env):
        if not can_recreate(source):
            return None
        env = make_from_spec(source)
    else:
        # What a function sets up beside its spec would be missing in another one.
        env = without_video(source)()
        if env.render_mode not in _RENDER_MODES:
            env.close()
            return None
    if env.render_mode in _RENDER_MODES:
        return env
    modes = [mode for mode in _RENDER_MODES if mode in env.metadata.get("render_modes", ())]
    env.close()
    return make_from_spec(env, render_mode=modes[0]) if modes and can_recreate(env) else None


def _frame(rendered: Any) -> dict[str, str]:
    """Returns a rendering as the report shows it: text, or an image as PNG in base64; empty if it is neither."""
    if isinstance(rendered, str):
        return {"text": rendered[:_CHARACTERS]}
    if not isinstance(rendered, np.ndarray) or rendered.ndim != 3 or rendered.shape[2] not in (3, 4):
        return {}
    step = max(1, -(-rendered.shape[1] // _PIXELS))
    pixels = rendered[::step, ::step, :3].astype(np.uint8)
    return {"png": base64.b64encode(_png(pixels)).decode()}


def _png(pixels: np.ndarray[Any, Any]) -> bytes:
    """Returns RGB pixels, uint8 (height, width, 3), as a PNG file (https://www.w3.org/TR/png/)."""
    height, width, _ = pixels.shape
    # Each row begins with its filter, 0 for none.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")]
    file = b"\x89PNG\r\n\x1a\n"
    for name, content in chunks:
        file += struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return file
