"""TextWorld games (https://arxiv.org/abs/1806.11532) as a Gymnasium environment: strings in, strings out.

TextWorld's own interface takes no seed, reports a score that adds up, and ends an episode at a limit as it does at an
ending. Here a seed picks the game, the reward is the change of score, and a limit truncates.
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

from ..errors import ConfigError, did_you_mean
from ..options import user_path

KINDS = ("coin_collector", "locked_door")
LOOKING = {"look", "inventory", "examine"}
"""Verbs of commands that tell something and change nothing, so that they are not what has happened last."""
_STRING = Text(1000, min_length=0, charset=string.printable)
# Of what a game prints: the banner's lines have neither letter nor digit, the status follows the prompt for a command.
_BANNER, _STATUS = re.compile(r"^[^a-z0-9]+$", re.MULTILINE | re.IGNORECASE), re.compile(r"\n> +-= .*", re.DOTALL)

# Commands that every game obeys and that read or write files; of a word the parser looks at nine letters.
_WITH_FILES = {"save", "restore", "script", "transcrip"}


def make_games(kind: str, seeds: Iterable[int], folder: str | Path, level: int = 5) -> list[Path]:
    """Generate games, as TextWorld's `tw-make` does; those that the folder holds already are left alone.

    Args:
        kind: "coin_collector" is `tw-make tw-coin_collector`: find a coin at the end of a chain of rooms. "locked_door"
            is a game of ours in two rooms: take the key, unlock and open the door, go through.
        seeds: Distinct; one game each.
        folder: Where they are kept.
        level: Of the coin collector: 1 to 100 is the number of rooms, from 101 on there are dead ends.

    Returns:
        The games' files, in the seeds' order.

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
    try:
        import textworld
    except ImportError as error:
        raise ConfigError(
            "These games need the package textworld, which runs on Linux and macOS. Run pip install "
            "'llamagym[textworld]'; it needs a C compiler."
        ) from error
    return textworld


@contextmanager
def _quietly() -> Iterator[None]:
    """The interpreter warns of every game that is not one of a list of published ones."""
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
    with tempfile.TemporaryDirectory(dir=path.parent) as unfinished:
        options.path = str(Path(unfinished) / path.name)
        made = Path(textworld.generator.compile_game(game, options))
        # TextWorld reads the game's state from the .json beside it: the game counts as made once both are there.
        made.with_suffix(".json").replace(path.with_suffix(".json"))
        made.replace(path)


def _coin_collector(options: Any, level: int) -> Any:
    from textworld.challenges.tw_coin_collector import coin_collector

    return coin_collector.make({"level": level}, options)


def _locked_door(options: Any) -> Any:
    """Two rooms, a locked door between them, and its key on the floor."""
    from textworld.generator.graph_networks import reverse_direction

    maker = _textworld().GameMaker(options)
    here, there = maker.new_room(), maker.new_room()
    direction = str(options.rngs["map"].choice(sorted(here.exits)))
    path = maker.connect(here.exits[direction], there.exits[reverse_direction(direction)])
    door = maker.new_door(path, name="door")
    door.add_property("locked")
    key = maker.new("k", name="key")
    here.add(key)
    maker.add_fact("match", key, door)
    maker.set_player(here)
    maker.set_quest_from_commands(["take key", "unlock door with key", "open door", f"go {direction}"])
    return maker.build()


class TextWorldEnv(gymnasium.Env[dict[str, Any], str]):
    """Plays games of a list; each episode plays one.

    An observation holds `text`, what the game has just printed, without banner, status and empty lines;
    `last_command`, the last one that was not merely a look at something ("" at the start); and `admissible_commands`,
    sorted. The reward is the change of score. Winning or losing terminates, the limit truncates; `info` tells `won`,
    `lost`, `score`, and `game`, the game's file.
    """

    def __init__(self, games: Sequence[str | Path], max_steps: int = 50) -> None:
        """Prepare to play.

        Args:
            games: Files made by `make_games` or `tw-make`, each with its .json beside it.
            max_steps: An episode is cut off after so many.

        Raises:
            ConfigError: There are no games, one is missing, or textworld is not installed.
        """
        if not games:
            raise ConfigError("No games to play. Pass files made by make_games() or tw-make.")
        self._games = [user_path(game, "games") for game in games]
        for game in self._games:
            for file in (game, game.with_suffix(".json")):
                if not file.exists():
                    raise ConfigError(f"{file} is not there. Make the game with make_games() or tw-make.")
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
        self._playing: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin a game: number `seed` modulo the number of games, or without a seed a random one."""
        super().reset(seed=seed)
        number = seed if seed is not None else int(self.np_random.integers(len(self._games)))
        self._game = self._games[number % len(self._games)]
        self.close()
        with _quietly():
            self._playing = self._start(str(self._game), self._infos)
            self._state = self._playing.reset()
        self._last_command, self._score, self._steps = "", int(self._state.score or 0), 0
        return self._observation(), self._info()

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Give a command; one that the game does not understand takes a step and does nothing.

        Only its first line counts, of that only printable ASCII without backslashes, and no more than 198 characters.
        What would save, restore or write a transcript counts as an empty command.
        """
        if self._playing is None:
            raise gymnasium.error.ResetNeeded("Call reset() before step().")
        action = _harmless(action)
        self._state, score, _ = self._playing.step(action)
        if LOOKING.isdisjoint(action.split()[:1]):
            self._last_command = action
        reward, self._score = float(score - self._score), int(score)
        self._steps += 1
        terminated = bool(self._state.won or self._state.lost)
        return self._observation(), reward, terminated, self._steps >= self._max_steps, self._info()

    def close(self) -> None:
        """Close the current game."""
        if self._playing is not None:
            self._playing.close()
            self._playing = None

    def _observation(self) -> dict[str, Any]:
        commands = tuple(sorted(self._state.admissible_commands or ()))
        text = _BANNER.sub("", _STATUS.sub("", self._state.feedback))
        text = "\n".join(line.strip() for line in text.splitlines() if line.strip())
        return {"text": text, "last_command": self._last_command, "admissible_commands": commands}

    def _info(self) -> dict[str, Any]:
        state = self._state
        return {"won": bool(state.won), "lost": bool(state.lost), "score": self._score, "game": str(self._game)}


def _harmless(command: str) -> str:
    """What the interpreter can be given of a command: a backslash makes it hang, a control character may crash it."""
    line = re.sub(r"[^ -\[\]-~]", " ", command.strip().partition("\n")[0])[:198]
    return "" if any(word[:9] in _WITH_FILES for word in re.findall("[a-z]+", line.lower())) else line
