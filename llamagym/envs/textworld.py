"""Wraps TextWorld games (https://arxiv.org/abs/1806.11532) for Gymnasium, with strings in and out.

TextWorld's own interface takes no seed, reports a cumulative score, and does not distinguish a limit from an ending.
Here the seed selects the game, the reward is the change of the score, and reaching the limit truncates.
"""

from __future__ import annotations

import re
import string
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
from gymnasium.spaces import Dict, Text

from ..errors import ConfigError, did_you_mean, needs
from ..options import user_path

KINDS = ("coin_collector", "locked_door")
LOOKING = {"look", "inventory", "examine"}
"""Verbs of commands that change nothing; they do not count as the last command."""
_STRING = Text(1000, min_length=0, charset=string.printable)
# Lines of a game's banner have neither letters nor digits.
_BANNER = re.compile(r"^[^a-z0-9]+$", re.MULTILINE | re.IGNORECASE)
# The status line follows the command prompt.
_STATUS = re.compile(r"\n> +-= .*", re.DOTALL)
# Commands of every game that read or write files, cut to nine letters, as the games' parser reads words.
_FILE_COMMANDS = {"save", "restore", "script", "transcrip"}


def make_games(kind: str, seeds: Iterable[int], folder: str | Path, level: int = 5) -> list[Path]:
    """Generates games as TextWorld's `tw-make` does; existing files in the folder are kept.

    Args:
        kind: "coin_collector" is `tw-make tw-coin_collector`: find a coin at the end of a chain of rooms. "locked_door"
            is a game of this library in two rooms: take the key, unlock and open the door, go through.
        seeds: Distinct seeds, one per game.
        folder: Folder of the games.
        level: Level of the coin collector: up to 100 the number of rooms; from 101 on there are also dead ends.

    Returns:
        Paths of the games, in the order of the seeds.

    Raises:
        ConfigError: The kind is unknown, or textworld is not installed.
    """
    if kind not in KINDS:
        raise ConfigError(f"There is no game of the kind {kind!r}. {did_you_mean(kind, KINDS)}")
    name = f"{kind}-level{level}" if kind == "coin_collector" else kind
    folder = user_path(folder, "folder")
    paths = {seed: folder / f"{name}-seed{seed}.z8" for seed in seeds}
    for seed, path in paths.items():
        if not path.exists():
            _make_game(kind, seed, level, path)
    return list(paths.values())


def _textworld() -> ModuleType:
    with needs("textworld", "TextWorldEnv, which requires Linux or macOS and a C compiler,"):
        import textworld
    return textworld


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppresses the interpreter's warning about games that are not on its list of published games."""
    from jericho import UnsupportedGameWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsupportedGameWarning)
        yield


def _make_game(kind: str, seed: int, level: int, path: Path) -> None:
    textworld = _textworld()
    options = textworld.GameOptions()
    options.seeds = seed
    with _quietly():
        game = _coin_collector(options, level) if kind == "coin_collector" else _locked_door(options)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary_folder:
        options.path = str(Path(temporary_folder) / path.name)
        compiled = Path(textworld.generator.compile_game(game, options))
        # The .json is moved first: `make_games` considers a game complete once its .z8 exists.
        compiled.with_suffix(".json").replace(path.with_suffix(".json"))
        compiled.replace(path)


def _coin_collector(options: Any, level: int) -> Any:
    from textworld.challenges.tw_coin_collector import coin_collector

    return coin_collector.make({"level": level}, options)


def _locked_door(options: Any) -> Any:
    """Makes a game of two rooms with a locked door between them and its key on the floor."""
    from textworld.generator.graph_networks import reverse_direction

    maker = _textworld().GameMaker(options)
    first_room = maker.new_room()
    second_room = maker.new_room()
    direction = str(options.rngs["map"].choice(sorted(first_room.exits)))
    path = maker.connect(first_room.exits[direction], second_room.exits[reverse_direction(direction)])
    door = maker.new_door(path, name="door")
    door.add_property("locked")
    key = maker.new("k", name="key")
    first_room.add(key)
    maker.add_fact("match", key, door)
    maker.set_player(first_room)
    maker.set_quest_from_commands(["take key", "unlock door with key", "open door", f"go {direction}"])
    return maker.build()


class TextWorldEnv(gymnasium.Env[dict[str, Any], str]):
    """Plays one of several games in each episode.

    An observation has the keys `text`, the game's last output without banner, status and empty lines; `last_command`,
    the last command whose verb is not in `LOOKING` ("" at the start); and `admissible_commands`, sorted. The reward is
    the change of the score. Winning or losing terminates, the limit truncates. `info` has the keys `won`, `lost`,
    `score`, and `game`, the path of the game.
    """

    def __init__(self, games: Sequence[str | Path], max_steps: int = 50) -> None:
        """Creates the environment.

        Args:
            games: Files from `make_games` or `tw-make`, each with its .json beside it.
            max_steps: Number of steps after which an episode is truncated.

        Raises:
            ConfigError: The list is empty, a file is missing, or textworld is not installed.
        """
        if not games:
            raise ConfigError("No games to play. Pass files made by make_games() or tw-make.")
        self._games = [user_path(game, "games") for game in games]
        for game in self._games:
            for file in (game, game.with_suffix(".json")):
                if not file.exists():
                    raise ConfigError(f"{file} does not exist. Make the game with make_games() or tw-make.")
        textworld = _textworld()
        self._infos = textworld.EnvInfos(admissible_commands=True, won=True, lost=True, score=True)
        self._start = textworld.start
        self._max_steps = max_steps
        self.observation_space = Dict(
            {
                "text": Text(10_000, min_length=0, charset=string.printable),
                "last_command": _STRING,
                "admissible_commands": gymnasium.spaces.Sequence(_STRING),
            }
        )
        self.action_space = _STRING
        self._game_env: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Starts the game with number `seed` modulo the number of games, or without a seed a random one."""
        super().reset(seed=seed)
        number = int(self.np_random.integers(len(self._games))) if seed is None else seed
        self._game = self._games[number % len(self._games)]
        self.close()
        with _quietly():
            self._game_env = self._start(str(self._game), self._infos)
            self._state = self._game_env.reset()
        self._last_command = ""
        self._score = int(self._state.score or 0)
        self._steps = 0
        return self._observation(), self._info()

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Gives a command to the game; an invalid command takes a step and does nothing.

        Only the first line of a command counts, up to 198 characters, with spaces for backslashes and characters that
        are not printable ASCII. A command that saves, restores or writes a transcript counts as an empty command.
        """
        if self._game_env is None:
            raise gymnasium.error.ResetNeeded("Call reset() before step().")
        action = _sanitize(action)
        self._state, score, _ = self._game_env.step(action)
        if LOOKING.isdisjoint(action.split()[:1]):
            self._last_command = action
        reward = float(score - self._score)
        self._score = int(score)
        self._steps += 1
        terminated = bool(self._state.won or self._state.lost)
        return self._observation(), reward, terminated, self._steps >= self._max_steps, self._info()

    def close(self) -> None:
        """Closes the current game."""
        if self._game_env is not None:
            self._game_env.close()
            self._game_env = None

    def _observation(self) -> dict[str, Any]:
        commands = tuple(sorted(self._state.admissible_commands or ()))
        text = _BANNER.sub("", _STATUS.sub("", self._state.feedback))
        lines = [line.strip() for line in text.splitlines()]
        text = "\n".join(filter(None, lines))
        return {"text": text, "last_command": self._last_command, "admissible_commands": commands}

    def _info(self) -> dict[str, Any]:
        state = self._state
        return {"won": bool(state.won), "lost": bool(state.lost), "score": self._score, "game": str(self._game)}


def _sanitize(command: str) -> str:
    """Returns the part of a command that is safe for the interpreter.

    A backslash makes the interpreter hang, and a control character may crash it.
    """
    first_line = command.strip().partition("\n")[0]
    line = re.sub(r"[^ -\[\]-~]", " ", first_line)[:198]
    words = re.findall("[a-z]+", line.lower())
    uses_files = any(word[:9] in _FILE_COMMANDS for word in words)
    return "" if uses_files else line
