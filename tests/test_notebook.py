"""The notebook runs from top to bottom, and is kept without outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.long

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "notebooks" / "frozenlake.ipynb"
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")


def test_it_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert [cell.id for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")] == []


# Jupyter's own, at the end of a kernel.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_it_runs_and_the_model_learns(tmp_path, monkeypatch):
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    # Its last cell asserts that the goal is reached in nine of ten episodes.
    assert "reaches the goal in" in printed
    assert "% before" in printed
