"""Renders the files of runs as one HTML page: the template is `page.html`, the data is embedded as JSON."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ...errors import ConfigError, excerpt
from ...learners.alarms import Alarms
from ...options import check_arguments, require_text

# Transcripts of a run that the page holds, spread evenly over what was recorded.
_TRANSCRIPTS = 200


def write_report(runs: Sequence[str | Path], path: str | Path) -> Path:
    """Write the report of one or several runs as one HTML file.

    Args:
        runs: Their folders, each with the `metrics.jsonl` that `default_tracker` writes.
        path: What to write.

    Raises:
        ConfigError: An argument has the wrong type, a folder holds no metrics, or a line of a file is damaged.
    """
    check_arguments(write_report, locals())
    require_text(path=path)
    if not runs or not all(isinstance(run, (str, Path)) and str(run) for run in runs):
        raise ConfigError(f"runs must be a list of folders, got {excerpt(runs)}. Pass at least one.")
    data = {"runs": [_run(Path(run).expanduser()) for run in runs]}
    title = ", ".join(run["name"] for run in data["runs"])
    # Inside a script element only "</" and "<!--" could end the data.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    page = template.replace("__TITLE__", html.escape(title)).replace("__DATA__", text)
    target = Path(path).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return target


def _run(folder: Path) -> dict[str, Any]:
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise ConfigError(
            f"{str(folder)!r} holds no metrics.jsonl. Pass the folder of a run that was tracked with default_tracker() "
            "(the examples and `python -m llamagym train` do so)."
        )
    rows = _lines(metrics)
    if not rows:
        raise ConfigError(f"{str(metrics)!r} is empty: no update has run yet. Wait for the first, or train longer.")
    told = _lines(folder / "transcripts.jsonl") if (folder / "transcripts.jsonl").is_file() else []
    step = max(1, math.ceil(len(told) / _TRANSCRIPTS))
    settings = _settings(folder)
    return {
        "name": folder.resolve().name,
        "settings": settings,
        "rows": rows,
        "alarms": _alarms(rows, str(settings.get("dtype", ""))),
        "transcripts": told[::step],
    }


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _alarms(rows: Sequence[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """Alarms by the number of the update, from the same rules over the same statistics as in the log."""
    alarms = Alarms(torch.float32 if dtype in ("", "float32") else torch.bfloat16)
    return [{"update": index, "text": text} for index, row in enumerate(rows) for text in alarms.check(row)]


def _lines(path: Path) -> list[dict[str, Any]]:
    """A JSONL file; a last line that a killed run left unfinished is no error."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise ConfigError(f"Line {number} of {str(path)!r} is not valid JSON: {error}. Delete the line.") from error
    return rows
