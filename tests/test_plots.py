"""The committed results can be drawn, and what is drawn is what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "scripts" / "benchmarks"


def draw(*arguments: str) -> None:
    subprocess.run([sys.executable, str(BENCHMARKS / "plots.py"), *arguments], check=True)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> dict[str, bytes]:
    """Every figure of the committed results, by its file's name."""
    folder = tmp_path_factory.mktemp("plots")
    draw("--out", str(folder))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_experiment_and_the_memory_have_their_figure(drawn):
    names = {path.stem.rpartition("-seed")[0] for path in (BENCHMARKS / "learning" / "results").glob("*.json")}
    assert "blackjack" in names
    assert set(drawn) == {"memory.png", *(f"{name}.png" for name in names)}


def test_figures_are_small(drawn):
    assert all(png.startswith(b"\x89PNG") and len(png) < 60_000 for png in drawn.values())


@pytest.fixture
def plots(monkeypatch, tmp_path):
    """The script's functions, on results of our own."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import plots
    import runs

    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    for seed, scores in ((0, [0.0, 1.0]), (1, [2.0, 3.0]), (10, [4.0, 5.0])):
        run = {
            "seed": seed,
            "expected_return_before": -1.0,
            "baselines": {"random": -1.0, "the_best": 6.0},
            "curve": [
                {"step": (index + 1) * (10 + seed), "minutes": float(index), "expected_return": score}
                for index, score in enumerate(scores)
            ]
            + [{"step": 1000, "minutes": 9.0, "return_mean": 0.0}],
        }
        (tmp_path / f"a-name-seed{seed}.json").write_text(json.dumps(run))
    yield plots
    for name in ("plots", "runs"):
        del sys.modules[name]


def test_runs_are_grouped_by_name_and_ordered_by_seed(plots):
    found = plots.runs_by_name()
    assert [run["seed"] for run in found["a-name"]] == [0, 1, 10]
    assert set(found) == {"a-name"}


def test_curves_meet_on_a_common_grid_without_extrapolation(plots):
    grid, scores = plots.on_common_grid([plots.curve(run, "step") for run in plots.runs_by_name()["a-name"]])
    assert (grid[0], grid[-1]) == (0.0, 20.0)
    assert scores[:, 0].tolist() == [-1.0] * 3
    # Seed 10 was scored 4.0 after 20 episodes.
    assert scores[:, -1] == pytest.approx([1.0, 2.0 + 9 / 11, 4.0])


def test_mean_interval_and_baselines_are_drawn(plots):
    figure = plots.learning("a-name", plots.runs_by_name()["a-name"])
    panel = figure.axes[0]
    mean, *baselines = panel.get_lines()
    last = [1.0, 2.0 + 9 / 11, 4.0]
    assert mean.get_ydata()[-1] == pytest.approx(sum(last) / 3)
    top = panel.collections[0].get_datalim(panel.transData).y1
    assert top == pytest.approx(max(mean.get_ydata() + (top - mean.get_ydata()[-1])))
    assert top - mean.get_ydata()[-1] == pytest.approx(plots.half_width(last))
    assert {line.get_label(): line.get_ydata()[0] for line in baselines} == {"random": -1.0, "the best": 6.0}
