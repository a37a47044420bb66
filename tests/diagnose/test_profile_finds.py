"""One real profile of a program with several faults at once: the faults that show only at run time, with
their lines.
"""

import json

import pytest

from flatout.diagnose.check import ranked
from flatout.schema.profile import ProfileRecord

pytestmark = [pytest.mark.timeout(240), pytest.mark.processes, pytest.mark.full]

PROGRAM = """\
import random

import torch

torch.manual_seed(0)
torch.autograd.set_detect_anomaly(True, check_nan=False)
rows = [[random.random() for _ in range(400)] for _ in range(500)]
model = torch.nn.Sequential(torch.nn.Linear(400, 64), torch.nn.Dropout(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100_000):
    if step % 4 == 0:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)  # scheduler_remade
    batch = torch.tensor([random.choice(rows) for _ in range(128)])  # python_between
    optimizer.zero_grad(set_to_none=False)  # gradients_zeroed
    prediction = model(batch)  # train_mode_not_restored
    loss = (prediction - 1).log().mean()
    loss.backward()  # not_finite
    optimizer.step()
    if step == 60:
        model.eval()
"""
LINES = {
    line.rpartition("# ")[2]: number for number, line in enumerate(PROGRAM.splitlines(), 1) if "  # " in line
}


@pytest.fixture(scope="module")
def profile(flatout_in, tmp_path_factory):
    flatout = flatout_in(tmp_path_factory.mktemp("ill"))
    (flatout.folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    done = flatout("profile", "--json", "--steps", "24", "--budget", "8s", "python", "train.py", timeout=200)
    assert done.code == 0, done.err
    return ProfileRecord.from_json(json.loads(done.out))


@pytest.mark.parametrize("name", LINES)
def test_a_fault_is_found_with_its_line(profile, name):
    found = {finding.name: finding for finding in profile.findings}
    assert name in found, list(found)
    assert found[name].place is not None
    assert found[name].place.line == LINES[name]


def test_wrong_results_come_first(profile):
    assert [finding.severity for finding in profile.findings[:2]] == ["wrong result"] * 2
    assert ranked(profile.findings) == profile.findings
