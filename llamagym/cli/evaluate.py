"""The command `eval`: compares a saved agent with random actions."""

from __future__ import annotations

from pathlib import Path

import click

from .. import training
from .runs import EVALUATION_SEED, UserPath, load_agent


@click.command("eval")
@click.argument("folder", type=UserPath(path_type=Path))
@click.argument("env_id", required=False)
@click.option("--episodes", type=int, default=100, show_default=True, help="Episodes per policy.")
@click.option("--seed", type=int, default=EVALUATION_SEED, show_default=True, help="Base seed of the episodes.")
@click.option("--num-envs", type=int, help="Environments stepped together.  [default: 64]")
@click.option("--sample", is_flag=True, help="Draw replies, as in training, instead of taking the likeliest.")
@click.option("--prompt", type=UserPath(path_type=Path), help="The environment in words.  [default: the run's]")
@click.option("--trust", is_flag=True, help="Execute code of the run's author: prompt.py, the environment's module.")
def evaluate(
    folder: Path,
    env_id: str | None,
    episodes: int,
    seed: int,
    num_envs: int | None,
    sample: bool,
    prompt: Path | None,
    trust: bool,
) -> None:
    """Compare the agent in FOLDER, of a run or of agent.save(), with random actions.

    ENV_ID is the environment, by default the one that the agent was trained in.
    """
    agent, env_id = load_agent(folder, env_id, prompt, trust)
    results = {
        "agent": training.evaluate(agent, env_id, episodes=episodes, seed=seed, num_envs=num_envs, greedy=not sample),
        "random": training.evaluate("random", env_id, episodes=episodes, seed=seed, num_envs=num_envs),
    }
    click.echo(training.side_by_side(results))
