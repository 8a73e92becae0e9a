"""A player that knows the way through MiniGrid's memory levels, to be imitated."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import gymnasium as gym
import script

from llamagym import ConfigError
from llamagym.envs.babyai import MOVES

LEFT, RIGHT, AHEAD = range(len(MOVES))
# What a step ahead adds to x and y, by minigrid's number of the direction: right, down, left, up.
STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))


def make_player(env: gym.Env[Any, Any], seed: int) -> script.Player:
    """Who plays this episode.

    Args:
        env: The level, after `reset`.
        seed: Of the side to which the player turns.

    Raises:
        ConfigError: It is another kind of level.
    """
    level: Any = env.unwrapped
    if not hasattr(level, "success_pos"):
        raise ConfigError(
            f"--shown-episodes in {type(level).__name__}: the player knows memory levels only. Take one, such as "
            "MiniGrid-MemoryS7-v0, or leave the option out."
        )
    actions = way(level, random.Random(seed))
    return lambda observation: next(actions)


def way(level: Any, rng: random.Random) -> Iterator[int]:
    """Turns round and goes back until the object is in view, then goes to its like at the end of the hallway."""
    turn = rng.choice((LEFT, RIGHT))
    for action in chain((turn, turn), repeat(AHEAD)):
        if level.agent_sees(1, level.height // 2 - 1):
            break
        yield action
    yield from shortest_way(level, level.success_pos)


def shortest_way(level: Any, goal: tuple[int, int]) -> list[int]:
    """Actions that lead to a cell, past walls and things; breadth first over cells and directions."""
    start = (*map(int, level.agent_pos), level.agent_dir)
    ways: dict[tuple[int, int, int], list[int]] = {start: []}
    queue = deque([start])
    while queue:
        x, y, direction = here = queue.popleft()
        if (x, y) == goal:
            return ways[here]
        dx, dy = STEPS[direction]
        after = {LEFT: (x, y, (direction - 1) % 4), RIGHT: (x, y, (direction + 1) % 4)}
        thing = level.grid.get(x + dx, y + dy)
        if thing is None or thing.can_overlap():
            after[AHEAD] = (x + dx, y + dy, direction)
        for action, there in after.items():
            if there not in ways:
                ways[there] = [*ways[here], action]
                queue.append(there)
    raise ValueError(f"no way leads to {goal}")
