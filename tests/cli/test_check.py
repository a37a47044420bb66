"""`flatout check` on the command line: its input, its output and its exit codes."""

import json

import pytest

pytestmark = pytest.mark.timeout(60)

WRONG = """import torch
from parts import make

model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(10):
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
"""
PARTS = "import torch\n\n\ndef make():\n    model = torch.nn.Linear(4, 1)\n    torch.save(model, 'a.pt')\n    return model\n"


@pytest.fixture
def program(flatout, script):
    script(WRONG)
    script(PARTS, "parts.py")
    return flatout


def test_output_shows_locations_lines_and_fixes(program):
    done = program.here("check", "train.py")
    assert done.code == 1
    shown = done.out.splitlines()
    at = shown.index("  train.py:8:5")
    assert shown[at + 1 : at + 3] == ["      optimizer.step()", "      ^"]
    assert "  fix: optimizer.zero_grad()  # before the forward pass of every cycle" in shown
    assert "  parts.py:6:5 in make" in shown
    assert shown.index("wrong result") < shown.index("fragile")
    assert "flatout check --explain FL001" in done.out
    assert "Found 2 (1 wrong result, 1 fragile) in 2 files." in shown[-1]


@pytest.mark.parametrize(
    "words",
    [
        ("python", "train.py", "--lr", "1"),
        ("-m", "train"),
        (".",),
        ("python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"),
    ],
    ids=["python", "-m", "folder", "launcher"],
)
def test_the_script_of_a_command_is_found(program, words):
    if words == (".",):
        (program.folder / "train.py").rename(program.folder / "__main__.py")
    done = program.here("check", "--json", "--select", "FL001", *words)
    assert done.code == 1
    (finding,) = json.loads(done.out)["findings"]
    assert finding["place"]["line"] == 8


def test_clean_programs_exit_with_zero(flatout, script, tiny):
    script(tiny)
    done = flatout.here("check", "train.py")
    assert done.code == 0
    assert (
        done.out == "\nNo mistakes found in the source (1 file). For speed: flatout profile python train.py\n"
    )


def test_select_and_ignore(program):
    assert program.here("check", "--ignore", "FL0,fl302", "train.py").code == 0
    done = program.here("check", "--json", "--select", "FL302", "train.py")
    assert [finding["rule"] for finding in json.loads(done.out)["findings"]] == ["FL302"]


def test_the_pages(flatout):
    done = flatout.here("check", "--explain", "fl001")
    assert done.code == 0
    assert "Why it matters:" in done.out
    assert "FL302  fragile" in flatout.here("check", "--explain", "all").out


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        (b"def f(:\n", ("check", "train.py"), "train.py:1"),
        (b"\x00\x01", ("check", "train.py"), "binary"),
        (b"\xff\xfe", ("check", "python", "train.py"), "UTF-8"),
        (b"", ("check",), "no program was given"),
        (b"", ("check", "nothing.py"), "'nothing.py'"),
        (b"", ("check", "nosuchprogram", "x"), "nosuchprogram"),
        (b"", ("check", "-m", "nosuchmodule"), "nosuchmodule"),
        (b"", ("check", "--select", "FL9", "train.py"), "FL9"),
        (b"", ("check", "--explain", "FL999"), "FL999"),
        (b"", ("check", "--format", "xml", "train.py"), "xml"),
    ],
    ids=[
        "syntax",
        "binary",
        "encoding",
        "nothing",
        "no script",
        "no program",
        "no module",
        "no rule",
        "no page",
        "no format",
    ],
)
def test_mistakes_exit_with_two_and_a_clear_message(flatout, content, words, said):
    (flatout.folder / "train.py").write_bytes(content)
    done = flatout.here(*words)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_a_module_that_cannot_be_read_is_reported_with_the_findings(program):
    (program.folder / "parts.py").write_text("def make(:\n")
    done = program.here("check", "train.py")
    assert "not read: " in done.err
    assert "parts.py:1" in done.err
    assert "in 1 file" in done.out


RUNS = """import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad(set_to_none=False)
    loss = (model(torch.randn(64, 8)) - 1).log().mean()
    loss.backward()
    optimizer.step()
    torch.save(model, "model.pt")
"""


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_run_adds_runtime_findings(flatout, script):
    pytest.importorskip("torch")
    script(RUNS)
    read = flatout.here("check", "--json", "train.py")
    ran = flatout("check", "--json", "--run", "5s", "train.py", timeout=110)
    assert ran.code == 1, ran.err
    assert ran.left == []
    by_reading, by_running = (
        {f["name"]: f for f in json.loads(done.out)["findings"]} for done in (read, ran)
    )
    assert "whole_model_saved" in by_reading
    assert "not_finite" not in by_reading
    assert set(by_reading) < set(by_running)
    assert by_running["not_finite"]["severity"] == "wrong result"
    assert (by_running["not_finite"]["place"]["file"], by_running["not_finite"]["place"]["line"]) == (
        "train.py",
        8,
    )
    assert flatout.here("check", "--run", "1s", "train.py").code == 2
    done = flatout.here("check", "--json", "--format", "github", "train.py")
    assert done.code == 2
    assert "--json and --format github cannot be printed at once" in done.err
