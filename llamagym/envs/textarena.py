"""TextArena's games for one player (https://arxiv.org/abs/2504.11442) in Gymnasium's terms: strings in, strings out.

TextArena's own interface repeats the whole game in every observation, rewards nothing but the end, and draws from
Python's and NumPy's global random numbers. Here an observation is what the game has said since the last move, and each
environment has random numbers of its own, so that a seed and the actions alone decide an episode.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np

from ..errors import ConfigError, did_you_mean, needs

_TEXT = gymnasium.spaces.Text(100_000, min_length=0, charset=string.printable)


class TextArenaEnv(gymnasium.Env[str, str]):
    """One of TextArena's games for one player.

    An action is a reply as the model gives it; the game says in its first observation how a move is to be written. A
    move that it does not understand is answered with the reason, and the second in a row ends the game. The reward
    comes with the end and is the game's own, from 0 to 1 in most; `info["success"]` is True for a reward of 1 or more
    and `info["reason"]` says how the game ended. TextArena counts reaching a limit of turns as an ending with a reward
    of its own, so nothing is ever truncated.

    Attributes:
        game: The game's id.
        repeats: Whether every observation repeats the game so far.
    """

    def __init__(self, game: str, repeats: bool = False, **options: Any) -> None:
        """Make a game.

        Args:
            game: TextArena's id, such as "GuessTheNumber-v0" or "TowerOfHanoi-v0".
            repeats: Whether an observation repeats the whole game so far, as TextArena shows it, which suits an agent
                with context="turn"; else it holds what is new, which suits context="episode".
            options: Passed on to the game, such as `max_turns`.

        Raises:
            ConfigError: There is no such game, it is for several players, or it cannot be made here.
        """
        self.game, self.repeats = game, repeats
        self.observation_space = self.action_space = _TEXT
        arena = _textarena()
        known = [name for name in arena.envs.registration.ENV_REGISTRY if not name.endswith(("-raw", "-train"))]
        if game not in known:
            raise ConfigError(f"TextArena has no game {game!r}. {did_you_mean(game, known)}")
        self._random: tuple[Any, Any] | None = None
        with self._own_random():
            try:
                self._game = arena.make(game, **options)
                self._game.reset(num_players=1, seed=0)
            except AssertionError as error:
                raise ConfigError(f"{game} is not for one player: {error}. Choose another game.") from error
            except Exception as error:  # some need a word list of NLTK's, a model's API, or a newer Python
                raise ConfigError(f"{game} cannot be made: {type(error).__name__}: {error}") from error
        self._over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin a game; its rules are the first observation."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31))
        with self._own_random(drawn):
            self._game.reset(num_players=1, seed=drawn)
        # Wrappers keep what they showed of the game before.
        for layer in self._layers():
            if hasattr(layer, "full_observations"):
                layer.full_observations = {}
        self._over = False
        return self._observation(), {"success": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make a move."""
        if self._over:
            raise gymnasium.error.ResetNeeded("The game is over. Call reset() before step().")
        with self._own_random():
            self._over, info = self._game.step(action)
        observation, reward = self._observation(), 0.0
        if self._over:
            rewards, players = self._game.close()
            reward, info = float(rewards[0]), {**info, **players[0]}
            observation = f"{observation}\n{info.get('reason', '')}".strip()
        return observation, reward, self._over, False, {**info, "success": self._over and reward >= 1.0}

    def _observation(self) -> str:
        if self.repeats:
            return str(self._game.get_observation()[1]).strip()
        said = self._layers()[-1].get_observation()[1]
        # What the player said stands in its own replies.
        return "\n".join(text.strip() for sender, text, _ in said if sender < 0)

    def _layers(self) -> list[Any]:
        """The game's wrappers, outermost first, then the game itself."""
        layers = [self._game]
        while isinstance(layers[-1], _textarena().Wrapper):
            layers.append(layers[-1].env)
        return layers

    @contextmanager
    def _own_random(self, seed: int | None = None) -> Iterator[None]:
        """While open, the global random numbers are this environment's, begun again with `seed` if one is given."""
        outside = random.getstate(), np.random.get_state()
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)
        elif self._random is not None:
            random.setstate(self._random[0])
            np.random.set_state(self._random[1])
        try:
            yield
        finally:
            self._random = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])


def _textarena() -> ModuleType:
    with needs("textarena", "TextArenaEnv"):
        import textarena
    return textarena
