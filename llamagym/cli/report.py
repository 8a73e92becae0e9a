"""Writes the report of runs, for the command `report`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from ..errors import ConfigError
from ..training import write_report

# Seconds between two reports of a run that is watched.
_INTERVAL_S = 5.0


def report(runs: Sequence[str], path: Path, watches: bool) -> None:
    """Writes the report; with `watches`, again and again until Ctrl-C."""
    if not watches:
        click.echo(write_report(runs, path))
        return
    click.echo(f"{path} is written every {_INTERVAL_S:.0f} seconds, once the run has begun. Ctrl-C ends it.")
    try:
        while True:
            # A run that has not begun yet has no metrics.
            with suppress(ConfigError):
                write_report(runs, path, refreshes=True)
            time.sleep(_INTERVAL_S)
    except KeyboardInterrupt:
        # The last page does not load itself again.
        write_report(runs, path)
