"""Renders the files of runs as one HTML page: the template is `page.html`, the data is embedded as JSON.

The files may be damaged or come from somebody else. What the page gets has the types that its script expects: finite
numbers, texts of limited length, transcripts with all their parts. Lines that do not fit are left out and counted.
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

# Of a run: transcripts, spread evenly over what was recorded; alarms; settings; characters of a text and of a setting.
_TRANSCRIPTS, _ALARMS, _SETTINGS, _CHARACTERS, _SETTING_CHARACTERS = 200, 200, 200, 2000, 500
_NAME_CHARACTERS = 100
# Statistics of an update, turns of a transcript, choices of a turn, and characters of all transcripts.
_STATISTICS = 200
_TURNS = 100
_CHOICES = 100
_TRANSCRIPT_CHARACTERS = 2**24
# Identifies a report in the first characters of a page. Elements further down occur in pages of others, too.
_GENERATOR = '<meta name="generator" content="llamagym report">'
_HEAD_CHARACTERS = 1000


def write_report(runs: Sequence[str | Path], path: str | Path) -> Path:
    """Write the report of one or several runs as one HTML file.

    Args:
        runs: Their folders, each with the `metrics.jsonl` that `default_tracker` writes.
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
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    values = {"__TITLE__": html.escape(title), "__DATA__": text}
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # In one pass: a title may contain the name of a placeholder.
    page = re.sub("|".join(values), lambda found: values[found[0]], template)
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
    """What the page shows of a run.

    Raises:
        ConfigError: The folder has no metrics, or cannot be read.
    """
    try:
        return _run(folder)
    except OSError as error:
        raise ConfigError(f"{str(folder)!r} cannot be read: {error}. Pass another folder.") from error


def _run(folder: Path) -> dict[str, Any]:
    metrics = _file(folder, "metrics.jsonl")
    if metrics is None:
        raise ConfigError(
            f"{str(folder)!r} holds no metrics.jsonl. Pass the folder of a run that was tracked with default_tracker() "
            "(the examples and `python -m llamagym train` do so)."
        )
    lines, damaged = _lines(metrics)
    if not lines and not damaged:
        raise ConfigError(f"{str(metrics)!r} is empty: no update has run yet. Wait for the first, or train longer.")
    if not lines:
        raise ConfigError(f"{str(metrics)!r} has no line that is a JSON object. Pass the folder of a run.")
    transcripts = _file(folder, "transcripts.jsonl")
    recorded, damaged_transcripts = ([], 0) if transcripts is None else _lines(transcripts)
    shown = recorded[:: max(1, math.ceil(len(recorded) / _TRANSCRIPTS))]
    told = [transcript for line in shown if (transcript := _transcript(line)) is not None]
    damaged += damaged_transcripts + len(shown) - len(told)
    settings = _settings(folder)
    rows = [_numbers(line) for line in lines]
    return {
        "name": json_safe(folder.resolve().name, _NAME_CHARACTERS),
        "settings": settings,
        "rows": rows,
        "alarms": _alarms(rows, settings.get("dtype", "")),
        "transcripts": _first(told, _TRANSCRIPT_CHARACTERS),
        "damaged": damaged,
    }


def _first(transcripts: Sequence[dict[str, Any]], characters: int) -> list[dict[str, Any]]:
    """The first transcripts, as many as have so many characters together."""
    kept = []
    for transcript in transcripts:
        characters -= len(json.dumps(transcript))
        if characters < 0:
            break
        kept.append(transcript)
    return kept


def _file(folder: Path, name: str) -> Path | None:
    """A file of a run; None if it is missing.

    Raises:
        ConfigError: It is a link to a file elsewhere, whose content the report would show.
    """
    try:
        path = file_inside(folder, name)
    except CheckpointError as error:
        raise ConfigError(f"{error} Replace the link by a copy.") from error
    return path if path.is_file() else None


def _settings(folder: Path) -> dict[str, str]:
    """Settings by name, as texts."""
    path = _file(folder, "config.json")
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
    """The statistics of a line that are finite numbers."""
    shown = list(line.items())[:_STATISTICS]
    numbers = {name: as_number(value) for name, value in shown if isinstance(value, (int, float))}
    return {json_safe(name, _NAME_CHARACTERS): value for name, value in numbers.items() if math.isfinite(value)}


def _number(value: Any) -> float | None:
    number = as_number(value) if isinstance(value, (int, float)) else math.nan
    return number if math.isfinite(number) else None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of a text")
    return str(json_safe(value, _CHARACTERS))


def _transcript(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """A transcript as the page's script expects it (see `learners.transcripts`); None if it is damaged."""
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
    choices = turn["choices"]
    choices = None if choices is None else choices[:_CHOICES]
    return {
        "turn": _number(turn["turn"]) or 0,
        "read": _text(turn["read"]),
        "reply": _text(turn["reply"]),
        "choices": None if choices is None else [(_text(text), _number(chance) or 0.0) for text, chance in choices],
        "valid": bool(turn["valid"]),
        **{name: _number(turn.get(name)) for name in ("reward", "penalty", "value", "advantage")},
    }


def _alarms(rows: Sequence[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """Alarms by the number of the update, from the same rules over the same statistics as in the log."""
    alarms = Alarms(Settings(dtype=torch.float32 if dtype in ("", "float32") else torch.bfloat16))
    found = [{"update": index, "text": text} for index, row in enumerate(rows) for text in alarms.check(row)]
    return found[:_ALARMS]


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects in a JSONL file, and how many lines are none, such as one that a killed run left unfinished."""
    rows, damaged = [], 0
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
