"""The command line: `python -m llamagym COMMAND`.

Exit status 0 says that all went well, 1 that something failed (one line says what), 2 that the command line is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from .agent import Agent
from .errors import LlamaGymError
from .learners.preflight import Check, Report
from .models.loading import load_model_and_tokenizer
from .models.registry import EMBEDDED_NAME, entries


class ProbeAgent(Agent):
    """Says whether it goes left or right, or whatever else it is asked."""

    def get_system_prompt(self) -> str:
        """One line."""
        return "You walk through a maze. Answer with one word: left or right."

    def format_observation(self, observation: Any) -> str:
        """As it is."""
        return str(observation)

    def get_action_choices(self, observation: Any) -> list[str] | None:
        """Two for every other observation."""
        return ["left", "right"] if "fork" in observation else None

    def extract_action(self, response: str) -> str:
        """The reply itself."""
        return response


def examine(model: str, device: str = "auto", dtype: str = "auto") -> Report:
    """The checks of a model, loading it included."""
    name = "model"
    try:
        loaded, tokenizer, on = load_model_and_tokenizer(model, device, dtype)
        found = f"{model}, {loaded.pretrained_model.dtype} on {on}"
        name = "template"
        agent = ProbeAgent(loaded, tokenizer, on, {"max_new_tokens": 8}, seed=0)
    except LlamaGymError as error:
        return Report((Check(name, False, str(error)),))
    checks = agent.preflight(["fork 1", "fork 2", "a room", "another room"]).checks
    template = Check("template", True, "conversations can be appended to")
    return Report((Check("model", True, found), template, *checks))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Language models that learn by acting."""


@cli.command()
@click.option("--model", default=EMBEDDED_NAME, show_default=True, help="Registered name, folder or hub id.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or mps.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16.")
def doctor(model: str, device: str, dtype: str) -> None:
    """Look over a model, the installation and this machine."""
    report = examine(model, device, dtype)
    verdict = "All is well." if report.passed else f"Not as it should be: {', '.join(report.failing)}."
    click.echo(f"{report}\n{verdict}")
    sys.exit(0 if report.passed else 1)


@cli.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN_DIR...")
@click.option("--out", type=click.Path(dir_okay=False), help="What to write.  [default: report.html in the first run]")
def report(runs: tuple[str, ...], out: str | None) -> None:
    """Write one HTML page about one or several runs: curves, alarms and episodes to read."""
    from .report import write_report

    click.echo(write_report(runs, out or Path(runs[0]) / "report.html"))


@cli.command()
def models() -> None:
    """List the models that are known by name."""
    for entry in entries():
        size = "" if entry.parameter_count is None else f"{entry.parameter_count / 1e6:,.0f}M"
        click.echo(f"{entry.name:<24} {size:>8}  {entry.hub_id}")


def main() -> None:
    """Run a command; the library's own errors end it with one line."""
    try:
        cli(prog_name="python -m llamagym")
    except LlamaGymError as error:
        click.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
