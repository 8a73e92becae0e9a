"""Renders the files of runs as one HTML page: the template is `page.html`, the data is embedded as JSON.

The files may be damaged or come from somebody else. The page gets only values of the types that its script expects:
finite numbers, texts of limited length, complete transcripts. Other lines are left out and counted.
"""

from __future__ import annotations

import html
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ...agent.alarms import Alarms, Settings
from ...errors import CheckpointError, ConfigError, excerpt
from ...options import as_number, check_arguments, json_safe, require_text, user_path
from ...saving.atomic import replace_file
from ...saving.paths import file_inside

# Limits for a run; transcripts are spread evenly over those recorded.
_TRANSCRIPTS = 200
_TRANSCRIPT_CHARACTERS = 2**24
_ALARMS = 200
_SETTINGS = 200
# Limits for a line of the metrics, a transcript and a turn.
_STATISTICS = 200
_TURNS = 100
_CHOICES = 100
# Limits for the characters of a text, a setting and a name.
_CHARACTERS = 2000
_SETTING_CHARACTERS = 500
_NAME_CHARACTERS = 100
# Identifies a report at the beginning of a page; further down, other pages may quote it.
_GENERATOR = '<meta name="generator" content="llamagym report">'
_HEAD_CHARACTERS = 1000


def write_report(runs: Sequence[str | Path], path: str | Path) -> Path:
    """Writes the report of one or several runs as one HTML file, and returns its path.

    Args:
        runs: Folders of the runs, each with the `metrics.jsonl` that `default_tracker` writes.
        path: The file to write: new, or an older report.

    Raises:
        ConfigError: An argument has the wrong type, a folder holds no readable metrics, or the file cannot be written
            or is something else.
    """
    check_arguments(write_report, locals())
    require_text(path=path)
    if not runs or not all(isinstance(run, (str, Path)) and str(run) for run in runs):
        raise ConfigError(f"runs must be a list of folders, got {excerpt(runs)}. Pass at least one.")
    target = user_path(path)
    if os.path.lexists(target) and not _is_report(target):
        raise ConfigError(f"{str(target)!r} exists and is not a report of llamagym. Pass another path.")
    data = {"runs": [_readable_run(user_path(run)) for run in runs]}
    title = ", ".join(run["name"] for run in data["runs"])
    # Inside a script element only "</" and "<!--" could end the data.
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    values = {"__TITLE__": html.escape(title), "__DATA__": embedded}
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # Replace both in one pass: a title may contain the name of a placeholder.
    page = re.sub("|".join(values), lambda match: values[match[0]], template)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, page)
    except OSError as error:
        raise ConfigError(f"the report {str(target)!r} cannot be written: {error}. Pass another path.") from error
    return target


def _is_report(path: Path) -> bool:
    """Whether a file is a report that `write_report` wrote."""
    try:
        if not path.is_file():
            return False
        with path.open(encoding="utf-8") as file:
            return _GENERATOR in file.read(_HEAD_CHARACTERS)
    except (OSError, ValueError):
        return False


def _readable_run(folder: Path) -> dict[str, Any]:
    """Returns the data of a run for the page.

    Raises:
        ConfigError: The folder has no metrics, or cannot be read.
    """
    try:
        return _run(folder)
    except OSError as error:
        raise ConfigError(f"{str(folder)!r} cannot be read: {error}. Pass another folder.") from error


def _run(folder: Path) -> dict[str, Any]:
    metrics = _run_file(folder, "metrics.jsonl")
    if metrics is None:
        raise ConfigError(
            f"{str(folder)!r} holds no metrics.jsonl. Pass the folder of a run that was tracked with default_tracker() "
            "(the examples and `python -m llamagym train` do so)."
        )
    lines, damaged = _read_lines(metrics)
    if not lines and not damaged:
        raise ConfigError(f"{str(metrics)!r} is empty: no update has run yet. Wait for the first, or train longer.")
    if not lines:
        raise ConfigError(f"{str(metrics)!r} has no line that is a JSON object. Pass the folder of a run.")
    transcripts = []
    path = _run_file(folder, "transcripts.jsonl")
    if path is not None:
        recorded, damaged_lines = _read_lines(path)
        damaged += damaged_lines
        interval = max(1, math.ceil(len(recorded) / _TRANSCRIPTS))
        for line in recorded[::interval]:
            transcript = _transcript(line)
            if transcript is None:
                damaged += 1
            else:
                transcripts.append(transcript)
    settings = _settings(folder)
    rows = [_numbers(line) for line in lines]
    return {
        "name": json_safe(folder.resolve().name, _NAME_CHARACTERS),
        "settings": settings,
        "rows": rows,
        "alarms": _alarms(rows, settings.get("dtype", "")),
        "transcripts": _first(transcripts, _TRANSCRIPT_CHARACTERS),
        "damaged": damaged,
    }


def _first(transcripts: Sequence[dict[str, Any]], characters: int) -> list[dict[str, Any]]:
    """Returns as many of the first transcripts as have at most `characters` together."""
    kept = []
    for transcript in transcripts:
        characters -= len(json.dumps(transcript))
        if characters < 0:
            break
        kept.append(transcript)
    return kept


def _run_file(folder: Path, name: str) -> Path | None:
    """Returns the path of a run's file; None if it is missing.

    Raises:
        ConfigError: It is a link to a file elsewhere, whose content the report would show.
    """
    try:
        path = file_inside(folder, name)
    except CheckpointError as error:
        raise ConfigError(f"{error} Replace the link by a copy.") from error
    return path if path.is_file() else None


def _settings(folder: Path) -> dict[str, str]:
    """Returns the run's settings as texts."""
    path = _run_file(folder, "config.json")
    if path is None:
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        return {"config.json": "damaged"}
    shown = list(settings.items())[:_SETTINGS]
    return {json_safe(name, _NAME_CHARACTERS): _setting(value) for name, value in shown}


def _setting(value: Any) -> str:
    safe = json_safe(value, _SETTING_CHARACTERS)
    text = safe if isinstance(safe, str) else json.dumps(safe, ensure_ascii=False)
    return str(json_safe(text, _SETTING_CHARACTERS))


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the statistics of a line that are finite numbers."""
    shown = list(line.items())[:_STATISTICS]
    numbers = {name: as_number(value) for name, value in shown if isinstance(value, (int, float))}
    return {json_safe(name, _NAME_CHARACTERS): value for name, value in numbers.items() if math.isfinite(value)}


def _number(value: Any) -> float | None:
    number = as_number(value) if isinstance(value, (int, float)) else math.nan
    return number if math.isfinite(number) else None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {type(value).__name__}")
    return str(json_safe(value, _CHARACTERS))


def _transcript(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a transcript as the page's script expects it (see `agent.transcripts`); None if it is damaged."""
    try:
        return {
            "update": _number(line["update"]) or 0,
            "system": _text(line["system"]),
            "return": _number(line["return"]),
            "length": _number(line["length"]) or 0,
            "truncated": bool(line["truncated"]),
            "turns": [_turn(turn) for turn in line["turns"][:_TURNS]],
        }
    except (KeyError, TypeError, ValueError):
        return None


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    choices = None
    if turn["choices"] is not None:
        choices = [(_text(text), _number(probability) or 0.0) for text, probability in turn["choices"][:_CHOICES]]
    return {
        "turn": _number(turn["turn"]) or 0,
        "read": _text(turn["read"]),
        "reply": _text(turn["reply"]),
        "choices": choices,
        "valid": bool(turn["valid"]),
        **{name: _number(turn.get(name)) for name in ("reward", "penalty", "value", "advantage")},
    }


def _alarms(rows: Sequence[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """Returns alarms with the index of their update, by the rules that the log follows."""
    is_float32 = dtype in ("", "float32")
    alarms = Alarms(Settings(dtype=torch.float32 if is_float32 else torch.bfloat16))
    fired = []
    for index, row in enumerate(rows):
        fired += [{"update": index, "text": text} for text in alarms.check(row)]
    return fired[:_ALARMS]


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the JSON objects of a JSONL file, and the number of other lines, such as an incomplete last one."""
    rows = []
    damaged = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                rows.append(row)
            elif line.strip():
                damaged += 1
    return rows, damaged
