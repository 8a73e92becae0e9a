"""A bonus for what an episode has not shown yet, so that exploring pays before the task's own reward does.

Where the way to a reward leads over steps that bring nothing by themselves, such as turning round to look at what will
have to be remembered, an agent gives them up before it has learnt what they are for.
"""

from __future__ import annotations

import math
import pickle
from typing import Any, TypeVar

import gymnasium

from ..errors import ConfigError

ObsType = TypeVar("ObsType")
ActType = TypeVar("ActType")


class DiscoveryBonus(gymnasium.Wrapper[ObsType, ActType, ObsType, ActType]):
    """Adds a bonus to the reward of each step whose observation is new in its episode.

    The episodic discovery bonus of Yuan et al. 2018 (https://arxiv.org/abs/1806.11525). It changes what is best: train
    with it, and measure without. All that there is to see must pay less than the task, or an agent looks about instead
    of fulfilling it.

    >>> env = DiscoveryBonus(gymnasium.make("FrozenLake-v1", is_slippery=False), 0.25)
    >>> _ = env.reset(seed=0)
    >>> [env.step(action)[1] for action in (0, 2, 2, 0)]  # into the wall, right, right, and back
    [0.0, 0.25, 0.25, 0.0]
    """

    def __init__(self, env: gymnasium.Env[ObsType, ActType], bonus: float) -> None:
        """Wrap an environment.

        Args:
            env: Of any kind; observations are told apart by all that they hold.
            bonus: In the reward's units.

        Raises:
            ConfigError: `bonus` is no positive number.
        """
        if not (isinstance(bonus, (int, float)) and 0 < bonus < math.inf):
            raise ConfigError(f"bonus={bonus!r}; expected a positive number, in the units of the environment's reward.")
        super().__init__(env)
        self._bonus = bonus
        self._seen: set[bytes] = set()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ObsType, dict[str, Any]]:
        """Begin an episode; its first observation is seen already."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._seen = {pickle.dumps(observation)}
        return observation, info

    def step(self, action: ActType) -> tuple[ObsType, float, bool, bool, dict[str, Any]]:
        """Take an action."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        shown = pickle.dumps(observation)
        bonus = 0.0 if shown in self._seen else self._bonus
        self._seen.add(shown)
        return observation, float(reward) + bonus, terminated, truncated, info
