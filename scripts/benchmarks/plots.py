"""Draw the committed results: memory.png, and for each experiment its learning curve.

python scripts/benchmarks/plots.py                 beside the JSON files
python scripts/benchmarks/plots.py --out FOLDER    all into one folder
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from runs import RESULTS, Run, half_width, runs_by_name, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEMORY = Path(__file__).resolve().parent / "results" / "memory.json"
GRID_POINTS = 200
BASELINE_STYLES = (":", "--", "-.", (0, (5, 1)))


def canvas(columns: int) -> tuple[Figure, list[Axes]]:
    """A figure with a number of panels side by side, which share their vertical axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * columns, 3.2), dpi=90, layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False, sharey=True)[0]
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(panels)


def memory() -> Figure:
    """Resident memory against hands played, with a mark at each update."""
    result = json.loads(MEMORY.read_text(encoding="utf-8"))
    figure, (panel,) = canvas(1)
    panel.plot(result["samples"]["hands"], result["samples"]["gib"], linewidth=1, label="resident")
    for hands in result["updates_at_hands"]:
        panel.axvline(hands, color="black", alpha=0.4, linewidth=0.8, linestyle=":")
    panel.plot([], [], color="black", alpha=0.4, linewidth=0.8, linestyle=":", label="update")
    panel.axhline(2.0, color="tab:red", linestyle="--", linewidth=1, label="limit")
    panel.set(xlabel="hands", ylabel="GiB", title="Memory of the default Blackjack run", ylim=(0, 2.2))
    panel.legend(fontsize=8, loc="lower right")
    return figure


def curve(run: Run, axis: str) -> tuple[list[float], list[float]]:
    """The scores of a run before, between and after its updates: positions on `axis` and expected returns.

    Args:
        run: The run.
        axis: "episodes" or "minutes".
    """
    scored = [point for point in run["curve"] if "expected_return" in point]
    key = "step" if axis == "episodes" else axis
    places, scores = [point[key] for point in scored], [point["expected_return"] for point in scored]
    if is_greedy(run):
        return [*places, run[axis]], [*scores, run["expected_return_greedy"]]
    return [0.0, *places, run[axis]], [run["expected_return_before"], *scores, run["expected_return_after"]]


def is_greedy(run: Run) -> bool:
    """Whether the curve is the greedy policy's: free text takes too long to sample in all states between updates."""
    return bool(run["settings"].get("free_text"))


def on_common_grid(curves: list[tuple[list[float], list[float]]]) -> tuple[np.ndarray, np.ndarray]:
    """Interpolates curves on the range that all share: positions (GRID_POINTS,) and scores (seeds, GRID_POINTS)."""
    start, end = max(places[0] for places, _ in curves), min(places[-1] for places, _ in curves)
    grid = np.linspace(start, end, GRID_POINTS)
    return grid, np.stack([np.interp(grid, *one) for one in curves])


def learning(name: str, runs: list[Run]) -> Figure:
    """Mean and 95 % interval over seeds, against episodes and against minutes, between the baselines."""
    figure, panels = canvas(2)
    for panel, axis in zip(panels, ("episodes", "minutes"), strict=True):
        grid, scores = on_common_grid([curve(run, axis) for run in runs])
        mean = scores.mean(axis=0)
        panel.plot(grid, mean, label=f"mean of {len(runs)} seeds" if len(runs) > 1 else f"seed {runs[0]['seed']}")
        if len(runs) > 1:
            half = np.array([half_width(column) for column in scores.T.tolist()])
            panel.fill_between(grid, mean - half, mean + half, alpha=0.25, linewidth=0, label="95 % interval")
        baselines = runs[0]["baselines"].items()
        for (baseline, value), style in zip(baselines, BASELINE_STYLES, strict=False):
            panel.axhline(value, color="black", linestyle=style, linewidth=0.9, label=baseline.replace("_", " "))
        panel.set_xlabel(axis)
        panel.locator_params(axis="x", nbins=6)
    # A wide interval of few seeds would squeeze the curve; it may leave the panel.
    values = [*(value for run in runs for value in curve(run, "minutes")[1]), *runs[0]["baselines"].values()]
    margin = 0.08 * (max(values) - min(values))
    panels[0].set_ylim(min(values) - margin, max(values) + margin)
    panels[0].set_ylabel(f"expected return, {'greedy' if is_greedy(runs[0]) else 'sampled'} policy")
    panels[1].legend(fontsize=8, loc="lower right")
    figure.suptitle(title(name, runs), fontsize=11)
    return figure


def figures() -> Iterator[tuple[Path, Figure]]:
    """Each figure, with its path beside the results."""
    yield MEMORY.with_suffix(".png"), memory()
    for name, runs in runs_by_name().items():
        yield RESULTS / f"{name}.png", learning(name, runs)


def main() -> None:
    """Write all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for all figures; default: beside the results")
    out = parser.parse_args().out
    if out:
        out.mkdir(parents=True, exist_ok=True)
    for path, figure in figures():
        # Without the version of matplotlib, the same data give the same bytes.
        figure.savefig(out / path.name if out else path, metadata={"Software": None})


if __name__ == "__main__":
    main()
