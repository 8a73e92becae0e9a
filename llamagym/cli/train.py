"""The command `train`: trains an agent in an environment, and evaluates it before and after."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from .. import training
from ..agent.agent import Agent, collector_of
from ..agent.checkpoint import check_identity
from ..agent.export import KIND
from ..errors import ConfigError
from ..models.loading import load_model_and_tokenizer
from ..models.registry import EMBEDDED_NAME
from ..saving.atomic import replace_file, require_replaceable
from ..saving.checkpoints import check_options, newest, require_no_checkpoints
from ..saving.paths import user_folder
from ..training.environments import make_env, resolve_num_envs
from ..training.run import require_budget
from ..training.run_folder import require_run_folder, require_same_run
from ..training.tracking import default_tracker
from .generic import default_context
from .prompts import agent_class
from .runs import AGENT, EVALUATION_SEED, UserPath, prompt_in, require_same_prompt


@click.command()
@click.argument("env_id")
@click.option("--minutes", type=float, help="Stop after this many minutes of training.")
@click.option("--episodes", type=int, help="Stop after this many episodes.")
@click.option("--turns", type=int, help="Stop after this many turns in all environments.")
@click.option("--model", default=EMBEDDED_NAME, show_default=True, help="Registered name, folder or hub id.")
@click.option("--prompt", type=UserPath(path_type=Path), help="The environment in words: a .yaml or .py file.")
@click.option(
    "--context",
    type=click.Choice(["turn", "episode"]),
    help="What the model sees.  [default: episode for texts, else turn]",
)
@click.option(
    "--num-envs", type=int, help="Environments stepped together.  [default: as many as a batch holds episodes]"
)
@click.option("--batch-size", type=int, help="Turns per update.  [default: it depends on the task]")
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed.")
@click.option(
    "--eval-episodes", type=int, default=100, show_default=True, help="Evaluation episodes, before and after."
)
@click.option("--run-dir", type=UserPath(file_okay=False, path_type=Path), help="[default: runs/ENV-TIME]")
@click.option("--checkpoint-dir", type=UserPath(file_okay=False, path_type=Path), help="[default: RUN_DIR/checkpoints]")
@click.option("--resume", is_flag=True, help="Continue the run in --run-dir; needs the same options.")
def train(
    env_id: str,
    minutes: float | None,
    episodes: int | None,
    turns: int | None,
    model: str,
    prompt: Path | None,
    context: Any,
    num_envs: int | None,
    batch_size: int | None,
    seed: int,
    eval_episodes: int,
    run_dir: Path | None,
    checkpoint_dir: Path | None,
    resume: bool,
) -> None:
    """Train an agent in the environment that Gymnasium knows as ENV_ID.

    Without --prompt, observations are shown as named numbers, and the agent chooses among the numbers of actions. At
    the end the agent is saved, and compared with the untrained agent and with random actions.
    """
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
    loaded, tokenizer, device = load_model_and_tokenizer(model)
    ppo_options = {} if batch_size is None else {"batch_size": batch_size}
    agent = selected_class(loaded, tokenizer, device, ppo_config_dict=ppo_options, context=context, seed=seed)
    if resume:
        _require_same_options(agent, checkpoint_dir, env_id, num_envs, seed)
    eval_options: dict[str, Any] = {"episodes": eval_episodes, "seed": EVALUATION_SEED, "num_envs": num_envs}
    results = {"before": training.evaluate(agent, env_id, **eval_options)}
    settings |= {"prompt": None if prompt is None else prompt_in(run_dir, prompt).name, "context": context}
    with closing(default_tracker(run_dir, settings, agent=agent)) as tracker:
        if prompt is not None:
            replace_file(prompt_in(run_dir, prompt), prompt.read_bytes())
        try:
            training_result = training.train(
                agent,
                env_id,
                episodes=episodes,
                num_envs=num_envs,
                seed=seed,
                tracker=tracker,
                turns=turns,
                minutes=minutes,
                checkpoint_dir=checkpoint_dir,
                resume=resume,
            )
        except SystemExit:
            click.echo(f"To continue: the same command with --run-dir {run_dir} --resume", err=True)
            raise
    results["after"] = training.evaluate(agent, env_id, **eval_options)
    results["random"] = training.evaluate("random", env_id, **eval_options)
    mean_returns = {f"mean return {name}": f"{result.mean:.3f}" for name, result in results.items()}
    agent.save_pretrained(run_dir / AGENT, environment=env_id, results=mean_returns)
    click.echo(training.side_by_side(results))
    click.echo(
        f"{len(training_result.returns)} episodes, {training_result.turns} turns, {len(training_result.updates)} "
        f"updates, {training_result.minutes:.1f} minutes. The agent and the logs: {run_dir}"
    )
    if training_result.updates:
        click.echo(f"Report: {training.write_report([run_dir], run_dir / 'report.html')}")


def _require_same_options(
    agent: Agent, checkpoint_dir: Path, env_id: str, num_envs: int | None, seed: int | None
) -> None:
    """Rejects options that differ from those of the run to be resumed, before anything is played.

    Raises:
        CheckpointError: The options of the newest checkpoint differ, or no checkpoint is readable.
    """
    path = newest(checkpoint_dir)
    if path is None:
        return
    check_identity(collector_of(agent), path)
    check_options(path, "train", {"num_envs": resolve_num_envs(env_id, num_envs), "seed": seed}, fixed={"seed"})
