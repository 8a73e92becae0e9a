"""Reads the folder of a run that the command `train` wrote.

RUN_DIR/config.json         options of the command; `env_id` and `prompt` are read here
RUN_DIR/prompt.yaml (.py)   copy of the file of --prompt
RUN_DIR/metrics.jsonl       statistics of each update
RUN_DIR/transcripts.jsonl   episodes as text
RUN_DIR/checkpoints/        checkpoints for --resume
RUN_DIR/agent/              the saved agent
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
from ..errors import ConfigError, reason_of
from ..options import shortened
from ..saving.atomic import verify
from ..saving.paths import file_inside
from ..saving.state_files import read_state
from ..training.environments import make_env
from .prompts import agent_class
from .terminal import printable

AGENT = "agent"
CONFIG = "config.json"
_PROMPTS = ("prompt.yaml", "prompt.yml", "prompt.py")
_MAX_CONFIG_BYTES = 2**20
_MAX_ID_LENGTH = 200


def _line(text: str) -> str:
    """Escapes control characters, newlines and tabs, with which the author of a run could hide text."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def prompt_in(run_dir: Path, prompt: Path) -> Path:
    """Returns the path of a run's copy of its prompt file."""
    return run_dir / f"prompt{prompt.suffix}"


def require_same_prompt(prompt: Path | None, run_dir: Path) -> None:
    """Raises a `ConfigError` for a prompt file that differs from the one that a run to be resumed began with."""
    # `agent_class` rejects files with other suffixes.
    if prompt is None or prompt_in(run_dir, prompt).name not in _PROMPTS or not prompt.is_file():
        return
    own_copy = file_inside(run_dir, prompt_in(run_dir, prompt).name)
    if own_copy.exists() and own_copy.read_bytes() != prompt.read_bytes():
        raise ConfigError(
            f"--prompt {str(prompt)!r} differs from {str(own_copy)!r}, which the run began with. Pass the latter, or "
            "another --run-dir."
        )


def load_agent(folder: Path, env_id: str | None, prompt: Path | None, trust: bool = False) -> tuple[Agent, str]:
    """Loads the agent of a run, or of a folder that `agent.save` wrote; returns it and the id of its environment.

    The folder may come from another person, so its contents are treated as data: without `trust` no file outside of it
    is read, and no code that it contains or names is executed. The arguments come from the user and are trusted.

    Args:
        folder: The folder.
        env_id: Id of the environment; None for the run's.
        prompt: The prompt file; None for the run's or, without one, the default wording.
        trust: Whether to execute code of the folder's author; its path or name is printed first.

    Raises:
        CheckpointError: The agent is damaged.
        ConfigError: The agent is missing, its environment is unknown, its class differs, or it needs `trust`.
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
        _remove_from_search_path(folder)
    # Files beside a folder of `agent.save` do not belong to it.
    settings = _read_settings(folder) if is_run else {}
    if env_id is None:
        env_id = _env_of_run(folder, settings, trust)
    if prompt is None and settings.get("prompt") is not None:
        prompt = _prompt_of_run(folder, settings["prompt"], trust)
    env = make_env(env_id)
    selected_class = agent_class(env, prompt)
    env.close()
    saved_class = read_state(saved, STATE).get("class")
    if saved_class != selected_class.__name__:
        raise ConfigError(
            f"The agent in {str(saved)!r} is a {str(saved_class)[:80]}, and would be loaded as a "
            f"{selected_class.__name__}. Pass the Python file that defines it with --prompt."
        )
    return selected_class.load(saved), env_id


def _env_of_run(folder: Path, settings: Mapping[str, Any], trust: bool) -> str:
    """Returns the id of the environment in a run's settings.

    Raises:
        ConfigError: The id is missing, too long, or names a module outside of installed packages without `trust`.
    """
    env_id = settings.get("env_id")
    if not isinstance(env_id, str):
        raise ConfigError(f"Nothing says which environment the agent in {str(folder)!r} is for. Pass its id as well.")
    if len(env_id) > _MAX_ID_LENGTH:
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
    """Returns the path of a run's prompt file.

    Raises:
        CheckpointError: The file is a link to a file outside of the folder.
        ConfigError: The name is not one that `train` writes, or the file is Python code and `trust` is not set.
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
    """Whether importing a module executes only installed packages, or nothing because it is already imported."""
    if module in sys.modules:
        return True
    # `find_spec` would import the parent package of a dotted name.
    if not module.isidentifier():
        return False
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return False
    origin = Path(spec.origin).resolve()
    site_packages = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")]
    return any(origin.is_relative_to(folder) for folder in site_packages)


def _import_module_of(env_id: str) -> None:
    """Imports the module in the user's environment id before the folder is removed from the search path."""
    module, colon, _ = env_id.partition(":")
    if colon:
        # Any error is raised again, with a message, when the environment is made.
        with suppress(Exception):
            import_module(module)


def _remove_from_search_path(folder: Path) -> None:
    """Removes a folder, its parents and its subfolders from Python's search path.

    `python -m` adds the working directory to the path, and files around a run may also come from its author.
    """
    folder = folder.resolve()
    library = Path(__file__).resolve().parents[2]
    kept = []
    for entry in sys.path:
        path = Path(entry or ".").resolve()
        is_related = path.is_relative_to(folder) or folder.is_relative_to(path)
        if not is_related or path == library:
            kept.append(entry)
    sys.path[:] = kept


def _read_settings(run_dir: Path) -> dict[str, Any]:
    if not os.path.lexists(run_dir / CONFIG):
        return {}
    path = file_inside(run_dir, CONFIG)
    try:
        if not path.is_file() or path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"it is not a file of at most {_MAX_CONFIG_BYTES} bytes")
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it holds no settings by name")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read: {reason_of(error)}. Pass ENV_ID and --prompt, and move it away."
        ) from error
    return settings
