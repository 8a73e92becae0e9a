"""The command line: `llamagym COMMAND`, or `python -m llamagym COMMAND`.

Exit status: 0 for success, 1 for an error (with a message of one line), 2 for a wrong command line.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import click

from . import __version__
from .cli.commands import cli
from .cli.terminal import printable
from .errors import LlamaGymError

click.version_option(__version__, message="llamagym %(version)s")(cli)


def main() -> None:
    """Runs a command; errors of the library become a message of one line."""
    for stream in (sys.stdout, sys.stderr):
        # Environments and models may print characters that the terminal's encoding, such as cp1252, does not have.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Shell completion works only for the installed program.
    is_program = Path(sys.argv[0]).stem == "llamagym"
    try:
        cli(prog_name="llamagym" if is_program else "python -m llamagym", complete_var="_LLAMAGYM_COMPLETE")
    except LlamaGymError as error:
        click.echo(printable(f"{type(error).__name__}: {error}"), err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
