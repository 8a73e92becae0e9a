"""A notebook's cell shows one bar and no warnings; the notebook in docs/ runs, and is kept without outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.tiny import tiny_base_model, tiny_tokenizer

CELLS = (
    """
import logging
from llamagym import load_model_and_tokenizer, train
from tests.helpers.agents import ChoiceAgent, CountdownEnv
logging.getLogger("llamagym").setLevel("ERROR")  # a tiny model is not in the registry
""",
    """
model, tokenizer, device = load_model_and_tokenizer({model!r}, "cpu")
agent = ChoiceAgent(model, tokenizer, device, ppo_config_dict={{"batch_size": 12}}, seed=0)
result = train(agent, CountdownEnv, episodes=12, num_envs=2, seed=0, on_update=lambda stats: print("an update"))
""",
)
pytestmark = pytest.mark.long
NOTEBOOK = ROOT / "docs" / "notebooks" / "frozenlake.ipynb"
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")


def test_it_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert [cell.id for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")] == []


def execute(notebook, folder: Path):
    """Runs a notebook and returns the outputs of its cells."""
    nbclient.NotebookClient(
        notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def bars(outputs) -> list[str]:
    """The progress bars among a cell's outputs."""
    shown = [output["data"].get("text/plain", "") for output in outputs if output.output_type == "display_data"]
    return [text for text in shown if "%|" in text]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_a_cell_that_loads_and_trains_shows_one_bar_and_no_warning(tmp_path, monkeypatch):
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    tiny_base_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer("llama").save_pretrained(tmp_path / "model")
    sources = [cell.format(model=str(tmp_path / "model")) for cell in CELLS]
    imported, trained = execute(nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, sources))), tmp_path)
    # Without ipywidgets, transformers' import would warn that they are missing.
    assert imported == []
    (bar,) = bars(trained)
    assert "100%" in bar
    assert "12 episodes" in bar
    assert "mean return" in bar
    others = [output for output in trained if output.output_type != "display_data"]
    assert {(output.name, line) for output in others for line in output.text.splitlines()} == {("stdout", "an update")}


# Jupyter's own, at the end of a kernel.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_it_runs_and_the_model_learns(tmp_path, monkeypatch):
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = execute(notebook, tmp_path)
    outputs = [output for cell in cells for output in cell]
    printed = "".join(output.get("text", "") for output in outputs)
    logged = "".join(output.text for output in outputs if output.get("name") == "stderr")
    # Matplotlib's own warning, that Agg shows no plots, is not ours.
    assert "IProgress" not in logged
    assert "it/s" not in logged
    assert len(bars(outputs)) == 1
    # The report, as the value of its cell.
    pages = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert [page.count("<iframe") for page in pages] == [1]
    # Its last cell asserts that the goal is reached in nine of ten episodes.
    assert "reaches the goal in" in printed
    assert "% before" in printed
