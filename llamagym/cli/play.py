"""The command `play`: episodes in the terminal, of a saved agent or of a person in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import gymnasium

from ..agent.agent import Agent
from ..agent.text_interface import no_action_advice
from ..errors import ActionParseError
from ..training.environments import make_env
from .runs import UserPath, load_agent, printable

Move = Callable[[Agent, Any, Mapping[str, Any]], Any]
"""The action for an observation and its info; the reply that names it stands in the terminal then."""


@click.command()
@click.argument("folder", type=UserPath(path_type=Path))
@click.argument("env_id", required=False)
@click.option("--human", is_flag=True, help="Play in the agent's place: replies are read from the terminal.")
@click.option("--episodes", type=click.IntRange(min=1), default=1, show_default=True, help="Episodes to play.")
@click.option(
    "--seed", type=click.IntRange(min=0), help="Seed of the first episode; later ones add 1.  [default: drawn]"
)
@click.option("--sample", is_flag=True, help="Draw replies, as in training, instead of taking the likeliest.")
@click.option("--prompt", type=UserPath(path_type=Path), help="The environment in words.  [default: the run's]")
@click.option("--trust", is_flag=True, help="Execute code of the run's author: prompt.py, the environment's module.")
def play(
    folder: Path,
    env_id: str | None,
    human: bool,
    episodes: int,
    seed: int | None,
    sample: bool,
    prompt: Path | None,
    trust: bool,
) -> None:
    """Watch the agent in FOLDER, of a run or of agent.save(), turn by turn.

    ENV_ID is the environment, by default the one that the agent was trained in.
    """
    agent, env_id = load_agent(folder, env_id, prompt, trust)
    agent.eval(greedy=not sample)
    env = _pictured(env_id)
    click.echo(printable(agent.get_system_prompt()))
    for number in range(episodes):
        total, turns = _episode(agent, env, _asked if human else _acted, None if seed is None else seed + number)
        click.echo(f"\nEpisode {number + 1}: return {total:g} in {turns} turns.")
    env.close()


def _pictured(env_id: str) -> gymnasium.Env[Any, Any]:
    """An environment that draws itself as text, if it can."""
    env = make_env(env_id)
    if "ansi" not in env.metadata.get("render_modes", ()):
        return env
    env.close()
    return make_env(env_id, render_mode="ansi")


def _episode(agent: Agent, env: gymnasium.Env[Any, Any], move: Move, seed: int | None) -> tuple[float, int]:
    """Play one episode; its return and its length."""
    observation, info = env.reset(seed=seed)
    total, turns, is_over = 0.0, 0, False
    while not is_over:
        click.echo("")
        if env.render_mode == "ansi":
            click.echo(str(env.render()).rstrip())
        click.echo(printable(agent.text_of(observation, info)))
        observation, reward, terminated, truncated, info = env.step(move(agent, observation, info))
        total, turns, is_over = total + float(reward), turns + 1, terminated or truncated
        click.echo(f"reward {float(reward):g}")
    click.echo(printable(f"\n{agent.text_of(observation, info)}"))
    agent.discard_episodes([0])
    return total, turns


def _acted(agent: Agent, observation: Any, info: Mapping[str, Any]) -> Any:
    action, reply = agent.act(observation, info), agent.conversation(0).messages[-1]["content"]
    click.echo(printable(f"> {reply}"))
    if action is None:
        raise ActionParseError(f"Reply {reply!r} names no action. {no_action_advice(agent)}")
    return action


def _asked(agent: Agent, observation: Any, info: Mapping[str, Any]) -> Any:
    """Ask the person until a reply names an action."""
    offered = agent.choices_for(observation, info)
    # Choices may come from the run's author.
    shown = None if offered is None else {printable(choice): choice for choice in offered}
    while True:
        reply = click.prompt("", type=None if shown is None else click.Choice(list(shown)), prompt_suffix="> ")
        if shown is not None:
            reply = shown[reply]
        try:
            action = agent.extract_action(agent.response_prefix + reply)
        except ValueError as problem:
            click.echo(printable(str(problem)))
        else:
            if action is not None:
                return action
            click.echo("That names no action.")
