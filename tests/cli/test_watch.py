"""`flatout run --watch`: one status line next to the program changes nothing else."""

import re

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


def test_a_line_every_few_seconds(flatout, script):
    script(PROGRAM.replace("EPOCHS", "12") + "    time.sleep(1)\n")
    watched = flatout("run", "--watch", "python", "train.py")
    assert (watched.code, len(watched.out.splitlines())) == (0, 12)
    lines = [line for line in watched.said if " cores | " in line]
    assert lines, watched.err
    assert all(
        re.search(r"[\d.,]+ samples/s \| [\d.,]+ steps/s \| waits for data \d+ % \|", line) for line in lines
    )
