"""Scripts that start their own processes or ask for several devices.

They are left as they are, rejected with an error, or get one device per rank; never N times N.
"""

import os
import re

import pytest

from flatout.agent.ledger import Ledger
from flatout.distributed.single_process import one_process, original_init_process_group, reject_child_process
from flatout.launch.command import Command, parse_command
from flatout.schema.errors import CannotParallelize
from flatout.schema.records import TrialRecord
from flatout.tune.rehearsal import advice_for, explain, missing_variable

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(400), pytest.mark.processes]

SPAWNS = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

def free_port():
    import socket
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]

def main(rank, world_size, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(loss.item().hex(), flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(main, args=(2, free_port()), nprocs=2, start_method="fork")  # mp.spawn, but torch is imported once
"""

HARMLESS = """
[levers]
gc_pause = true
fused_optimizer = "foreach"
"""


@pytest.mark.full
def test_ranks_of_its_own_are_left_alone(flatout, script):
    """Under a plan they compute bitwise what they compute by themselves.

    Parallelising them again is rejected before flatout starts any rank.
    """
    script(SPAWNS)
    (flatout.folder / "plan.toml").write_text(HARMLESS)
    plain = flatout.plain("python", "train.py")
    under = flatout("run", "--plan", "plan.toml", "python", "train.py")
    assert (plain.code, under.code) == (0, 0), under.err
    assert under.out == plain.out
    assert "applied gc_pause, fused_optimizer=foreach" in under.err

    refused = flatout("run", "--procs", "2", "python", "train.py")
    assert refused.code == 6
    assert "it trains in processes that it starts itself" in refused.err
    assert re.search(r"Remove --procs.*: flatout run python train\.py$", refused.err, re.MULTILINE)
    assert refused.out == ""
    assert plain.left == under.left == refused.left == []


def test_a_split_without_a_rehearsal_is_rejected_by_the_rank_itself():
    """A plan asks for the split although each of N ranks would start N more."""
    ledger, really = Ledger(), torch.distributed.init_process_group
    one_process(torch, ledger)
    try:
        for name in (torch.distributed, torch.distributed.distributed_c10d):
            with pytest.raises(CannotParallelize, match="the script parallelises itself"):
                name.init_process_group("gloo")
        assert original_init_process_group(torch) is really
    finally:
        ledger.restore()
    assert torch.distributed.init_process_group is really
    reject_child_process(torch)  # flatout did not start this process
    child = torch.multiprocessing.get_context("fork").Process(target=rejects)
    child.start()
    child.join()
    assert child.exitcode == 7


def rejects():
    try:
        reject_child_process(torch)
    except CannotParallelize:
        os._exit(7)


def test_the_right_command_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "job.sh"):
        (tmp_path / name).write_text("")
    script = parse_command(["python", "-u", "train.py", "--lr", "0.1"])
    assert advice_for("group", script, 4).endswith(
        "flatout run torchrun --nproc-per-node 4 train.py --lr 0.1"
    )
    assert advice_for("group", parse_command(["train.py", "a b"]), 2).endswith(
        "torchrun --nproc-per-node 2 train.py 'a b'"
    )
    assert advice_for("group", parse_command(["python", "-m", "train", "-x"]), 2).endswith(
        "torchrun --nproc-per-node 2 -m train -x"
    )
    assert advice_for("group", Command(("./job.sh",), ("./job.sh",)), 2).endswith(
        "torchrun --nproc-per-node 2 --no-python ./job.sh"
    )
    assert advice_for(
        "launcher", parse_command(["torchrun", "--nproc-per-node", "2", "train.py"]), 4
    ).endswith(": flatout run torchrun --nproc-per-node 2 train.py")
    assert explain("launcher") != explain("group") != explain("children")


@pytest.mark.parametrize(
    ("last", "name"),
    [
        (
            "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set",
            "RANK",
        ),
        ("KeyError: 'LOCAL_RANK'", "LOCAL_RANK"),
        ("KeyError: 'rank'", ""),
        ("ValueError: RANK", ""),
    ],
)
def test_a_program_that_needs_a_launcher_is_distinguished_from_one_that_fails(last, name):
    assert (
        missing_variable(TrialRecord(status="failed", reason=f"Traceback (most recent call last):\n{last}\n"))
        == name
    )
