"""The search over options: what W&B reads is read, better trials rank higher, and a search goes on where it stopped."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import yaml

from llamagym import ConfigError
from tests.helpers import ROOT

pytestmark = pytest.mark.long

pytest.importorskip("optuna", reason="the extra sweep is not installed")
SPEC = importlib.util.spec_from_file_location("sweep", ROOT / "scripts" / "sweep.py")
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)

# Best at a rate of 0.01; whatever has a bonus of 3 fails.
PROGRAM = """
import argparse, json, math, pathlib, sys
options = argparse.ArgumentParser()
for name, kind in (("rate", float), ("bonus", int), ("steps", int), ("word", str), ("run-dir", pathlib.Path)):
    options.add_argument("--" + name, type=kind)
args = options.parse_args()
if args.bonus == 3:
    sys.exit("no")
scores = [{"score": 0.0}, {"score": -abs(math.log10(args.rate) + 2)}, {"entropy": 1.0}]
(args.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + chr(10) for line in scores))
"""


@pytest.fixture
def sweep(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return {
        "program": str(tmp_path / "program.py"),
        "method": "random",
        "metric": {"name": "score", "goal": "maximize"},
        "parameters": {
            "rate": {"distribution": "log_uniform_values", "min": 1e-4, "max": 1.0},
            "bonus": {"min": 1, "max": 3},
            "word": {"values": ["a", "b"]},
            "steps": {"value": 7},
            "track": {"value": "wandb"},
        },
    }


def test_the_best_trial_ranks_first_and_failures_are_passed_over(sweep, tmp_path):
    study = script.search(sweep, tmp_path / "runs", trials=8, seed=0)
    table = [line.split() for line in script.ranked(study, "score")]
    assert table[0][:2] == ["trial", "score"]
    scores = [float(row[1]) for row in table[1:]]
    failed = [trial for trial in study.trials if trial.value is None]
    assert failed
    assert all(trial.params["bonus"] == 3 for trial in failed)
    assert len(scores) == 8 - len(failed) > 2
    assert scores == sorted(scores, reverse=True)
    assert study.best_params["word"] in ("a", "b")
    assert "no" in (tmp_path / f"runs/trial-{failed[0].number}.txt").read_text()


def test_a_search_goes_on_where_it_stopped(sweep, tmp_path):
    sweep["parameters"]["bonus"] = {"min": 1, "max": 2}
    values = [trial.value for trial in script.search(sweep, tmp_path / "runs", trials=2, seed=0).trials]
    more = script.search(sweep, tmp_path / "runs", trials=3, seed=1)
    assert [trial.value for trial in more.trials][:2] == values
    assert len(more.trials) == 3
    assert len(script.search(sweep, tmp_path / "runs", trials=3, seed=2).trials) == 3


@pytest.mark.parametrize("name", ["trial-0.txt", "trial-0/notes", "sweep.log"])
def test_files_of_the_user_stay(sweep, tmp_path, name):
    path = tmp_path / "runs" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(ConfigError, match="Pass another --folder"):
        script.search(sweep, tmp_path / "runs", 1, 0)
    assert path.read_text() == "mine"


def test_rejects_invalid_arguments(sweep, tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'random'"):
        script.search({**sweep, "method": "randm"}, tmp_path / "runs", 1, 0)
    sweep["parameters"]["bonus"] = {"value": 1}
    wrong = {**sweep, "metric": {"name": "scor", "goal": "maximize"}}
    with pytest.raises(ConfigError, match=r"has no 'scor'\. Did you mean 'score'"):
        script.search(wrong, tmp_path / "metric", 1, 0)
    sweep["parameters"]["rate"]["distribution"] = "uniforn"
    with pytest.raises(ConfigError, match="Did you mean 'uniform'"):
        script.search(sweep, tmp_path / "space", 1, 0)


def test_the_sweep_names_options_that_the_example_has(monkeypatch):
    sweep = yaml.safe_load((ROOT / "scripts" / "sweep.yaml").read_text())
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = importlib.import_module(Path(sweep["program"]).stem)
    drawn = {
        name: space["values"][0] if "values" in space else space.get("min", space.get("value"))
        for name, space in sweep["parameters"].items()
    }
    monkeypatch.setattr(sys, "argv", ["blackjack.py", *(f"--{name}={value}" for name, value in drawn.items())])
    parsed: list[dict[str, object]] = []

    def stop_after_parsing(args, *rest, **options):
        parsed.append(vars(args))
        sys.exit()

    monkeypatch.setattr(example.script, "load", stop_after_parsing)
    with pytest.raises(SystemExit):
        example.main()
    (args,) = parsed
    # Takes several names.
    assert args["track"] == [drawn.pop("track")]
    assert {name: args[name.replace("-", "_")] for name in drawn} == drawn
