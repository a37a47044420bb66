"""`flatout check` on the command line: its input, its output and its exit codes."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

WRONG = """import torch
from parts import make

model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(10):
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step
"""
PARTS = "import torch\n\n\ndef make():\n    return torch.load('a.pt', weights_only=False)\n"


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
    assert shown[at + 1 : at + 3] == ["      optimizer.step", "      ^"]
    assert "  fix: optimizer.step()" in shown
    assert "  parts.py:5:12 in make" in shown
    assert shown.index("wrong result") < shown.index("fragile")
    assert "flatout check --explain FL028" in done.out
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
    done = program.here("check", "--json", "--select", "FL028", "--no-run", *words)
    assert done.code == 1
    (finding,) = json.loads(done.out)["findings"]
    assert finding["place"]["line"] == 8


def test_clean_programs_exit_with_zero(flatout, script, tiny):
    script(tiny)
    done = flatout.here("check", "train.py")
    assert done.code == 0
    assert done.out == "\nNo mistakes found in 1 file. For speed: flatout profile python train.py\n"


def test_select_and_ignore(program):
    assert program.here("check", "--ignore", "FL0,fl304", "train.py").code == 0
    done = program.here("check", "--json", "--select", "FL304", "train.py")
    assert [finding["rule"] for finding in json.loads(done.out)["findings"]] == ["FL304"]


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


UNUSED = """import torch

torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.position = torch.nn.Parameter(torch.zeros(8))
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.head(x)

net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(STEPS):
    optimizer.zero_grad()
    net(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
open("written.txt", "w").write("done")
"""
UNUSED_LINE = 7


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_command_is_run_and_observed_without_a_change(flatout, script):
    pytest.importorskip("torch")
    script(UNUSED.replace("STEPS", "300"))
    read = flatout.here("check", "--json", "train.py")
    assert json.loads(read.out)["findings"] == []
    ran = flatout("check", "--json", "python", "train.py", timeout=110)
    assert ran.code == 1, ran.err
    assert ran.left == []
    record = json.loads(ran.out)
    (finding,) = record["findings"]
    assert (finding["rule"], finding["place"]["file"], finding["place"]["line"]) == (
        "FL060",
        "train.py",
        UNUSED_LINE,
    )
    assert "1 of 3 parameters got no gradient in 300 steps: Net.position" in finding["message"]
    assert record["steps"] == 300
    assert not Path("written.txt").exists()
    unread = flatout.here("check", "--json", "--no-run", "python", "train.py")
    assert json.loads(unread.out)["findings"] == []


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_long_program_is_observed_for_the_budget_and_a_failing_one_says_why(flatout, script):
    pytest.importorskip("torch")
    script(UNUSED.replace("range(STEPS)", "iter(int, 1)"))
    done = flatout("check", "--budget", "2s", "python", "train.py", timeout=110)
    assert "FL060" in done.out
    assert "not seen: an evaluation" in done.err
    script(UNUSED.replace("STEPS", "80") + "raise ValueError('the end')")
    done = flatout("check", "python", "train.py", timeout=110)
    assert "FL060" in done.out
    assert "the program itself fails" in done.err
    assert "ValueError: the end" in done.err
    script("import torch")
    done = flatout("check", "python", "train.py", timeout=110)
    assert done.code != 0
    assert "without a backward pass" in done.err


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_labels_that_depend_on_the_hash_seed_are_found(flatout, script):
    pytest.importorskip("torch")
    from flatout.diagnose.invariants.hash_order import RULE

    for name, findings in (("Bad", ["FL068"]), ("Good", [])):
        script(RULE.section(name))
        done = flatout("check", "--json", "--select", "FL068", "python", "train.py", timeout=110)
        assert [finding["rule"] for finding in json.loads(done.out)["findings"]] == findings, done.err


def test_one_output_format_at_a_time(flatout, script):
    script("import torch")
    done = flatout.here("check", "--json", "--format", "github", "train.py")
    assert done.code == 2
    assert "--json and --format github cannot be printed at once" in done.err
