"""Trains an agent for the command `train`."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import click

from .. import training
from ..agent.export import KIND
from ..errors import ConfigError
from ..learners.ppo import PPOConfig
from ..models.loading import load_model_and_tokenizer
from ..saving.atomic import replace_file, require_replaceable
from ..saving.checkpoints import require_no_checkpoints
from ..saving.paths import user_folder
from ..training.environments import make_env
from ..training.run import require_budget
from ..training.run_folder import require_run_folder, require_same_run
from .generic import default_context
from .prompts import agent_class
from .runs import AGENT, prompt_in, require_same_prompt


def train(
    *,
    env_id: str,
    minutes: float | None,
    episodes: int | None,
    turns: int | None,
    model: str,
    prompt: Path | None,
    context: Any,
    num_envs: int | None,
    batch_size: int | None,
    learning_rate: float,
    entropy_coef: float,
    device: str,
    dtype: str,
    seed: int,
    eval_episodes: int,
    run_dir: Path | None,
    checkpoint_dir: Path | None,
    track: tuple[str, ...],
    resume: bool,
) -> None:
    """Trains an agent, saves it, and prints its scores before and after; the arguments are the command's options."""
    if minutes is None and episodes is None and turns is None:
        raise click.UsageError("train needs a budget. Pass --minutes, --episodes or --turns.")
    if resume and run_dir is None:
        raise click.UsageError("--resume needs --run-dir, the folder of the run to continue.")
    settings = dict(locals())
    require_budget(episodes, turns, minutes)
    run_dir = run_dir or Path("runs") / time.strftime(f"{env_id.replace('/', '-').replace(':', '-')}-%Y%m%d-%H%M%S")
    # An environment may change the working directory.
    run_dir = user_folder(run_dir, "--run-dir")
    checkpoint_dir = user_folder(checkpoint_dir or run_dir / "checkpoints", "--checkpoint-dir")
    if not resume and (run_dir / "metrics.jsonl").exists():
        raise ConfigError(f"{str(run_dir)!r} holds a run. Pass --resume to continue it, or another --run-dir.")
    require_run_folder(run_dir)
    require_replaceable(run_dir / AGENT, KIND)
    if resume:
        require_same_run(run_dir, checkpoint_dir)
    else:
        require_no_checkpoints(checkpoint_dir)
    require_same_prompt(prompt, run_dir)
    env = make_env(env_id)
    selected_class = agent_class(env, prompt)
    context = context or default_context(env)
    env.close()
    loaded, tokenizer, used_device = load_model_and_tokenizer(model, device, dtype)
    learner = PPOConfig(batch_size=batch_size, learning_rate=learning_rate, entropy_coef=entropy_coef)
    agent = selected_class(loaded, tokenizer, used_device, learner=learner, context=context, seed=seed)
    settings |= {"prompt": None if prompt is None else prompt_in(run_dir, prompt).name, "context": context}
    try:
        result = training.train(
            agent,
            env_id,
            episodes=episodes,
            num_envs=num_envs,
            seed=seed,
            turns=turns,
            minutes=minutes,
            callbacks=[] if prompt is None else [_KeepPrompt(prompt, run_dir)],
            run_dir=run_dir,
            eval_episodes=eval_episodes,
            track=track,
            config=settings,
            checkpoint_dir=checkpoint_dir,
            resume=resume,
        )
    except SystemExit:
        click.echo(f"To continue: the same command with --run-dir {shlex.quote(str(run_dir))} --resume", err=True)
        raise
    mean_returns = {f"mean return {name}": f"{score.mean:.3f}" for name, score in result.scores.items()}
    agent.save_pretrained(run_dir / AGENT, environment=env_id, results=mean_returns)
    click.echo(result)
    arguments = shlex.quote(str(run_dir))
    if prompt is not None:
        arguments += f" --prompt {shlex.quote(str(prompt))}"
    click.echo(f"Next: python -m llamagym play {arguments}")
    click.echo(f"      python -m llamagym eval {arguments}")


class _KeepPrompt(training.Callback):
    """Copies the prompt file into the run's folder once the folder is that of a run."""

    def __init__(self, prompt: Path, run_dir: Path) -> None:
        self._prompt = prompt
        self._run_dir = run_dir

    def on_training_start(self, run: training.Run) -> None:
        replace_file(prompt_in(self._run_dir, self._prompt), self._prompt.read_bytes())
