"""`flatout fix` edits the cells of a notebook, and every other byte of the file stays."""

import json
import subprocess

import pytest
from click.testing import CliRunner

from flatout.cli.main import flatout

CODE = [
    "import gc\nimport torch",
    '%matplotlib inline\nname = "é𝄞"\nmodel = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)',
    "for _ in range(9):\n    model.cuda()\n    loss = model(torch.ones(2, 4)).sum()  # é𝄞\n"
    '    model.load_state_dict(torch.load("é𝄞.pt"))\n    gc.collect()',
]
FIXED = CODE[2].replace('pt")', 'pt", map_location="cpu")')


def of_list(code):
    return code.splitlines(keepends=True)


def write(path, code, source=of_list, **layout):
    cells = [{"cell_type": "markdown", "metadata": {}, "source": ["# é\n", "gc.collect()"]}]
    for text in code:
        output = {"output_type": "stream", "name": "stdout", "text": ["gc.collect()\n", "1.50"]}
        cells.append(
            {
                "source": source(text),
                "outputs": [output],
                "metadata": {"b": 1.0e3, "a": {}},
                "execution_count": 2,
                "cell_type": "code",
            }
        )
    path.write_bytes(
        (json.dumps({"nbformat": 4, "cells": cells, "nbformat_minor": 5}, **layout) + "\n").encode()
    )


def run(*words):
    return CliRunner().invoke(flatout, ["fix", *words], standalone_mode=False)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.ipynb"


@pytest.mark.parametrize("source", [of_list, str], ids=["list", "string"])
@pytest.mark.parametrize(
    "layout",
    [
        {"indent": 1, "ensure_ascii": False},
        {"indent": "\t", "ensure_ascii": True},
    ],
    ids=["indent 1", "tabs"],
)
def test_only_the_edited_lines_change(path, source, layout):
    write(path, [*CODE[:2], FIXED], source, **layout)
    expected = path.read_bytes()
    write(path, CODE, source, **layout)
    done = run("--apply", "train.ipynb")
    assert done.return_value == 0
    assert "train.ipynb[4]:4: FL303" in done.stderr
    assert path.read_bytes() == expected
    assert run("train.ipynb").return_value == 0


def test_a_notebook_in_another_form_stays_and_the_reason_is_named(path):
    write(path, CODE, indent=2)
    path.write_text(path.read_text().replace("# ", "\\u0023 "))
    before = path.read_bytes()
    done = run("--apply", "train.ipynb")
    assert "not fixed, its edit overlaps another, or the notebook is not as Jupyter saves it" in done.stderr
    assert path.read_bytes() == before


@pytest.mark.processes
def test_the_diff_is_one_that_git_applies(path):
    write(path, CODE, indent=1)
    before = path.read_bytes()
    done = run("train.ipynb")
    assert done.return_value == 1
    assert path.read_bytes() == before
    path.with_suffix(".diff").write_text(done.stdout, encoding="utf-8")
    subprocess.run(["git", "apply", "-p0", "train.diff"], check=True)
    applied = path.read_bytes()
    path.write_bytes(before)
    run("--apply", "train.ipynb")
    assert applied == path.read_bytes() != before
