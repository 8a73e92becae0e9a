"""BabyAI's grid worlds (https://arxiv.org/abs/1810.08272) as text: what the agent sees of the room, and the mission.

The agent sees the 7 by 7 cells before it, turned so that it looks ahead; walls hide what is behind them. Positions are
given as steps ahead and to the side, so the same view reads the same wherever the agent stands.

Words come in an order in which a language model looks things up. At a word it finds what followed an earlier mention of
that word (induction heads, Olsson et al. 2022, https://arxiv.org/abs/2209.11895). So each thing's name is followed at
once by the way on which most of the steps lie, actions are called as these ways are, and the mission, which names a
thing, comes last. A reply that begins with the thing's name is then next to its answer.
"""

from __future__ import annotations

import string
from typing import Any

import gymnasium
import numpy as np

from ..errors import ConfigError

ACTIONS = ("left", "right", "ahead", "pick up", "drop", "toggle", "done")
"""By minigrid's number, in the words of what is seen: turn left, turn right, go ahead. Toggle opens and closes."""
MOVES = ACTIONS[:3]
"""All that a mission of the kind "go to" needs."""


def make_babyai(
    level: str = "BabyAI-GoToRedBallNoDists-v0",
    all_actions: bool = False,
    repeat_mission: bool = True,
    max_steps: int | None = None,
) -> BabyAIText:
    """A BabyAI level whose observations are strings.

    Args:
        level: Its id.
        all_actions: Whether the seven `ACTIONS` are offered, or only `MOVES`.
        repeat_mission: Whether every observation says the mission, or only an episode's first.
        max_steps: An episode is cut off after so many, and the reward for success falls over them; None is the level's
            own limit.

    Raises:
        ConfigError: minigrid is not installed.
    """
    try:
        import minigrid  # noqa: F401 - registers the levels
    except ImportError as error:
        raise ConfigError(f"{level} needs the package minigrid. Run pip install 'llamagym[minigrid]'.") from error
    limit: dict[str, Any] = {} if max_steps is None else {"max_steps": max_steps}
    return BabyAIText(gymnasium.make(level, **limit), all_actions, repeat_mission)


class BabyAIText(gymnasium.Wrapper[str, Any, Any, Any]):
    """Puts a level's observations into words.

    The reward is minigrid's, 1 - 0.9 * steps / limit on success and 0 otherwise; `info["success"]` tells it apart from
    failure. Reaching the limit truncates.

    Attributes:
        action_names: What each action is called.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], all_actions: bool = False, repeat_mission: bool = True) -> None:
        """Wrap a level; see `make_babyai`."""
        super().__init__(env)
        self._repeat_mission = repeat_mission
        self.action_names = ACTIONS if all_actions else MOVES
        self.action_space = gymnasium.spaces.Discrete(len(self.action_names))
        self.observation_space = gymnasium.spaces.Text(1000, charset=string.printable)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode in a room of its own."""
        observation, info = self.env.reset(seed=seed, options=options)
        return _in_words(observation, with_mission=True), {**info, "success": False}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an action."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        info = {**info, "success": bool(terminated and float(reward) > 0)}
        return _in_words(observation, self._repeat_mission), float(reward), terminated, truncated, info


def _in_words(observation: Any, with_mission: bool) -> str:
    mission = f" Mission: {observation['mission']}." if with_mission else ""
    return f"{describe(observation['image'])}.{mission}"


def describe(image: np.ndarray) -> str:
    """What a view shows, nearest first, and what lies straight ahead.

    Args:
        image: Kind, colour and state of each cell, as minigrid numbers them, uint8 (W, W, 3): from left to right, and
            from far to near. The agent stands in the middle of the nearest row; what it carries shows there.
    """
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX

    states = {number: name for name, number in STATE_TO_IDX.items()}
    middle, near = image.shape[0] // 2, image.shape[1] - 1
    seen: list[tuple[int, str]] = []
    for column, row in np.ndindex(image.shape[:2]):
        kind, color, state = (int(number) for number in image[column, row])
        name = IDX_TO_OBJECT[kind]
        if name in ("unseen", "empty", "wall", "floor"):
            continue
        thing = f"{IDX_TO_COLOR[color]} {name}" if name != "door" else f"{states[state]} {IDX_TO_COLOR[color]} door"
        ahead, aside = near - row, column - middle
        ways = [(ahead, "ahead"), (abs(aside), "left" if aside < 0 else "right")]
        place = ", ".join(f"{way} {steps}" for steps, way in sorted(ways, key=lambda each: -each[0]) if steps)
        seen.append((ahead + abs(aside), f"{thing} {place or 'in hand'}"))
    things = "; ".join(words for _, words in sorted(seen)) or "nothing"
    front = IDX_TO_OBJECT[int(image[middle, near - 1, 0])]
    return f"You see: {things}. Ahead: {'free' if front in ('empty', 'floor') else front}"
