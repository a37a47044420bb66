"""The programs of the page about models over several devices learn what one process learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import hang_s

torch = pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "parallel.md"
PROGRAMS = re.findall(r"```python\n(# torchrun.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def plain(clip: float | None = None, seeded: bool = False) -> list[float]:
    """The losses of the same model and batches in this process. ``seeded``: each step seeds its batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(10):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step) if seeded else None)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def losses_of(script: Path, ranks: int) -> list[float]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launcher, str(script)],
        capture_output=True,
        text=True,
        cwd=script.parent,
        timeout=hang_s(200),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(map(float, done.stdout.split()))


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("number", "clip"), [(1, 1.0), (2, None)], ids=["tensor", "pipeline"])
def test_two_ranks_learn_what_one_process_learns(tmp_path, number, clip):
    script = tmp_path / "train.py"
    script.write_text(PROGRAMS[number], encoding="utf-8")
    assert losses_of(script, 2) == pytest.approx(plain(clip), rel=1e-5)


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_sharded_weights_are_resumed_on_another_number_of_ranks(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAMS[0], encoding="utf-8")
    assert [*losses_of(script, 2), *losses_of(script, 1)] == pytest.approx(plain(seeded=True), rel=1e-5)
