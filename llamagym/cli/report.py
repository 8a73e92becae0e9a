"""Writes the report of runs, for the command `report`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from ..training import write_report

# Seconds between two reports of a training that is watched.
_INTERVAL_S = 5.0


def report(runs: Sequence[str], path: Path, watches: bool) -> None:
    """Writes the report; with `watches`, again and again until Ctrl-C."""
    if not watches:
        click.echo(write_report(runs, path))
        return
    click.echo(
        f"{write_report(runs, path, refreshes=True)} is written every {_INTERVAL_S:.0f} seconds; Ctrl-C ends it."
    )
    try:
        while True:
            time.sleep(_INTERVAL_S)
            write_report(runs, path, refreshes=True)
    except KeyboardInterrupt:
        # The last one stays as it is.
        write_report(runs, path)
