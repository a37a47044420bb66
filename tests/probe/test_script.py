"""What is read from a script: names, its modules, and files that are no scripts."""

import ast
import json
from pathlib import Path

import pytest

from flatout.probe.program import ScriptProgram
from flatout.probe.script import MAX_BYTES, SourceFile, Unreadable


def named(source, text):
    """The last expression with this spelling."""
    return max(
        (node for node in source.nodes if isinstance(node, ast.expr) and ast.unparse(node) == text),
        key=lambda node: (node.lineno, node.col_offset),
    )


@pytest.mark.parametrize(
    ("imports", "spelled", "meant"),
    [
        ("import torch.nn.functional as F", "F.mse_loss", "torch.nn.functional.mse_loss"),
        ("from torch.nn import functional", "functional.mse_loss", "torch.nn.functional.mse_loss"),
        ("from torch.nn.functional import mse_loss as loss", "loss", "torch.nn.functional.mse_loss"),
        ("import torch", "torch.nn.Linear", "torch.nn.Linear"),
        ("import torch\ntorch = object()", "torch.nn", ""),
        ("def f(torch): pass", "torch.nn", ""),
    ],
)
def test_names_are_followed_to_their_imports(imports, spelled, meant):
    source = SourceFile("a.py", f"{imports}\nprint({spelled})\n")
    assert source.dotted(named(source, spelled)) == meant


def test_modules_of_the_scripts_own_folder_are_read_and_no_others(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch, os\nfrom parts import net\nimport parts.loop as loop\nm = net.make()\nloop.run(m)\n"
    )
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "parts" / "net.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(4, 1)\n"
    )
    (tmp_path / "parts" / "loop.py").write_text("from . import net\ndef run(model):\n    return model\n")
    (tmp_path / "os.py").write_text("raise SystemExit\n")
    (tmp_path / "unused.py").write_text("")
    program = ScriptProgram.read(tmp_path / "train.py")
    assert {Path(source.path).name for source in program.sources} == {
        "train.py",
        "__init__.py",
        "net.py",
        "loop.py",
        "os.py",
    }


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"def f(:\n", "train.py:1"),
        (b"\x7fELF\0\0\0", "binary"),
        ("x = 'é'".encode("latin-1"), "UTF-8"),
        (b"x = " + b"(" * 300 + b")" * 300, "train.py"),
        (b"x = " + b"-" * 500 + b"1", "nested"),
        (b"#" * (MAX_BYTES + 1), "too many for"),
    ],
    ids=["syntax", "binary", "latin", "brackets", "deep", "huge"],
)
def test_other_files_are_explained(tmp_path, content, words):
    file = tmp_path / "train.py"
    file.write_bytes(content)
    with pytest.raises(Unreadable, match=words):
        SourceFile.read(file)


def test_a_notebook_names_its_cells(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# hello"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "!pip install x\n", "import torch"]},
        {"cell_type": "code", "source": "\ntorch.load('a.pt')\n"},
        {"cell_type": "code", "source": ["%%bash\n", "rm -r ("]},
        {"cell_type": "code", "source": ["%%time\n", "torch.save({}, 'a.pt')"]},
    ]
    file = tmp_path / "a.ipynb"
    file.write_text(json.dumps({"cells": cells}))
    source = SourceFile.read(file)
    place = source.place(next(node for node in source.calls if source.dotted(node.func) == "torch.load"))
    assert (place.file, place.line) == (f"{file}[3]", 2)
    place = source.place(next(node for node in source.calls if source.dotted(node.func) == "torch.save"))
    assert (place.file, place.line) == (f"{file}[5]", 2)
    file.write_text('{"cells": 3}')
    with pytest.raises(Unreadable, match="not a readable notebook"):
        SourceFile.read(file)
