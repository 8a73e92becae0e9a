"""The committed results can be drawn, and what is drawn is what they say."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.long

BENCHMARKS = ROOT / "scripts" / "benchmarks"


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
        # Updates between evaluations have no score.
        steps = [{"step": 10 + seed, "minutes": 1.0, "expected_return": scores[0]}, {"step": 15 + seed, "minutes": 1.5}]
        run = {
            "seed": seed,
            "episodes": 2 * (10 + seed),
            "minutes": 2.0,
            "expected_return_before": -1.0,
            "expected_return_after": scores[1],
            "expected_return_greedy": scores[1] + 0.5,
            "settings": {},
            "baselines": {"random": -1.0, "the_best": 6.0},
            "curve": steps,
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
    grid, scores = plots.on_common_grid([plots.curve(run, "episodes") for run in plots.runs_by_name()["a-name"]])
    assert (grid[0], grid[-1]) == (0.0, 20.0)
    assert scores[:, 0].tolist() == [-1.0] * 3
    # Seed 1 was scored after 11 and 22 episodes, seed 10 after 20.
    assert scores[:, -1] == pytest.approx([1.0, 2 + 9 / 11, 4.0])


def test_where_the_greedy_policy_was_scored_the_curve_is_its_own(plots):
    run = plots.runs_by_name()["a-name"][0]
    run["settings"]["free_text"] = True
    assert plots.curve(run, "episodes") == ([10, 20], [0.0, 1.5])
    assert "greedy" in plots.learning("a-name", [run]).axes[0].get_ylabel()


def test_mean_interval_and_baselines_are_drawn(plots):
    panel = plots.learning("a-name", plots.runs_by_name()["a-name"]).axes[1]
    mean, *baselines = panel.get_lines()
    # After two minutes the seeds score 1, 3 and 5: their standard error is 2 / sqrt(3), Student's t 4.303.
    assert (mean.get_xdata()[-1], mean.get_ydata()[-1]) == pytest.approx((2.0, 3.0))
    outline = panel.collections[0].get_paths()[0].vertices
    edge = outline[outline[:, 0] == 2.0, 1]
    assert (edge.min(), edge.max()) == pytest.approx((3 - 4.969, 3 + 4.969), abs=1e-3)
    assert {line.get_label(): line.get_ydata()[0] for line in baselines} == {"random": -1.0, "the best": 6.0}
