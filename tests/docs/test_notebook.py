"""The notebooks of examples/ run from their first cell to their last."""

import os
from pathlib import Path

import pytest
from limits import hang_s

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(280)]


@pytest.fixture
def executed(flatout, monkeypatch):
    """``executed(name)`` runs a notebook of examples/ in an empty folder and returns its code cells."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name, value in flatout.environment({"IPYTHONDIR": str(flatout.folder / "ipython")}).items():
        monkeypatch.setenv(name, value)  # the kernel inherits this process's environment

    def run(name):
        notebook = nbformat.read(EXAMPLES / name, as_version=4)
        resources = {"metadata": {"path": str(flatout.folder)}}
        nbclient.NotebookClient(
            notebook, timeout=hang_s(200), kernel_name="python3", resources=resources
        ).execute()
        return [cell for cell in notebook.cells if cell.cell_type == "code"]

    return run


def text(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def html(cell):
    return "".join(output.get("data", {}).get("text/html", "") for output in cell.outputs)


@pytest.mark.full
def test_the_notebook_of_a_script_runs(flatout, executed):
    cells = executed("notebook.ipynb")
    assert "time of a step" in "".join(map(text, cells))  # the verdict's table
    assert any(map(html, cells))
    assert "7 " in text(cells[-1])  # the Loop's last step
    assert os.listdir(flatout.folder / ".flatout")


@pytest.mark.full
def test_the_notebook_with_the_magic_runs(executed):
    """The first cell installs what is installed already; nothing is downloaded."""
    _, _, _, _, profile, tune, loop = executed("notebook_magic.ipynb")
    assert "forward" in text(profile)
    assert "time of a step" in text(tune)
    for cell, page in ((profile, "profile"), (tune, "report")):
        assert html(cell).startswith("<iframe sandbox srcdoc=")
        assert "&lt;html" in html(cell)
        (shown,) = [out["data"]["text/plain"] for out in cell.outputs if "data" in out]
        assert shown.startswith("page: .flatout/notebook/cell-")
        assert shown.endswith(f"/{page}.html")
    assert "64 of 64 steps done" in html(loop)
    assert "<progress" in html(loop)
