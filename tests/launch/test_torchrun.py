"""A single-device script under torchrun: the command, and two agents on this machine as two nodes."""

import inspect
import os
import re
import socket
import sys

import pytest

from flatout.launch.command import parse_command
from flatout.launch.torchrun import FLAGS, RANKS, torchrun_of
from flatout.schema.errors import ProgramNotFound, UsageError

MODULE = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "program", "rdzv_id"),
    [
        ("--nnodes 2 train.py --lr 1", (sys.executable, "train.py", "--lr", "1"), ""),
        ("--nnodes=1:2 --rdzv_id=7 --standalone train.py", (sys.executable, "train.py"), "7"),
        ("--rdzv-id 7 --nproc_per_node 2 -m train -m x", (sys.executable, "-m", "train", "-m", "x"), "7"),
        ("--no-python --rdzv-conf is_host=1 python train.py", ("python", "train.py"), ""),
    ],
)
def test_the_program_of_a_torchrun_command(folder, words, program, rdzv_id):
    command = parse_command([*MODULE, *words.split()])
    found = torchrun_of(command, 2)
    assert (found.program.typed, found.rdzv_id, found.command) == (program, rdzv_id, command)
    same = torchrun_of(parse_command([*MODULE, "--max-restarts", "3", *words.split()]), 2)
    assert found.seed == same.seed != torchrun_of(parse_command([*MODULE, *words.split(), "more"]), 2).seed
    environment = found.environment({"HOME": "/root"}, 2, gpus=True)
    assert (environment[RANKS], environment["FLATOUT_DATA_PARALLEL"]) == ("2", "gpus")
    assert environment["FLATOUT_LAUNCHER"] == str(os.getpid())  # torchrun replaces this process


def test_other_commands_and_mistakes(folder):
    assert torchrun_of(parse_command(["train.py"]), 2) is None
    assert torchrun_of(parse_command([sys.executable, "-m", "timeit"]), 2) is None
    with pytest.raises(UsageError, match="names no script"):
        torchrun_of(parse_command([*MODULE, "--nnodes", "2"]), 2)
    with pytest.raises(UsageError, match="--nproc-per-node gpu of torchrun disagrees with the 2 ranks"):
        torchrun_of(parse_command([*MODULE, "--nproc-per-node", "gpu", "train.py"]), 2)
    with pytest.raises(ProgramNotFound):
        torchrun_of(parse_command([*MODULE, "missing.py"]), 2)


def test_the_options_without_a_value_are_those_of_torchs_parser():
    run = pytest.importorskip("torch.distributed.run")
    parser = run.get_args_parser()
    flags = {name for action in parser._actions if action.nargs == 0 for name in action.option_strings}
    assert {name.replace("_", "-") for name in flags} - {"-h", "--help"} == FLAGS
    assert RANKS.removeprefix("PET_").lower() in inspect.getsource(run.get_args_parser)


TRAINS = """
import os, sys
import torch
from torch import nn
torch.manual_seed(0)
loader = torch.utils.data.DataLoader(torch.randn(96, 8), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
for epoch in range(3):
    for x in loader:
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
    print(f"{epoch} {loss.item():.4f}", flush=True)
if "fail" in sys.argv and os.environ.get("FLATOUT_RANK") == "1":
    raise ValueError("a fault of this rank alone")
"""


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_two_nodes_train_as_one_process_and_a_failure_is_named(flatout, script):
    """The commands of docs/howto/nodes.md, at a free port. The first rehearses; the last needs none."""
    script(TRAINS)
    one = flatout("train.py", python=[sys.executable])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "train.py"]
    nodes = [flatout.start("run", "--procs", "1", *MODULE, "--nnodes", "2", *words) for _ in range(2)]
    done = [flatout.finish(process, 180) for process in nodes]
    assert [each.code for each in done] == [0, 0], done
    assert sorted(each.out for each in done) == ["", one.out]
    said = "".join(each.err for each in done)
    assert said.count("applied data_parallel(batches=index") == 1
    assert "nothing was applied" not in said
    assert all(each.left == [] for each in done)

    fails = flatout("run", "--procs", "2", *MODULE, "--standalone", "train.py", "fail", timeout=180)
    assert fails.code == 1
    report = fails.err.partition("Root Cause")[2]
    assert re.search(r"rank      : 1 .*ValueError: a fault of this rank alone", report, re.DOTALL), fails.err
    assert re.search(r"The output of this rank is in \S+/rank1\.log", report)
    assert "flatout: rank 1 was the first to fail: it exited with code 1" in fails.err
    assert fails.left == []


def test_supervision_and_torchrun_both_restart(flatout, script):
    script("pass")
    done = flatout.here("run", "--supervise", "--procs", "2", *MODULE, "--nnodes", "2", "train.py")
    assert done.code == 2
    assert "Remove --supervise. torchrun restarts them itself, if its max-restarts is above 0." in done.err
