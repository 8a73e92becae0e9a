"""BabyAI's grid worlds (https://arxiv.org/abs/1810.08272) as text: the agent's view of the room, and the mission.

The agent sees the 7 by 7 cells in front of it; walls hide the cells behind them. Positions are steps ahead and to the
side, so the description does not depend on the agent's position and direction.

The order of words suits the induction heads of language models (Olsson et al. 2022, https://arxiv.org/abs/2209.11895):
at a word, a model finds what followed an earlier mention of that word. So the name of each object is followed by the
direction with the most steps, actions have the names of directions, and the mission, which names an object, comes last.
After the object's name, the next word of a reply is then the action.
"""

from __future__ import annotations

import string
from typing import Any

import gymnasium
import numpy as np

from ..errors import needs

ACTIONS = ("left", "right", "ahead", "pick up", "drop", "toggle", "done")
"""Names of minigrid's actions, by number: turn left, turn right, go ahead and so on. Toggle opens and closes."""
MOVES = ACTIONS[:3]
"""The actions that "go to" missions need."""


def make_babyai(
    level: str = "BabyAI-GoToRedBallNoDists-v0",
    all_actions: bool = False,
    repeat_mission: bool = True,
    max_steps: int | None = None,
) -> BabyAIText:
    """Creates a BabyAI level whose observations are strings.

    Args:
        level: Id of the level.
        all_actions: Whether all seven `ACTIONS` are offered, or only `MOVES`.
        repeat_mission: Whether every observation contains the mission, or only the first of an episode.
        max_steps: Number of steps after which an episode is truncated, and over which the reward for success falls;
            None for the level's own limit.

    Raises:
        ConfigError: minigrid is not installed.
    """
    with needs("minigrid", level):
        import minigrid  # noqa: F401 - registers the levels
    limit: dict[str, Any] = {} if max_steps is None else {"max_steps": max_steps}
    return BabyAIText(gymnasium.make(level, **limit), all_actions, repeat_mission)


class BabyAIText(gymnasium.Wrapper[str, Any, Any, Any]):
    """Describes a level's observations in words.

    The reward is minigrid's, 1 - 0.9 * steps / limit on success and 0 otherwise. Reaching the limit truncates.
    `info["success"]` is True after success.

    Attributes:
        action_names: Names of the actions, by number.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], all_actions: bool = False, repeat_mission: bool = True) -> None:
        """Wraps a level; see `make_babyai`."""
        super().__init__(env)
        self._repeat_mission = repeat_mission
        self.action_names = ACTIONS if all_actions else MOVES
        self.action_space = gymnasium.spaces.Discrete(len(self.action_names))
        self.observation_space = gymnasium.spaces.Text(1000, charset=string.printable)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode in a new room."""
        observation, info = self.env.reset(seed=seed, options=options)
        return _to_text(observation, with_mission=True), {**info, "success": False}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes an action."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        info = {**info, "success": bool(terminated and float(reward) > 0)}
        return _to_text(observation, self._repeat_mission), float(reward), terminated, truncated, info


def _to_text(observation: Any, with_mission: bool) -> str:
    mission = f" Mission: {observation['mission']}." if with_mission else ""
    return f"{describe(observation['image'])}.{mission}"


def describe(image: np.ndarray) -> str:
    """Describes a view: its objects, nearest first, and the cell straight ahead.

    Args:
        image: Type, color and state of each cell as minigrid's numbers, uint8 (W, W, 3), from left to right and from
            far to near. The agent is in the middle of the nearest row; an object it carries appears there.
    """
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX

    states = {number: name for name, number in STATE_TO_IDX.items()}
    middle = image.shape[0] // 2
    nearest = image.shape[1] - 1
    objects: list[tuple[int, str]] = []
    for column, row in np.ndindex(image.shape[:2]):
        type_number, color_number, state_number = image[column, row].tolist()
        name = IDX_TO_OBJECT[type_number]
        if name in ("unseen", "empty", "wall", "floor"):
            continue
        name = f"{IDX_TO_COLOR[color_number]} {name}"
        if IDX_TO_OBJECT[type_number] == "door":
            name = f"{states[state_number]} {name}"
        steps_ahead = nearest - row
        steps_aside = abs(column - middle)
        directions = [(steps_ahead, "ahead"), (steps_aside, "left" if column < middle else "right")]
        # At equal steps "ahead" comes first, since sorting is stable.
        directions.sort(key=lambda direction: -direction[0])
        position = ", ".join(f"{direction} {steps}" for steps, direction in directions if steps)
        objects.append((steps_ahead + steps_aside, f"{name} {position or 'in hand'}"))
    objects.sort()
    descriptions = "; ".join(description for _, description in objects) or "nothing"
    front = IDX_TO_OBJECT[int(image[middle, nearest - 1, 0])]
    if front in ("empty", "floor"):
        front = "free"
    return f"You see: {descriptions}. Ahead: {front}"
