"""The command line: `python -m llamagym COMMAND`.

Exit status: 0 for success, 1 for an error (with a message of one line), 2 for a wrong command line.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import click

from . import __version__
from .cli.doctor import doctor
from .cli.play import evaluate, play
from .cli.runs import printable
from .cli.train import train
from .errors import LlamaGymError
from .models.registry import entries


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="llamagym %(version)s")
def cli() -> None:
    """Train, evaluate and play language models that learn by acting."""


for command in (train, evaluate, play, doctor):
    cli.add_command(command)


@cli.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN_DIR...")
@click.option("--out", type=click.Path(dir_okay=False), help="What to write.  [default: report.html in the first run]")
def report(runs: tuple[str, ...], out: str | None) -> None:
    """Write one HTML page about one or several runs: curves, alarms and episodes to read."""
    from .training.report import write_report

    click.echo(write_report(runs, out or Path(runs[0]) / "report.html"))


@cli.command()
def models() -> None:
    """List the registered models."""
    for entry in entries():
        size = "" if entry.parameter_count is None else f"{entry.parameter_count / 1e6:,.0f}M"
        click.echo(f"{entry.name:<24} {size:>8}  {entry.hub_id}")


def main() -> None:
    """Runs a command; errors of the library become a message of one line."""
    for stream in (sys.stdout, sys.stderr):
        # Environments and models may print characters that the terminal's encoding, such as cp1252, does not have.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        cli(prog_name="python -m llamagym")
    except LlamaGymError as error:
        click.echo(printable(f"{type(error).__name__}: {error}"), err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
