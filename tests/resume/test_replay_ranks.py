"""A script with its own ranks is killed and started again: all ranks resume from checkpoints of the same
moment, and sum gradients in the same order.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupted import SITE
from limits import hang_s

from flatout.checkpoint.resume.choice import newest_of_all
from flatout.checkpoint.resume.ranks import ResumeRanks
from flatout.checkpoint.save_schedule import AHEAD, SaveSchedule

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(
        not torch.distributed.is_available(), reason="not run: this torch has no torch.distributed"
    ),
    pytest.mark.processes,
]

PROGRAM = """
import hashlib, os, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(144, 6), torch.randint(0, 3, (144,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=6, sampler=sampler)
class Net(nn.Module):
    def __init__(self):  # in another order than that in which they are used
        super().__init__()
        self.third, self.first, self.second = nn.Linear(64, 3), nn.Linear(6, 64), nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
    def forward(self, x):
        return self.third(nn.functional.dropout(self.second(self.norm(self.first(x))).tanh(), 0.2, self.training))
net = Net()
model = nn.parallel.DistributedDataParallel(net)
adam = torch.optim.AdamW(model.parameters(), lr=0.01)
decay = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0)
torch.manual_seed(100 + rank)
for epoch in range(5):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for at, (x, y) in enumerate(loader):
        with model.no_sync() if at % 2 == 0 else torch.enable_grad():
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
        total += loss.detach()
        if at % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            adam.zero_grad()
    waits = dist.all_reduce(total, async_op=True)
    waits.wait()
    told = [None] * 3
    dist.all_gather_object(told, {"rank": rank, "draw": round(torch.rand(()).item(), 4)})
    decay.step(total.item())
    if rank == 0:
        os.write(1, f"{epoch} {total.item():.9f} {told}\\n".encode())
state = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
os.write(1, f"end {rank} {hashlib.sha256(state).hexdigest()}\\n".encode())
"""
RANKS, STEPS_OF_AN_EPOCH = 3, 4
TELLS_ONE = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 3))
sgd = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(20):
    loss = model(torch.ones(4, 6)).square().mean()
    loss.backward()
    sgd.step()
    sgd.zero_grad()
    told = loss.detach()
    if rank == 0:
        dist.send(told, 1)
    elif rank == 1:
        dist.recv(told, 0)
"""


def run(folder, *before, ranks=RANKS, **more):
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FLATOUT_", "PYTEST_", "PYTHON"))
    }
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}", "OMP_NUM_THREADS": "1", **more}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "train.py"]
    return subprocess.run(
        [sys.executable, *before, *(["python"] if before else []), *launch],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=hang_s(120),
        check=False,
    )


def ends(done):
    return sorted(line for line in done.stdout.splitlines() if line.startswith("end "))


@pytest.mark.full
def test_ranks_resume_from_the_newest_checkpoints_of_one_moment(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(PROGRAM)
    undisturbed = run(tmp_path)
    assert len(ends(undisturbed)) == RANKS, undisturbed.stderr
    resume, saves = ("-m", "flatout", "run", "--resume"), {"PYTHONPATH": SITE, "TRAP_SAVE": "10"}
    killed = run(tmp_path, *resume, **saves, TRAP_KILL="16")
    assert killed.returncode != 0
    newest = sorted(tmp_path.glob(".flatout/*/rescue/**/step-00000012/manifest.json"))
    assert len(newest) == RANKS, killed.stderr
    shutil.copytree(tmp_path / ".flatout", tmp_path / "kept")

    again = run(tmp_path, *resume, **saves)
    assert again.stderr.count("resumed exactly after step 12") == 1, again.stderr
    assert ends(again) == ends(undisturbed)
    lines = [line for line in again.stdout.splitlines() if not line.startswith("end ")]
    assert (
        lines
        == [line for line in undisturbed.stdout.splitlines() if not line.startswith("end ")][
            12 // STEPS_OF_AN_EPOCH :
        ][-len(lines) :]
    )

    # As if its process group had communicated once more before one rank was saved: these are not of one
    # moment.
    monkeypatch.setenv("FLATOUT_JOB", str(tmp_path / "job"))
    (folder,) = (tmp_path / "kept").glob("*/rescue")
    ranks = ResumeRanks(torch, 1, RANKS, RANKS, folder)
    (manifest,) = folder.glob("rank-1/step-00000012/manifest.json")
    content = json.loads(manifest.read_text())
    monkeypatch.setattr(sys, "orig_argv", ["python", *content["metadata"]["program"]])
    assert newest_of_all(ranks)[0].step == 12
    (group,) = content["metadata"]["ranks"]["met"]
    content["metadata"]["ranks"]["met"][group] += 1
    manifest.write_text(json.dumps(content))
    save, why_not = newest_of_all(ranks)
    assert (
        save.step < 12
        if save is not None
        else "its ranks have no checkpoints from the same moment" in why_not
    )


@pytest.mark.full
def test_ranks_with_point_to_point_messages_are_not_resumed(tmp_path):
    (tmp_path / "train.py").write_text(TELLS_ONE)
    resume, saves = ("-m", "flatout", "run", "--resume"), {"PYTHONPATH": SITE, "TRAP_SAVE": "4"}
    killed = run(tmp_path, *resume, ranks=2, **saves, TRAP_KILL="12")
    assert killed.returncode != 0
    again = run(tmp_path, *resume, ranks=2, **saves)
    assert again.returncode != 0  # torchrun has its own exit code
    assert (
        "cannot resume exactly: its last start left no checkpoint to resume from: its ranks use point-to-point communication"
        in again.stderr
    )
    begun = run(tmp_path, *resume[:-1], "--supervise", ranks=2, **saves)
    assert begun.returncode == 0
    assert (
        begun.stderr.count(
            "this program starts from scratch: its last start left no checkpoint to resume from"
        )
        == 1
    )


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=60))
@settings(max_examples=50)
def test_ranks_that_are_never_more_than_a_step_apart_save_after_the_same_steps(tmp_path_factory, turns):
    path = str(tmp_path_factory.mktemp("page") / "page")
    ranks = [SaveSchedule(path, leads=True), SaveSchedule(path, leads=False)]
    assert ranks[0].launch == ranks[1].launch
    steps, saved, wanted = [0, 0], ([], []), []
    for rank, wants in turns:
        if steps[rank] > steps[1 - rank]:
            rank = 1 - rank  # it waits for the other one
        steps[rank] += 1
        if rank == 0 and wants:
            wanted.append(steps[0])
        if ranks[rank].agrees(wants, steps[rank]):
            saved[rank].append(steps[rank])
    both = min(steps)
    assert [step for step in saved[0] if step <= both] == [step for step in saved[1] if step <= both]
    if wanted and wanted[0] + AHEAD <= both:
        assert saved[0][0] == wanted[0] + AHEAD
