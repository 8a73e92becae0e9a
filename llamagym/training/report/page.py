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
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ...agent.alarms import Alarms, Settings
from ...errors import CheckpointError, ConfigError, excerpt
from ...learners.grpo import GRPOConfig, ReinforceConfig
from ...learners.ppo import PPOConfig
from ...options import as_number, check_arguments, json_safe, require_text, user_path
from ...saving.atomic import replace_file
from ...saving.paths import file_inside
from .scores import read_scores

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
# Limits for the scores, for the states in a picture of the policy, and for the characters of an image.
_SCORES = 20
MAX_STATES = 2000
_MAX_CELLS = 10_000
_MAX_BYTES = 2**24
_IMAGE_CHARACTERS = 200_000
# Seconds after which a page that shows a running training is loaded again.
_REFRESH_S = 5
# Identifies a report at the beginning of a page; further down, other pages may quote it.
_GENERATOR = '<meta name="generator" content="llamagym report">'
_HEAD_CHARACTERS = 1000
# Settings in which runs of one group may differ.
_OF_ONE_RUN = ("seed", "llamagym", "run_dir", "resume")
_CONFIGS = {kind.__name__: kind for kind in (PPOConfig, GRPOConfig, ReinforceConfig)}
_BASE64 = re.compile(r"[A-Za-z0-9+/]*=*")


def write_report(runs: Sequence[str | Path], path: str | Path, refreshes: bool = False) -> Path:
    """Writes the report of one or several runs as one HTML file, and returns its path.

    Args:
        runs: Folders of the runs, each with the `metrics.jsonl` that `train(run_dir=)` and `default_tracker` write.
            Runs that differ in their seed only share a curve, the mean.
        path: The file to write: new, or an older report.
        refreshes: Whether a browser loads the page again every few seconds, to follow a training.

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
    folders = [user_path(run) for run in runs]
    data = {"runs": [_readable_run(folder) for folder in folders]}
    _make_names_distinct_(data["runs"], folders)
    title = ", ".join(run["name"] for run in data["runs"])
    # Inside a script element only "</" and "<!--" could end the data.
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    refresh = f'<meta http-equiv="refresh" content="{_REFRESH_S}">\n' if refreshes else ""
    values = {"__TITLE__": html.escape(title), "__DATA__": embedded, "__REFRESH__": refresh}
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # Replace all in one pass: a title may contain the name of a placeholder.
    page = re.sub("|".join(values), lambda match: values[match[0]], template)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, page)
    except OSError as error:
        raise ConfigError(f"the report {str(target)!r} cannot be written: {error}. Pass another path.") from error
    return target


def _make_names_distinct_(runs: list[dict[str, Any]], folders: Sequence[Path]) -> None:
    """Adds the parent folder's name to the names of runs whose folders have one name."""
    names = [run["name"] for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if names.count(run["name"]) > 1:
            path = folder.resolve()
            run["name"] = json_safe(f"{path.parent.name}/{path.name}", _NAME_CHARACTERS)


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
            f"{str(folder)!r} holds no metrics.jsonl. Pass the run_dir of a training, or the folder of "
            "default_tracker()."
        )
    lines, damaged = _read_lines(metrics)
    if damaged and not lines:
        raise ConfigError(f"{str(metrics)!r} has no line that is a JSON object. Pass the folder of a run.")
    transcripts, damaged_transcripts = _transcripts(_run_file(folder, "transcripts.jsonl"))
    played, damaged_played = _transcripts(_run_file(folder, "played.jsonl"))
    settings = _settings(folder)
    rows = [_numbers(line) for line in lines]
    return {
        "name": json_safe(folder.resolve().name, _NAME_CHARACTERS),
        "settings": settings,
        "defaults": _default_settings(settings),
        "group": json.dumps({name: value for name, value in settings.items() if name not in _OF_ONE_RUN}),
        "rows": rows,
        "alarms": _alarms(rows, settings.get("dtype", "")),
        "transcripts": transcripts,
        "played": played,
        "scores": _scores(folder),
        "policy": _policy(folder),
        "damaged": damaged + damaged_transcripts + damaged_played,
    }


def _transcripts(path: Path | None) -> tuple[list[dict[str, Any]], int]:
    """Returns the transcripts in a file, evenly spread if there are many, and the number of damaged lines."""
    if path is None:
        return [], 0
    recorded, damaged = _read_lines(path)
    interval = max(1, math.ceil(len(recorded) / _TRANSCRIPTS))
    transcripts = []
    for line in recorded[::interval]:
        transcript = _transcript(line)
        if transcript is None:
            damaged += 1
        else:
            transcripts.append(transcript)
    return _first(transcripts, _TRANSCRIPT_CHARACTERS), damaged


def _scores(folder: Path) -> list[dict[str, Any]]:
    """Returns the scores of the run's policies, in the order in which the terminal printed them."""
    path = _run_file(folder, "scores.json")
    if path is None or path.stat().st_size > _MAX_BYTES:
        return []
    shown = list(read_scores(path).items())[:_SCORES]
    return [{"name": json_safe(name, _NAME_CHARACTERS), **json_safe(score._asdict())} for name, score in shown]


def _policy(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the cells of the policy's picture before and after the training; without those that are damaged."""
    path = _run_file(folder, "policy.json")
    pictures: Any = None
    if path is not None and path.stat().st_size <= _MAX_BYTES:
        with suppress(OSError, ValueError, RecursionError):
            pictures = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    found = {}
    for when in ("before", "after"):
        cells = pictures.get(when) if isinstance(pictures, dict) else None
        if isinstance(cells, list):
            found[when] = [cell for cell in map(_cell, cells[:MAX_STATES]) if cell is not None]
    return {when: cells for when, cells in found.items() if cells and fits_a_page(cells)}


def fits_a_page(cells: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a picture's panels, as tables with all of their rows and columns, have few enough cells."""
    rows: dict[str, set[str]] = {}
    columns: dict[str, set[str]] = {}
    for cell in cells:
        rows.setdefault(cell["panel"], set()).add(cell["row"])
        columns.setdefault(cell["panel"], set()).add(cell["column"])
    return sum(len(rows[panel]) * len(columns[panel]) for panel in rows) <= _MAX_CELLS


def _cell(record: Any) -> dict[str, Any] | None:
    """Returns a cell as the page's script expects it; None if it is damaged."""
    try:
        shown = list(record["choices"].items())[:_CHOICES]
        choices = [(json_safe(text, _NAME_CHARACTERS), _number(probability) or 0.0) for text, probability in shown]
        place = {name: json_safe(_text(record[name]), _NAME_CHARACTERS) for name in ("panel", "row", "column")}
    except (AttributeError, KeyError, TypeError):
        return None
    return {**place, "choices": choices} if choices else None


def _default_settings(settings: Mapping[str, str]) -> list[str]:
    """Returns the names of settings that have their learner's default."""
    config = _CONFIGS.get(settings.get("learner", ""))
    if config is None:
        return []
    defaults = {name: _setting(value) for name, value in config().to_dict().items()}
    return [name for name, value in settings.items() if name in defaults and defaults[name] == value]


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
            "end": _end(line.get("end")),
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
        "frame": _frame(turn.get("frame")),
        **{name: _number(turn.get(name)) for name in ("reward", "penalty", "value", "advantage")},
    }


def _end(end: Any) -> dict[str, Any] | None:
    """Returns the last observation of an episode and its rendering; None without one."""
    if not isinstance(end, Mapping):
        return None
    return {"read": _text(end.get("read", "")), "frame": _frame(end.get("frame"))}


def _frame(frame: Any) -> dict[str, str]:
    """Returns the environment's rendering of a turn as text or as an image; empty without one."""
    if not isinstance(frame, Mapping):
        return {}
    text = frame.get("text")
    if isinstance(text, str):
        return {"text": str(json_safe(text, _CHARACTERS))}
    png = frame.get("png")
    if isinstance(png, str) and len(png) <= _IMAGE_CHARACTERS and _BASE64.fullmatch(png):
        return {"png": png}
    return {}


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
