"""The programs of the page about models over several devices learn what one process learns."""

import os
import re
import sys
from pathlib import Path

import pytest
from limits import hang_s
from processes import free_port
from warm import start_program

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
    """What the first rank prints, of ranks as torchrun starts them."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KMP_", "PYTHON"))}
    env |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
    }
    env["MASTER_PORT"] = str(free_port())
    command = [sys.executable, str(script)]
    processes = [
        start_program(command, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=script.parent)
        for rank in range(ranks)
    ]
    printed = []
    for process in processes:
        out, err = process.communicate(timeout=hang_s(200))
        # a thread of gloo may abort a process at its very end (1 of 24, torch 2.14.1)
        assert process.returncode == 0 or "terminate called without an active exception" in err, err[-3000:]
        printed += map(float, out.split())
    return printed


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
