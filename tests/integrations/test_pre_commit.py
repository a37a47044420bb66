"""The hook of .pre-commit-hooks.yaml: its entry with the staged files, as pre-commit calls it."""

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
LOADS = "import torch\n\n\ndef read():\n    return torch.load('a.pt', weights_only=False){comment}\n"
TRAINS = """import torch
from parts import read

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(10):
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step
read()
"""


@pytest.fixture
def hook(flatout, script):
    """``hook("a.py")`` runs the entry with these files."""
    program, *words = shlex.split(HOOK["entry"])
    assert program == "flatout"
    return lambda *files: flatout.here(*words, *files)


def findings(flatout, *files):
    done = flatout.here("check", "--each", "--json", *files)
    return [(each["rule"], each["place"]["file"]) for each in json.loads(done.out)["findings"]]


def test_every_staged_file_is_checked_and_no_other(hook, flatout, script):
    script(TRAINS)
    script(LOADS.format(comment=""), "parts.py")
    done = hook("train.py")
    assert done.code == 1
    assert "FL028" in done.out
    assert "parts.py:" not in done.out
    done = hook("parts.py", "train.py")
    assert done.code == 1
    assert "parts.py:5" in done.out
    assert done.out.index("wrong result") < done.out.index("fragile")  # the worst first, of all files
    once = findings(flatout, "parts.py", "train.py", "./parts.py")
    assert sorted(once) == [("FL028", "train.py"), ("FL304", "parts.py")]


def test_a_file_without_findings_passes_and_comments_are_honoured(hook, script):
    script(LOADS.format(comment="  # flatout: ignore FL304"), "parts.py")
    script("print('no torch here')\n", "other.py")
    assert hook("parts.py", "other.py").code == 0


def test_a_notebook_is_checked_cell_by_cell(hook, flatout):
    cells = [
        {"cell_type": "code", "source": "%pip list"},
        {"cell_type": "code", "source": LOADS.format(comment="")},
    ]
    (flatout.folder / "train.ipynb").write_text(json.dumps({"cells": cells}))
    done = hook("train.ipynb")
    assert done.code == 1
    assert "train.ipynb[2]:5" in done.out


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.skipif(shutil.which("pre-commit") is None, reason="pre-commit is not installed")
def test_pre_commit_accepts_the_file():
    done = subprocess.run(
        ["pre-commit", "validate-manifest", ".pre-commit-hooks.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
