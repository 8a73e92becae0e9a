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
from pathlib import Path
from typing import Any

import click

from ..agent import Agent
from ..errors import ConfigError
from ..models.atomic import verify
from ..models.state_files import read_state
from ..policy.export import KIND, STATE
from ..training.environments import made
from .prompts import agent_class


class UserPath(click.Path):
    """A path in which `~` is the home folder, also behind an equals sign, where a shell leaves it as it is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, written out."""
        return super().convert(os.path.expanduser(value), param, ctx)


AGENT, CONFIG = "agent", "config.json"

EVALUATION_SEED = 1_000_000
"""What episodes to measure with are drawn from, far from the seeds that people train with."""


def prompt_in(run_dir: Path, prompt: Path) -> Path:
    """Where a run keeps a copy of its prompt file."""
    return run_dir / f"prompt{prompt.suffix}"


def require_same_prompt(prompt: Path | None, run_dir: Path) -> None:
    """Reject a prompt file other than the one that a run to be resumed began with.

    Raises:
        ConfigError: The run has another one.
    """
    if prompt is None or not prompt.is_file():
        return
    kept = prompt_in(run_dir, prompt)
    if kept.exists() and kept.read_bytes() != prompt.read_bytes():
        raise ConfigError(
            f"--prompt {str(prompt)!r} differs from {str(kept)!r}, which the run began with. Pass the latter, or "
            "another --run-dir."
        )


def load_agent(folder: Path, env_id: str | None, prompt: Path | None) -> tuple[Agent, str]:
    """The agent of a run's folder, or of a folder that `agent.save` wrote, and the id of the environment it is for.

    Args:
        folder: The folder.
        env_id: The environment; None is the run's.
        prompt: What puts it into words; None is the run's, or what follows from the environment's spaces.

    Raises:
        CheckpointError: The agent is damaged.
        ConfigError: There is none, it is for an unknown environment, or of a class that nothing defines.
    """
    saved = folder / AGENT if (folder / AGENT).is_dir() else folder
    if not (saved / f"{STATE}.json").is_file():
        raise ConfigError(
            f"{str(folder)!r} holds no agent. Pass the folder of a run that `train` has finished (--resume finishes "
            "one), or one that agent.save() wrote."
        )
    verify(saved, KIND)
    settings = _settings(saved.parent)
    env_id = env_id or settings.get("env_id")
    if env_id is None:
        raise ConfigError(f"Nothing says which environment the agent in {str(saved)!r} is for. Pass its id as well.")
    if prompt is None and settings.get("prompt") is not None:
        prompt = saved.parent / settings["prompt"]
    env = made(env_id)
    kind = agent_class(env, prompt)
    env.close()
    was = read_state(saved, STATE)["class"]
    if was != kind.__name__:
        raise ConfigError(
            f"The agent in {str(saved)!r} is a {was}, and would be loaded as a {kind.__name__}. Pass the Python file "
            f"that defines {was} with --prompt."
        )
    return kind.load(saved), env_id


def _settings(run_dir: Path) -> dict[str, Any]:
    path = run_dir / CONFIG
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read: {error}. Pass ENV_ID and --prompt, and move it away."
        ) from error
