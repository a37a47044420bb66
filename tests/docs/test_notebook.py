"""examples/notebook.ipynb runs from its first cell to its last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(280)]


@pytest.mark.full
def test_the_notebook_runs(flatout, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name, value in flatout.environment({"IPYTHONDIR": str(flatout.folder / "ipython")}).items():
        monkeypatch.setenv(name, value)  # the kernel inherits this process's environment
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(flatout.folder)}}
    )
    client.execute()
    said = [
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    tuned = "".join(said)
    assert "time of a step" in tuned  # the verdict's table
    assert any(
        "text/html" in output.get("data", {})
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    assert "7 " in said[-1]  # the Loop's last step
    assert os.listdir(flatout.folder / ".flatout")
