"""`flatout run --procs N`: a single-process script trains on several ranks with the same results, or is
rejected with an error.
"""

import json
import re
import sys

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(400), pytest.mark.processes]

TRAINS = """
import os, sys, torch
from torch import nn
data = torch.utils.data.TensorDataset(torch.randn(90, 8, generator=torch.Generator().manual_seed(3)), torch.arange(90) % 3)
torch.manual_seed(0)
loader = torch.utils.data.DataLoader(data, batch_size=20, shuffle=True)
held_out = torch.utils.data.DataLoader(data, batch_size=45)
model = nn.DataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
class Centred(nn.Linear):
    def forward(self, x):
        return super().forward(x) if self.training else super().forward(x) - super().forward(x).mean(0)
centred = Centred(8, 3)  # looks from sample to sample as it is evaluated
optimizer = torch.optim.Adam([*model.parameters(), *centred.parameters()], lr=0.01)
if not os.path.isdir("runs"):
    os.mkdir("runs")
best = 1e9
for epoch in range(int(os.environ.get("EPOCHS", 4))):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y) + 0.1 * centred(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{epoch} {loss.item():.4f}")
    model.eval(), centred.eval()
    with torch.no_grad():
        value = sum(nn.functional.cross_entropy(model(x), y, reduction="sum").item() + centred(x).square().sum().item() for x, y in held_out) / 90
    model.train(), centred.train()
    print(f"held out {value:.4f} of {len(held_out)}")
    with open("runs/log.txt", "a") as log:
        log.write(f"{epoch} {value:.4f}\\n")
    if value < best:
        best = value
        torch.save(model.state_dict(), "runs/best.pt")
model.load_state_dict(torch.load("runs/best.pt"))
if os.environ.get("FAILS") == os.environ.get("FLATOUT_RANK", "-"):
    raise ValueError("a fault of this rank alone")
print("done", len(os.listdir("runs")))
"""

CONTRASTS = """
import torch
from torch import nn
torch.manual_seed(0)
loader = torch.utils.data.DataLoader(torch.randn(70, 8), batch_size=20, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
for epoch in range(3):
    nearest = 0
    for x in loader:
        z = nn.functional.normalize(model(x))
        loss = nn.functional.cross_entropy(z @ z.t() * 5, torch.arange(len(z)))
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():  # by hand: an optimizer of torch's own takes two seconds to import, in each of twenty processes
                p -= 0.1 * p.grad
        nearest += ((z @ z.t() - 2 * torch.eye(len(z))).argmax(1) > 9).sum().item()
        print(f"{len(x)} {loss.item():.4f}")
    print("nearest", nearest)
"""


def numbers(text):
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


def test_a_script_for_one_process_as_two(flatout, script):
    """Text and figures are the same, with one log and one file of weights.

    The second run needs no rehearsal, and a failing rank is named.
    """
    script(TRAINS)
    folders = [flatout.folder / name for name in ("one", "two", "fails")]
    for folder in folders:
        folder.mkdir()
        (folder / "train.py").write_text(TRAINS)
    one = flatout("train.py", python=[sys.executable], cwd=folders[0])
    two = flatout("run", "--procs", "2", "python", "train.py", cwd=folders[1], timeout=150)
    assert (one.code, two.code) == (0, 0), two.err
    assert len(two.out.splitlines()) == len(one.out.splitlines())
    assert numbers(two.out) == pytest.approx(numbers(one.out), abs=2e-4)
    assert "rehearsing" in two.err
    assert "applied data_parallel(batches=index" in two.err
    assert (folders[1] / "runs" / "log.txt").read_text().count("\n") == 4
    a, b = (torch.load(folder / "runs" / "best.pt") for folder in folders[:2])
    assert list(a) == list(b)
    assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)
    assert sorted(path.name for path in folders[1].iterdir()) == [".flatout", "runs", "train.py"]
    assert two.left == []

    fails = flatout(
        "run", "--procs", "2", "python", "train.py", cwd=folders[1], env={"FAILS": "1"}, timeout=100
    )
    assert fails.code == 1
    assert "rehearsing" not in fails.err
    assert "flatout: rank 1" in fails.err
    assert "ValueError: a fault of this rank alone" in fails.err
    assert fails.left == []

    tune = flatout(
        "tune",
        "--procs",
        "2",
        "--budget",
        "12s",
        "--levers",
        "tf32",
        "--no-write",
        "python",
        "train.py",
        cwd=folders[1],
        env={"EPOCHS": "100000"},
        timeout=150,
    )
    assert tune.code == 0, tune.err
    assert "rehearsing" not in tune.err
    job = next(path for path in (folders[1] / ".flatout").iterdir() if path.name.endswith("-2-processes"))
    ranks = json.loads((job / "session.json").read_text())["ranks"]
    assert ranks["division"]["batches"] == "index"
    assert ranks["ratio"]["median"] > 0
    assert "2 ranks are " in tune.out
    assert "flatout run --procs 2 python train.py" in tune.out
    assert "Ranks compared with one process" in (job / "report.html").read_text()
    assert tune.left == []


@pytest.mark.full
def test_a_loss_between_samples_sees_whole_batches(flatout, script):
    """The loss is neither a mean nor a sum over samples.

    The model is data-parallel all the same, and the output is that of one process.
    """
    script(CONTRASTS)
    one = flatout("train.py", python=[sys.executable])
    two = flatout("run", "--procs", "2", "python", "train.py", timeout=170)
    assert (one.code, two.code) == (0, 0), two.err
    assert "batches=whole" in two.err
    assert re.sub(r"0\.|\d\.\d+", "", two.out) == re.sub(
        r"0\.|\d\.\d+", "", one.out
    )  # sizes and counts to the last digit
    assert numbers(two.out) == pytest.approx(numbers(one.out), abs=2e-4)
    assert two.left == []


def test_an_unsupported_script_is_not_run(flatout, script):
    """The model mixes samples."""
    script(
        CONTRASTS.replace("nn.Tanh()", "Mixing()").replace(
            "torch.manual_seed(0)",
            """torch.manual_seed(0)
class Mixing(nn.Module):
    def forward(self, x):
        return torch.tanh(x - x.roll(1, 0))""",
        )
    )
    done = flatout("run", "--procs", "2", "python", "train.py", timeout=170)
    assert done.code == 6
    assert "neither a mean nor a sum over samples" in done.err
    record = json.loads(next((flatout.folder / ".flatout").glob("*/ranks.json")).read_text())["rehearsed"]
    assert record["division"] is None
    assert record["gradient_error"] > 0.01
    assert done.left == []
