"""`flatout run --procs N --shard`: ranks that each keep a shard of each weight print and save what one
process does. Also when sharding is chosen, and what is reported.
"""

import sys

import pytest

from flatout.schema.facts import Facts, Gpu
from flatout.schema.records import TrialRecord
from flatout.tune.sharding import ran_out, verdict

torch = pytest.importorskip("torch")
GIB = 2**30

TRAINS = """
import os, torch
from torch import nn
data = torch.utils.data.TensorDataset(torch.randn(50, 16, generator=torch.Generator().manual_seed(3)), torch.arange(50) % 3)
torch.manual_seed(0)
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2)), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(2):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"{epoch} {loss.item():.3f} {norm:.3f}")
print(model[0], sum(p.numel() for p in model.parameters()), f"{model[2].weight.norm():.3f}")
print(f"{sum(p._local_tensor.numel() if hasattr(p, '_local_tensor') else p.numel() for p in model.parameters())} here", file=open("held.txt", "w"))
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_single_process_script_on_two_ranks_with_sharded_weights(flatout, script):
    script(TRAINS)
    one = flatout("train.py", python=[sys.executable])
    saved = torch.load(flatout.folder / "last.pt")
    two = flatout("run", "--procs", "2", "--shard", "always", "python", "train.py", timeout=170)
    assert (one.code, two.code) == (0, 0), two.err
    assert two.out == one.out
    assert "sharding(over=node)" in two.err
    assert "each of the 2 ranks keeps a shard, as requested" in two.err
    assert (
        flatout.folder / "held.txt"
    ).read_text() == "578 here\n"  # of 1139: half of each layer, and two of three rows of the head
    again = torch.load(flatout.folder / "last.pt")
    assert list(again["model"]) == list(saved["model"])
    assert all(
        torch.allclose(again["model"][name], value, atol=1e-5) for name, value in saved["model"].items()
    )
    assert again["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]
    assert all(
        torch.allclose(
            again["optimizer"]["state"][at]["exp_avg_sq"], state["exp_avg_sq"], rtol=1e-3, atol=1e-9
        )
        for at, state in saved["optimizer"]["state"].items()
    )
    assert two.left == []


@pytest.mark.parametrize(
    ("requested", "weights_gib", "device", "divides", "says"),
    [
        ("auto", 1, "cuda", False, ""),  # 4 of 80: nothing to report
        ("auto", 8, "cuda", False, "--shard always shards them"),
        ("auto", 11, "cuda", True, "44.0 GiB"),
        ("never", 11, "cuda", False, "each rank keeps a full copy"),
        ("always", 0.001, "cuda", True, "as requested"),
        ("auto", 3, "cpu", True, "16.0 GiB"),  # 12 of 32 / 2
        ("auto", 1.5, "cpu", False, "6.00 GiB"),
    ],
)
def test_when_weights_are_sharded(requested, weights_gib, device, divides, says):
    """The choice compares the need of one process, four times its weights with Adam, with the memory of the
    GPU, or of the machine divided by the ranks.
    """
    held = {
        "weights": int(weights_gib * GIB),
        "gradients": int(weights_gib * GIB),
        "optimizer state": int(2 * weights_gib * GIB),
    }
    facts = Facts(memory_bytes=32 * GIB, gpus=(Gpu("A100", 80 * GIB, (8, 0)), Gpu("H200", 140 * GIB, (9, 0))))
    found = verdict(requested, held, device, facts, 2)
    assert found.divides is divides
    assert says in found.sentence
    assert bool(found.sentence) is bool(says)


def test_running_out_of_memory_is_distinguished_from_other_failures():
    assert ran_out(
        TrialRecord(
            "failed",
            reason="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
            exit_code=1,
        )
    )
    assert ran_out(
        TrialRecord(
            "failed",
            log_tail="RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes",
            exit_code=1,
        )
    )
    assert ran_out(TrialRecord("failed", exit_code=-9))
    assert not ran_out(TrialRecord("failed", reason="ValueError: shapes do not match", exit_code=1))
