"""The folder of a run that `train` wrote: what it played, how that was put into words, and the agent that it saved.

RUN_DIR/config.json         the command line; `env_id` and `prompt` are read again
RUN_DIR/prompt.yaml (.py)   a copy of what --prompt said
RUN_DIR/metrics.jsonl       statistics of each update
RUN_DIR/transcripts.jsonl   episodes in words
RUN_DIR/checkpoints/        what --resume goes on from
RUN_DIR/agent/              the agent
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from ..agent.agent import Agent
from ..agent.export import KIND, STATE
from ..errors import ConfigError
from ..options import shortened
from ..saving.atomic import reason_of, verify
from ..saving.paths import file_inside
from ..saving.state_files import read_state
from ..training.environments import make_env
from .prompts import agent_class


class UserPath(click.Path):
    """A path in which `~` is the home folder, also behind an equals sign, where a shell leaves it as it is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, written out; one that no file can have, or that may not be looked up, is a usage error."""
        path = os.path.expanduser(value)
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            self.fail(f"{shortened(path)} cannot be used: {error.strerror}. Pass another path.", param, ctx)
        return super().convert(path, param, ctx)


AGENT, CONFIG = "agent", "config.json"
_PROMPTS = ("prompt.yaml", "prompt.yml", "prompt.py")
_LARGEST_SETTINGS = 2**20
_LONGEST_ID = 200

EVALUATION_SEED = 1_000_000
"""Seed for evaluation episodes, far from usual training seeds."""


def printable(text: str) -> str:
    r"""A text with the characters escaped by which it could control the terminal.

    >>> print(printable("red: \x1b[31m"))
    red: \x1b[31m
    """
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def _line(text: str) -> str:
    """A text in one line, in which the author of a run can hide nothing."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def prompt_in(run_dir: Path, prompt: Path) -> Path:
    """Where a run keeps a copy of its prompt file."""
    return run_dir / f"prompt{prompt.suffix}"


def require_same_prompt(prompt: Path | None, run_dir: Path) -> None:
    """Reject a prompt file other than the one that a run to be resumed began with.

    Raises:
        ConfigError: The run has another one.
    """
    # `agent_class` rejects files with another ending.
    if prompt is None or prompt_in(run_dir, prompt).name not in _PROMPTS or not prompt.is_file():
        return
    kept = file_inside(run_dir, prompt_in(run_dir, prompt).name)
    if kept.exists() and kept.read_bytes() != prompt.read_bytes():
        raise ConfigError(
            f"--prompt {str(prompt)!r} differs from {str(kept)!r}, which the run began with. Pass the latter, or "
            "another --run-dir."
        )


def load_agent(folder: Path, env_id: str | None, prompt: Path | None, trust: bool = False) -> tuple[Agent, str]:
    """The agent of a run's folder, or of a folder that `agent.save` wrote, and the id of the environment it is for.

    The folder may come from somebody else. What it contains is data: no file outside of it is read, and no code that it
    contains or names is executed, unless `trust` says so. What is passed here comes from the user.

    Args:
        folder: The folder.
        env_id: The environment; None is the run's.
        prompt: What puts it into words; None is the run's, or what follows from the environment's spaces.
        trust: Whether to execute code of the folder's author, whose path or name is printed first.

    Raises:
        CheckpointError: The agent is damaged.
        ConfigError: The agent is missing, for an unknown environment, of an undefined class, or needs `trust`.
    """
    is_run = (folder / AGENT).is_dir()
    saved = file_inside(folder, AGENT) if is_run else folder
    if not (saved / f"{STATE}.json").is_file():
        raise ConfigError(
            f"{str(folder)!r} holds no agent. Pass the folder of a run that `train` has finished (--resume finishes "
            "one), or one that agent.save() wrote."
        )
    verify(saved, KIND)
    if not trust:
        if env_id is not None:
            _import_module_of(env_id)
        _import_nothing_from(folder)
    # What lies next to an agent that is passed alone may be anybody's.
    settings = _settings(folder) if is_run else {}
    if env_id is None:
        env_id = _env_of_run(folder, settings, trust)
    if prompt is None and settings.get("prompt") is not None:
        prompt = _prompt_of_run(folder, settings["prompt"], trust)
    env = make_env(env_id)
    kind = agent_class(env, prompt)
    env.close()
    was = read_state(saved, STATE).get("class")
    if was != kind.__name__:
        raise ConfigError(
            f"The agent in {str(saved)!r} is a {str(was)[:80]}, and would be loaded as a {kind.__name__}. Pass the "
            "Python file that defines it with --prompt."
        )
    return kind.load(saved), env_id


def _env_of_run(folder: Path, settings: Mapping[str, Any], trust: bool) -> str:
    """The id of the environment that a run's settings name.

    Raises:
        ConfigError: They name none, or one whose module is not an installed package's.
    """
    env_id = settings.get("env_id")
    if not isinstance(env_id, str):
        raise ConfigError(f"Nothing says which environment the agent in {str(folder)!r} is for. Pass its id as well.")
    if len(env_id) > _LONGEST_ID:
        raise ConfigError(f"{CONFIG} in {str(folder)!r} names the environment {shortened(env_id)}. Pass its id.")
    module, colon, _ = env_id.partition(":")
    if colon and not _is_installed(module):
        if not trust:
            raise ConfigError(
                f"The run in {str(folder)!r} names the environment {shortened(env_id)}. Gymnasium would execute the "
                f"module {shortened(module)}, which is not part of an installed package. If you trust it, pass "
                "--trust, or the environment's id yourself."
            )
        click.echo(_line(f"--trust: executing the module {module} for the environment {env_id}"), err=True)
    return env_id


def _prompt_of_run(folder: Path, name: object, trust: bool) -> Path:
    """The prompt file of a run.

    Raises:
        CheckpointError: It is a link to a file elsewhere.
        ConfigError: It is not one that `train` wrote, or is Python code.
    """
    if name not in _PROMPTS:
        raise ConfigError(
            f"{CONFIG} in {str(folder)!r} names the prompt {shortened(name)}; a run has one of {_PROMPTS} in its "
            "folder. Pass your own with --prompt."
        )
    path = file_inside(folder, str(name))
    if path.suffix == ".py":
        if not trust:
            raise ConfigError(
                f"{str(path)!r} is Python code by the run's author and would be executed. Read it; if you trust it, "
                "pass --trust, or a file of your own with --prompt."
            )
        click.echo(_line(f"--trust: executing {path}"), err=True)
    return path


def _is_installed(module: str) -> bool:
    """Whether importing a module executes only what is installed, or what has been executed already."""
    if module in sys.modules:
        return True
    # A name with a dot would import its first part.
    spec = find_spec(module) if module.isidentifier() else None
    places = [Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")]
    origin = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
    return origin is not None and any(origin.is_relative_to(place) for place in places)


def _import_module_of(env_id: str) -> None:
    """Imports the module that the user's environment id names, since it may lie beside the run."""
    module, colon, _ = env_id.partition(":")
    if colon:
        # `make_env` reports a module that cannot be imported, whatever it raises.
        with suppress(Exception):
            import_module(module)


def _import_nothing_from(folder: Path) -> None:
    """Takes a folder, and the folders around it, off Python's search path.

    `python -m` puts the current working directory there, and what lies around a run may come from its author, too.
    """
    real = folder.resolve()
    own = Path(__file__).resolve().parents[2]
    kept = []
    for place in sys.path:
        real_place = Path(place or ".").resolve()
        is_near = real_place.is_relative_to(real) or real.is_relative_to(real_place)
        if not is_near or real_place == own:
            kept.append(place)
    sys.path[:] = kept


def _settings(run_dir: Path) -> dict[str, Any]:
    if not os.path.lexists(run_dir / CONFIG):
        return {}
    path = file_inside(run_dir, CONFIG)
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST_SETTINGS:
            raise ValueError(f"it is not a file of at most {_LARGEST_SETTINGS} bytes")
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it holds no settings by name")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read: {reason_of(error)}. Pass ENV_ID and --prompt, and move it away."
        ) from error
    return settings
