"""A held program waits for its plan before it makes a loader, and then trains like one that started with the plan."""

import sys

import pytest
from limits import hang_s
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

PROGRAM = """
import torch
torch.manual_seed(0)
samples = torch.randn(400, 8)
print("imported", flush=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples), batch_size=8, shuffle=True)
print("made a loader", flush=True)
while True:
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
"""
PLAN = Plan((Choice("loader", {"workers": 1}), Choice("gc_pause", True)))


def test_a_held_program_gets_its_plan_late(tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.mkdir()
    monkeypatch.chdir(program)
    (program / "train.py").write_text(PROGRAM)
    command = parse_command([sys.executable, "train.py"])
    job, facts, records = JobFolder(tmp_path / "job").make(), look(), []
    with warm_programs():
        for hold in (False, True):
            options, plan = TrialOptions(0, reseed=True, hold=hold), Plan() if hold else PLAN
            with Trial(command, job.new_trial(), plan, facts, options) as trial:
                deadline_s = seconds() + hang_s(60)
                if hold:
                    while not trial.held:
                        assert not trial.is_ready(deadline_s)
                    while "imported" not in trial.log_tail():  # the log is written by another process
                        assert seconds() < deadline_s
                    assert "made a loader" not in trial.log_tail()
                    trial.release(PLAN)
                records.append(measure(trial, 4, deadline_s))
    direct, held = records
    assert {c["name"] for c in held.applied} == {c["name"] for c in direct.applied} == {"loader", "gc_pause"}
    assert held.plan == direct.plan
    count = min(len(held.losses), len(direct.losses))
    assert count >= 8
    assert held.losses[:count] == direct.losses[:count]
