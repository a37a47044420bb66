"""Seeds of a search shift the program's own seeds, and nothing else."""

import sys

import pytest
from trials import warm_programs

from flatout.job.folder import JobFolder
from flatout.launch.command import parse_command
from flatout.measure.clock import seconds
from flatout.probe.machine import look
from flatout.schema.plan import Choice, Plan
from flatout.trial.parent import Trial, measure
from flatout.trial.spec import TrialOptions

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(120), pytest.mark.processes]

# The data set draws from torch's generator and from Python's, in two workers.
PROGRAM = """
import random, torch
class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, at):
        return torch.full((8,), float(at)) + torch.rand(8) + random.random()
random.seed(a=3)
torch.manual_seed(seed=7)
model = torch.nn.Linear(8, 1)
for epoch in range(9):
    for batch in torch.utils.data.DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2):
        model.zero_grad()
        model(batch).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-9 * p.grad
"""


def test_without_workers_batches_stay_the_same_under_every_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    job, facts = JobFolder(tmp_path / "job").make(), look()

    def batches(seed, plan):
        command = parse_command([sys.executable, "train.py"])
        with Trial(command, job.new_trial(), plan, facts, TrialOptions(seed, reseed=True)) as trial:
            return measure(trial, 3, seconds() + 60).batch_hashes

    without = Plan((Choice("loader", {"workers": 0}),))
    with warm_programs():
        plain, other, tuned = batches(1, Plan()), batches(2, Plan()), batches(1, without)
    length = min(map(len, (plain, other, tuned)))
    assert length >= 3
    assert tuned[:length] == plain[:length]
    assert other[0] != plain[0]
