"""Plays and evaluates saved agents, for the commands `play` and `eval`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import gymnasium

from .. import training
from ..agent.agent import Agent, collector_of
from ..agent.transcripts import choice_probabilities
from ..errors import ActionParseError
from ..training.environments import make_env
from .runs import load_agent
from .terminal import printable

ChooseAction = Callable[[Agent, Any, Mapping[str, Any]], Any]
"""Returns the action for an observation and its info, after the terminal has shown the reply."""


def play(
    *,
    folder: Path,
    env_id: str | None,
    human: bool,
    episodes: int,
    seed: int | None,
    sample: bool,
    prompt: Path | None,
    trust: bool,
) -> None:
    """Shows episodes of a saved agent; the arguments are the command's options."""
    agent, env_id = load_agent(folder, env_id, prompt, trust)
    agent.eval(greedy=not sample)
    choose_action = _ask_person if human else _ask_agent
    env = _make_rendered_env(env_id)
    click.echo(printable(agent.get_system_prompt()))
    for number in range(episodes):
        episode_seed = None if seed is None else seed + number
        episode_return, turns = _play_episode(agent, env, choose_action, episode_seed)
        click.echo(f"\nEpisode {number + 1}: return {episode_return:g} in {turns} turns.")
    env.close()


def _make_rendered_env(env_id: str) -> gymnasium.Env[Any, Any]:
    """Makes an environment that renders as text, if it supports that."""
    env = make_env(env_id)
    if "ansi" not in env.metadata.get("render_modes", ()):
        return env
    env.close()
    return make_env(env_id, render_mode="ansi")


def _play_episode(
    agent: Agent, env: gymnasium.Env[Any, Any], choose_action: ChooseAction, seed: int | None
) -> tuple[float, int]:
    """Plays one episode; returns its return and its length."""
    observation, info = env.reset(seed=seed)
    hooks = collector_of(agent).actor.hooks
    episode_return = 0.0
    turns = 0
    is_over = False
    while not is_over:
        click.echo("")
        if env.render_mode == "ansi":
            click.echo(str(env.render()).rstrip())
        click.echo(printable(hooks.text(observation, info)))
        action = choose_action(agent, observation, info)
        observation, reward, terminated, truncated, info = env.step(action)
        episode_return += float(reward)
        turns += 1
        is_over = terminated or truncated
        click.echo(f"reward {float(reward):g}")
    click.echo(printable(f"\n{hooks.text(observation, info)}"))
    collector_of(agent).actor.discard_episodes([0])
    return episode_return, turns


def _ask_agent(agent: Agent, observation: Any, info: Mapping[str, Any]) -> Any:
    action = agent.act(observation, info)
    reply = agent.current_episode_messages[-1]["content"]
    actor = collector_of(agent).actor
    probabilities = choice_probabilities(actor.conversation(0).turns[-1], actor.decode)
    shown = ", ".join(f"{choice} {probability:.0%}" for choice, probability in probabilities or ())
    click.echo(printable(f"> {reply}" + (f"    ({shown})" if shown else "")))
    if action is None:
        raise ActionParseError(f"Reply {reply!r} names no action. {collector_of(agent).actor.hooks.no_action_advice()}")
    return action


def _ask_person(agent: Agent, observation: Any, info: Mapping[str, Any]) -> Any:
    """Prompts the person until a reply names an action."""
    hooks = collector_of(agent).actor.hooks
    choices = hooks.choices(observation, info)
    # Choices may come from the run's author, so control characters are escaped.
    choice_of = {printable(choice): choice for choice in choices or ()}
    prompt_type = None if choices is None else click.Choice(list(choice_of))
    while True:
        reply = click.prompt("", type=prompt_type, prompt_suffix="> ")
        if choices is not None:
            reply = choice_of[reply]
        try:
            action = agent.extract_action(hooks.response_prefix + reply)
        except ValueError as problem:
            click.echo(printable(str(problem)))
        else:
            if action is not None:
                return action
            click.echo("The reply names no action.")


def evaluate(
    *,
    folder: Path,
    env_id: str | None,
    episodes: int,
    seed: int,
    num_envs: int | None,
    sample: bool,
    prompt: Path | None,
    trust: bool,
) -> None:
    """Compares a saved agent with random actions; the arguments are the command's options."""
    agent, env_id = load_agent(folder, env_id, prompt, trust)
    results = {
        "agent": training.evaluate(agent, env_id, episodes=episodes, seed=seed, num_envs=num_envs, greedy=not sample),
        "random": training.evaluate("random", env_id, episodes=episodes, seed=seed, num_envs=num_envs),
    }
    click.echo(training.side_by_side(results))
