"""Wraps TextArena's games for one player (https://arxiv.org/abs/2504.11442) for Gymnasium, with strings in and out.

TextArena's own interface repeats the whole game in every observation and draws from the global random number generators
of Python and NumPy. Here an observation is the game's output since the last move, and each environment has its own
random state, so that an episode depends on the seed and the actions only.
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
    """A TextArena game for one player.

    An action is the model's whole reply; the first observation explains the format of moves. The answer to an invalid
    move is the reason, and a second one in a row ends the game. The reward comes at the end and is the game's own, from
    0 to 1 in most games. `info["success"]` is True for a reward of at least 1, and `info["reason"]` says how the game
    ended. TextArena treats a turn limit as an ending with its own reward, so episodes are never truncated.

    Attributes:
        game: Id of the game.
        repeats: Whether every observation repeats the game so far.
    """

    def __init__(self, game: str, repeats: bool = False, **options: Any) -> None:
        """Creates a game.

        Args:
            game: TextArena's id, such as "GuessTheNumber-v0" or "TowerOfHanoi-v0".
            repeats: Whether an observation repeats the whole game so far, for agents with context="turn"; else it
                contains only new text, for context="episode".
            options: Options of the game, such as `max_turns`.

        Raises:
            ConfigError: The game is unknown, is for several players, or cannot be created here.
        """
        self.game = game
        self.repeats = repeats
        self.observation_space = self.action_space = _TEXT
        arena = _textarena()
        known = [name for name in arena.envs.registration.ENV_REGISTRY if not name.endswith(("-raw", "-train"))]
        if game not in known:
            raise ConfigError(f"TextArena has no game {game!r}. {did_you_mean(game, known)}")
        self._random_state: tuple[Any, Any] | None = None
        with self._own_random_state():
            try:
                self._game = arena.make(game, **options)
                self._game.reset(num_players=1, seed=0)
            except AssertionError as error:
                raise ConfigError(f"{game} is not for one player: {error}. Choose another game.") from error
            except Exception as error:  # some games need a word list of NLTK, a model's API, or a newer Python
                raise ConfigError(f"{game} cannot be made: {type(error).__name__}: {error}") from error
        self._over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts a game; its rules are the first observation."""
        super().reset(seed=seed)
        game_seed = int(self.np_random.integers(2**31))
        with self._own_random_state(game_seed):
            self._game.reset(num_players=1, seed=game_seed)
        # TextArena's wrappers do not clear the observations of the previous game.
        for wrapper in self._wrappers():
            if hasattr(wrapper, "full_observations"):
                wrapper.full_observations = {}
        self._over = False
        return self._observation(), {"success": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Makes a move."""
        if self._over:
            raise gymnasium.error.ResetNeeded("The game is over. Call reset() before step().")
        with self._own_random_state():
            self._over, info = self._game.step(action)
        observation = self._observation()
        reward = 0.0
        if self._over:
            rewards, player_infos = self._game.close()
            reward = float(rewards[0])
            info = {**info, **player_infos[0]}
            observation = f"{observation}\n{info.get('reason', '')}".strip()
        return observation, reward, self._over, False, {**info, "success": self._over and reward >= 1.0}

    def _observation(self) -> str:
        if self.repeats:
            return str(self._game.get_observation()[1]).strip()
        messages = self._wrappers()[-1].get_observation()[1]
        # The player's own messages are left out: the conversation already contains them as replies.
        return "\n".join(text.strip() for sender, text, _ in messages if sender < 0)

    def _wrappers(self) -> list[Any]:
        """Returns the game's wrappers, outermost first, then the game itself."""
        wrappers = [self._game]
        while isinstance(wrappers[-1], _textarena().Wrapper):
            wrappers.append(wrappers[-1].env)
        return wrappers

    @contextmanager
    def _own_random_state(self, seed: int | None = None) -> Iterator[None]:
        """While open, the global generators have this environment's state, or a new one from `seed`."""
        outside = _get_random_state()
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)
        elif self._random_state is not None:
            _set_random_state(self._random_state)
        try:
            yield
        finally:
            self._random_state = _get_random_state()
            _set_random_state(outside)


def _get_random_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])


def _textarena() -> ModuleType:
    with needs("textarena", "TextArenaEnv"):
        import textarena
    return textarena
