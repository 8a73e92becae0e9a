"""The commands and their options.

Each command imports what it needs when it runs: PyTorch takes seconds, and `--help` should not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .terminal import ContextType, UserPath

# Defaults of the library, named here since importing them takes seconds; a test compares them.
MODEL = "smollm2-135m"
LEARNING_RATE = 0.001
ENTROPY_COEF = 0.02
EVALUATION_SEED = 1_000_000
# Defaults of a new served agent. Programs expect longer replies than environments.
SERVED = {"model": MODEL, "max_new_tokens": 256, "learning_rate": LEARNING_RATE, "seed": 0}


FOLDER = UserPath(file_okay=False, path_type=Path)
COUNT = click.IntRange(min=1)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Train, evaluate and play language models that learn by acting."""


@cli.command()
@click.argument("env_id")
@click.option("--minutes", type=float, help="Stop after this many minutes of training.")
@click.option("--episodes", type=int, help="Stop after this many episodes.")
@click.option("--turns", type=int, help="Stop after this many turns in all environments.")
@click.option("--model", default=MODEL, show_default=True, help="Registered name, folder or hub id.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or mps.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16.")
@click.option("--prompt", type=UserPath(path_type=Path), help="The environment in words: a .yaml or .py file.")
@click.option(
    "--context",
    type=ContextType(),
    help="The current observation, the conversation or N turns.  [default: episode if observations are text]",
)
@click.option("--num-envs", type=int, help="Environments stepped together.  [default: 16 to 64, by the batch]")
@click.option("--batch-size", type=int, help="Turns per update.  [default: 768 distinct ones, or 8,192]")
@click.option(
    "--learning-rate", type=float, default=LEARNING_RATE, show_default=True, help="Learning rate of the policy."
)
@click.option(
    "--entropy-coef", type=float, default=ENTROPY_COEF, show_default=True, help="Weight of the entropy bonus."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed.")
@click.option(
    "--eval-episodes", type=int, default=100, show_default=True, help="Evaluation episodes, before and after."
)
@click.option("--run-dir", type=FOLDER, help="Folder of the run.  [default: runs/ENV-TIME]")
@click.option("--checkpoint-dir", type=FOLDER, help="[default: checkpoints in the run's folder]")
@click.option("--track", multiple=True, help="A further tracker: tensorboard, wandb, mlflow or csv. May be repeated.")
@click.option("--resume", is_flag=True, help="Continue the run in --run-dir; needs the same options.")
def train(**options: Any) -> None:
    """Train an agent in the environment that Gymnasium knows as ENV_ID.

    Without --prompt, observations are shown as named numbers, and the agent chooses among the numbers of actions. The
    agent is saved, and compared with the untrained agent and with random actions.
    """
    from . import train as command

    command.train(**options)


def _options_of_saved_agents(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the parameters of commands about a saved agent: its folder, its environment, and how it replies."""
    parameters = (
        click.argument("folder", type=UserPath(path_type=Path)),
        click.argument("env_id", required=False),
        click.option("--sample", is_flag=True, help="Draw replies, as in training, instead of taking the likeliest."),
        click.option("--prompt", type=UserPath(path_type=Path), help="The environment in words.  [default: the run's]"),
        click.option(
            "--trust", is_flag=True, help="Execute code of the run's author: prompt.py, the environment's module."
        ),
    )
    # Decorators apply from the last one to the first.
    for parameter in reversed(parameters):
        function = parameter(function)
    return function


@cli.command()
@_options_of_saved_agents
@click.option("--human", is_flag=True, help="Play in the agent's place: replies are read from the terminal.")
@click.option("--episodes", type=COUNT, default=1, show_default=True, help="Episodes to play.")
@click.option(
    "--seed", type=click.IntRange(min=0), help="Seed of the first episode; later ones add 1.  [default: drawn]"
)
def play(**options: Any) -> None:
    """Watch the agent in FOLDER, of a run or of agent.save(), turn by turn.

    ENV_ID is the environment, by default the one that the agent was trained in.
    """
    from . import play as command

    command.play(**options)


@cli.command("eval")
@_options_of_saved_agents
@click.option("--episodes", type=int, default=100, show_default=True, help="Episodes per policy.")
@click.option("--seed", type=int, default=EVALUATION_SEED, show_default=True, help="Base seed of the episodes.")
@click.option("--num-envs", type=int, help="Environments stepped together.  [default: 64, or as many as episodes]")
def evaluate(**options: Any) -> None:
    """Compare the agent in FOLDER, of a run or of agent.save(), with random actions.

    ENV_ID is the environment, by default the one that the agent was trained in.
    """
    from . import play as command

    command.evaluate(**options)


@cli.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN_DIR...")
@click.option("--out", type=click.Path(dir_okay=False), help="File to write.  [default: report.html in the first run]")
@click.option("--watch", is_flag=True, help="Write it again every few seconds, until Ctrl-C; the page reloads itself.")
def report(runs: tuple[str, ...], out: str | None, watch: bool) -> None:
    """Write one HTML page about one or several runs: scores, curves, alarms and episodes to read."""
    from . import report as command

    command.report(runs, Path(out) if out else Path(runs[0]) / "report.html", watch)


@cli.command()
@click.argument("folder", required=False, type=UserPath(path_type=Path))
@click.option("--train", is_flag=True, help="Record calls and learn from the rewards that are posted; needs --out.")
@click.option("--out", type=FOLDER, help="Save the agent here, after each update and at the end.")
@click.option(
    "--sample", is_flag=True, help="Draw replies where a call names no temperature, instead of the likeliest."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="Port; 0 takes a free one.")
@click.option("--api-key", envvar="LLAMAGYM_API_KEY", help="Key that clients must send.  [env: LLAMAGYM_API_KEY]")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or mps.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16.")
@click.option("--model", help=f"Of a new agent: registered name, folder or hub id.  [default: {SERVED['model']}]")
@click.option(
    "--demonstrations", type=UserPath(path_type=Path), help="Of a new agent: JSONL file that it learns from first."
)
@click.option(
    "--max-new-tokens", type=COUNT, help=f"Of a new agent: tokens per reply.  [default: {SERVED['max_new_tokens']}]"
)
@click.option(
    "--batch-size", type=int, help="Of a new agent: turns per update.  [default: 768 distinct ones, or 8,192]"
)
@click.option("--learning-rate", type=float, help=f"Of a new agent.  [default: {SERVED['learning_rate']}]")
@click.option("--seed", type=int, help=f"Of a new agent.  [default: {SERVED['seed']}]")
def serve(**options: Any) -> None:
    """Serve a new agent, or the one in FOLDER, as OpenAI's chat completions API."""
    from . import serve as command

    if options["folder"] is None:
        for name, default in SERVED.items():
            options[name] = default if options[name] is None else options[name]
    command.serve(**options)


@cli.command()
@click.option("--model", default=MODEL, show_default=True, help="Registered name, folder or hub id.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or mps.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16.")
def doctor(**options: Any) -> None:
    """Check a model, the installation and this machine."""
    from . import doctor as command

    command.doctor(**options)


@cli.command()
def models() -> None:
    """List the registered models."""
    from ..models.registry import entries

    for entry in entries():
        size = "" if entry.parameter_count is None else f"{entry.parameter_count / 1e6:,.0f}M"
        click.echo(f"{entry.name:<24} {size:>8}  {entry.hub_id}")
