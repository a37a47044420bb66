"""`flatout run --watch`: one status line next to the program changes nothing else."""

import os
import pty
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.timeout(120), pytest.mark.processes]

PROGRAM = """\
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(4096, 8)), batch_size=16)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(EPOCHS):
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item().hex())
"""


def test_a_file_gets_one_line_at_the_end_and_the_output_stays(flatout, script):
    script(PROGRAM.replace("EPOCHS", "2"))
    watched, plain = flatout("run", "--watch", "python", "train.py"), flatout.plain("python", "train.py")
    assert (watched.code, watched.out) == (0, plain.out)
    steps, rate, samples = (
        float(re.search(pattern, watched.err)[1].replace(",", ""))
        for pattern in (r"([\d,]+) steps in", r"([\d.,]+) steps/s", r"([\d.,]+) samples/s")
    )
    assert steps == 512
    assert samples == pytest.approx(16 * rate, rel=0.02)
    assert re.search(r"waited for data \d+%", watched.err)
    assert re.search(r"peak memory [\d.,]+ [MG]iB", watched.err)


def test_a_terminal_has_a_row_of_its_own_and_gets_it_back(flatout, script):
    """The program's output is complete; the live row is written between saving and restoring the cursor."""
    script(
        PROGRAM.replace("EPOCHS", "15") + "    time.sleep(0.2)\n"
    )  # 3 s: long enough to show the row on any machine
    outside, inside = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "flatout", "run", "--watch", "python", "train.py"],
        cwd=flatout.folder,
        stdin=subprocess.DEVNULL,
        env=flatout.environment({"TERM": "xterm"}),
        stdout=subprocess.PIPE,
        stderr=inside,
        text=True,
    )
    os.close(inside)
    seen = b""
    while True:
        try:
            more = os.read(outside, 1 << 16)
        except OSError:  # the terminal closes with the program
            break
        if not more:
            break
        seen += more
    assert process.stdout is not None
    out = process.stdout.read()
    assert process.wait(30) == 0
    assert len(out.splitlines()) == 15
    rows = re.findall(rb"\x1b7\x1b\[24;1H\x1b\[2K\x1b\[2m([^\x1b]*)\x1b\[0m\x1b8", seen)
    assert rows, seen
    assert all(b"steps/s" in row or b"no step" in row for row in rows)
    assert max(map(len, rows)) < 100
    assert seen.index(b"\x1b[1;23r") < seen.rindex(b"\x1b[r"), (
        "only the rows above scroll, and at the end all rows scroll again"
    )
    assert b"steps in" in seen.rpartition(b"\x1b[r")[2]
