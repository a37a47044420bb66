"""`%%flatout` in a real session of IPython, and the script that it makes of the cells."""

import os
import signal
import sys

import pytest

pytest.importorskip("IPython")
from processes import alive, until

from flatout.integrations.notebook import script_of

pytestmark = pytest.mark.timeout(120)

# A session without a kernel; a shell is slow to make, so one test holds what a session can show.
SESSION = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in {cells!r}:
    result = shell.run_cell(cell, store_history=True)
"""
SIZE = "listed = !ls\nsize = 8\n"
TRAIN = """import torch
model = torch.nn.Linear(size, 1)
for step in range(100000):
    loss = model(torch.randn(16, size)).square().mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
"""


def made(*cells):
    """The script of the last cell."""
    from IPython.core.inputtransformer2 import TransformerManager

    numbered = list(enumerate(cells, 1))
    number, cell = numbered.pop()
    return script_of(numbered, cell, number, TransformerManager().transform_cell)


def run(script):
    names = {}
    path, folder = list(sys.path), os.getcwd()
    try:
        exec(compile(script, "cell.py", "exec"), names)
    finally:
        sys.path[:] = path
    assert os.getcwd() == folder
    return names


def test_earlier_cells_run_first_without_magics_and_shell_commands():
    names = run(
        made(
            "%load_ext flatout",
            "a = 1\n!exit 3\nif a:\n    %cd /\nfiles = !ls",
            "%%writefile other.py\na = 5",
            "%%time\nb = a + 1",
            "text = '''\n%not a magic\n'''",
            "def half(",
            "c = b + 1",
        )
    )
    assert (names["a"], names["b"], names["c"], names["text"]) == (1, 2, 3, "\n%not a magic\n")


def test_future_imports_come_first_and_names_of_ipython_exist():
    script = made(
        "x = 'google.colab' in str(get_ipython())",
        "from __future__ import annotations\ndef f(a: Missing): ...",
        "display(x)",
    )
    names = run(script)
    assert names["x"] is False
    assert names["f"].__annotations__ == {"a": "Missing"}


def test_a_loop_that_ran_before_is_not_repeated_and_the_name_depends_on_the_code_alone():
    loop = "n = n + 1"
    assert run(made("n = 0", loop, loop))["n"] == 1
    assert made("n = 0", "%pwd", loop) != made("n = 1", "%pwd", loop)
    assert made("n = 0", loop) == made("n = 0", "%%flatout profile\n" + loop, loop)


def test_a_cell_that_is_not_python_is_an_error():
    with pytest.raises(SyntaxError):
        made("x = 1", "for in x")


@pytest.mark.processes
def test_a_cell_is_measured_and_mistakes_are_one_line(flatout):
    pytest.importorskip("torch")
    cells = [
        "%load_ext flatout",
        "undefined",
        SIZE,
        f"%%flatout memory --no-measure\n{TRAIN}",
        "print(repr(_), len(_._repr_html_()) > 1000)",
        "%%flatout tuna\nx = 1",
        "%%flatout profile --steps none\nx = 1",
    ]
    environment = {"IPYTHONDIR": str(flatout.folder / "ipython"), "FORCE_COLOR": "1"}
    done = flatout("-c", SESSION.format(cells=cells), python=[sys.executable], env=environment)
    assert done.code == 0, done.err
    assert "A step takes" in done.out
    assert "\x1b[2K" not in done.out  # progress is not redrawn
    assert "/memory.html True" in done.out
    said = done.out + done.err
    assert "`flatout tuna` cannot run on a cell" in said
    assert "'none' is not a valid integer" in said
    assert "`flatout profile` ended with exit code 2; its message is above" in said
    (script,) = [
        path for path in flatout.folder.glob(".flatout/notebook/*.py") if "backward" in path.read_text()
    ]
    assert "undefined" not in script.read_text()
    assert done.left == []


@pytest.mark.processes
def test_an_interrupted_cell_ends_its_program(flatout, script):
    pytest.importorskip("torch")
    # what Python writes stays in the trial; a shell writes for real
    begin = "import os\nos.system(f'echo {os.getpid()} > new; mv new began')\n"
    script(f"{begin}size = 8\n{TRAIN}")
    started = (
        "import sys\nfrom pathlib import Path\nfrom flatout.integrations.flatout_command import stream_flatout\n"
        "stream_flatout(['profile', sys.executable, 'train.py'], Path.cwd(), sys.stdout.write)"
    )
    process = flatout.start("-c", started, python=[sys.executable])
    began = flatout.folder / "began"
    program = int(until(lambda: began.exists() and began.read_text(), 40))
    process.send_signal(signal.SIGINT)
    process.wait(20)
    assert not alive(program)  # the command has ended it before it ended itself
    done = flatout.finish(process)
    assert "KeyboardInterrupt" in done.err
    assert done.left == []
