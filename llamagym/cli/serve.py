"""Serves an agent for the command `serve`, and saves it after each update."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import click

from .. import serving
from ..agent.export import KIND
from ..learners.base import Stats
from ..learners.ppo import PPOConfig
from ..models.loading import load_model_and_tokenizer
from ..models.registry import GenerationConfig
from ..saving.atomic import require_replaceable
from ..serving import ChatAgent
from .runs import AGENT
from .terminal import printable


def serve(
    *,
    folder: Path | None,
    device: str,
    dtype: str,
    train: bool,
    out: Path | None,
    sample: bool,
    host: str,
    port: int,
    api_key: str | None,
    **new_agent: Any,
) -> None:
    """Serves an agent until Ctrl-C; the arguments are the command's options, `new_agent` those of a new agent."""
    if train and out is None:
        raise click.UsageError("--train needs --out, the folder to save the agent in.")
    if out is not None:
        require_replaceable(out, KIND)
    if folder is None:
        agent = _new_agent(device, dtype, **new_agent)
    else:
        for name, value in new_agent.items():
            if value is not None:
                raise click.UsageError(f"--{name.replace('_', '-')} is for a new agent. FOLDER keeps its own options.")
        agent = ChatAgent.load(folder / AGENT if (folder / AGENT).is_dir() else folder, device, dtype)
    agent.set_training_mode(train, greedy=not sample)
    updates = 0

    def report(stats: Stats) -> None:
        nonlocal updates
        updates += 1
        click.echo(
            f"Update {updates}: {stats['episodes']:.0f} episodes, mean return {stats['return_mean']:.3f}, entropy "
            f"{stats['entropy']:.2f}."
        )
        if out is not None:
            agent.save(out)

    stopped = threading.Event()
    previous: dict[signal.Signals, Any] = {}

    def stop(*_: object) -> None:
        stopped.set()
        # A second Ctrl-C ends the program even during an update.
        for number, handler in previous.items():
            signal.signal(number, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, stop)
        with serving.serve(agent, host, port, api_key=api_key, on_update=report) as url:
            mode = "training" if train else "evaluation"
            click.echo(f"Serving at {url} in {mode} mode. Press Ctrl-C to stop.")
            stopped.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if out is not None:
        agent.save(out)
        click.echo(f"Saved in {printable(str(out))}.")


def _new_agent(
    device: str,
    dtype: str,
    *,
    model: str,
    demonstrations: Path | None,
    max_new_tokens: int,
    batch_size: int | None,
    learning_rate: float,
    seed: int,
) -> ChatAgent:
    """Creates an agent from a model, and lets it learn from demonstrations."""
    learner = PPOConfig(batch_size=batch_size, learning_rate=learning_rate)
    generation = GenerationConfig(max_new_tokens=max_new_tokens)
    loaded, tokenizer, used_device = load_model_and_tokenizer(model, device, dtype)
    agent = ChatAgent(loaded, tokenizer, used_device, generation, learner=learner, seed=seed)
    if demonstrations is not None:
        click.echo(f"Learning from {printable(str(demonstrations))}.")
        agent.sft_from_jsonl(demonstrations)
    return agent
