"""What is read from a script: names, values, the contents of each loop, and files that are no scripts."""

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


def kinds(code, text):
    program = ScriptProgram.of_text(code)
    return set(program.values.kinds(program.main, named(program.main, text)))


@pytest.mark.parametrize(
    ("imports", "spelled", "meant"),
    [
        ("import torch.nn.functional as F", "F.mse_loss", "torch.nn.functional.mse_loss"),
        ("from torch.nn import functional", "functional.mse_loss", "torch.nn.functional.mse_loss"),
        ("from torch.nn.functional import mse_loss as loss", "loss", "torch.nn.functional.mse_loss"),
        ("import torch", "torch.nn.Linear", "torch.nn.Linear"),
        ("import torch\nLayer = torch.nn.Linear", "Layer", "torch.nn.Linear"),
        ("import torch\ntorch = object()", "torch.nn", ""),
        ("def f(torch): pass", "torch.nn", ""),
    ],
)
def test_names_are_followed_to_their_imports(imports, spelled, meant):
    source = SourceFile("a.py", f"{imports}\nprint({spelled})\n")
    assert source.dotted(named(source, spelled)) == meant


@pytest.mark.parametrize(
    ("code", "spelled", "kind"),
    [
        ("import torch\nx = torch.optim.SGD([], 0.1)\nx", "x", "Optimizer"),
        ("import torch\ndef make():\n    return torch.optim.Adam([])\nx = make()\nx", "x", "Optimizer"),
        ("import torch\ndef make():\n    return 1, torch.nn.Linear(1, 1)\na, b = make()\nb", "b", "Module"),
        ("import torch\nclass Net(torch.nn.Module): pass\nm = Net().cuda().train()\nm", "m", "Module"),
        (
            "import torch\nclass A(torch.nn.Module): pass\nclass B(A): pass\nm = torch.compile(B())\nm",
            "m",
            "Module",
        ),
        ("import torch\ndef f(o):\n    o\nf(torch.optim.SGD([], 0.1))", "o", "Optimizer"),
        ("import torch\ndef f(*, o=None):\n    o\nf(o=torch.optim.SGD([], 0.1))", "o", "Optimizer"),
        (
            "import torch\nclass T:\n    def __init__(self, o):\n        self.o = o\n    def run(self):\n        self.o\nT(torch.optim.SGD([], 0.1)).run()",
            "self.o",
            "Optimizer",
        ),
        (
            "import torch\nclass T:\n    def __init__(self):\n        self.s = torch.amp.GradScaler()\nt = T()\nt.s",
            "t.s",
            "GradScaler",
        ),
        ("import torch\nl = torch.utils.data.DataLoader([])\nfor x in l:\n    x", "x", "Tensor"),
        ("import torch\nx = torch.zeros(3)\ny = x.sum() * 2\ny", "y", "Tensor"),
        ("import torch\nx = []\nx = torch.zeros(1)\nx", "x", "Tensor"),
    ],
)
def test_values_are_followed_to_their_source(code, spelled, kind):
    assert kind in kinds(code, spelled)


def test_the_other_branch_of_an_if_is_not_seen():
    before = "import torch\nx = torch.zeros(1)\n"
    assert kinds(before + "if a:\n    x = []\nelse:\n    x.sum()", "x") == {"Tensor"}
    assert kinds(before + "for i in a:\n    if i:\n        x = []\n    else:\n        x.sum()", "x") == {
        "Tensor",
        "list",
    }, "an earlier pass may have set it"


def test_a_parameter_has_the_values_of_its_callers():
    program = ScriptProgram.of_text(
        "import torch\ndef f(o, p):\n    o, p\nf(torch.optim.SGD([], 0.1), *rest)\nf(torch.optim.Adam([]), 3)\n"
    )
    source = program.main
    origins = {
        text: [ast.unparse(origin.node) for origin in program.origins(source, named(source, text))]
        for text in ("o", "p")
    }
    assert origins == {"o": ["torch.optim.Adam([])"], "p": ["3"]}
    lonely = ScriptProgram.of_text("def f(o):\n    o\n")
    assert [type(origin.node) for origin in lonely.origins(lonely.main, named(lonely.main, "o"))] == [ast.arg]


def test_a_value_made_from_itself_ends():
    assert kinds("x = x\ndef f():\n    return f()\ny = f()\nx\ny", "y") == set()


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
    loop = program.modules["parts.loop"]
    model = next(node for node in loop.nodes if isinstance(node, ast.Name) and node.id == "model")
    assert "Module" in program.values.kinds(loop, model), "followed from the call in another file"


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
